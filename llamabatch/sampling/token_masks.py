"""Masks: the tokens that may come next in a sequence, from several sources combined into one mask for the sampler.

A mask is llguidance's: bit i of word i / 32 allows token i; uint32, one word for 32 tokens of the vocabulary. A source
that allows everything gives None, and a sequence without sources has no Masks at all, so that it costs nothing.
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
        """The mask for output token `index`, or None for all tokens. It is read before the next call.

        Args:
            token_ids: prompt and output so far, which ends with output token index - 1; not to be changed.
        """


class Masks:
    """The sources of one sequence. A token may come if all of them allow it."""

    def __init__(self, n_vocab: int) -> None:
        self._sources: list[MaskSource] = []
        self._together = np.empty(n_words(n_vocab), np.uint32)

    def add(self, source: MaskSource) -> None:
        self._sources.append(source)

    def next(self, index: int, token_ids: Sequence[int]) -> Bitmask | None:
        """The mask for output token `index`; good until the next call."""
        given = [words for source in self._sources if (words := source.mask(index, token_ids)) is not None]
        if len(given) < 2:
            return given[0] if given else None
        np.bitwise_and(given[0], given[1], out=self._together)
        for words in given[2:]:
            self._together &= words
        return self._together


def n_words(n_vocab: int) -> int:
    """Words of a mask."""
    return -(-n_vocab // 32)


def all_but(token_ids: Iterable[int], n_vocab: int) -> Bitmask:
    """A mask that forbids these tokens."""
    words = np.full(n_words(n_vocab), _ALL, np.uint32)
    for token_id in token_ids:
        forbid(words, token_id)
    return words


def forbid(words: Bitmask, token_id: int) -> None:
    """Takes a token out of a mask."""
    words[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def allow(words: Bitmask, token_id: int) -> None:
    """Puts a token into a mask."""
    words[token_id // 32] |= np.uint32(1 << token_id % 32)


class NotBefore:
    """Forbids tokens in the first part of the output: with min_tokens those that would end the text.

    Args:
        min_tokens: length of that part.
        words: the mask for it.
    """

    def __init__(self, min_tokens: int, words: Bitmask) -> None:
        self._min_tokens = min_tokens
        self._words = words

    def mask(self, index: int, token_ids: Sequence[int]) -> Bitmask | None:
        return self._words if index < self._min_tokens else None


class BadWords:
    """Forbids the last token of each of these runs where the output ends with the tokens before it.

    Args:
        runs: lists of token ids, none empty.
    """

    def __init__(self, runs: Iterable[tuple[int, ...]], n_vocab: int) -> None:
        runs = set(runs)
        self._always = all_but((run[0] for run in runs if len(run) == 1), n_vocab)
        self._forbids_always = any(len(run) == 1 for run in runs)
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the token before the last
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
