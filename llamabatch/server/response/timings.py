"""llama-server's "timings" in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamabatch.request.outputs import RequestOutput


def timings_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Returns counts, milliseconds and rates of the prompts and the texts of a response.

    As in llama-server, the time of a prompt ends with the first token, because the prefill already yields this token.
    The rate and the time per token of a text therefore count only the steps after the first token. Both are 0 if there
    are no such steps. The requests of a list run at the same time, so their milliseconds overlap.
    """
    cached = sum(output.num_cached_tokens for output in outputs)
    prompt_n = sum(len(output.prompt_token_ids) for output in outputs) - cached
    predicted_n = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    steps = sum(max(0, len(each.token_ids) - 1) for output in outputs for each in output.outputs)
    prompt_ms = predicted_ms = 0.0
    for output in outputs:
        times = output.timings
        first = times.total_s if times.ttft_s is None else times.ttft_s
        prompt_ms += 1000 * max(0.0, first - (times.queued_s or 0.0))
        if times.token_times_s:
            predicted_ms += 1000 * max(0.0, times.token_times_s[-1] - first)
    return prompt_timings(prompt_n, cached, prompt_ms) | output_timings(predicted_n, steps, predicted_ms)


def prompt_timings(n_computed: int, n_cached: int, ms: float) -> dict[str, Any]:
    """Returns the timings of a prompt.

    Args:
        n_computed: number of computed prompt tokens.
        n_cached: number of prompt tokens from the cache.
        ms: milliseconds for the prompt.
    """
    return {
        "cache_n": n_cached,
        "prompt_n": n_computed,
        "prompt_ms": ms,
        "prompt_per_token_ms": _ratio(ms, n_computed),
        "prompt_per_second": 1000 * _ratio(n_computed, ms),
    }


def output_timings(n_output: int, steps: int, ms: float) -> dict[str, Any]:
    """Returns the timings of a generated text.

    Args:
        n_output: number of tokens of the text.
        steps: number of tokens after the first.
        ms: milliseconds of these steps.
    """
    return {
        "predicted_n": n_output,
        "predicted_ms": ms,
        "predicted_per_token_ms": _ratio(ms, steps),
        "predicted_per_second": 1000 * _ratio(steps, ms),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
