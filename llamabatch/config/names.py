"""Other libraries' names for options of an engine, and conversion of other libraries' values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.config.values import KV_TYPES, SPLIT_MODES
from llamabatch.errors import ConfigError, UnknownOptionError
from llamabatch.gguf.pooling import POOLINGS
from llamabatch.gguf.validation import ROPE_SCALINGS
from llamabatch.request.adapters import MAX_ADAPTERS
from llamabatch.request.parameter_names import ALIASES as PARAMETER_ALIASES
from llamabatch.request.sampling_params import PARAMETERS
from llamabatch.utils.aliases import model_named
from llamabatch.utils.checks import nearest, show

# Keys: names of options in vLLM, llama.cpp and llama_cpp.Llama. Values: our names for the same options.
ALIASES = {
    "max_model_len": "n_ctx",
    "ctx_size": "n_ctx",
    "context_length": "n_ctx",
    "max_num_seqs": "n_slots",
    "n_parallel": "n_slots",
    "n_seq_max": "n_slots",
    "max_num_batched_tokens": "n_batch",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "threads": "n_threads",
    "threads_batch": "n_threads_batch",
    "gpu_layers": "n_gpu_layers",
    "ngl": "n_gpu_layers",
    "device": "devices",
    "kv_offload": "offload_kqv",
    "cache_type_k": "type_k",
    "cache_type_v": "type_v",
    "enable_prefix_caching": "cache_prefix",
    "mmap": "use_mmap",
    "mlock": "use_mlock",
    "rope_scaling_type": "rope_scaling",
    "pooling_type": "pooling",
    "override_kv": "kv_overrides",
    "model_draft": "draft_model",
    "draft_max": "n_draft",
}

# Keys: options of other libraries that have no meaning in llamabatch. Values: (accepted values, advice). An accepted
# value asks only for the usual behaviour.
_LORA = "give adapters={'name': path} here, and generate(..., adapters='name') to the requests that want it"
AS_HERE: dict[str, tuple[tuple[object, ...], str]] = {
    "verbose": ((False, None), 'the log is Python\'s: logging.getLogger("llamabatch.llama_cpp").setLevel("INFO")'),
    **dict.fromkeys(("lora", "loras", "adapter", "lora_modules", "lora_path"), ((None,), _LORA)),
    "lora_base": ((None,), _LORA),
    "lora_scale": ((1.0, 1, None), "give generate(..., adapters={'name': scale})"),
    "enable_lora": ((True, False, None), _LORA),
    "gpu_memory_utilization": (
        (None,),
        "the plan takes half of the free memory; n_slots and n_ctx say how much is used",
    ),
    "tensor_parallel_size": ((1, None), "give tensor_split=(1, 1), layers over GPUs, or strategy='multi-instance'"),
    "pipeline_parallel_size": ((1, None), "give tensor_split=(1, 1), which gives each GPU a part of the layers"),
    "data_parallel_size": ((1, None), "give strategy='multi-instance' and instances=…"),
    "dtype": (("auto", None), "the file has its type; choose another file, as hf:owner/repo:Q8_0"),
    "quantization": ((None, "gguf"), "the file has its quantisation; choose another file, as hf:owner/repo:Q4_K_M"),
    "load_format": (("auto", "gguf", None), "models are GGUF files"),
    "kv_cache_dtype": (("auto", None), "give type_k and type_v, as q8_0"),
    "enable_chunked_prefill": ((True, None), "prompts are always computed in chunks; prefill_budget bounds them"),
    "enforce_eager": ((True, False, None), "there are no graphs to turn off"),
    "trust_remote_code": ((True, False, None), "a GGUF file holds no code"),
    "disable_log_stats": ((True, False, None), "LLM.stats() and LLM.monitor() give them"),
    "tokenizer": ((None,), "the file has its tokenizer"),
    "tokenizer_mode": (("auto", None), "the file has its tokenizer"),
    "revision": ((None,), "give hf:owner/repo@revision:Q4_K_M, or LLM.from_pretrained(repo, revision=…)"),
    "download_dir": ((None,), "give LLM.from_pretrained(repo, cache_dir=…)"),
    "swap_space": ((0, None), "the KV cache is never swapped"),
    "cpu_offload_gb": ((0, None), "give n_gpu_layers, the number of layers on the GPU"),
    "max_logprobs": ((None,), "any request may ask for 1024; SamplingParams(logprobs=…)"),
    "speculative_config": ((None,), "give speculate='lookup', or speculate='draft' and draft_model"),
    "hf_overrides": ((None,), "give kv_overrides or the rope options"),
    "pooler_config": ((None,), "give pooling='cls'"),
    "scheduling_policy": (("fcfs", "priority", None), "SamplingParams(priority=…) needs no option"),
    "reasoning_parser": ((None,), "the family is found from the chat template; reasoning_tags replaces it"),
    "tool_call_parser": ((None,), "the family is found from the chat template"),
    "chat_template": ((None,), "give chat(..., chat_template=…)"),
    "chat_format": ((None,), "the GGUF's own template is used; chat(..., chat_template=…) replaces it"),
    "chat_handler": ((None,), "the GGUF's own template is used; chat(..., chat_template=…) replaces it"),
    "guided_decoding_backend": ((None, "auto", "guidance"), "llguidance is the only one"),
    "embedding": ((True, False, None), "embed() needs no option"),
    "embeddings": ((True, False, None), "embed() needs no option"),
    "logits_all": ((True, False, None), "logprobs need no option"),
    "vocab_only": ((False, None), "a model is loaded whole"),
    "last_n_tokens_size": ((None,), "give SamplingParams(repeat_last_n=…)"),
    "runner": (("auto", "generate", "pooling"), "any engine generates, and embeds as `pooling` says"),
    "convert": (("auto", "none"), "give pooling, or LLM.rerank and LLM.classify"),
    "task": (("auto", "generate"), "any engine generates, and embeds as `pooling` says"),
    "skip_tokenizer_init": ((False, None), "the file has its tokenizer"),
    "tokenizer_revision": ((None,), "the file has its tokenizer"),
    "disable_custom_all_reduce": ((True, False, None), "there is no all-reduce"),
    "distributed_executor_backend": ((None, "uni", "mp"), "give strategy='multi-instance' and instances=…"),
    "hf_token": ((None,), "the hub's token is HF_TOKEN, or that of `hf auth login`"),
    "mm_processor_kwargs": ((None,), "image_min_tokens and image_max_tokens bound the tokens of a picture"),
    "kv_cache_memory_bytes": ((None,), "give n_slots and n_ctx, or kv='unified' and kv_cells"),
    "compilation_config": ((None,), "nothing is compiled at run time"),
    "block_size": ((None,), "the KV cache has no blocks"),
    "max_loras": ((None,), f"up to {MAX_ADAPTERS} adapters need no option"),
    "max_lora_rank": ((None,), "adapters of any rank need no option"),
    "served_model_name": ((None,), "there is no server"),
    "structured_outputs_config": ((None,), "llguidance is the only backend"),
    "logits_processors": ((None,), "give SamplingParams(logits_processors=[f])"),
    "no_perf": ((True, False, None), "LLM.stats() has the times"),
}
# ggml.h gives the types in KV_TYPES these numbers. llama_cpp.Llama takes a type as such a number.
_GGML_TYPES = dict(zip((0, 1, 30, 8, 2, 3, 20, 6, 7), KV_TYPES, strict=True))


def advice_about(name: str) -> str:
    """Returns advice for an option that the engine does not have, such as its replacement; "": no advice."""
    if name in PARAMETERS or name in PARAMETER_ALIASES:
        return f"it belongs to a request; give generate(..., SamplingParams({name}=…))"
    return AS_HERE.get(name, ((), ""))[1]


def named(options: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Returns a caller's options with the names of EngineConfig's fields, and with converted values.

    Args:
        fields: names of EngineConfig's fields.

    Raises:
        UnknownOptionError: a name is unknown. ConfigError: two names mean the same option.
    """
    values: dict[str, Any] = {}
    for given, value in model_named(options).items():
        name = ALIASES.get(given, given)
        if name != given and value is None:
            continue  # None is the other library's default
        if name not in fields:
            meant, advice = AS_HERE.get(name, ((), ""))
            if any(type(value) is type(one) and value == one for one in meant):
                continue
            if advice := advice or advice_about(name):
                raise UnknownOptionError(f"{name} is {show(value)}, which is no option of the engine: {advice}")
            known = [name for name in (*fields, *ALIASES, *AS_HERE) if name != "model"]
            raise UnknownOptionError(f"there is no option {show(given)}{nearest(str(given), known)}")
        if name in values:
            other = given if given != name else next(n for n in options if ALIASES.get(n) == name)
            raise ConfigError(f"{name} is given twice, once as {other!r}; give it once")
        values[name] = _in_form(name, value)
    return values


def _in_form(name: str, value: Any) -> Any:
    """Converts another library's value of an option to ours."""
    if name in ("flash_attn", "device_sampling", "row_ladder") and isinstance(value, bool):
        return "on" if value else "off"
    if name == "numa" and isinstance(value, bool):
        return "distribute" if value else "off"
    if type(value) is not int:
        return value
    if name == "split_mode":
        return dict(enumerate(SPLIT_MODES)).get(value, value)
    if name in ("type_k", "type_v"):
        return _GGML_TYPES.get(value, value)
    if name == "pooling":  # enum llama_pooling_type in llama.h; -1 means that the file decides
        return {-1: "auto", **dict(enumerate(POOLINGS))}.get(value, value)
    if name == "rope_scaling":  # enum llama_rope_scaling_type
        return {-1: None, **dict(enumerate(ROPE_SCALINGS))}.get(value, value)
    return value
