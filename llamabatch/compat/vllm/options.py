"""The options of vLLM's LLM. Some become options of an EngineConfig, some change nothing, and some are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from llamabatch.compat.options import check_further, refuse_or_warn
from llamabatch.config import KV_TYPES, MAX_BATCH, MAX_SLOTS, EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.utils.checks import choice, show
from llamabatch.utils.paths import AUTO

Given = Callable[[Any], dict[str, Any]]
_ONE_MACHINE = (
    "one machine computes; llama.cpp spreads the layers over its GPUs, and strategy='multi-instance' adds engines"
)
_MEDIA = "pictures are read one after another, by one encoder"
_KERNELS = "llama.cpp has kernels of its own"
_GRAPHS = "nothing is compiled at run time"
_PLUGINS = "plugins are not supported"
_OF_FILE = "the GGUF file has it"
_LORA_ANY = "adapters of any rank and number need no option"
_FIGURES = "LLM.get_metrics and llm.llm.stats() have the figures"
_CELLS = "a slot has cells of its own"
_FAMILY = "the family is found from the chat template"


def _all(why: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


# These options cause one warning and have no effect. No text depends on them, or llamabatch does not need them.
IGNORED: dict[str, str] = {
    "gpu_memory_utilization": "the plan takes half of the free memory; n_slots and n_ctx say how much",
    "dtype": "the file has its types; another file has others, as hf:owner/repo:Q8_0",
    "trust_remote_code": "a GGUF file holds no code",
    "tokenizer": "the GGUF file has its own",
    **_all("the GGUF file has its tokenizer", "tokenizer_mode tokenizer_revision"),
    "hf_config_path": _OF_FILE,
    **_all(
        _OF_FILE,
        "config_format model_impl model_loader_extra_config ignore_patterns pt_load_map_location code_revision "
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size use_tqdm_on_load "
        "allow_deprecated_quantization served_model_name",
    ),
    **_all(
        _GRAPHS,
        "enforce_eager compilation_config cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture "
        "optimization_level performance_mode ir_op_priority cuda_graph_sizes",
    ),
    **_all(
        _KERNELS,
        "attention_backend attention_config override_attention_dtype mamba_config mamba_backend mamba_block_size "
        "mamba_cache_mode mamba_cache_dtype mamba_ssm_cache_dtype enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds kernel_config moe_backend linear_backend all2all_backend gdn_prefill_backend "
        "kda_prefill_backend enable_flashinfer_autotune disable_cascade_attn kv_cache_dtype_skip_layers "
        "calculate_kv_scales kv_sharing_fast_prefill async_scheduling disable_async_output_proc additional_config "
        "device use_fp64_gumbel",
    ),
    **_all(
        _ONE_MACHINE,
        "tensor_parallel_size pipeline_parallel_size data_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size distributed_executor_backend disable_custom_all_reduce master_addr master_port "
        "nnodes node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_comm_backend "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank "
        "data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "data_parallel_supervisor_port enable_expert_parallel enable_ep_weight_filter enable_elastic_ep enable_dbo "
        "enable_eplb eplb_config expert_placement_strategy dbo_decode_token_threshold dbo_prefill_token_threshold "
        "disable_nccl_for_dp_synchronization max_parallel_loading_workers ray_workers_use_nsight numa_bind "
        "numa_bind_nodes numa_bind_cpus ubatch_size",
    ),
    **_all(
        "llama.cpp keeps weights where n_gpu_layers and override_tensor say",
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params offload_config",
    ),
    **_all(
        _CELLS,
        "swap_space block_size num_gpu_blocks_override kv_cache_memory_bytes prefix_caching_hash_algo "
        "kv_offloading_size kv_offloading_backend kv_transfer_config kv_events_config ec_transfer_config "
        "disable_hybrid_kv_cache_manager preemption_mode use_v2_block_manager num_lookahead_slots",
    ),
    **_all(
        "prompts are always computed in chunks; prefill_budget bounds them",
        "enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
        "disable_chunked_mm_input scheduler_reserve_full_isl num_scheduler_steps multi_step_stream_outputs",
    ),
    "scheduling_policy": "SamplingParams(priority=…) and generate(..., priority=…) need no option",
    "max_logprobs": "any request may ask for 1024",
    "stream_interval": "whole outputs are returned",
    **_all(
        _LORA_ANY,
        "max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size long_lora_scaling_factors "
        "fully_sharded_loras enable_lora_bias enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token",
    ),
    **_all(
        _MEDIA,
        "media_io_kwargs mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin mm_tensor_ipc video_pruning_rate language_model_only "
        "interleave_mm_strings skip_mm_profiling disable_mm_preprocessor_cache default_mm_loras",
    ),
    "mm_processor_kwargs": "image_min_tokens and image_max_tokens bound the tokens of a picture",
    **_all("llguidance is the only backend", "guided_decoding_backend guided_decoding_disable_fallback"),
    **_all(_FAMILY, "tool_call_parser enable_auto_tool_choice"),
    **_all(
        _FIGURES,
        "disable_log_stats disable_log_requests aggregate_engine_logging kv_cache_metrics kv_cache_metrics_sample "
        "cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details enable_mm_processor_stats "
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces profiler_config "
        "enable_layerwise_nvtx_tracing",
    ),
    **_all("llm.sleep() is there without it", "enable_sleep_mode enable_cumem_allocator"),
    **_all("the model stays loaded", "weight_transfer_config shutdown_timeout"),
    **_all("nothing asks for it here", "fail_on_environ_validation renderer_num_workers tokens_only reasoning_config"),
}


class Refusal(NamedTuple):
    """The rule for an option that is refused, because ignoring it would change an answer.

    Attributes:
        why: the replacement, or the reason.
        fine: values that are accepted, because they ask for llamabatch's own behaviour.
    """

    why: str
    fine: tuple[object, ...] = (None,)


REFUSED: dict[str, Refusal] = {
    "quantization": Refusal("the file has its quantisation; choose a file, as hf:owner/repo:Q4_K_M", (None, "gguf")),
    "load_format": Refusal("models are GGUF files", (None, "auto", "gguf")),
    "quantization_config": Refusal("the file has its quantisation"),
    "hf_overrides": Refusal("give kv_overrides or the rope options", (None, {})),
    "rope_scaling": Refusal("give kv_overrides or the rope options of EngineConfig", (None, {})),
    "model_weights": Refusal("give the file as `model`", (None, "")),
    "skip_tokenizer_init": Refusal("texts and token ids are both taken", (None, False)),
    "enable_prompt_embeds": Refusal("a prompt is a text or token ids", (None, False)),
    "enable_return_routed_experts": Refusal("outputs do not name experts", (None, False)),
    "return_sampling_mask": Refusal("outputs do not name the tokens that were cut", (None, False)),
    "disable_sliding_window": Refusal("the GGUF file decides this", (None, False)),
    "mm_encoder_only": Refusal(_MEDIA, (None, False)),
    "enable_mm_embeds": Refusal(_MEDIA, (None, False)),
    "lora_target_modules": Refusal("the adapter's file says what it changes"),
    "logits_processors": Refusal("give SamplingParams(logits_processors=[f])", (None, [])),
    "logits_processor_pattern": Refusal(_PLUGINS),
    "io_processor_plugin": Refusal(_PLUGINS),
    "reasoning_parser_plugin": Refusal(_PLUGINS, (None, "")),
    "scheduler_cls": Refusal(_PLUGINS),
    "worker_cls": Refusal(_PLUGINS, (None, "auto")),
    "worker_extension_cls": Refusal(_PLUGINS, (None, "")),
    "guided_decoding_disable_any_whitespace": Refusal("white space of JSON is llguidance's", (None, False)),
}

_POOLING = {"last": "last", "mean": "mean", "cls": "cls", "all": "none"}
_FLOATS = {"auto": None, "half": "f16", "float16": "f16", "fp16": "f16", "bfloat16": "bf16", "float32": "f32"}


class Defaults(NamedTuple):
    """The options for requests; all other options are for the engine.

    Attributes:
        from_file: True if requests without sampling parameters use the file's parameters.
        sampling: parameters that replace the file's parameters.
        post_sampling: True if logprobs include the effect of all sampling settings; else they are the model's own.
        in_reasoning: True applies structured outputs from the first token on, False only after the thinking.
        normalize, dimensions, use_activation: the defaults of these PoolingParams fields.
        chat_template: the template for a chat without its own template.
    """

    from_file: bool = True
    sampling: Mapping[str, Any] = {}
    post_sampling: bool = False
    in_reasoning: bool = True
    normalize: bool = True
    dimensions: int | None = None
    use_activation: bool = True
    chat_template: str | None = None


def engine_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], Defaults]:
    """Returns the options of EngineConfig, and the defaults of requests.

    Args:
        given: vLLM's options without `model`, and options of EngineConfig.

    Raises:
        ConfigError: a value is refused, or out of range. UnknownOptionError: a name is unknown.
    """
    given = {name: value for name, value in given.items() if value is not None}
    parts = {key: given.pop(name) for name, key in _SPEC.items() if name in given}
    if parts:
        given["speculative_config"] = parts
    options: dict[str, Any] = {"reasoning_format": "none", "seed": 0}  # vLLM keeps thinking in the text and has seed 0
    answers: dict[str, Any] = {}
    for name, option in TAKEN.items():
        if name in given:
            found = option.read(given.pop(name))
            for key, value in found.items():
                (answers if key in Defaults._fields else options)[key] = value
    refused = {name: rule.why for name, rule in REFUSED.items() if not any(given.get(name) == v for v in rule.fine)}
    refuse_or_warn(given, refused, IGNORED)
    own = {name: value for name, value in given.items() if name not in REFUSED and name not in IGNORED}
    check_further(own, [*TAKEN, *REFUSED, *IGNORED])
    return options | own, Defaults(**answers)


class Taken(NamedTuple):
    """An option of vLLM that has a meaning here.

    Attributes:
        read: turns the option's value into options of EngineConfig and fields of Defaults.
        here: the option's effect here, for the list in docs/vllm_names.md.
    """

    read: Given
    here: str


def _length(value: Any) -> dict[str, Any]:
    if value in ("auto", -1):
        return {}
    return {"n_ctx": _counted(value)}


def _counted(value: Any) -> Any:
    """Returns a number, also for vLLM's short forms: "4k" is 4000, "4K" is 4096."""
    if isinstance(value, str) and value[:-1].replace(".", "", 1).isdigit() and value[-1] in "kKmM":
        base = 1000 if value[-1].islower() else 1024
        return int(float(value[:-1]) * base ** ("km".index(value[-1].lower()) + 1))
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _kv_type(value: Any) -> dict[str, Any]:
    kind = _FLOATS.get(value, value)
    if kind is not None and kind not in KV_TYPES:
        raise ConfigError(
            f"kv_cache_dtype is {show(value)}, which llama.cpp does not have; give type_k and type_v, as 'q8_0'"
        )
    return {} if kind is None else {"type_k": kind, "type_v": kind}


def _draft(value: Any) -> dict[str, Any]:
    config = dict(value) if isinstance(value, Mapping) else {}
    method, model, count = config.get("method"), config.get("model"), config.get("num_speculative_tokens")
    options = {} if count is None else {"n_draft": count}
    if method == "ngram":
        return {"speculate": "lookup", **options}
    if model and method in (None, "draft_model"):
        return {"speculate": "draft", "draft_model": str(model), **options}
    raise ConfigError(
        f"speculative_config is {show(value)}; give {{'method': 'ngram', 'num_speculative_tokens': n}}, or a mapping "
        "with 'model', a GGUF file of the same vocabulary"
    )


def _pooler(value: Any) -> dict[str, Any]:
    config = dict(value) if isinstance(value, Mapping) else dict(vars(value)) if hasattr(value, "__dict__") else {}
    found: dict[str, Any] = {}
    for name, each in config.items():
        if each is None or name == "task":
            continue
        if name in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
            found["pooling"] = _POOLING[choice(ConfigError, name, str(each).lower(), _POOLING)]
        elif name in ("normalize", "dimensions", "use_activation"):
            found[name] = each
        elif name in ("activation", "softmax"):
            found["use_activation"] = each
        else:
            raise ConfigError(f"pooler_config has {name} of {show(each)}, which is not supported; leave it out")
    return found


def _generation(value: Any) -> dict[str, Any]:
    if value not in ("auto", "vllm"):
        raise ConfigError(f"generation_config is {show(value)}; give 'auto' (the file's own) or 'vllm' (no others)")
    return {"from_file": value == "auto"}


def _logprobs(value: Any) -> dict[str, Any]:
    known = {"raw_logprobs": False, "processed_logprobs": True}
    return {"post_sampling": known[choice(ConfigError, "logprobs_mode", value, known)]}


def _pictures(value: Any) -> dict[str, Any]:
    return {"mmproj": AUTO} if isinstance(value, Mapping) and value.get("image") else {}


def _outputs(value: Any) -> dict[str, Any]:
    config = dict(value) if isinstance(value, Mapping) else dict(vars(value)) if hasattr(value, "__dict__") else {}
    if config.get("disable_any_whitespace"):
        raise ConfigError(
            "structured_outputs_config has disable_any_whitespace=True, which is not supported; the white space of "
            "JSON is llguidance's"
        )
    return {"in_reasoning": bool(config.get("enable_in_reasoning")) or not config.get("reasoning_parser")}


def _nothing(value: Any) -> dict[str, Any]:
    return {}


def _one_of(name: str, *known: str) -> Given:
    def read(value: Any) -> dict[str, Any]:
        choice(ConfigError, name, value, known)
        return {}

    return read


_SPEC = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
TAKEN: dict[str, Taken] = {
    "max_model_len": Taken(_length, "`n_ctx`; without it min(trained, 4096), in vLLM the trained length"),
    "max_num_seqs": Taken(
        lambda n: {"n_slots": min(_counted(n), MAX_SLOTS)}, "`n_slots`, or as many as fit in memory where fewer do"
    ),
    "max_num_batched_tokens": Taken(lambda n: {"n_batch": min(_counted(n), MAX_BATCH)}, "`n_batch`"),
    "enable_prefix_caching": Taken(lambda on: {"cache_prefix": on}, "`cache_prefix`"),
    "seed": Taken(lambda n: {"seed": n}, "`seed`, 0 unless given, as in vLLM"),
    "kv_cache_dtype": Taken(_kv_type, "`type_k` and `type_v`; fp8 is refused"),
    "rope_theta": Taken(lambda base: {"rope_freq_base": base}, "`rope_freq_base`"),
    "speculative_config": Taken(_draft, "`speculate`: method ngram, or a model; others are refused"),
    **{name: Taken(_nothing, f"as {key} of speculative_config") for name, key in _SPEC.items()},
    "allowed_local_media_path": Taken(lambda folder: {"allowed_local_media_path": folder or None}, "the same"),
    "allowed_media_domains": Taken(lambda names: {"allowed_media_domains": names}, "the same; without it no host"),
    "limit_mm_per_prompt": Taken(_pictures, "`mmproj`, 'auto' where pictures are allowed and no file is given"),
    "pooler_config": Taken(_pooler, "`pooling`, and the defaults of PoolingParams"),
    "override_pooler_config": Taken(_pooler, "as pooler_config"),
    "generation_config": Taken(
        _generation, '"auto": sampling defaults are the file\'s (general.sampling); "vllm": vLLM\'s; others are refused'
    ),
    "override_generation_config": Taken(
        lambda found: {"sampling": dict(found)}, "replaces the file's sampling defaults"
    ),
    "logprobs_mode": Taken(_logprobs, "raw_logprobs or processed_logprobs; logits are refused"),
    "structured_outputs_config": Taken(_outputs, "any backend: llguidance is the only one; its switches are refused"),
    "reasoning_parser": Taken(
        lambda name: {"in_reasoning": not name},
        "any: structured outputs then apply after the thinking; the text holds it, as there",
    ),
    "chat_template": Taken(lambda text: {"chat_template": str(text)}, "of chats that give none"),
    "enable_lora": Taken(_nothing, "nothing: a LoRARequest needs no option"),
    "runner": Taken(
        _one_of("runner", "auto", "generate", "pooling"), "any engine generates and embeds; draft is refused"
    ),
    "convert": Taken(
        _one_of("convert", "auto", "none", "embed", "classify"),
        "nothing: any engine embeds; the file's head classifies",
    ),
    "task": Taken(
        _one_of("task", "auto", "generate", "embed", "embedding", "score", "classify"), "as runner; others are refused"
    ),
    "revision": Taken(lambda name: {"revision": name}, "of a model on the hub"),
    "download_dir": Taken(lambda path: {"download_dir": path}, "the cache of a model on the hub"),
    "hf_token": Taken(_nothing, "nothing: the environment's HF_TOKEN, or that of `hf auth login`"),
}
HUB = ("revision", "download_dir")  # options for a model on the hub; EngineConfig does not have them

OWN = tuple(field.name for field in fields(EngineConfig) if field.name != "model")
