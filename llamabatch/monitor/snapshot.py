"""Snapshot: the argument of a Monitor's callback."""

from __future__ import annotations

from dataclasses import dataclass

from llamabatch.engine.stats import EngineStats
from llamabatch.monitor.host import MachineSample


@dataclass(frozen=True)
class Snapshot:
    """An engine and its machine at one moment.

    Attributes:
        time_s: time of the snapshot, seconds since 1970.
        elapsed_s: seconds since the monitor started.
        stats: figures since the engine started.
        interval_s: seconds since the previous snapshot, or since the monitor started.
        recent: figures of this interval alone. The histograms of `recent` have the percentiles of the interval.
        machine: CPU, memory, power and GPUs in this interval.
    """

    time_s: float
    elapsed_s: float
    stats: EngineStats
    interval_s: float
    recent: EngineStats
    machine: MachineSample

    @property
    def generated_tokens_per_s(self) -> float:
        """The number of sampled tokens, divided by the seconds of the interval."""
        return self._rate(self.recent.generated_tokens)

    @property
    def prompt_tokens_per_s(self) -> float:
        """The number of tokens in admitted prompts and embedded texts, divided by the seconds of the interval."""
        return self._rate(self.recent.prompt_tokens + self.recent.embed_tokens)

    @property
    def requests_per_s(self) -> float:
        """The number of ended requests, including errors and aborts, divided by the seconds of the interval."""
        return self._rate(self.recent.ok + self.recent.errors + self.recent.aborted)

    def _rate(self, count: int) -> float:
        return count / self.interval_s if self.interval_s > 0 else 0.0
