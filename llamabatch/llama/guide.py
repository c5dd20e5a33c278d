"""Keeps outputs to their grammars: which tokens may come next, for all constrained rows of a call together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from llamabatch.llama.grammar_check import reason
from llamabatch.llama.masks import Masks, Words, n_words
from llamabatch.llama.sampler import Draw

_FEW = 4  # rows that one thread serves sooner than several: a mask takes 5 to 50 us


class Guide:
    """How far one sequence has come in its grammar; a source of masks.

    It follows the tokens of the sequence and keeps none of its own, so that preemption and dropped draws need no care.

    Attributes:
        error: what went wrong, when the grammar has become too costly to follow; then it allows nothing.
    """

    __slots__ = ("_ready", "_row", "_taken", "error", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher.deep_copy()
        self.error: str | None = None
        self._taken = 0
        self._ready = -1  # the output token that _row is for
        self._row: Words | None = None

    def advance(self, index: int, token_ids: Sequence[int]) -> None:
        """Takes in the output tokens before `index`; token_ids ends with the last of them."""
        if self._taken > index:  # the text was cut back
            self.matcher.rollback(self._taken - index)
            self._taken = index
        while self._taken < index and self.error is None:
            self.matcher.consume_token(token_ids[self._taken - index])
            self._taken += 1
            self.check()

    def check(self) -> None:
        if self.matcher.is_error():
            self.error = f"structured_outputs cannot be followed any further: {reason(self.matcher.get_error())}"

    @property
    def why_nothing(self) -> str:
        """What to say when no token may come."""
        return self.error or (
            "no token may come: structured_outputs and the other parameters exclude all, or the logits are not finite"
        )

    def give(self, index: int, row: Words) -> None:
        """Its mask for output token `index` is this row, as long as nobody else writes there."""
        self._ready, self._row = index, row
        self.check()
        if self.error is not None:
            row[:] = 0

    def words(self, index: int, token_ids: Sequence[int]) -> Words | None:
        """As MaskSource; GuideRows.fill has made it ready."""
        assert self._ready == index
        return self._row


def hold(draw: Draw, matcher: Any, n_vocab: int) -> Guide:
    """Holds what this draws to a compiled grammar from its beginning."""
    guide = Guide(matcher)
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

    def fill(self, guided: list[tuple[Guide, int, Sequence[int]]]) -> None:
        """Makes the next mask of each of these: a guide, the index of its next output token, its tokens so far."""
        if len(guided) > len(self._rows):
            self._rows = np.zeros((len(guided), self._rows.shape[1]), np.uint32)
        rows = self._rows
        width, start = rows.strides[0], rows.ctypes.data
        for guide, index, token_ids in guided:
            guide.advance(index, token_ids)
        pairs = [(guide.matcher, at) for at, (guide, _, _) in enumerate(guided) if guide.error is None]
        if len(pairs) < _FEW or self._n_threads < 2:
            for matcher, at in pairs:
                matcher.unsafe_compute_mask_ptr(start + at * width, width)
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(min(self._n_threads, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(pairs, start, width, len(rows))
        for at, (guide, index, _) in enumerate(guided):
            guide.give(index, rows[at])
