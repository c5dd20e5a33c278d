"""Deadlines of the requests in flight. Pure Python."""

from __future__ import annotations

import heapq
import itertools
import math
import weakref

from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence
from llamabatch.utils.checks import counted

_FEW = 64  # up to this many entries, ended sequences stay in the heap


class Deadlines:
    """The sequences in flight that have a deadline, earliest deadline first. The references are weak, because most
    sequences end long before their deadlines."""

    def __init__(self) -> None:
        self.num_missed = 0
        self._heap: list[tuple[float, int, weakref.ref[Sequence]]] = []
        self._numbers = itertools.count()
        self._most = _FEW  # above this many entries, ended sequences are removed

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.params.deadline_s is not None:
            at = request.arrival_s + request.params.deadline_s
            heapq.heappush(self._heap, (at, next(self._numbers), weakref.ref(sequence)))
            if len(self._heap) > self._most:
                self._heap = [entry for entry in self._heap if _in_flight(entry[2]) is not None]
                heapq.heapify(self._heap)
                self._most = _FEW + 2 * len(self._heap)

    @property
    def next(self) -> float:
        """The time of the next deadline; infinity if there is none."""
        while self._heap and _in_flight(self._heap[0][2]) is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def missed(self, now: float) -> list[Sequence]:
        """Returns the unfinished sequences whose deadline has passed. Later calls do not return them again."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            sequence = _in_flight(heapq.heappop(self._heap)[2])
            if sequence is not None:
                late.append(sequence)
        self.num_missed += len(late)
        return late


def _in_flight(reference: weakref.ref[Sequence]) -> Sequence | None:
    sequence = reference()
    return None if sequence is None or sequence.finished else sequence


# Errors of missed deadlines begin with this text.
DEADLINE_EXCEEDED = "DeadlineExceeded: "


def sequence_deadline_message(sequence: Sequence, now: float) -> str:
    """Returns the error of a sequence that missed its deadline."""
    n = sequence.num_output
    where = f"with {counted(n, 'token')} generated" if sequence.was_admitted else "while it waited for a slot"
    return deadline_message(sequence.request, now, where)


def deadline_message(request: Request, now: float, where: str) -> str:
    """Returns the error of a request that missed its deadline.

    Args:
        where: the end of the message. It says how far the request had come.
    """
    after = now - request.arrival_s
    return f"{DEADLINE_EXCEEDED}deadline_s is {request.params.deadline_s}; it was ended after {after:.3f} s, {where}"
