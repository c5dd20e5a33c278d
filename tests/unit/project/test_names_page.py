"""docs/names.md names every field of SamplingParams and every alias."""

import re
from dataclasses import fields
from pathlib import Path

from llamabatch import SamplingParams
from llamabatch.config import EngineConfig
from llamabatch.config.names import ALIASES as OPTIONS
from llamabatch.config.names import AS_HERE as OPTIONS_AS_HERE
from llamabatch.request.parameter_names import ALIASES, AS_HERE
from llamabatch.utils.aliases import MODEL_NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "names.md").read_text(encoding="utf-8")


def test_every_field_and_alias_is_on_the_page():
    first_column = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `"))
    ours = set(re.findall(r"`(\w+)`", first_column))
    assert {field.name for field in fields(SamplingParams)} - ours == set()
    bold = set(re.findall(r"\*\*`(\w+)`\*\*", PAGE))
    assert bold - {*ALIASES, *OPTIONS, *MODEL_NAMES} == set(), "named as understood, but is no alias"
    assert {*ALIASES, *OPTIONS, *MODEL_NAMES} - bold == set()
    assert {*AS_HERE, *OPTIONS_AS_HERE} - set(re.findall(r"`(\w+)`", PAGE)) == set()


# options of vLLM 0.11: vllm/entrypoints/llm.py, common fields of EngineArgs, and vllm/sampling_params.py
VLLM_OPTIONS = """model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code
tensor_parallel_size dtype quantization revision tokenizer_revision seed gpu_memory_utilization swap_space
cpu_offload_gb enforce_eager disable_custom_all_reduce hf_token hf_overrides mm_processor_kwargs pooler_config
kv_cache_memory_bytes compilation_config logits_processors structured_outputs_config max_model_len max_num_seqs
max_num_batched_tokens enable_prefix_caching enable_chunked_prefill enable_lora max_loras max_lora_rank
speculative_config kv_cache_dtype block_size load_format download_dir served_model_name disable_log_stats
data_parallel_size pipeline_parallel_size max_logprobs scheduling_policy distributed_executor_backend"""
VLLM_PARAMETERS = """n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs flat_logprobs detokenize
skip_special_tokens spaces_between_special_tokens logits_processors include_stop_str_in_output
truncate_prompt_tokens output_kind structured_outputs logit_bias allowed_token_ids extra_args bad_words
guided_json guided_regex guided_choice guided_grammar thinking_token_budget best_of skip_reading_prefix_cache"""


def test_every_name_of_vllm_is_known_and_on_a_page():
    options = {field.name for field in fields(EngineConfig)} | {*OPTIONS, *OPTIONS_AS_HERE}
    assert set(VLLM_OPTIONS.split()) <= options
    assert set(VLLM_PARAMETERS.split()) <= {field.name for field in fields(SamplingParams)} | {*ALIASES, *AS_HERE}
    told = PAGE + (Path(__file__).parents[3] / "docs" / "from_vllm.md").read_text(encoding="utf-8")
    assert {*VLLM_OPTIONS.split(), *VLLM_PARAMETERS.split()} <= set(re.findall(r"`(\w+)", told))
