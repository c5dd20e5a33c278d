"""llama-server's "timings" of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamabatch.request.outputs import RequestOutput


def timings_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Counts, milliseconds and rates of the prompts and the texts of a response.

    As there, the time of a prompt ends with the first token, which costs no step of its own: rates and the time per
    token of a text are over the steps behind it, 0 where there are none. The requests of a list ran side by side, so
    that their milliseconds overlap.
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
    """The part about a prompt.

    Args:
        n_computed, n_cached: its tokens that were computed, and copied. ms: milliseconds that it took.
    """
    return {
        "cache_n": n_cached,
        "prompt_n": n_computed,
        "prompt_ms": ms,
        "prompt_per_token_ms": _ratio(ms, n_computed),
        "prompt_per_second": 1000 * _ratio(n_computed, ms),
    }


def output_timings(n_output: int, steps: int, ms: float) -> dict[str, Any]:
    """The part about a text.

    Args:
        n_output: its tokens. steps: those behind the first. ms: milliseconds that these took.
    """
    return {
        "predicted_n": n_output,
        "predicted_ms": ms,
        "predicted_per_token_ms": _ratio(ms, steps),
        "predicted_per_second": 1000 * _ratio(steps, ms),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
