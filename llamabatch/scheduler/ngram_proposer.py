"""Drafts by prompt lookup: what followed the last time that the text's own last tokens stood in it. Pure Python."""

from __future__ import annotations

from collections import abc
from weakref import WeakKeyDictionary

from llamabatch.request.sequence import Sequence

# The last so many tokens are looked for, the longest run first. Runs of one token guess badly in long texts, but they
# cost nothing where nothing is computed from a bad guess: speculation.py weighs each draft by what such drafts brought.
LONGEST_RUN = 3


class RunIndex:
    """Where each run of 1 to LONGEST_RUN tokens of one text was last followed by a token.

    Grows by as many entries as the text grows by tokens, never by the text: a step of a long text costs what a step of
    a short one does.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  # run -> the place of the token after it
        self._known = 0  # tokens whose place is in it

    def find(self, token_ids: abc.Sequence[int], n: int) -> list[int]:
        """n tokens that may come next; none where the last token is new to the text."""
        self._take_in(token_ids)
        size = len(token_ids)
        for length in range(min(LONGEST_RUN, size - 1), 0, -1):
            place = self._next.get(tuple(token_ids[size - length : size]))
            if place is not None:
                found = list(token_ids[place : place + n])
                # a text that repeats itself: what it repeats goes on where the known part ends
                for at in range(n - len(found)):
                    found.append(found[at])
                return found
        return []

    def _take_in(self, token_ids: abc.Sequence[int]) -> None:
        size = len(token_ids)
        if size < self._known:  # the text was cut
            self._next, self._known = {}, 0
        table = self._next
        for place in range(max(1, self._known), size):
            for length in range(1, min(LONGEST_RUN, place) + 1):
                table[tuple(token_ids[place - length : place])] = place
        self._known = size


class NgramProposer:
    """A Drafter that computes nothing."""

    is_free = True

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Sequence, RunIndex] = WeakKeyDictionary()

    def propose(self, sequences: abc.Sequence[Sequence], n: int) -> list[list[int]]:
        """Up to n guessed tokens for each sequence."""
        return [self._index(sequence).find(sequence.token_ids, n) for sequence in sequences]

    def _index(self, sequence: Sequence) -> RunIndex:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = RunIndex()
        return index

    def close(self) -> None:
        """There is nothing to free."""
