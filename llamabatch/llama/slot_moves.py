"""Moves cells between the slots of a context, and between slots and main memory."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

from llamabatch.errors import EngineError
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context
from llamabatch.llama.positions import SlotPositions
from llamabatch.scheduler.output import Call, PrefixCopy, Restore, Save, SchedulerOutput

logger = logging.getLogger(__name__)


class SlotMoves:
    """Executes the saves, restores, copies, cuts and shifts of a step.

    Attributes:
        context: the context of the slots; grow_into() replaces it.
        unflushed: True while copies between slots, or shifts of positions, wait for the next decode.
        unfilled: slots that stayed empty because llama.cpp refused the saved prefix.
        rolled_back: slots that were set back to an older state and have had no pass since.
    """

    def __init__(self, context: Context, batch: Batch, positions: SlotPositions, *, can_cut: bool) -> None:
        self.context = context
        self.unflushed = False
        self.unfilled: set[int] = set()
        self.rolled_back: set[int] = set()
        self.positions = positions
        self._batch = batch
        self._can_cut = can_cut

    def execute(self, batch: SchedulerOutput) -> None:
        """Executes the moves of a step, before its calls."""
        for save in batch.saves:
            self._save(save)
        for restore in batch.restores:
            self._restore(restore)
        for copy in batch.copies:
            self._copy(copy)
        for cut in batch.cuts:
            self.clear(cut.slot, cut.count)
            self.positions.cut(cut.slot, cut.count)
        self.unflushed = self.unflushed or bool(batch.shifts)
        for shift in batch.shifts:
            self.context.shift(shift.slot, shift.start, shift.count)

    def end_with(self, call: Call) -> None:
        """Notes that a call was computed. Its decode has executed the pending moves."""
        self.unflushed = False
        if self.rolled_back:
            self.rolled_back.difference_update(span.slot for span in call.spans)

    def grow_into(self, larger: Context, held: Iterable[int], *, can_carry: bool) -> frozenset[int]:
        """Replaces and closes the context. Returns those slots of `held` whose cells are now in the larger context."""
        carries = can_carry and not self.unflushed
        carried = self.context.carry_over(held, larger) if carries else frozenset[int]()
        self.context.close()
        self.context, self.unflushed = larger, False
        self.positions.keep(carried)
        return carried

    def clear(self, slot: int, count: int = 0) -> bool:
        """Drops the cells of a slot after the first `count`. Returns False if the model's state cannot be cut there."""
        return self.context.clear(slot, self.positions.of(slot, count))

    def _save(self, save: Save) -> None:
        """Copies the state of a slot to main memory. Does nothing if copies between slots wait for the next decode,
        because llama.cpp would return the slot's old cells. Also does nothing if the slot has more tokens than the
        prefix and cannot be cut back."""
        count = len(save.prefix.token_ids)
        if self.unflushed or save.slot in self.unfilled:
            return
        held, end = self.context.length(save.slot), self.positions.length(save.slot, count)
        if held == end or (held > end and self._can_cut and self.clear(save.slot, count)):
            began = time.perf_counter()
            if not save.make_room(save.prefix, self.context.state_bytes(save.slot)):
                return
            with contextlib.suppress(MemoryError):  # a request also works without a checkpoint
                save.prefix.state = self.context.raw_state(save.slot)
                save.prefix.media_runs = self.positions.runs(save.slot, count)
                save.prefix.save_s = time.perf_counter() - began

    def _copy(self, copy: PrefixCopy) -> None:
        """Copies the cells of a slot to another slot. For a slot that was rolled back, llama.cpp would copy the newest
        state (llama-memory-recurrent.cpp, seq_cp). So the state of such a slot is saved and restored instead."""
        if copy.target in self.rolled_back:
            self.context.clear(copy.target)  # else the target's rollback would also apply to the copy
            self.rolled_back.discard(copy.target)
        if copy.source in self.unfilled:
            self.context.clear(copy.target)
            self.unfilled.add(copy.target)
        elif copy.source in self.rolled_back:
            self.context.clear(copy.target)
            self._flush(copy.target)
            state = self.context.raw_state(copy.source)
            if state is None or not self.context.restore(copy.target, state, self._end_of(copy)):
                raise EngineError(f"the state of slot {copy.source} cannot be copied to slot {copy.target}")
            self.unfilled.discard(copy.target)
        else:
            self.unflushed = True
            self.context.copy_prefix(copy.source, copy.target, self._end_of(copy))
            self.unfilled.discard(copy.target)
        self.positions.copy(copy.source, copy.target, copy.count)

    def _end_of(self, copy: PrefixCopy) -> int:
        """Returns the highest position in the copied cells plus 1."""
        return self.positions.length(copy.source, copy.count)

    def _flush(self, slot: int) -> None:
        """Decodes a dummy row in `slot`, so that llama.cpp executes pending copies and shifts. Then clears the slot.
        Does nothing if no copies or shifts are pending."""
        if self.unflushed:
            self.context.decode(self._batch.fill_rows([0], [0], [slot]))
            self.context.clear(slot)
            self.unflushed = False

    def _restore(self, restore: Restore) -> None:
        """Fills a slot with a saved prefix.

        If llama.cpp refuses the prefix, the slot stays empty and is added to `unfilled`. So no tokens are computed
        without the cells before them. A request with a prefix from a file then fails. A request with a checkpoint is
        computed from its beginning.
        """
        self._flush(restore.slot)  # pending copies may still read the slot
        state: Any = restore.prefix.state
        self.positions.put(restore.slot, restore.prefix.media_runs, restore.count)
        if not self.context.restore(restore.slot, state, self.positions.length(restore.slot, restore.count)):
            restore.prefix.is_refused = True
            logger.warning(
                "llama.cpp refuses the saved prefix %s, so it is computed again",
                restore.prefix.path or "in main memory",
            )
            self.context.clear(restore.slot)
            self.unfilled.add(restore.slot)
        else:
            self.unfilled.discard(restore.slot)
            self.rolled_back.discard(restore.slot)
