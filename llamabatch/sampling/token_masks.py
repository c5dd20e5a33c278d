"""Masks: the tokens that may come next in a sequence. Combines the masks of several sources into one for the sampler.

A mask has llguidance's format: bit i % 32 of word i / 32 allows token i; uint32, one word for 32 tokens of the
vocabulary. A source that allows all tokens returns None. A sequence without sources has no Masks object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bitmask = npt.NDArray[np.uint32]

_ALL = np.uint32(0xFFFFFFFF)


class MaskSource(Protocol):
    def mask(self, index: int, token_ids: Sequence[int]) -> Bitmask | None:
        """Returns the mask for output token `index`; None: all tokens are allowed. The caller must read the mask before
        the next call.

        Args:
            token_ids: prompt and output, up to output token index - 1; must not be changed.
        """


class Masks:
    """The mask sources of one sequence. A token may come if all sources allow it."""

    def __init__(self, n_vocab: int) -> None:
        self._sources: list[MaskSource] = []
        self._together = np.empty(n_words(n_vocab), np.uint32)

    def add(self, source: MaskSource) -> None:
        self._sources.append(source)

    def next(self, index: int, token_ids: Sequence[int]) -> Bitmask | None:
        """Returns the mask for output token `index`; None: all tokens are allowed. The mask is valid until the next
        call."""
        given = [words for source in self._sources if (words := source.mask(index, token_ids)) is not None]
        if len(given) < 2:
            return given[0] if given else None
        np.bitwise_and(given[0], given[1], out=self._together)
        for words in given[2:]:
            self._together &= words
        return self._together


def n_words(n_vocab: int) -> int:
    """Returns the number of words of a mask."""
    return -(-n_vocab // 32)


def all_but(token_ids: Iterable[int], n_vocab: int) -> Bitmask:
    """Returns a mask that forbids these tokens."""
    words = np.full(n_words(n_vocab), _ALL, np.uint32)
    for token_id in token_ids:
        forbid(words, token_id)
    return words


def forbid(words: Bitmask, token_id: int) -> None:
    """Removes a token from a mask."""
    words[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def allow(words: Bitmask, token_id: int) -> None:
    """Adds a token to a mask."""
    words[token_id // 32] |= np.uint32(1 << token_id % 32)


class NotBefore:
    """Forbids tokens in the first part of the output. For min_tokens, these are the tokens that would end the text.

    Args:
        min_tokens: number of tokens of the first part.
        words: the mask for the first part.
    """

    def __init__(self, min_tokens: int, words: Bitmask) -> None:
        self._min_tokens = min_tokens
        self._words = words

    def mask(self, index: int, token_ids: Sequence[int]) -> Bitmask | None:
        return self._words if index < self._min_tokens else None


class BadWords:
    """Forbids the last token of each run while the output ends with the run's earlier tokens.

    Args:
        runs: lists of token ids, none empty.
    """

    def __init__(self, runs: Iterable[tuple[int, ...]], n_vocab: int) -> None:
        runs = set(runs)
        self._always = all_but((run[0] for run in runs if len(run) == 1), n_vocab)
        self._forbids_always = any(len(run) == 1 for run in runs)
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # second last token -> [(other tokens, last)]
        for *before, last in sorted(runs):
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))

    def mask(self, index: int, token_ids: Sequence[int]) -> Bitmask | None:
        closed = []
        for before, last in self._after.get(token_ids[-1], ()) if index else ():
            if len(before) <= index and tuple(token_ids[-len(before) :]) == before:
                closed.append(last)
        if not closed:
            return self._always if self._forbids_always else None
        words = self._always.copy()
        for token_id in closed:
            forbid(words, token_id)
        return words
