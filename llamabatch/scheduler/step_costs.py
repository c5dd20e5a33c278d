"""Measured costs of a step: of a pass over the weights, of a row in it, of the copy of a slot. Pure Python.

The scheduler's constants that weigh these costs were measured on a CPU, where a row costs a tenth of a pass. On a GPU
it may cost a 250th, so that there the costs are measured while the engine runs; until they are known, and on CPUs, the
constants hold.
"""

from __future__ import annotations

import statistics
from collections import deque

from llamabatch.scheduler.output import Limits, SchedulerOutput

# Time of a step: the least of its last samples. The first of a shape builds its graph, others wait for neighbours.
_SAMPLES = 4
# The cost of a row shows between steps whose rows differ so much, times: neighbours differ by noise.
_LEAST_SPREAD = 1.25
# A row never counts as cheaper than this part of a pass, whatever the measured times say: samples of few rows may be of
# longer contexts than those of many.
_LEAST_ROW = 0.002
_COPIES = 5  # measured copies whose median counts


class StepTimes:
    """Seconds of a step by its rows, in stairs of half an octave of rows."""

    def __init__(self) -> None:
        self._stairs: dict[int, tuple[int, deque[float]]] = {}  # stair -> rows of its last sample, seconds

    def add(self, rows: int, seconds: float) -> None:
        _, samples = self._stairs.get(stair(rows), (0, deque(maxlen=_SAMPLES)))
        samples.append(seconds)
        self._stairs[stair(rows)] = rows, samples

    def seconds(self, rows: int) -> float | None:
        """Seconds of a step of so many rows, interpolated between measured stairs; None before the first measurement.

        Beyond them it is the nearest: more rows than were ever tried seem to cost nothing more, so that they are tried.
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
        """Rows and seconds of the measured stairs with the fewest rows and with the most; None before there are any."""
        if not self._stairs:
            return None
        (low, fast), (high, slow) = self._stairs[min(self._stairs)], self._stairs[max(self._stairs)]
        return (low, min(fast)), (high, min(slow))


class StepCosts:
    """Costs of the steps of an engine, in the rows that cost as much.

    Args:
        limits: on_device says if costs are measured; elsewhere each method returns its default.
    """

    def __init__(self, limits: Limits) -> None:
        self._measures = limits.on_device
        self._times = StepTimes()
        self._copies: deque[float] = deque(maxlen=_COPIES)  # seconds of a copy

    def observe(self, batch: SchedulerOutput, seconds: float) -> None:
        """Takes the duration of a step in that was one call of decoding sequences."""
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
        """Seconds of a row; None: not measured."""
        ends = self._times.ends()
        if ends is None or ends[1][0] < _LEAST_SPREAD * ends[0][0]:
            return None
        (low, fast), (high, slow) = ends
        return max((slow - fast) / (high - low), _LEAST_ROW * fast)

    def pass_in_rows(self, default: int) -> int:
        """Rows, or prompt tokens, that cost as much as a pass over the weights without any."""
        if not self._measures:
            return default
        ends, row_s = self._times.ends(), self.row_s
        if ends is None or row_s is None:
            return default
        [(low, fast), _] = ends
        return max(1, int((fast - low * row_s) / row_s))

    def copy_in_rows(self, default: int) -> int:
        """Rows, or prompt tokens, that cost as much as the copy of a slot."""
        row_s = self.row_s if self._copies else None
        if row_s is None:
            return default
        return max(1, int(statistics.median(self._copies) / row_s))

    def rows_in(self, share: float, n_rows: int, default: int) -> int:
        """Rows that make a step of `n_rows` longer by this share of its time."""
        row_s, seconds = self.row_s, self._times.seconds(n_rows)
        if row_s is None or seconds is None:
            return default
        return int(share * seconds / row_s)


def stair(rows: int) -> int:
    bits = rows.bit_length()
    return 2 * bits + (rows >> (bits - 2) & 1 if bits > 1 else 0)
