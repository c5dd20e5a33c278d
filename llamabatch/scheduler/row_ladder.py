"""Gives decode calls few different shapes, so that llama.cpp reuses its last graph. Pure Python.

llama.cpp builds a new graph for a pass unless the last pass had the same sequences and the same numbers of tokens,
output rows, and cells (rounded up to a multiple of 256; llama-graph.h, allow_reuse). For a new graph, CUDA launches
some thousand kernels one by one, and records them again. On a GPU, a row costs only a small part of a pass. So a call
covers a window of slots, and has dummy rows in idle slots of the window. The window stays the same while sequences end
and begin in it.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.batch_builder import MAX_DUMMY_GAP, decode_spans
from llamabatch.scheduler.output import Call, Limits
from llamabatch.scheduler.step_costs import StepCosts

# Dummy rows may lengthen a step by at most the fraction PADDING. A call may have _TO_KEEP times as many dummy rows if
# they keep the window of the last call.
PADDING = 0.05
_TO_KEEP = 1.5
# Each ladder has one of these steps between its upper rungs. Its rungs are powers of two up to the step, then multiples
# of the step.
_STEPS = (32, 16, 8, 4, 2, 1)
_CELLS = 256  # llama.cpp rounds up the number of cells of a pass to a multiple of this


class RowLadder:
    """Adds dummy rows to decode calls, so that calls have only a few different numbers of rows (rungs).

    A dummy row is in a slot that does not decode. It comes after the cells of this slot, and does not change these
    cells. A dummy row is not added if it would widen the attention of all rows.
    """

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        wanted = limits.row_ladder == "on" or (limits.row_ladder == "auto" and limits.on_device)
        self.is_on = wanted and limits.can_pad and not limits.is_unified
        self._limits = limits
        self._costs = costs
        self._window = range(0)

    def call(self, sequences: abc.Sequence[Sequence], held: abc.Mapping[int, int], n_slots: int) -> Call | None:
        """Returns a call with a row for each sequence, and dummy rows; None if no window of slots can be filled.

        Args:
            held: slot -> number of tokens in the slot, for slots of other sequences and slots that cache a prefix.
            n_slots: slots of the context.
        """
        spans = decode_spans(sequences)
        own = {span.slot for span in spans}
        reach = -(-(max(span.start for span in spans) + 1) // _CELLS) * _CELLS

        def is_free(slot: int) -> bool:
            count = held.get(slot, 0)
            return count == 0 or (self._limits.can_share and self._limits.can_cut and count < reach)

        for window in self._windows(spans[0].slot, spans[-1].slot, len(spans), n_slots):
            dummies = [slot for slot in window if slot not in own]
            if all(map(is_free, dummies)):
                self._window = window
                starts = tuple(held.get(slot, 0) for slot in dummies)
                return Call(tuple(spans), tuple(dummies), 0, starts, is_padded=True)
        return None

    def fills(self, sequences: abc.Sequence[Sequence]) -> bool:
        """True if dummy rows in the holes between the slots of these sequences cost less than moves of sequences."""
        slots = [s.slot for s in sequences if s.slot is not None]
        return not slots or max(slots) - min(slots) + 1 - len(slots) <= self._padding(len(slots))

    def _padding(self, n_rows: int) -> int:
        """Returns the maximum number of dummy rows in a call of `n_rows` rows."""
        if self._limits.row_ladder == "on":
            return self._limits.n_slots
        return self._costs.rows_in(PADDING, n_rows, default=0)

    def _windows(self, low: int, high: int, n_rows: int, n_slots: int) -> Iterator[range]:
        """Yields windows that contain all slots from `low` to `high`, the best window first."""
        padding, last = self._padding(n_rows), self._window
        most = min(self._limits.n_ubatch, self._limits.n_batch, self._limits.n_outputs)
        if low in last and high in last and last.stop <= n_slots and len(last) - n_rows <= _TO_KEEP * padding:
            yield last
        if low == high:  # a window of one slot needs no dummy row and only one pass
            yield range(low, low + 1)
        # dummy rows in holes save a second pass, so they may cost as much as a pass
        holes = max(padding, self._costs.pass_in_rows(MAX_DUMMY_GAP))
        for first in (0, low):
            for step in _STEPS:
                n = min(_rung(high + 1 - first, step), n_slots)
                start = min(first, n_slots - n)
                if n <= most and n - n_rows <= (padding if step > 1 else holes):
                    yield range(start, start + n)


def _rung(n_rows: int, step: int) -> int:
    """Returns the smallest rung of at least `n_rows` rows."""
    return 1 << (n_rows - 1).bit_length() if n_rows <= step else -(-n_rows // step) * step
