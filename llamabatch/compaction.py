"""Closes holes among the slots, so that a step needs neither dummy rows nor a second pass. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable

from llamabatch.request import Sequence

# A sequence moves into a hole if it may go on for this many steps: moving costs as much as 1 to 8 dummy rows
# (0.5B Q8_0: 2 ms with slots of 512 cells, 15 to 35 ms with 4,096; a dummy row 2.3 ms a step).
MIN_STEPS_TO_MOVE = 16


def moves(sequences: Iterable[Sequence], free: Iterable[int], *, up: bool = False) -> list[tuple[Sequence, int]]:
    """Who moves to which of the free slots, so that these sequences stand side by side: those on top move down.

    Args:
        up: those at the bottom move up.
    """
    at = {s.slot: s for s in sequences if s.slot is not None}
    if not at or max(at) - min(at) < len(at):
        return []
    final = range(max(at), max(at) - len(at), -1) if up else range(min(at), min(at) + len(at))
    free = set(free)
    holes = iter([slot for slot in final if slot not in at and slot in free])
    astray = [at[slot] for slot in sorted(at, reverse=not up) if slot not in final]
    movable = [s for s in astray if s.num_pending == 1 and s.most_steps_left >= MIN_STEPS_TO_MOVE]
    return list(zip(movable, holes, strict=False))
