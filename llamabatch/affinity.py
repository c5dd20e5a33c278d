"""Which of several engines may still hold the beginning of a prompt. Pure Python.

Beginnings are remembered by hash at a few lengths, so that a look-up costs the same however many are known; where two
hashes meet, or the engine has given the cells up, a request computes what it would have computed anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as ListLike

from llamabatch.prefix import MIN_SHARED

MAX_KNOWN = 8192  # beginnings; the oldest is forgotten first
_LENGTHS = tuple(itertools.takewhile(lambda n: n < 2**24, (round(MIN_SHARED * 1.25**i) for i in range(100))))


class Affinity:
    """Remembers where prompts went."""

    def __init__(self) -> None:
        self._members: dict[int, int] = {}

    def add(self, token_ids: ListLike[int], member: int) -> None:
        """This text has been computed there."""
        for key, _ in _keys(token_ids):
            self._members.pop(key, None)  # so that it stands at the end, as the youngest
            self._members[key] = member
        while len(self._members) > MAX_KNOWN:
            del self._members[next(iter(self._members))]

    def find(self, token_ids: ListLike[int]) -> tuple[int, int] | None:
        """Who has computed the longest beginning known, and its length in tokens, at least."""
        found = None
        for key, length in _keys(token_ids):
            member = self._members.get(key)
            if member is None:
                break
            found = member, length
        return found


def _keys(token_ids: ListLike[int]) -> list[tuple[int, int]]:
    """(hash, length) of the beginnings that are remembered, shortest first."""
    lengths = itertools.takewhile(lambda n: n <= len(token_ids), _LENGTHS)
    return [(hash(tuple(token_ids[:n])), n) for n in lengths]
