"""When things happened to a request."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """When things happened to one request; seconds, relative to its arrival.

    Attributes:
        queued_s: until it got a slot.
        ttft_s: until its first output token was known (time to first token); None if there was none.
        total_s: until it finished.
        token_times_s: when each output token was known.
    """

    queued_s: float | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    token_times_s: tuple[float, ...] = ()

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Seconds between neighbouring output tokens (one fewer than tokens)."""
        return tuple(b - a for a, b in itertools.pairwise(self.token_times_s))

    @property
    def generation_tps(self) -> float | None:
        """Output tokens a second after the first one; None below two tokens."""
        if len(self.token_times_s) < 2:
            return None
        span = self.token_times_s[-1] - self.token_times_s[0]
        return (len(self.token_times_s) - 1) / span if span > 0 else None
