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
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": 1000 * _ratio(prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, steps),
        "predicted_per_second": 1000 * _ratio(steps, predicted_ms),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
