"""Who goes before whom among those that run: background sequences, and who gives its slot up. Pure functions."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.request_queue import MAX_OVERTAKEN, PREEMPTION_COUNTS


def foreground(running: list[Sequence]) -> list[Sequence]:
    """Those that are not background; all, where there are no others."""
    return [s for s in running if not s.background] or running


def copy_candidates(sequence: Sequence, running: Iterable[Sequence]) -> Iterator[Sequence]:
    """Those whose prefix it may wait for: who is in front does not wait for a background one that stands aside."""
    return (s for s in running if sequence.background or not s.background or s.num_pending == 1)


def peer_slots(sequence: Sequence, running: Iterable[Sequence]) -> list[int]:
    """The slots of those that compute when it does."""
    return [s.slot for s in running if s.slot is not None and s.background == sequence.background]


def victims(
    waiting: Sequence, running: abc.Sequence[Sequence], n_free: int, n_cells: int | None, preempt: bool
) -> list[Sequence]:
    """Who has to go so that `waiting` can enter: the worst tier first, and of that the youngest; background sequences
    from the lowest slot up, so that those in front stay side by side. Nobody if that would not be enough.

    Args:
        n_free: free slots.
        n_cells: cells of a unified KV cache; None: each slot has enough of its own.
        preempt: others than background sequences may have to go, too.
    """
    tier = waiting.request.tier
    worse = [
        s
        for s in reversed(running)
        if s.request.tier > tier
        and s.overtaken + PREEMPTION_COUNTS < MAX_OVERTAKEN  # else it would be the next to enter, before `waiting`
        and (preempt or s.background > waiting.background)
    ]
    worse.sort(key=lambda s: (s.request.tier, s.background and -(s.slot or 0)), reverse=True)
    needed = 0 if n_cells is None else sum(s.most_cells for s in running) + waiting.most_cells - n_cells
    leaving: list[Sequence] = []
    for sequence in worse:
        if needed <= 0 and n_free + len(leaving) > 0:
            break
        leaving.append(sequence)
        needed -= sequence.most_cells
    return leaving if needed <= 0 and n_free + len(leaving) > 0 else []
