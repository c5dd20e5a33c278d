"""Turns the options of llama_cpp.Llama into options of an EngineConfig. Some are refused, and some change nothing."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.config.names import advice_about
from llamabatch.errors import ConfigError, UnknownOptionError
from llamabatch.gguf.pooling import POOLINGS
from llamabatch.utils.caller import caller_level
from llamabatch.utils.checks import integer, nearest, show

LORA = "lora"  # the name of the adapter in lora_path

# Keys: constants of ggml.h and llama.h, as in llama_cpp's options. Values: the same in EngineConfig's options.
KV_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
ROPE_SCALINGS = {0: "none", 1: "linear", 2: "yarn", 3: "longrope"}
NUMA = {0: "off", 1: "distribute", 2: "isolate", 3: "numactl"}

_PAD = 256  # llama.cpp rounds a context's number of cells up to a multiple of 256
_LOOKUP = "LlamaPromptLookupDecoding"

# These options cause one warning and have no effect. No text depends on them.
IGNORED = {
    "no_perf": "stats() counts, with no option",
    "lora_base": "the adapter is applied to the model as it is",
}
# These options are refused, because the text would differ if they were ignored.
REFUSED = {
    "vocab_only": "an engine has its weights; llm.tokenize and tokenize work on any loaded model",
    "attention_type": "the model's own attention is used",
    "tokenizer": "the GGUF's vocabulary tokenizes; give prompts as token ids of your tokenizer",
}


def engine_options(given: Mapping[str, Any], defaults: Mapping[str, Any], header: Mapping[str, str]) -> dict[str, Any]:
    """Returns the options of EngineConfig for the arguments of Llama's constructor.

    Args:
        given: the arguments.
        defaults: the defaults of the arguments.
        header: the metadata of the file, as texts.

    Raises:
        ConfigError: a value is refused, or out of range.
    """
    changed = {name: value for name, value in given.items() if name in defaults and value != defaults[name]}
    refuse_or_warn(changed, REFUSED, IGNORED)
    scaled = any(name.startswith(("rope_", "yarn_")) for name in changed)
    options: dict[str, Any] = {
        "n_ctx": context(given["n_ctx"], header, scaled=scaled, is_default="n_ctx" not in changed),
        "n_gpu_layers": given["n_gpu_layers"],
        "pooling": _pooling(given["pooling_type"], header),
    }
    if not scaled and 0 < trained_for(header) < options["n_ctx"]:
        # The engine refuses an n_ctx above the trained length of the file, so the trained length is overridden.
        changed["kv_overrides"] = {_context_key(header): options["n_ctx"]} | dict(given["kv_overrides"] or {})
    passed = ("split_mode", "offload_kqv", "use_mmap", "use_mlock", "kv_overrides")
    options |= {name: changed[name] for name in passed if name in changed}
    options |= {name: given[name] for name in ("op_offload", "swa_full") if given[name] is not None}
    if "main_gpu" in changed:
        if given["split_mode"] == 0:
            options["main_gpu"] = given["main_gpu"]
        else:  # llama.cpp reads main_gpu only when a single GPU is used
            warn_once(["main_gpu (several GPUs share the layers unless split_mode is 0)"])
    options |= {name: value for name in ("n_threads", "n_threads_batch", "tensor_split") if (value := given[name])}
    options |= {name: value for name in ("n_batch", "n_ubatch") if (value := given[name]) > 2048}
    for name in ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"):
        if given[name]:
            options[name] = given[name]
    if given["yarn_ext_factor"] is not None and given["yarn_ext_factor"] >= 0:
        options["yarn_ext_factor"] = given["yarn_ext_factor"]
    options |= {n: changed[n] for n in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow") if n in changed}
    if "rope_scaling_type" in changed and changed["rope_scaling_type"] is not None:
        options["rope_scaling"] = _named("rope_scaling_type", changed["rope_scaling_type"], ROPE_SCALINGS)
    for name in ("type_k", "type_v"):
        if given[name] is not None:
            options[name] = _named(name, given[name], KV_TYPES)
    if given["flash_attn"]:
        options["flash_attn"] = "on"
    if given["numa"]:
        options["numa"] = "distribute" if given["numa"] is True else _named("numa", given["numa"], NUMA)
    if given["lora_path"]:
        options["adapters"] = {LORA: given["lora_path"]}
    return options | _speculation(given["draft_model"])


def refuse_or_warn(changed: Mapping[str, Any], refused: Mapping[str, str], ignored: Mapping[str, str]) -> None:
    """Refuses options that would change a text, and warns once of options without effect.

    Args:
        changed: the options that a caller gave.
        refused: the reason for each refused option.
        ignored: the reason for each option without effect.

    Raises:
        ConfigError: an option is in `refused`.
    """
    for name, value in changed.items():
        if name in refused:
            raise ConfigError(f"{name} is {show(value)}, which is not supported: {refused[name]}; leave it out")
    warn_once([f"{name} ({ignored[name]})" for name in changed if name in ignored])


def context(n_ctx: object, header: Mapping[str, str], *, scaled: bool = False, is_default: bool = False) -> int:
    """Returns n_ctx as llama.cpp rounds it. For 0, returns the trained length.

    A default n_ctx above the trained length becomes the trained length. Rounding never passes the trained length. If
    the caller's n_ctx is above the trained length, there is one warning and n_ctx stays. But a model with a table of
    positions gets the trained length.

    Args:
        scaled: an option changes the rotary embedding. The trained length is then no limit.
        is_default: `n_ctx` is the default. Then there is no warning.

    Raises:
        ConfigError: `n_ctx` is out of range, or is 0 and the file does not give the trained length.
    """
    requested = integer(ConfigError, "n_ctx", n_ctx, 0, 2**24)
    trained = trained_for(header)
    if requested == 0 and not trained:
        raise ConfigError("n_ctx is 0, but the file does not say what the model was trained for; give a number")
    rounded = -(-(requested or trained) // _PAD) * _PAD
    if scaled or not trained or rounded <= trained:
        return rounded
    if requested <= trained or is_default:
        return trained
    if _has_rope(header):
        _warn(
            f"n_ctx is {requested}, and the model was trained for {trained} tokens: it runs, as in llama_cpp, but "
            "text beyond them may make no sense"
        )
        return rounded
    warn_once([f"n_ctx={requested} (the model was trained for {trained} tokens, which are used)"])
    return trained


def trained_for(header: Mapping[str, str]) -> int:
    """Returns the trained context length in tokens; 0: the file does not have it."""
    declared = header.get(_context_key(header), "")
    return int(declared) if declared.isdigit() else 0


def _context_key(header: Mapping[str, str]) -> str:
    return f"{header.get('general.architecture', '')}.context_length"


def _has_rope(header: Mapping[str, str]) -> bool:
    """Returns True if the model has a rotary embedding, which has no last position. A table of positions has one."""
    return any(key.startswith(f"{header.get('general.architecture', '')}.rope.") for key in header)


def _pooling(number: object, header: Mapping[str, str]) -> str:
    """Returns the pooling. "auto" becomes "none" if the file has no pooling: llama.cpp then gives token vectors."""
    known = {-1: "auto", **dict(enumerate(POOLINGS))}
    name = _named("pooling_type", number, known)
    names_one = f"{header.get('general.architecture', '')}.pooling_type" in header
    return "none" if name == "auto" and not names_one else name


def _named(name: str, number: object, known: Mapping[int, str]) -> str:
    for each, found in known.items():
        if number == each:
            return found
    listed = ", ".join(f"{each} ({found})" for each, found in known.items())
    raise ConfigError(f"{name} is {show(number)}; allowed are {listed}")


def _speculation(draft: object) -> dict[str, Any]:
    """Returns the options of speculation. `draft` is an object of llama_cpp's lookup class, or None. Raises
    ConfigError."""
    if draft is None:
        return {}
    count = getattr(draft, "num_pred_tokens", None)
    if type(draft).__name__ != _LOOKUP or not isinstance(count, int):
        raise ConfigError(
            f"draft_model is {show(draft)}; of llama_cpp's drafts only {_LOOKUP} is supported; for a draft model "
            "use llamabatch.LLM(..., speculate='draft', draft_model=FILE)"
        )
    return {"speculate": "lookup", "n_draft": max(1, min(count, 64))}


def check_further(options: Mapping[str, Any], known: list[str]) -> None:
    """Raises UnknownOptionError for an option that EngineConfig does not have; `known` adds names to suggest."""
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for name in options:
        if name not in names:
            if advice := advice_about(name):
                raise UnknownOptionError(f"there is no option {show(name)}: {advice}")
            raise UnknownOptionError(f"there is no option {show(name)}{nearest(name, [*known, *names])}")


_warned: set[str] = set()
_lock = threading.Lock()


def warn_once(notes: list[str]) -> None:
    """Warns of options that change nothing. Each option is named once per process."""
    with _lock:
        new = [note for note in notes if note not in _warned]
        _warned.update(new)
    if new:
        warnings.warn(f"accepted, but without effect here: {'; '.join(new)}", UserWarning, stacklevel=caller_level())


def _warn(text: str) -> None:
    """Gives a warning, once per process for the same text."""
    with _lock:
        is_new = text not in _warned
        _warned.add(text)
    if is_new:
        warnings.warn(text, UserWarning, stacklevel=caller_level())
