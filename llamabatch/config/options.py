"""EngineConfig: the options of an engine as requested, with their defaults, help texts and checks.

A config is frozen and checked once. The error for an unknown option names the option. The command line's engine
options are generated from the fields of EngineConfig.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from llamabatch.chat.formats import check_tags
from llamabatch.config.names import ALIASES, named
from llamabatch.config.values import (
    AUTO_NUMBERS,
    BOOLEANS,
    CHOICES,
    DEVICE_TOP,
    KV_TYPES,
    MAX_CTX,
    MAX_DRAFT,
    MAX_SLOTS,
    NUMA,
    RANGES,
    ROPE_NUMBERS,
    ROPE_OPTIONS,
    Auto,
    Fit,
)
from llamabatch.errors import ConfigError
from llamabatch.gguf.overrides import (
    TensorOverrides,
    check_kv_overrides,
    check_tensor_overrides,
    expert_overrides,
)
from llamabatch.gguf.pooling import POOLINGS
from llamabatch.gguf.validation import ROPE_SCALINGS
from llamabatch.request.adapters import MAX_ADAPTERS, check_name
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.utils.aliases import takes_names
from llamabatch.utils.checks import boolean, choice, integer, items, number, pairs, show, string
from llamabatch.utils.paths import AUTO, absolute, model_name

_DIGEST = re.compile("[0-9a-fA-F]{64}")
_MOST_SHARES = 16  # maximum number of GPUs in tensor_split or devices
_NAME_LENGTH = 128  # maximum number of characters in a device's name
_MOST_DOMAINS = 256
_DOMAIN = re.compile(r"\*|[\w.:-]{1,253}")
# The options of every draft model, whatever the options of its target are. A draft model does not speculate, and no
# option changes the values of its file.
OF_DRAFT_MODELS: dict[str, Any] = {
    "kv": "split", "speculate": "off", "draft_model": None, "speculate_always": False, "sha256": None,
    "device_sampling": "off", "cache_ram": 0, "cache_disk": None, "mmproj": None, "kv_overrides": (),
    "override_tensor": (), "n_cpu_moe": 0, "cpu_moe": False, **dict.fromkeys(ROPE_OPTIONS),
}  # fmt: skip


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine, as requested; capacity.resolve turns "auto" into values. Raises ConfigError.

    Keywords may also have the names of vLLM, llama.cpp and llama_cpp.Llama (docs/names.md): model_path, max_model_len,
    max_num_seqs. An unknown keyword raises UnknownOptionError (a TypeError, too) with the nearest name.

    Paths become absolute at once: the same files are then read after os.chdir and in other processes.

    Attributes: each field has a help text. `llamabatch generate --help-all` prints these texts.
    """

    model: str
    strategy: str = _option("auto", f"how requests share the engine: {', '.join(STRATEGIES)}")
    n_slots: int | Auto = _option(
        "auto", f"sequences at once, 1..{MAX_SLOTS}; auto: what fits, at most 32, or 128 on GPUs"
    )
    start_slots: int | Auto = _option(
        "auto",
        "slots of the first context, which grows once to all; auto: n_slots if given, or if cells cost nothing yet",
    )
    n_ctx: int | Auto | Fit = _option(
        "auto",
        "tokens of one request, prompt and output; auto: the model's limit, at most 4096; fit (serve): more, up to "
        "32768, if 4 slots fit (GPUs: 16)",
    )
    n_batch: int = _option(2048, "tokens in one llama_decode call at most")
    n_ubatch: int | Auto = _option("auto", "tokens in one pass over the weights at most; auto: 512, or n_batch if less")
    prefill_budget: int | Auto = _option(
        "auto", "prompt tokens in a step at most while others wait for their next token; auto: n_ubatch"
    )
    prefill_share: float = _option(
        0.5, "part of the time, 0.05 to 1, that prompts have while others stream their tokens; 1: all they want"
    )
    n_threads: int | Auto = _option("auto", "threads for one sequence alone; auto: the cores, 1 for models below 64 MB")
    n_threads_batch: int | Auto = _option(
        "auto", "threads for prompts and several sequences; auto: n_threads if given, else the cores"
    )
    instances: int | Auto = _option(
        "auto", "engines: child processes of multi-instance, else in this process and with shared weights"
    )
    instance_strategy: str = _option("batched", "strategy inside each instance of multi-instance")
    n_gpu_layers: int = _option(-1, "layers on the GPU; -1: all, 0: none")
    main_gpu: int = _option(0, "index of the GPU that holds all layers with split_mode=none")
    split_mode: str = _option(
        "layer",
        "several GPUs: layer (each holds some layers), row (each holds rows of matrices; CUDA), or none: one GPU",
    )
    devices: tuple[str, ...] | None = _option(
        None, "GPUs to use, by the names of `llamabatch doctor`: CUDA0,CUDA2; none: the CPU alone (not given: all)"
    )
    tensor_split: tuple[float, ...] | None = _option(None, "share of the model for each GPU, as 3,1")
    override_tensor: tuple[tuple[str, str], ...] = _option(
        (), "device of tensors whose names match a regular expression, as exps=CPU,attn=CUDA0; the first match counts"
    )
    n_cpu_moe: int = _option(0, "number of layers, from the first, whose experts stay in main memory")
    cpu_moe: bool = _option(False, "keep the experts of all layers in main memory")
    offload_kqv: bool = _option(True, "keep the KV cache, and compute attention, on the GPUs of the layers")
    op_offload: bool = _option(True, "compute large batches of layers in main memory on a GPU")
    device_sampling: str = _option(
        "auto",
        f"let the device of the output find the {DEVICE_TOP} likeliest tokens of a row, instead of copying all logits: "
        "on, off, or auto: on a GPU",
    )
    row_ladder: str = _option(
        "auto",
        "add dummy rows to decode steps, so that llama.cpp computes the last graph again: on, off, or auto: on a GPU, "
        "where they cost next to nothing",
    )
    flash_attn: str = _option("auto", "flash attention: on, off, or auto: on where it is fast")
    kv: str = _option("auto", "KV cache: split (cells for each slot), unified (shared by all), or auto: what fits")
    swa_full: bool = _option(True, "keep all cells of layers with a sliding window; False: those of the window alone")
    kv_cells: int | Auto = _option("auto", "cells of a unified KV cache, at least n_ctx; auto: what fits")
    type_k: str = _option("f16", f"type of the K cache: {', '.join(KV_TYPES)}")
    type_v: str = _option("f16", "type of the V cache, as for K; a quantised type needs flash attention")
    batch_invariant: bool = _option(
        False, "make sure that a row's logits are the same bits whatever is computed beside it, or refuse to start"
    )
    pooling: str = _option(
        "auto",
        f"how the tokens of a text become its vector, or with rank its scores: {', '.join(POOLINGS)}; "
        "auto: as the file says, else mean",
    )
    cache_prefix: bool = _option(True, "finished requests leave their KV cells to later ones that begin alike")
    cache_ram: int | Auto = _option(
        "auto",
        "MiB of main memory for prefixes that no slot holds any more, 0: none; auto: a quarter of what is left, at "
        "most 8192, and without recurrent state or sliding windows the cells of 64 slots",
    )
    cache_disk: str | None = _option(
        None,
        "folder for prefixes that outlive the process, made if it is missing (not given: none); prompts can be read "
        "from its files",
    )
    cache_disk_mib: int = _option(8192, "MiB of all files in the folder of cache_disk, also those of other models")
    max_queue: int | None = _option(
        None,
        "requests that may wait for a slot; more are refused (not given: any number; serve: 2048)",
    )
    max_wait_ms: int = _option(0, "time that the first request waits for others when the engine is idle, milliseconds")
    preempt: bool = _option(
        False, "let a request of better priority take the slot of a running one, which continues later"
    )
    use_mmap: bool = _option(True, "map the file instead of reading it")
    use_mlock: bool = _option(False, "lock the weights in main memory, so that they are never swapped out")
    numa: str | None = _option(
        None,
        f"threads on NUMA nodes, as set by the first model of a process: {', '.join(NUMA)} (not given: off)",
    )
    rope_scaling: str | None = _option(
        None, f"scaling of the rotary embedding: {', '.join(ROPE_SCALINGS)} (not given: the file's, as all of these)"
    )
    rope_freq_base: float | None = _option(None, "base frequency of the rotary embedding")
    rope_freq_scale: float | None = _option(
        None, "scale of its frequencies: 0.25 lets n_ctx be 4 times what the model was trained for"
    )
    yarn_ext_factor: float | None = _option(None, "YaRN: share of extrapolation, 0: only interpolation")
    yarn_attn_factor: float | None = _option(None, "factor of the attention, where yarn_ext_factor is 0")
    yarn_beta_fast: float | None = _option(None, "YaRN: rotations from which on a dimension is not scaled")
    yarn_beta_slow: float | None = _option(None, "YaRN: rotations up to which a dimension is scaled fully")
    yarn_orig_ctx: int | None = _option(None, "YaRN: tokens that the model was trained for before it was scaled")
    kv_overrides: tuple[tuple[str, bool | int | float | str], ...] = _option(
        (), "other values for the metadata of the file, as tokenizer.ggml.add_bos_token=bool:false"
    )
    trial: str = _option(
        "auto", "load the file in a child process first: on, off, or auto: unless its hash is known to load"
    )
    sha256: str | None = _option(
        None, "refuse the file unless it has this digest, 64 hexadecimal digits (of a split file: of all parts joined)"
    )
    extra_bufts: str = _option("auto", "repacked weights (AMX, AVX, NEON): on, off, or auto: on where they are safe")
    speculate: str = _option(
        "off", "guess tokens and check several in a step, where that pays: off, lookup (in the text so far), draft"
    )
    draft_model: str | None = _option(None, "model that guesses for speculate=draft, of the same vocabulary")
    mmproj: str | None = _option(
        None, "file of the encoder for pictures or sounds; auto: a file next to the model or in its repository"
    )
    image_min_tokens: int = _option(0, "tokens of a picture at least, for encoders of any size; 0: as the file says")
    image_max_tokens: int = _option(0, "tokens of a picture at most, for encoders of any size; 0: as the file says")
    allowed_local_media_path: str | None = _option(None, "folder whose files prompts may name as file:// addresses")
    allowed_media_domains: tuple[str, ...] = _option(
        (), "hosts whose pictures prompts may name by address, with commas; *: any host that is public"
    )
    n_draft: int = _option(8, f"guesses for each sequence in a step at most, 1..{MAX_DRAFT}")
    speculate_always: bool = _option(False, "guess in every step, also where it does not pay")
    isolate: bool = _option(False, "run llama.cpp in a child process")
    adapters: tuple[tuple[str, str], ...] = _option((), "LoRAs and control vectors to load: names and paths")
    reasoning_format: str = _option(
        "auto", "auto: the thinking of a known model family is kept apart from the answer; none: it stays in the answer"
    )
    reasoning_tags: tuple[str, str] | None = _option(
        None, "texts that begin and end the thinking, as <think>,</think>, in place of those of the model's family"
    )
    seed: int | None = _option(
        None, "seed of requests without one: each draws its own from it, in the order in which they are made"
    )
    profile: bool = _option(
        True, "use the values that `llamabatch tune` found for this model and machine in place of auto"
    )

    def __post_init__(self) -> None:
        self._keep("model", model_name(_path("model", self.model, "give the path of a .gguf file, or 'tiny'")))
        for name, low, high in RANGES:
            self._keep(name, self._number(name, low, high))
        for name, known in CHOICES:
            self._keep(name, choice(ConfigError, name, getattr(self, name), known))
        if self.max_queue is not None:
            self._keep("max_queue", integer(ConfigError, "max_queue", self.max_queue, 0, 2**31 - 1, ", or None"))
        if self.seed is not None:
            self._keep("seed", integer(ConfigError, "seed", self.seed, 0, 2**64 - 1, ", or None"))
        for name in BOOLEANS:
            self._keep(name, boolean(ConfigError, name, getattr(self, name)))
        self._check_sizes()
        self._keep("prefill_share", float(number(ConfigError, "prefill_share", self.prefill_share, 0.05, 1.0)))
        self._check_media()
        self._check_cache_disk()
        self._check_speculation()
        self._check_rope()
        if self.numa is not None:
            self._keep("numa", choice(ConfigError, "numa", self.numa, NUMA))
        self._keep("kv_overrides", check_kv_overrides(self.kv_overrides))
        self._keep("override_tensor", check_tensor_overrides(self.override_tensor))
        self._check_digest()
        self._check_devices()
        if self.reasoning_tags is not None:
            self._keep("reasoning_tags", check_tags(self.reasoning_tags))
        adapters = _checked_adapters(self.adapters)
        self._keep("adapters", tuple((name, absolute(path)) for name, path in adapters))

    def _number(self, name: str, low: int, high: int) -> int | Auto | Fit:
        value, is_open = getattr(self, name), name in AUTO_NUMBERS
        if is_open and string(value) == "auto":
            return "auto"
        if name == "n_ctx" and string(value) == "fit":
            return "fit"
        words = ", 'auto' or 'fit'" if name == "n_ctx" else ", or 'auto'" if is_open else ""
        return integer(ConfigError, name, value, low, high, words)

    def _keep(self, name: str, value: object) -> None:
        if value is not getattr(self, name):
            object.__setattr__(self, name, value)

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
        """Makes a config from options by name. Other libraries' names and values are allowed, such as flash_attn=True.
        Raises UnknownOptionError for an unknown name, with the nearest known name."""
        return cls(model, **options)  # type: ignore[arg-type]  # a path becomes its text in __post_init__

    def _check_sizes(self) -> None:
        if self.n_ubatch != "auto" and self.n_ubatch > self.n_batch:
            raise ConfigError(f"n_ubatch is {self.n_ubatch}; it must not exceed n_batch, {self.n_batch}")
        if self.n_slots != "auto" and self.n_slots > self.n_batch:
            raise ConfigError(f"n_slots is {self.n_slots}; it must not exceed n_batch, {self.n_batch}")
        if self.kv_cells != "auto" and self.kv_cells > 0:
            if self.kv == "split":
                raise ConfigError(f"kv_cells is {self.kv_cells}; it is for kv='unified', and kv is 'split'")
            if isinstance(self.n_ctx, int) and self.kv_cells < self.n_ctx:
                raise ConfigError(f"kv_cells is {self.kv_cells}; it must be at least n_ctx, {self.n_ctx}")
        if self.type_v not in ("f32", "f16", "bf16") and self.flash_attn == "off":
            raise ConfigError(f"type_v is {self.type_v!r}, which needs flash attention; flash_attn is 'off'")

    def _check_digest(self) -> None:
        if self.sha256 is not None:
            self._keep("sha256", string(self.sha256) or self.sha256)
            if not isinstance(self.sha256, str) or not _DIGEST.fullmatch(self.sha256):
                raise ConfigError(f"sha256 is {show(self.sha256)}; give 64 hexadecimal digits")

    def _check_media(self) -> None:
        if self.mmproj is not None:
            path = _path("mmproj", self.mmproj, "give the path of an mmproj .gguf file, or 'auto'")
            self._keep("mmproj", path if path == AUTO else model_name(path))
        self._check_media_sources()
        low, high = self.image_min_tokens, self.image_max_tokens
        if low and high and low > high:
            raise ConfigError(f"image_min_tokens is {low}; it must not exceed image_max_tokens, {high}")

    def _check_speculation(self) -> None:
        if self.draft_model is not None:
            path = _path("draft_model", self.draft_model, "give the path of a .gguf file")
            self._keep("draft_model", model_name(path))
        draft = self.draft_model
        if draft is not None and self.mmproj is not None:
            raise ConfigError(
                "draft_model and mmproj are both given, and a draft model reads no pictures; give speculate='lookup', "
                "or leave mmproj out"
            )
        if self.speculate == "draft" and draft is None:
            raise ConfigError("speculate is 'draft', but draft_model is not given; give the path of a .gguf file")
        if self.speculate != "draft" and draft is not None:
            raise ConfigError(f"draft_model is {show(draft)}; it is for speculate='draft', not {self.speculate!r}")
        if self.device_sampling == "on" and self.speculate != "off":
            raise ConfigError(
                f"device_sampling is 'on', but speculate is {self.speculate!r}, and guesses are verified on whole "
                "rows; give device_sampling='auto', or speculate='off'"
            )
        if self.row_ladder == "on" and (self.speculate != "off" or self.kv == "unified"):
            other = f"kv is {self.kv!r}" if self.kv == "unified" else f"speculate is {self.speculate!r}"
            raise ConfigError(
                f"row_ladder is 'on', but {other}, where steps have no constant shape; give row_ladder='auto', or "
                "kv='split' and speculate='off'"
            )
        if self.speculate_always and self.speculate == "off":
            raise ConfigError("speculate_always is on, but speculate is 'off'; give 'lookup' or 'draft'")

    def _check_cache_disk(self) -> None:
        if self.cache_disk is not None:
            self._keep("cache_disk", absolute(_path("cache_disk", self.cache_disk, "give the path of a folder")))
            self._check_cache_ram()

    def _check_cache_ram(self) -> None:
        if not self.cache_prefix or self.cache_ram == 0:
            given = "cache_ram is 0" if self.cache_prefix else "cache_prefix is False"
            raise ConfigError(
                f"cache_disk is given, but {given}, and prefixes reach the disk through main memory; leave one out"
            )

    def _check_media_sources(self) -> None:
        if self.allowed_local_media_path is not None:
            name = "allowed_local_media_path"
            folder = absolute(_path(name, self.allowed_local_media_path, "give the path of a folder"))
            if not os.path.isdir(folder):
                raise ConfigError(f"{name} is {show(folder)}, which is no folder")
            self._keep(name, folder)
        given = string(self.allowed_media_domains)
        names = given.split(",") if given is not None else items(self.allowed_media_domains, _MOST_DOMAINS + 1)
        texts = [(string(name) or "").strip().lower().rstrip(".") for name in names or ()]
        if names is None or len(texts) > _MOST_DOMAINS or not all(_DOMAIN.fullmatch(text) for text in texts):
            raise ConfigError(
                f"allowed_media_domains is {show(self.allowed_media_domains)}; give at most {_MOST_DOMAINS} names of "
                "hosts, as example.org, or '*'"
            )
        self._keep("allowed_media_domains", tuple(texts))

    def _check_devices(self) -> None:
        if self.tensor_split is not None:
            shares = items(self.tensor_split, _MOST_SHARES + 1)
            if shares is None or not 1 <= len(shares) <= _MOST_SHARES:
                raise ConfigError(f"tensor_split is {show(self.tensor_split)}; give 1 to {_MOST_SHARES} shares")
            found = tuple(float(number(ConfigError, "tensor_split", share, 0.0, 1e6)) for share in shares)
            self._keep("tensor_split", found)
        if self.devices is not None:
            given = string(self.devices)
            names = given.split(",") if given is not None else items(self.devices, _MOST_SHARES + 1)
            texts = [(string(name) or "").strip() for name in names or ()]
            if not 1 <= len(texts) <= _MOST_SHARES or not all(0 < len(text) <= _NAME_LENGTH for text in texts):
                what = f"1 to {_MOST_SHARES} names of GPUs, or 'none' for the CPU alone"
                raise ConfigError(f"devices is {show(self.devices)}; give {what}")
            if len(set(texts)) < len(texts):
                raise ConfigError(f"devices is {show(self.devices)}; give each name once")
            if "none" in texts and len(texts) > 1:
                raise ConfigError(f"devices is {show(self.devices)}; 'none' stands alone")
            self._keep("devices", tuple(texts))
        if self.main_gpu > 0 and self.split_mode != "none":
            raise ConfigError(
                f"main_gpu is {self.main_gpu}; it is for split_mode='none', and {self.split_mode!r} uses all GPUs"
            )
        if self.tensor_split is not None and self.split_mode == "none":
            raise ConfigError(
                f"tensor_split is {show(self.tensor_split)}; it is for several GPUs, and split_mode is 'none'"
            )

    def _check_rope(self) -> None:
        for name, low, high in ROPE_NUMBERS:
            if getattr(self, name) is not None:
                found = number(ConfigError, name, getattr(self, name), low, high, ", or None: as the file says")
                self._keep(name, float(found))
        if self.yarn_orig_ctx is not None:
            found = integer(ConfigError, "yarn_orig_ctx", self.yarn_orig_ctx, 1, MAX_CTX, ", or None: as the file says")
            self._keep("yarn_orig_ctx", found)
        scaling = self.rope_scaling
        if scaling is None:
            return
        self._keep("rope_scaling", choice(ConfigError, "rope_scaling", scaling, ROPE_SCALINGS))
        if scaling == "none" and self.rope_freq_scale is not None:
            raise ConfigError(f"rope_freq_scale is {self.rope_freq_scale:g}, but rope_scaling is 'none'")
        extrapolates = self.yarn_ext_factor if self.yarn_ext_factor is not None else float(scaling == "yarn")
        for name in ("yarn_beta_fast", "yarn_beta_slow"):
            if getattr(self, name) is not None and not extrapolates:
                raise ConfigError(f"{name} is {getattr(self, name):g}; it is for rope_scaling='yarn', not {scaling!r}")
        if self.yarn_attn_factor is not None and extrapolates:  # llama-context.cpp overwrites the factor
            raise ConfigError(
                f"yarn_attn_factor is {self.yarn_attn_factor:g}; llama.cpp works it out from rope_freq_scale unless "
                "yarn_ext_factor is 0"
            )

    @property
    def changes_rope(self) -> bool:
        """True if an option changes the rotary embedding of the file."""
        return any(getattr(self, name) is not None for name in ROPE_OPTIONS)

    @property
    def tensor_overrides(self) -> TensorOverrides:
        """The rules of override_tensor, then the rules of n_cpu_moe and cpu_moe."""
        experts = expert_overrides(None) if self.cpu_moe else expert_overrides(self.n_cpu_moe)
        return self.override_tensor + experts

    @property
    def speed_changes(self) -> str:
        """A text of JSON with the options that change how or where a step is computed; "": no such option is set."""
        names = ("override_tensor", "n_cpu_moe", "cpu_moe", "kv_overrides", "numa")
        given = {name: value for name in names if (value := getattr(self, name))}
        given |= {name: False for name in ("offload_kqv", "op_offload", "swa_full") if not getattr(self, name)}
        given |= {
            name: getattr(self, name) for name in ("split_mode", "devices") if getattr(self, name) != _USUAL[name]
        }
        return json.dumps(given) if given else ""

    def requested(self) -> EngineConfig:
        """Returns the options as a caller would write them, for child processes and reports."""
        return self

    def for_draft_model(self) -> EngineConfig:
        """Returns the options of the draft model: a split KV cache, no speculation, and the file's own values."""
        return replace(self, kv_cells="auto", pooling="auto", **OF_DRAFT_MODELS)

    def for_child(self) -> EngineConfig:
        """Returns the options of a child process. The parent has already tried the file and checked its digest."""
        return replace(self, trial="off", sha256=None)


# takes_names wraps __init__ here, because @dataclass generates it. Type checkers see only the fields.
_FIELDS = tuple(f.name for f in fields(EngineConfig))
_USUAL = {f.name: f.default for f in fields(EngineConfig)}
setattr(EngineConfig, "__init__", takes_names(partial(named, fields=_FIELDS), ALIASES)(EngineConfig.__init__))  # noqa: B010


def with_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with absolute paths, and adapters as pairs. Other values are left as they are, for EngineConfig
    to check.

    Raises ConfigError.
    """
    found = dict(options)
    for name in ("model", "draft_model", "mmproj"):
        value = found.get(name)
        if isinstance(value, (str, os.PathLike)) and value != "":
            path = _path(name, value, "give the path of a .gguf file")
            found[name] = path if (name, path) == ("mmproj", AUTO) else model_name(path)
    for name in ("allowed_local_media_path", "cache_disk"):
        if isinstance(folder := found.get(name), (str, os.PathLike)) and folder != "":
            found[name] = absolute(folder)
    if "adapters" in found:
        found["adapters"] = tuple((name, absolute(path)) for name, path in _checked_adapters(found["adapters"]))
    return found


def _path(name: str, given: object, cure: str) -> str:
    """Returns a path as a plain str. Raises ConfigError, even if __fspath__ of `given` raises another error."""
    try:
        text = string(os.fspath(given) if isinstance(given, os.PathLike) else given)
    except Exception:
        text = None
    if not text:
        raise ConfigError(f"{name} is {show(given)}; {cure}")
    return text


def _checked_adapters(adapters: object) -> tuple[tuple[str, str], ...]:
    """Returns adapters as pairs of a name and a path. Raises ConfigError."""
    given = pairs(adapters, MAX_ADAPTERS + 1)
    if given is None:
        raise ConfigError(f"adapters is {show(adapters)}; give {{'name': 'path.gguf'}}, or pairs of a name and a path")
    if len(given) > MAX_ADAPTERS:
        raise ConfigError(f"adapters holds more than {MAX_ADAPTERS}; at most that many are allowed")
    found: dict[str, str] = {}
    for key, path in given:
        name = check_name(key)
        if name in found:
            raise ConfigError(f"adapters names {name!r} twice")
        found[name] = _path(f"the path of adapter {name!r}", path, "give the path of a .gguf file")
    return tuple(found.items())
