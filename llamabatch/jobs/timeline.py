"""Speed and slot use over the time of a job, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_MOST_POINTS = 1024
_RECENT_S = 30.0
_SHORT_S = 2.0


@dataclass(frozen=True)
class Point:
    """How a job stood: seconds since its start; counts since then; rows that were being computed."""

    at_s: float
    rows: int
    tokens: int
    running: int


class Timeline:
    """Points at equal distances; when there are too many, every second one goes and the distance doubles.

    Args:
        slots: rows that can be computed at once.
        every_s: seconds between points, at first.
        clock: seconds, of a clock that no one sets.
    """

    def __init__(self, slots: int, every_s: float = 0.5, clock: Callable[[], float] = time.perf_counter) -> None:
        self.points: list[Point] = []
        self._slots = slots
        self._every_s = every_s
        self._clock = clock
        self._start = clock()
        self._running_s = 0.0  # slot-seconds
        self._last = Point(0.0, 0, 0, 0)
        self._recent: deque[Point] = deque([self._last])

    def add(self, rows: int, tokens: int, running: int) -> None:
        """How it stands now."""
        point = Point(self._clock() - self._start, rows, tokens, running)
        self._running_s += (point.at_s - self._last.at_s) * running
        self._last = point
        if not self.points or point.at_s - self.points[-1].at_s >= self._every_s:
            self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[::2]
            self._every_s *= 2
        self._recent.append(point)
        while len(self._recent) > 2 and point.at_s - self._recent[1].at_s > _RECENT_S:
            self._recent.popleft()

    @property
    def slot_use(self) -> float | None:
        """Mean share of the slots that were in use; None of a job so short that the engine was hardly asked."""
        return self._running_s / (self._last.at_s * self._slots) if self._last.at_s >= _SHORT_S else None

    @property
    def tokens_per_s(self) -> float:
        """Of the last 30 s."""
        first, last = self._recent[0], self._recent[-1]
        return (last.tokens - first.tokens) / max(1e-9, last.at_s - first.at_s)

    def seconds_for(self, rows: int) -> float | None:
        """How long that many more rows will take, at the speed so far; None where nothing is known yet."""
        last = self._last
        return rows * last.at_s / last.rows if last.rows else None
