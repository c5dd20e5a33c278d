"""What callers were told of a request by an engine that is gone. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from llamabatch.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Known:
    """Output tokens with which the next engine goes on: it computes them like a prompt and does not tell them again.

    Attributes:
        token_ids: the tokens. times_s: time.perf_counter() when each was told.
        logprobs: one for each, where they were asked for.
        admitted_s: time.perf_counter() when the request first had a slot.
    """

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    admitted_s: float | None = None
