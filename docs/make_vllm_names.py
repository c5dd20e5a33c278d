"""Writes docs/vllm_names.md: the names of vLLM's offline classes, and what llamabatch.compat.vllm does with each.

`python docs/make_vllm_names.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from llamabatch.compat import vllm
from llamabatch.compat.vllm import options, sampling_params
from llamabatch.compat.vllm.entrypoints import llm

PAGE = Path(__file__).with_name("vllm_names.md")
_HEAD = """# vLLM's names in llamabatch.compat.vllm

`from llamabatch.compat.vllm import LLM, SamplingParams` in place of `from vllm`: a program of vLLM's offline classes
runs with the import and the model's name changed. [From vLLM](from_vllm.md) tells the way; this page has each name.
(`python docs/make_vllm_names.py` writes this page.)
"""
_MODULES = {
    "vllm": f"{', '.join(f'`{name}`' for name in vllm.__all__)}",
    "vllm.sampling_params": "`SamplingParams`, `StructuredOutputsParams`, `GuidedDecodingParams`, `RequestOutputKind`",
    "vllm.lora.request": "`LoRARequest`",
    "vllm.outputs": "the classes of outputs",
    "vllm.inputs": "`TextPrompt`, `TokensPrompt`, `PromptType`",
    "vllm.pooling_params": "`PoolingParams`",
    "vllm.config": "`PoolerConfig`",
    "vllm.v1.metrics.reader": "`Counter`, `Gauge`, `Histogram`, `Vector`",
    "vllm.entrypoints.llm": "`LLM`",
    "vllm.engine.arg_utils": "`EngineArgs`",
    "vllm.engine.llm_engine": "`LLMEngine`",
}
_METHODS = {
    "generate": "a bad prompt ends the call with a ValueError, as there; texts are read with special tokens",
    "chat": "the text holds thinking and calls as the model writes them, as there; `chat_template_kwargs` that the "
    "template does not read are refused",
    "embed": "vectors of length 1; `PoolingParams(normalize=False)` for the others",
    "encode": "`pooling_task` embed, token_embed or classify; arrays of numpy in place of tensors",
    "classify": "the same",
    "score": "relevance by a model that ranks, else cosines",
    "get_tokenizer": "encode, decode, batch_decode, apply_chat_template, convert_ids_to_tokens, convert_tokens_to_ids, "
    "tokenize, get_vocab, a call, eos_token_id and its like; lists of numbers, no tensors",
    "get_default_sampling_params": "the file's own (general.sampling), else vLLM's",
    "get_metrics": "figures under vLLM's names",
    "reset_prefix_cache": "the same",
    "sleep": "levels 1 and 2 free the weights, and `enable_sleep_mode` is not needed; calls must have ended",
    "wake_up": "all that was loaded is loaded again; any call wakes the model, too",
}
_ENGINE = {
    "EngineArgs": "takes the options of LLM; `LLM(**dataclasses.asdict(args))`; the command line is not parsed",
    "LLMEngine.from_engine_args": "the same",
    "LLMEngine.add_request": "the same; at any time, also between steps",
    "LLMEngine.step": "waits for new tokens; the engine computes in a thread of its own, also between the calls",
    "LLMEngine.abort_request": "the same",
    "LLMEngine.has_unfinished_requests": "the same",
    "LLMEngine.get_num_unfinished_requests": "the same",
    "LLMEngine.get_tokenizer": "as of LLM",
}
_PARAMETERS = {
    "top_k": "the same, before the temperature (there: behind it), as `top_p` and `min_p`",
    "detokenize": "False: the text is empty",
    "logprobs": "the same; up to 1024, -1: all",
    "seed": "the same text for the same seed; other draws than vLLM's",
    "structured_outputs": "the same; white space of JSON is llguidance's, whose switches are refused",
    "guided_decoding": "the former name of structured_outputs",
    "stop_token_ids": "the same; `stop_reason` is None where the model itself ended the text",
    "thinking_token_budget": 'needs LLM(reasoning_format="auto"), which takes the thinking out of the text',
    "truncate_prompt_tokens": "the last tokens are kept; -1: those that n_ctx takes",
    "logits_processors": "functions of (token ids of the output, logits), with arrays of numpy; those of three "
    "arguments are refused",
    "best_of": "the n with the highest mean logprob, of former versions",
}


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## Modules\n", *_table(("module, behind `llamabatch.compat.`", "names"), _MODULES)]
    parts += [
        "\n## Options of LLM\n",
        "Of EngineConfig the options stand beside vLLM's (`n_slots`, `n_gpu_layers`). These have a meaning:\n",
    ]
    parts += _table(("vLLM", "here"), {name: each.here for name, each in options.TAKEN.items()})
    parts += ["\nThese are accepted with one warning, since no text depends on them:\n"]
    parts += _grouped(("vLLM", "why"), options.IGNORED)
    parts += ["\nThese are refused, but for a value that asks for what happens anyway:\n"]
    refused = {name: f"{rule.why} (taken: {_listed(rule.fine)})" for name, rule in options.REFUSED.items()}
    parts += _table(("vLLM", "in its place"), refused)
    parts += [
        "\n`model` is the path of a .gguf file, 'tiny', or `owner/repo:Q4_K_M`. An unknown name is a "
        "TypeError with the nearest one."
    ]
    parts += ["\n## Methods of LLM\n", *_table(("vLLM", "here"), _METHODS)]
    parts += ["\nThese are not there; the AttributeError says so:\n", *_grouped(("vLLM", "in its place"), llm.ABSENT)]
    parts += ["\n## LLMEngine\n", *_table(("vLLM", "here"), _ENGINE)]
    parts += ["\n## SamplingParams\n", "Names, order and defaults are vLLM's; a field can be set afterwards.\n"]
    parts += _grouped(("vLLM", "here"), _parameters())
    parts += ["\n## Outputs\n", _OUTPUTS]
    return "\n".join(parts).rstrip() + "\n"


_OUTPUTS = """`RequestOutput` (`request_id`, `prompt`, `prompt_token_ids`, `prompt_logprobs`, `outputs`, `finished`,
`lora_request`, `num_cached_tokens`), `CompletionOutput` (`index`, `text`, `token_ids`, `cumulative_logprob`,
`logprobs`, `finish_reason`, `stop_reason`, `lora_request`), `EmbeddingRequestOutput.outputs.embedding`,
`ClassificationRequestOutput.outputs.probs`, `ScoringRequestOutput.outputs.score` and
`PoolingRequestOutput.outputs.data` are as in vLLM. `metrics`, `encoder_prompt`,
`encoder_prompt_token_ids`, `kv_transfer_params` and `routed_experts` are None."""


def _parameters() -> dict[str, str]:
    names = [*sampling_params.SamplingParams.__dataclass_fields__, "guided_decoding"]
    found = dict.fromkeys(names, "the same") | _PARAMETERS
    found |= {name: f"changes nothing: {why}" for name, why in sampling_params.WITHOUT_EFFECT.items()}
    refused = sampling_params.REFUSED | sampling_params.FORMER
    return found | {name: f"refused: {why}" for name, why in refused.items()}


def _listed(values: Iterable[object]) -> str:
    return ", ".join(f"`{value!r}`" for value in values)


def _grouped(head: tuple[str, str], rows: Mapping[str, str]) -> list[str]:
    """A table in which names with the same words share a line."""
    names: dict[str, list[str]] = {}
    for name, text in rows.items():
        names.setdefault(text, []).append(name)
    return _lines(head, ((", ".join(f"`{name}`" for name in several), text) for text, several in names.items()))


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> list[str]:
    return _lines(head, ((f"`{name}`", text) for name, text in rows.items()))


def _lines(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    body = [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *body]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
