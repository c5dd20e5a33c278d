"""Percentiles of millions of figures in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

_GROWTH = math.log(1.02)  # neighbouring classes differ by 2 %, so that what is told is within 1 % of the figure
_LEAST = 1e-7


class Quantiles:
    """Counts figures in classes whose limits grow by 2 %: a few hundred counters, whatever comes.

    Attributes:
        n: how many figures. total: their sum.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.n = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        """One figure; negative ones count as 0."""
        self.add_all((value,))

    def add_all(self, values: Iterable[float]) -> None:
        counts, log, total = self._counts, math.log, 0.0
        for value in values:
            at = int(log(max(value, _LEAST) / _LEAST) / _GROWTH)
            counts[at] = counts.get(at, 0) + 1
            total += value
            self.n += 1
        self.total += total

    def at(self, percent: float) -> float | None:
        """The percentile, the lower one where it lies between two figures, within 1 %; None of nothing.

        Args:
            percent: 0 to 100.
        """
        if not self.n:
            return None
        wanted, seen = percent / 100 * (self.n - 1), 0
        for at in sorted(self._counts):
            seen += self._counts[at]
            if seen > wanted:
                return 0.0 if at == 0 else self._value(at)
        return self._value(max(self._counts))

    @property
    def mean(self) -> float | None:
        return self.total / self.n if self.n else None

    def classes(self) -> list[tuple[float, int]]:
        """The middle of each class that holds figures, rising, and how many it holds."""
        return [(self._value(at), self._counts[at]) for at in sorted(self._counts)]

    @staticmethod
    def _value(at: int) -> float:
        return _LEAST * math.exp((at + 0.5) * _GROWTH)
