"""Keeps outputs to their grammars: which tokens may come next, for all constrained rows of a call together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np

from llamabatch.errors import describe
from llamabatch.sampling.grammar_sandbox import reason
from llamabatch.sampling.sampler import SamplerState
from llamabatch.sampling.token_masks import Masks, Words, n_words

_MOST_SECONDS = 0.02  # to compile within a step
_FEW = 4  # rows that one thread serves sooner than several: a mask takes 5 to 50 us


class Compiled:
    """A grammar ready for a vocabulary, for any number of sequences.

    They share what its lexer has learnt, most of the work. The states of a lexer are limited, for all who share
    it together; whoever meets the limit goes on with a lexer of its own, so that no request's text can end another's.

    Args:
        make: an LLMatcher at its beginning.

    Attributes:
        first: an LLMatcher at its beginning; copies of it share its lexer.
        spent: its lexer is full, and it takes long to make; the next request should have it compiled anew.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        start = time.perf_counter()
        self.first = make()
        self._seconds = time.perf_counter() - start
        self.spent = False

    @property
    def error(self) -> str:
        """What is wrong with it; empty if nothing is."""
        return reason(self.first.get_error()) if self.first.is_error() else ""

    def own(self, full: Any) -> Any | None:
        """A matcher at its beginning that shares nothing, for one that was a copy of `full`; None where to make it
        would keep others waiting. Those that come later share a new lexer, too."""
        if self._seconds > _MOST_SECONDS:
            self.spent = True
            return None
        if self.first is full:
            self.first = self._make()
        return self._make()


class GrammarMatcher:
    """How far one sequence has come in its grammar; a source of masks.

    It follows the tokens of the sequence and keeps none of its own, so that preemption and dropped draws need no care.

    Attributes:
        error: what went wrong, when the grammar has become too costly to follow; then it allows nothing.
    """

    __slots__ = ("_compiled", "_ready", "_row", "_source", "_taken", "error", "matcher")

    def __init__(self, compiled: Compiled) -> None:
        self._source: Any = compiled.first  # None: its lexer is its own
        self.matcher = self._source.deep_copy()
        self.error: str | None = None
        self._compiled = compiled
        self._taken = 0
        self._ready = -1  # the output token that _row is for
        self._row: Words | None = None

    def fail(self, error: Exception) -> None:
        """Ends this sequence with its next token; the other rows of the call go on."""
        self.error = f"structured_outputs cannot be followed any further: {describe(error)}"

    def advance(self, index: int, token_ids: Sequence[int]) -> None:
        """Takes in the output tokens before `index`; token_ids ends with the last of them."""
        if self.error is not None:
            return
        if self._taken > index:  # the text was cut back
            self.matcher.rollback(self._taken - index)
            self._taken = index
        while self._taken < index:
            self.matcher.consume_token(token_ids[self._taken - index])
            self._taken += 1
        if self.matcher.is_error():
            self._start_anew(index, token_ids)

    def _start_anew(self, index: int, token_ids: Sequence[int]) -> None:
        own = None if self._source is None else self._compiled.own(self._source)
        if own is not None:
            self.matcher, self._source = own, None
            self.matcher.consume_tokens(list(token_ids[len(token_ids) - index :]))
        if self.matcher.is_error():
            self.error = f"structured_outputs cannot be followed any further: {reason(self.matcher.get_error())}"

    def give(self, index: int, token_ids: Sequence[int], row: Words) -> None:
        """Its mask for output token `index` is this row, to which the matcher wrote it, until somebody else does."""
        self._ready, self._row = index, row
        for _ in range(2):
            if self.error is None and self.matcher.is_error():
                self._start_anew(index, token_ids)
                if self.error is None:
                    self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.error is not None:
            row[:] = 0

    def words(self, index: int, token_ids: Sequence[int]) -> Words | None:
        """As MaskSource; GuideRows.fill has made it ready."""
        assert self._ready == index
        return self._row

    @property
    def why_nothing(self) -> str:
        """What to say when no token may come."""
        return self.error or (
            "no token may come: structured_outputs and the other parameters exclude all, or the logits are not finite"
        )


def hold(draw: SamplerState, compiled: Compiled, n_vocab: int) -> GrammarMatcher:
    """Holds what this draws to a compiled grammar from its beginning."""
    guide = GrammarMatcher(compiled)
    if draw.masks is None:
        draw.masks = Masks(n_vocab)
    draw.masks.add(guide)
    return guide


class GuideRows:
    """The memory that masks are written to, in place, and the threads that write them.

    Args:
        n_vocab: tokens of the vocabulary.
        n_threads: at most.
    """

    def __init__(self, n_vocab: int, n_threads: int) -> None:
        self._rows = np.zeros((0, n_words(n_vocab)), np.uint32)
        self._n_threads = n_threads
        self._executor: Any = None

    def fill(self, guided: list[tuple[GrammarMatcher, int, Sequence[int]]]) -> None:
        """Makes the next mask of each of these: a guide, the index of its next output token, its tokens so far."""
        if len(guided) > len(self._rows):
            self._rows = np.zeros((len(guided), self._rows.shape[1]), np.uint32)
        rows = self._rows
        width, start = rows.strides[0], rows.ctypes.data
        for guide, index, token_ids in guided:
            try:
                guide.advance(index, token_ids)
            except Exception as error:
                guide.fail(error)
        pairs = [(guide.matcher, at) for at, (guide, _, _) in enumerate(guided) if guide.error is None]
        if len(pairs) < _FEW or self._n_threads < 2:
            for matcher, at in pairs:
                try:
                    matcher.unsafe_compute_mask_ptr(start + at * width, width)
                except Exception as error:
                    guided[at][0].fail(error)
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(min(self._n_threads, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(pairs, start, width, len(rows))
        for at, (guide, index, token_ids) in enumerate(guided):
            try:
                guide.give(index, token_ids, rows[at])
            except Exception as error:
                guide.fail(error)
                guide.give(index, token_ids, rows[at])
