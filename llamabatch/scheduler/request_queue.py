"""The waiting queue. Better priorities come first, then the order of a policy. Prompts with a common prefix stay
together.

A later request passes an earlier one if it has a better tier (Request.tier), or if a unified KV cache has room for the
later one but not for the earlier one. MAX_OVERTAKEN limits how often an earlier request is passed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.common_prefix import prefix_families

# A request is overtaken at most this many times. It is then the next to be admitted, and is not preempted.
MAX_OVERTAKEN = 64
# A preemption counts as being overtaken this many times, because computed cells are lost. So a request is preempted at
# most three times.
PREEMPTION_COUNTS = 16
# The search for a request that fits checks at most this many requests, so that a step takes no longer if the queue is
# long.
LOOK_AHEAD = 16

Key = Callable[[Sequence], tuple[Any, ...]]
_Entry = tuple[tuple[bool, int], tuple[Any, ...], int, int, Sequence]


class RequestQueue:
    """Sequences that wait for a slot.

    Args:
        key: the policy's order within a tier. The request with the lowest key is admitted first. Equal keys are in
            order of arrival.
        find_families: look for common beginnings of requests that arrive together, so that the key can use these
            beginnings.
    """

    def __init__(self, key: Key, find_families: bool) -> None:
        self._key = key
        self._find_families = find_families
        self._arrivals: list[Sequence] = []  # not yet in the heap: families are found among all arrivals first
        self._heap: list[_Entry] = []  # may still contain sequences that have left the queue
        self._by_age: deque[Sequence] = deque()  # oldest first; may still contain sequences that have left the queue
        self._numbers = itertools.count()
        self._entries = itertools.count()
        self._members: set[int] = set()  # numbers of the waiting sequences

    def __len__(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence, or a preempted one. A preempted sequence gets its old place back."""
        if sequence.number is None:
            sequence.number = next(self._numbers)
            self._arrivals.append(sequence)
            self._by_age.append(sequence)
        else:
            self._by_age.appendleft(sequence)
            self._push(sequence)
        self._members.add(sequence.number)

    def forget(self, sequence: Sequence) -> None:
        """Removes a sequence that ended while it waited. Its entry stays in the heap, and the queue skips it."""
        self._leave(sequence)

    def head(self, count: int) -> list[Sequence]:
        """Returns at most `count` waiting sequences in the order of admission. Unsorted new arrivals come last.

        May be called from any thread. Copies the queue once, and sorts only its first entries.
        """
        heap, arrivals = list(self._heap), list(self._arrivals)
        found: list[Sequence] = []
        ahead = [(heap[0], 0)] if heap else []  # entries to visit; each is added after its parent in the heap
        while ahead and len(found) < count:
            entry, at = heapq.heappop(ahead)
            if self._is_waiting(entry[-1]):
                found.append(entry[-1])
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(ahead, (heap[child], child))
        return (found + [sequence for sequence in arrivals if self._is_waiting(sequence)])[:count]

    def first(self) -> Sequence | None:
        """Returns the sequence that is admitted next if there is room for it."""
        self._sort_in()
        oldest = self._oldest()
        if oldest is not None and oldest.overtaken >= MAX_OVERTAKEN:
            return oldest
        while self._heap and not self._is_waiting(self._heap[0][-1]):
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Removes and returns the first sequence that fits. Returns None if no sequence fits, or if the oldest sequence
        does not fit and must not be overtaken again."""
        self._sort_in()
        oldest = self._oldest()
        if oldest is None:
            return None
        if oldest.overtaken >= MAX_OVERTAKEN:
            found = oldest if fits(oldest) else None
        else:
            found = self._search(fits)
        if found is not None:
            self._leave(found)
            if found.request.tier < oldest.request.tier:
                oldest.overtaken += 1
        return found

    def _search(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Removes and returns the first sequence that fits, in the order of tiers and policy. Counts each sequence
        before it as overtaken."""
        passed: list[_Entry] = []
        found = None
        while self._heap and len(passed) < LOOK_AHEAD:
            entry = heapq.heappop(self._heap)
            if not self._is_waiting(entry[-1]):
                continue
            if fits(entry[-1]):
                found = entry[-1]
                break
            passed.append(entry)
            if entry[-1].overtaken >= MAX_OVERTAKEN:
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
            if found is not None:
                entry[-1].overtaken += 1
        return found

    def _oldest(self) -> Sequence | None:
        while self._by_age and not self._is_waiting(self._by_age[0]):
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

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
        entry = (sequence.request.tier, self._key(sequence), sequence.number, next(self._entries), sequence)
        heapq.heappush(self._heap, entry)

    def _is_waiting(self, sequence: Sequence) -> bool:
        return sequence.number in self._members

    def _leave(self, sequence: Sequence) -> None:
        if sequence.number is not None:  # None: the sequence could not be added
            self._members.discard(sequence.number)
        if not self._members:  # an idle engine must not keep finished sequences in memory
            self._arrivals.clear()
            self._heap.clear()
            self._by_age.clear()
