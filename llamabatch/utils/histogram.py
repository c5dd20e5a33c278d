"""A Histogram counts durations in fixed buckets, so that histograms of several engines can be added. Quantiles gives
percentiles of millions of figures in bounded memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Limits of buckets in each power of ten, at most 25 % apart.
_STEPS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7.5, 8)
# _STEPS lacks these limits of vLLM's histograms. With these limits, each of vLLM's buckets is a sum of our buckets.
_OTHERS = (120.0, 160.0, 240.0, 480.0, 640.0, 960.0, 1920.0, 2560.0, 7680.0)

LIMITS_S = tuple(sorted({float(f"{step}e{power}") for power in range(-4, 4) for step in _STEPS} | {*_OTHERS, 1e4}))
"""Upper limits of the buckets in seconds: 0.1 ms to 10,000 s. A bucket holds durations above the previous limit, up to
and including its own limit. One more bucket holds all longer durations."""

_NOTHING = (0,) * (len(LIMITS_S) + 1)


@dataclass(frozen=True)
class Histogram:
    """Counts of durations by bucket. Histograms can be added, and an earlier one can be subtracted from a later one.

    Attributes:
        counts: number of durations in each bucket of LIMITS_S; the last item counts durations above all limits.
        sum_s: sum of all durations, seconds.
    """

    counts: tuple[int, ...] = _NOTHING
    sum_s: float = 0.0

    def __repr__(self) -> str:
        return f"Histogram(count={self.count}, sum={self.sum_s:.6g})"

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float | None:
        """Mean of the durations, seconds; None if there are none."""
        count = self.count
        return self.sum_s / count if count else None

    def percentile(self, percent: float) -> float | None:
        """Returns a percentile of the durations in seconds, or None if there are none.

        Durations are assumed to be spread evenly within a bucket (as in PromQL's histogram_quantile). So the result is
        at most 25 % away from the true value, or at most 0.1 ms if the true value is below 0.1 ms. Durations above
        10,000 s count as 10,000 s.

        Args:
            percent: 0 to 100.
        """
        rank = self.count * percent / 100
        below = 0
        for number, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                low = LIMITS_S[number - 1] if number else 0.0
                return low + (LIMITS_S[number] - low) * (rank - below) / count
            below += count
        return LIMITS_S[-1] if self.counts[-1] else None

    def at_most(self, limits: Sequence[float]) -> list[int]:
        """Returns the number of durations up to each limit. Each of `limits` must be in LIMITS_S."""
        return [sum(self.counts[: LIMITS_S.index(limit) + 1]) for limit in limits]

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(tuple(map(int.__add__, self.counts, other.counts)), self.sum_s + other.sum_s)

    def __sub__(self, earlier: Histogram) -> Histogram:
        return Histogram(tuple(map(int.__sub__, self.counts, earlier.counts)), self.sum_s - earlier.sum_s)

    def to_wire(self) -> list[Any]:
        return [self.counts, self.sum_s]

    @classmethod
    def from_wire(cls, packed: Sequence[Any]) -> Histogram:
        counts, sum_s = packed
        return cls(tuple(counts), sum_s)


class Tally:
    """A histogram that one thread fills while other threads may read it."""

    def __init__(self) -> None:
        self._counts = list(_NOTHING)
        self._sum_s = 0.0

    def add(self, seconds: float, n: int = 1) -> None:
        """Counts `n` durations of this length."""
        self._counts[bisect_left(LIMITS_S, seconds)] += n
        self._sum_s += seconds * n

    def histogram(self) -> Histogram:
        """Returns the durations counted so far."""
        return Histogram(tuple(self._counts), self._sum_s)


_GROWTH = math.log(1.02)  # limits of buckets are 2 % apart, so a percentile is within 1 % of the true figure
_LEAST = 1e-7


class Quantiles:
    """Counts of figures in classes. The limits of the classes are 2 % apart, so a few hundred counters are enough for
    any number of figures.

    Attributes:
        n: number of figures.
        total: sum of the figures.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._are_whole = True
        self.n = 0
        self.total = 0.0

    def __repr__(self) -> str:
        return f"Quantiles(n={self.n}, total={self.total:.6g})"

    def add(self, value: float) -> None:
        """Counts one figure. For percentiles, a negative figure counts as 0."""
        self.add_all((value,))

    def add_all(self, values: Iterable[float]) -> None:
        """Counts several figures."""
        counts, log, total, are_whole = self._counts, math.log, 0.0, self._are_whole
        for value in values:
            are_whole = are_whole and value == int(value)
            at = int(log(max(value, _LEAST) / _LEAST) / _GROWTH)
            counts[at] = counts.get(at, 0) + 1
            total += value
            self.n += 1
        self.total += total
        self._are_whole = are_whole

    def include(self, other: Quantiles) -> None:
        """Adds the figures of another object."""
        for at, n in other._counts.items():
            self._counts[at] = self._counts.get(at, 0) + n
        self.n += other.n
        self.total += other.total
        self._are_whole = self._are_whole and other._are_whole

    def at(self, percent: float) -> float | None:
        """Returns a percentile that is at most 1 % off, or None if there are no figures.

        The result is the smallest figure that is at least as large as `percent` % of the figures ("nearest rank"). So
        the 99th percentile of few figures is the largest figure. If all figures are whole numbers, the result is a
        whole number, too.

        Args:
            percent: 0 to 100.
        """
        if not self.n:
            return None
        wanted, seen = percent / 100 * self.n, 0
        for at in sorted(self._counts):
            seen += self._counts[at]
            if seen >= wanted:
                break
        found = 0.0 if at == 0 else self._value(at)
        return float(round(found)) if self._are_whole else found

    @property
    def mean(self) -> float | None:
        """Mean of the figures; None if there are none."""
        return self.total / self.n if self.n else None

    def classes(self) -> list[tuple[float, int]]:
        """Returns (middle, number of figures) for each class that is not empty, in ascending order."""
        return [(self._value(at), self._counts[at]) for at in sorted(self._counts)]

    @staticmethod
    def _value(at: int) -> float:
        return _LEAST * math.exp((at + 0.5) * _GROWTH)
