"""Separates foreground from background sequences, and chooses the sequences to preempt. Pure functions."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.request_queue import MAX_OVERTAKEN, PREEMPTION_COUNTS


def foreground(running: list[Sequence]) -> list[Sequence]:
    """Returns the sequences that are not background, or all sequences if all are background."""
    return [s for s in running if not s.background] or running


def copy_candidates(sequence: Sequence, running: Iterable[Sequence]) -> Iterator[Sequence]:
    """Returns the sequences from which `sequence` may copy a prefix, perhaps after it has waited for the prefix. A
    foreground sequence does not wait for the prompt of a background sequence, because few steps compute background
    prompts."""
    return (s for s in running if sequence.background or not s.background or s.num_pending == 1)


def peer_slots(sequence: Sequence, running: Iterable[Sequence]) -> list[int]:
    """Returns the slots of the running sequences that compute together with `sequence`: all background sequences, or
    all foreground sequences."""
    return [s.slot for s in running if s.slot is not None and s.background == sequence.background]


def victims(
    waiting: Sequence, running: abc.Sequence[Sequence], n_free: int, n_cells: int | None, preempt: bool
) -> list[Sequence]:
    """Returns the sequences to preempt so that `waiting` gets a slot; an empty list if preemption would not be enough.

    Sequences of the worst tier come first. Within a tier, the youngest sequence comes first. Background sequences are
    preempted from the lowest slot up, so that foreground sequences stay in neighbouring slots.

    Args:
        n_free: number of free slots.
        n_cells: number of cells of a unified KV cache; None: each slot has enough cells of its own.
        preempt: True: foreground sequences may also be preempted, not only background ones.
    """
    tier = waiting.request.tier
    worse = [
        s
        for s in reversed(running)
        if s.request.tier > tier
        and s.overtaken + PREEMPTION_COUNTS < MAX_OVERTAKEN  # otherwise `s` would be admitted again before `waiting`
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
