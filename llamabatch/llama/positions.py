"""Positions of tokens in slots. A text cell has its own position. With M-RoPE, the cells of a picture share positions.

The scheduler counts cells, but llama.cpp cuts, copies and computes by positions. So the model runner converts cells to
positions here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from llamabatch.request.media import MediaRun


class SlotPositions:
    """Records which pictures in the slots of a context take fewer positions than cells."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[MediaRun, ...]] = {}

    def __bool__(self) -> bool:
        """Returns True if some slot has fewer positions than cells."""
        return bool(self._runs)

    def of(self, slot: int, cell: int) -> int:
        """Returns the position of a cell, even if the cell is not computed yet. For a cell within a picture, this is
        the picture's first position."""
        lost = 0
        for run in self._runs.get(slot, ()):
            if cell >= run.end:
                lost += run.length - run.n_pos
            elif cell > run.start:
                return run.start - lost
        return cell - lost

    def length(self, slot: int, count: int) -> int:
        """Returns the highest position of the first `count` cells, plus 1. After a picture, the next token
        may have a higher position."""
        last = next((run for run in self._runs.get(slot, ()) if run.end == count), None)
        return self.of(slot, count) if last is None else self.of(slot, last.start) + last.n_time

    def add(self, slot: int, run: MediaRun) -> None:
        """Notes that cells of a picture are computed in a slot."""
        known = self._runs.get(slot, ())
        if run.n_pos != run.length and run not in known:
            self._runs[slot] = (*known, run)

    def cut(self, slot: int, count: int) -> None:
        """Notes that a slot keeps only its first `count` cells."""
        if slot in self._runs:
            self.put(slot, self._runs[slot], count)

    def copy(self, source: int, target: int, count: int) -> None:
        """Notes that slot `target` gets the first `count` cells of slot `source`."""
        self.put(target, self._runs.get(source, ()), count)

    def runs(self, slot: int, count: int) -> tuple[MediaRun, ...]:
        """Returns the pictures that end within the first `count` cells of a slot, for `put`."""
        return tuple(run for run in self._runs.get(slot, ()) if run.end <= count)

    def put(self, slot: int, runs: tuple[MediaRun, ...], count: int) -> None:
        """Notes that a slot contains the pictures of `runs` that end within its first `count` cells."""
        kept = tuple(run for run in runs if run.end <= count)
        if kept:
            self._runs[slot] = kept
        else:
            self._runs.pop(slot, None)

    def keep(self, slots: frozenset[int]) -> None:
        """Notes that all slots but `slots` are empty."""
        self._runs = {slot: runs for slot, runs in self._runs.items() if slot in slots}


def position_ranges(runs: Iterable[MediaRun], count: int) -> npt.NDArray[np.int64]:
    """Returns the lowest and the highest possible position of each of `count` cells, as an array of shape (2, count).

    Args:
        runs: the pictures that take fewer positions than cells, in order.
    """
    steps = np.ones(count + 1, np.int64)
    for run in runs:
        steps[run.start : run.end] = 0
        steps[run.end - 1] = run.n_pos
    least = np.cumsum(steps[:-1]) - steps[:-1]
    most = least.copy()
    for run in runs:
        most[run.start : run.end] += run.n_time - 1
    return np.stack([least, most])
