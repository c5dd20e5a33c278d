"""Figures: what an engine counts, and percentiles over requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started; running, waiting and free_slots are of now.

    Attributes:
        decode_calls, decode_rows, decode_passes: calls that only continue sequences; the rows in them; their passes
            over the weights.
        prefill_calls, prefill_tokens, prefill_passes: the same for calls with prompt tokens.
        dummy_rows: rows computed only to keep the ids of a call dense.
        adapter_switches: changes of the adapters that a context computes with: turns that sets of them have taken.
        shared_tokens: prompt tokens that were copied from requests in flight instead of computed.
        prefix_hits: requests that began with the cells of a finished one. prefix_tokens: tokens that they did not have
            to compute for that.
        verify_calls: those decode calls that checked guesses (speculative decoding).
        drafted_tokens, accepted_tokens: guesses checked; those that held.
        speculating: engines in which guessing pays by what is known now.
        embed_passes, embed_texts, embed_tokens: passes for embeddings; texts and tokens in them.
        preemptions: sequences that lost their slot and came back.
        missed_deadlines: continuations that were ended by deadline_s.
        rejected: requests that max_queue refused.
    """

    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    preemptions: int = 0
    missed_deadlines: int = 0
    rejected: int = 0
    shared_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    decode_calls: int = 0
    decode_rows: int = 0
    decode_passes: int = 0
    prefill_calls: int = 0
    prefill_tokens: int = 0
    prefill_passes: int = 0
    dummy_rows: int = 0
    adapter_switches: int = 0
    embed_passes: int = 0
    embed_texts: int = 0
    embed_tokens: int = 0
    verify_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    speculating: int = 0

    @property
    def rows_per_step(self) -> float:
        """Mean rows of a decode call."""
        return self.decode_rows / self.decode_calls if self.decode_calls else 0.0

    @property
    def passes_per_step(self) -> float:
        """Mean passes over the weights of a decode call; 1 is what batching is for."""
        return self.decode_passes / self.decode_calls if self.decode_calls else 0.0

    @property
    def acceptance(self) -> float:
        """The share of guesses that held; 0 of none."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def __add__(self, other: EngineStats) -> EngineStats:
        return EngineStats(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The percentile by linear interpolation between neighbours (numpy's default); None of nothing.

    Args:
        percent: 0 to 100.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
