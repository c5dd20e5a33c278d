"""Makes drafts by prompt lookup: finds an earlier place in the text with the same last tokens, and guesses the tokens
after that place. Pure Python."""

from __future__ import annotations

from collections import abc
from weakref import WeakKeyDictionary

from llamabatch.request.sequence import Sequence

# The last tokens are looked up as runs of at most this many tokens, the longest run first. A run of one token gives bad
# guesses in long texts, but a bad guess costs nothing until it is computed. spec_decode.py decides by the gain of
# earlier drafts which guesses are computed.
LONGEST_RUN = 3


class NgramProposer:
    """A Proposer that computes nothing: it finds guesses in the text itself."""

    is_free = True

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Sequence, RunIndex] = WeakKeyDictionary()

    def propose(self, sequences: abc.Sequence[Sequence], n: int) -> list[list[int]]:
        """Returns up to n guessed tokens for each sequence."""
        return [self._index(sequence).find(sequence.token_ids, n) for sequence in sequences]

    def _index(self, sequence: Sequence) -> RunIndex:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = RunIndex()
        return index

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


class RunIndex:
    """Index of one text. Maps each run of 1 to LONGEST_RUN tokens to the place of the token that last followed the run.

    A token adds at most LONGEST_RUN entries. So a step of a long text takes no longer than a step of a short text.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  # run of tokens -> place of the token that last followed it
        self._known = 0  # number of indexed tokens

    def find(self, token_ids: abc.Sequence[int], n: int) -> list[int]:
        """Returns up to n tokens that may come next; none if the last token is new to the text."""
        self._extend(token_ids)
        size = len(token_ids)
        for length in range(min(LONGEST_RUN, size - 1), 0, -1):
            place = self._next.get(tuple(token_ids[size - length : size]))
            if place is not None:
                found = list(token_ids[place : place + n])
                if min(found) < 0:  # a negative id is a picture, which cannot be guessed
                    return found[: next(at for at, token_id in enumerate(found) if token_id < 0)]
                # if the text ends after fewer than n tokens, the found tokens are repeated
                for at in range(n - len(found)):
                    found.append(found[at])
                return found
        return []

    def _extend(self, token_ids: abc.Sequence[int]) -> None:
        size = len(token_ids)
        if size < self._known:  # the text was cut
            self._next, self._known = {}, 0
        table = self._next
        for place in range(max(1, self._known), size):
            for length in range(1, min(LONGEST_RUN, place) + 1):
                table[tuple(token_ids[place - length : place])] = place
        self._known = size
