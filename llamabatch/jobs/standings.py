"""How a job stands: from what it counts itself and what the engine says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llamabatch.jobs.counts import Counts
from llamabatch.jobs.progress import Standing
from llamabatch.jobs.reader import Reader
from llamabatch.jobs.timeline import Timeline
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
        self._total: int | None = None
        self._next = 0.0

    def begin(self, slots: int, total: int | None, reader: Reader) -> None:
        """The engine is ready.

        Args:
            total: rows of the job; None: not known.
        """
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
        return {"rows": now.rows, "total": now.total, "left_s": now.left_s, "errors": now.failed}

    def now(self) -> Standing:
        """For those who want to know."""
        counts = self._counts
        left = None if self._total is None else max(0, self._total - counts.rows)
        left_s = self._left_s() if left is None else self.timeline.seconds_for(left)
        running = self.stats.running
        return Standing(
            counts.rows, self._total, counts.failed, self.timeline.tokens_per_s, running, self._slots, left_s
        )

    def _left_s(self) -> float | None:
        """By how much of the inputs has been read, where their rows have not been counted."""
        share = None if self._reader is None else self._reader.share
        rows = self._counts.rows
        return self.timeline.seconds_for(round(rows / share - rows)) if share else None


def _tokens(stats: EngineStats) -> int:
    return stats.generated_tokens + stats.embed_tokens
