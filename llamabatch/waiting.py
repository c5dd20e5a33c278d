"""The waiting queue: in the order of a policy, prefixes together, with bounded overtaking of what does not fit yet."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from llamabatch.prefix import prefix_families
from llamabatch.request import Sequence

# A request that waits for room (unified KV cache) lets this many smaller ones pass; then nobody enters before it.
MAX_OVERTAKEN = 64
# Requests that are looked at for one that fits, so that a step costs the same however long the queue is.
LOOK_AHEAD = 16

Key = Callable[[Sequence], tuple[Any, ...]]


class WaitingQueue:
    """Sequences that have no slot.

    Args:
        key: the policy's order; the lowest goes first, equal ones in order of arrival.
        find_families: look for common beginnings among requests that arrive together, so that the key can use them.
    """

    def __init__(self, key: Key, find_families: bool) -> None:
        self._key = key
        self._find_families = find_families
        self._arrivals: list[Sequence] = []  # since the last look at the queue: a submitted list is ordered as a whole
        self._heap: list[tuple[tuple[Any, ...], int, Sequence]] = []
        self._numbers = itertools.count()
        self._overtaken: dict[str, int] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, sequence: Sequence) -> None:
        """A new request, or one that comes back: that one keeps its place."""
        self._n += 1
        if sequence.number is None:
            sequence.number = next(self._numbers)
            self._arrivals.append(sequence)
        else:
            self._push(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It was ended while it waited; it stays in the heap, and is passed over there."""
        self._n -= 1
        self._overtaken.pop(sequence.request.request_id, None)

    def pop(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The first that fits; None if there is none, or if it is somebody else's turn to wait for room."""
        self._sort_in()
        passed: list[tuple[tuple[Any, ...], int, Sequence]] = []
        found = None
        while self._heap and len(passed) < LOOK_AHEAD:
            entry = heapq.heappop(self._heap)
            if entry[2].finished:
                continue
            if fits(entry[2]):
                found = entry[2]
                break
            passed.append(entry)
            if self._overtaken.get(entry[2].request.request_id, 0) >= MAX_OVERTAKEN:
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if found is None:
            return None
        for _, _, sequence in passed:
            request_id = sequence.request.request_id
            self._overtaken[request_id] = self._overtaken.get(request_id, 0) + 1
        self._overtaken.pop(found.request.request_id, None)
        self._n -= 1
        return found

    def _sort_in(self) -> None:
        arrivals, self._arrivals = [s for s in self._arrivals if not s.finished], []
        if self._find_families and len(arrivals) > 1:
            for family in prefix_families([s.token_ids for s in arrivals]):
                members = [arrivals[i] for i in family]
                longest = max(s.request.expected_tokens for s in members)
                for sequence in members:
                    sequence.family = (longest, members[0].number or 0)
        for sequence in arrivals:
            self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        assert sequence.number is not None
        heapq.heappush(self._heap, (self._key(sequence), sequence.number, sequence))
