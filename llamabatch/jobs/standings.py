"""How a job stands: from what it counts itself and what the engine says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llamabatch.jobs.counts import Counts
from llamabatch.jobs.progress import Standing
from llamabatch.jobs.reader import Reader
from llamabatch.jobs.timeline import Timeline
from llamabatch.jobs.total import Total
from llamabatch.monitor.snapshot import Snapshot
from llamabatch.stats import EngineStats

_EVERY_S = 0.1


class Standings:
    """For one job.

    Attributes:
        timeline: how it stood, from its beginning on.
        stats: what the engine has last said of itself.
    """

    def __init__(self, counts: Counts) -> None:
        self.timeline = Timeline(1)
        self.stats = EngineStats()
        self._counts = counts
        self._reader: Reader | None = None
        self._slots = 1
        self._total: Total | None = None
        self._next = 0.0

    def begin(self, slots: int, total: Total, reader: Reader) -> None:
        """The engine is ready."""
        self.timeline = Timeline(slots)
        self._slots, self._total, self._reader = slots, total, reader

    def take(self, snapshot: Snapshot) -> None:
        """What a monitor has seen; on its thread."""
        self.stats = snapshot.stats

    def note(self, *, at_once: bool = False) -> None:
        """A point of the timeline, if it is time for one."""
        now = time.perf_counter()
        if at_once or now >= self._next:
            self._next = now + _EVERY_S
            stats = self.stats
            self.timeline.add(self._counts.ok + self._counts.failed, _tokens(stats), stats.running)

    def job(self) -> Mapping[str, Any]:
        """For `llamabatch top`."""
        now = self.now()
        return {
            "rows": now.rows,
            "total": now.total,
            "estimated": now.estimated,
            "left_s": now.left_s,
            "errors": now.failed,
        }

    def now(self) -> Standing:
        """For those who want to know."""
        counts = self._counts
        known = None if self._total is None or self._reader is None else self._total.rows(self._reader.seen)
        total = None if known is None else max(known.n, counts.rows)
        left_s = None if total is None else self.timeline.seconds_for(total - counts.rows)
        return Standing(
            *(counts.rows, total, counts.failed, self.timeline.tokens_per_s, self.stats.running, self._slots, left_s),
            estimated=known is not None and known.estimated,
        )


def _tokens(stats: EngineStats) -> int:
    return stats.generated_tokens + stats.embed_tokens
