"""Measures the costs of parts of a step: a pass over the weights, a row, and a copy of a slot. Pure Python.

The scheduler has constants for these costs. They were measured on a CPU, where a row costs a tenth of a pass. On a GPU
a row may cost a 250th of a pass, so the costs are measured there while the engine runs. The constants are used until
the costs are known, and always on CPUs.
"""

from __future__ import annotations

import statistics
from collections import deque

from llamabatch.scheduler.output import Limits, SchedulerOutput

# The time of a step is the shortest of this many last samples. Some steps take longer, because the first step of each
# shape also builds the graph, and other work on the machine may delay a step.
_SAMPLES = 4
# The cost of a row is measured between steps whose numbers of rows differ by at least this factor. Otherwise their
# times differ only by noise.
_LEAST_SPREAD = 1.25
# A row counts as at least this share of a pass, even if the measured cost is lower. The measurement may be wrong,
# because samples with few rows may come from longer contexts than samples with many rows.
_LEAST_ROW = 0.002
_COPIES = 5  # the median of this many latest copies is used


class StepTimes:
    """Measured seconds of steps by number of rows. The numbers of rows are grouped in stairs: two stairs for each power
    of two."""

    def __init__(self) -> None:
        self._stairs: dict[int, tuple[int, deque[float]]] = {}  # stair -> (rows of its last sample, seconds of samples)

    def add(self, rows: int, seconds: float) -> None:
        _, samples = self._stairs.get(stair(rows), (0, deque(maxlen=_SAMPLES)))
        samples.append(seconds)
        self._stairs[stair(rows)] = rows, samples

    def seconds(self, rows: int) -> float | None:
        """Returns the seconds of a step with `rows` rows, interpolated between stairs; None without measurements.

        Outside the measured stairs, the time of the nearest stair is used. So a step with more rows than the highest
        stair seems to take no longer. Callers therefore try such steps.
        """
        own = stair(rows)
        below = max((s for s in self._stairs if s <= own), default=None)
        above = min((s for s in self._stairs if s >= own), default=None)
        if below is None or above is None or below == above:
            known = below if below is not None else above
            return None if known is None else min(self._stairs[known][1])
        (low_rows, low), (high_rows, high) = self._stairs[below], self._stairs[above]
        share = (rows - low_rows) / (high_rows - low_rows)
        return min(low) + share * (min(high) - min(low))

    def ends(self) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """Returns the rows and seconds of the lowest and of the highest measured stair; None without measurements."""
        if not self._stairs:
            return None
        (low, fast), (high, slow) = self._stairs[min(self._stairs)], self._stairs[max(self._stairs)]
        return (low, min(fast)), (high, min(slow))


class StepCosts:
    """Measures costs in an engine's steps. Each cost is given as the number of rows that take the same time.

    Args:
        limits: costs are measured if `on_device` is set; otherwise each method returns its default.
    """

    def __init__(self, limits: Limits) -> None:
        self._measures = limits.on_device
        self._times = StepTimes()
        self._copies: deque[float] = deque(maxlen=_COPIES)  # seconds of a copy

    def observe(self, batch: SchedulerOutput, seconds: float) -> None:
        """Records the duration of a step, if the step was a single call of decoding sequences."""
        if not self._measures or len(batch.calls) != 1 or batch.restores or batch.shifts or batch.saves:
            return
        [call] = batch.calls
        if not call.is_decode:
            return
        n_rows = len(call.spans) + len(call.dummy_slots)
        if not batch.copies:
            self._times.add(n_rows, seconds)
        elif (plain := self._times.seconds(n_rows)) is not None:
            self._copies.append(max(0.0, seconds - plain) / len(batch.copies))

    @property
    def row_s(self) -> float | None:
        """The seconds for a row; None: not measured."""
        ends = self._times.ends()
        if ends is None or ends[1][0] < _LEAST_SPREAD * ends[0][0]:
            return None
        (low, fast), (high, slow) = ends
        return max((slow - fast) / (high - low), _LEAST_ROW * fast)

    def pass_in_rows(self, default: int) -> int:
        """Returns the number of rows or prompt tokens that cost as much as a pass over the weights without rows."""
        if not self._measures:
            return default
        ends, row_s = self._times.ends(), self.row_s
        if ends is None or row_s is None:
            return default
        [(low, fast), _] = ends
        return max(1, int((fast - low * row_s) / row_s))

    def copy_in_rows(self, default: int) -> int:
        """Returns the number of rows or prompt tokens that cost as much as a copy of a slot."""
        row_s = self.row_s if self._copies else None
        if row_s is None:
            return default
        return max(1, int(statistics.median(self._copies) / row_s))

    def rows_in(self, share: float, n_rows: int, default: int) -> int:
        """Returns the number of rows by which a step of `n_rows` rows can grow if its time may grow by the fraction
        `share`."""
        row_s, seconds = self.row_s, self._times.seconds(n_rows)
        if row_s is None or seconds is None:
            return default
        return int(share * seconds / row_s)


def stair(rows: int) -> int:
    bits = rows.bit_length()
    return 2 * bits + (rows >> (bits - 2) & 1 if bits > 1 else 0)
