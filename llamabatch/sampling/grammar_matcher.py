"""Restricts outputs to their grammars. Makes the masks of all constrained rows of a call together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import llguidance
import numpy as np

from llamabatch.errors import describe
from llamabatch.request.reasoning import GAP
from llamabatch.request.structured_outputs import CANNOT_FOLLOW
from llamabatch.sampling.grammar_sandbox import reason
from llamabatch.sampling.reasoning import Phase, ReasoningTracker
from llamabatch.sampling.token_masks import Bitmask, all_but, allow, n_words

_MOST_SECONDS = 0.02  # maximum CPU seconds for a new lexer within a step
_FEW = 4  # for fewer masks, one thread is faster than several: a mask takes 5 to 50 us


class VocabularyFacts:
    """Masks for the tokens between thinking and answer.

    Args:
        tokens: bytes of each token, or the name of a special token.
        eog_ids: tokens that end a generation.
        spell: returns the tokens of a text.

    Attributes:
        no_end: mask of all tokens except eog_ids.
        no_break: mask of all tokens that do not begin with a line break.
        breaks: at index n, a mask of the tokens that consist of 1 to n line breaks.
    """

    def __init__(self, tokens: Sequence[bytes], eog_ids: Iterable[int], spell: Callable[[bytes], list[int]]) -> None:
        n_vocab = len(tokens)
        self.spell = spell
        self.no_end = all_but(eog_ids, n_vocab)
        self.no_break = all_but((at for at, text in enumerate(tokens) if text[:1] == b"\n"), n_vocab)
        self.breaks = [np.zeros(n_words(n_vocab), np.uint32) for _ in range(len(GAP) + 1)]
        for at, text in enumerate(tokens):
            if text[:1] == b"\n" and text == b"\n" * len(text):
                for mask in self.breaks[len(text) :]:
                    allow(mask, at)


class Compiled:
    """A grammar compiled for a vocabulary. Any number of sequences can use it.

    The sequences share the lexer's states, because computing states is most of the work. The number of states is
    limited. A sequence that reaches the limit gets its own lexer, so that the text of one request cannot end another
    request.

    Args:
        make: returns a new LLMatcher at the beginning of the grammar.
        vocabulary: only needed if the grammar applies after thinking.
        left_out: functions that the model cannot call, because their schemas are not supported. An entry is for example
            "function 'f'".

    Attributes:
        first: an LLMatcher at the beginning of the grammar; its copies share its lexer.
        spent: True if the lexer is full and a new one would take long. The next request should compile the grammar
            again.
    """

    def __init__(
        self, make: Callable[[], Any], vocabulary: VocabularyFacts | None = None, left_out: tuple[str, ...] = ()
    ) -> None:
        self._make = make
        self.vocabulary = vocabulary
        self.left_out = left_out
        start = time.thread_time()
        self.first = make()
        self._seconds = time.thread_time() - start
        self.spent = False

    @property
    def error(self) -> str:
        """The error of the grammar; empty if the grammar has no error."""
        return reason(self.first.get_error()) if self.first.is_error() else ""

    def own(self, full: Any) -> Any | None:
        """Returns a matcher with its own lexer, at the beginning of the grammar. Returns None if a new lexer would
        delay other requests.

        Args:
            full: a matcher whose lexer is full. If `full` is `first`, `first` is also replaced.
        """
        if self._seconds > _MOST_SECONDS:
            self.spent = True
            return None
        if self.first is full:
            self.first = self._make()
        return self._make()


class GrammarMatcher:
    """The position of one sequence in its grammar: a MaskSource.

    It reads the tokens of the sequence but stores none. So preemption and dropped tokens need no extra code.

    Args:
        reasoning: the thinking before the grammar applies; None: the grammar applies from the first token on.

    Attributes:
        error: the reason if the matcher cannot continue, in most cases the grammar's cost. Then no token is allowed.
            None: no error.
        computes: the next mask depends on the grammar, and the matcher must write it.
    """

    __slots__ = (
        *("_begin", "_compiled", "_extra", "_gap", "_num_consumed", "_ready", "_reasoning", "_rest", "_row", "_source"),
        *("computes", "error", "matcher"),
    )

    def __init__(self, compiled: Compiled, reasoning: ReasoningTracker | None = None) -> None:
        self._source: Any = compiled.first  # None: the matcher has its own lexer
        self.matcher = self._source.deep_copy()
        self.error: str | None = None
        self.computes = True
        self._compiled = compiled
        self._reasoning = reasoning
        self._begin = 0  # number of output tokens before the first consumed token
        self._rest = b""  # the end of output token _begin - 1, if the answer begins within this token
        self._num_consumed = 0  # number of consumed output tokens from _begin on
        self._gap = 0  # number of line breaks that may come before the answer
        self._extra: list[int] = []  # further allowed tokens: from the tag before the thinking, or from a header
        self._ready = -1  # index of the output token to which _row applies
        self._row: Bitmask | None = None

    def fail(self, error: Exception) -> None:
        """Sets the error, which ends this sequence at its next token. Does not affect other rows of the call."""
        self.error = f"{CANNOT_FOLLOW}: {describe(error)}"

    def advance(self, index: int, token_ids: Sequence[int]) -> None:
        """Consumes the output tokens before `index`. `token_ids` ends with the last of these tokens."""
        if self.error is not None:
            return
        self._extra, self._gap, self.computes = [], 0, True
        begin, rest = 0, b""
        if self._reasoning is not None:
            state = self._reasoning.at(index, token_ids)
            if state.phase is Phase.BEFORE:
                tokens = self._reasoning.tokens
                self._extra = tokens.next_of_tag(state.tail)
                self.computes = not tokens.tags.channels and self._may_consume(token_ids[len(token_ids) - index :])
            elif state.phase is not Phase.ANSWER:
                self.computes = False
            if not self.computes:
                return
            begin, rest, self._gap = state.begin, state.rest, state.gap
        if (begin, rest) != (self._begin, self._rest) or (index - begin < self._num_consumed and begin):
            self._begin_at(begin, rest)
        self._consume(index, token_ids)
        if self.matcher.is_error():
            self._start_anew(index, token_ids)

    def _consume(self, index: int, token_ids: Sequence[int]) -> None:
        index -= self._begin
        if self._num_consumed > index:  # tokens were dropped
            self.matcher.rollback(self._num_consumed - index)
            self._num_consumed = index
        while self._num_consumed < index:
            self.matcher.consume_token(token_ids[self._num_consumed - index])
            self._num_consumed += 1

    def _begin_at(self, begin: int, rest: bytes) -> None:
        """Sets the matcher to the beginning of an answer. An answer may begin within a token: `rest` is the end of
        output token `begin - 1`, and has the first bytes of the answer."""
        self.matcher = self._compiled.first.deep_copy()
        self._source, self._num_consumed = self._compiled.first, 0
        self._begin, self._rest = begin, rest
        if rest:
            self.matcher.consume_tokens(self._facts.spell(rest))

    def _may_consume(self, token_ids: Sequence[int]) -> bool:
        """Returns True if the grammar allows an answer that begins with these tokens."""
        if not token_ids:
            return True
        matcher = self._compiled.first.deep_copy()
        return bool(matcher.validate_tokens(list(token_ids)) == len(token_ids))

    @property
    def _facts(self) -> VocabularyFacts:
        assert self._compiled.vocabulary is not None
        return self._compiled.vocabulary

    def _start_anew(self, index: int, token_ids: Sequence[int]) -> None:
        own = None if self._source is None else self._compiled.own(self._source)
        if own is not None:
            self.matcher, self._source = own, None
            before = self._facts.spell(self._rest) if self._rest else []
            self.matcher.consume_tokens([*before, *token_ids[len(token_ids) - (index - self._begin) :]])
            self._num_consumed = index - self._begin
        if self.matcher.is_error():
            self.error = f"{CANNOT_FOLLOW}: {reason(self.matcher.get_error())}"

    def set_mask(self, index: int, token_ids: Sequence[int], row: Bitmask) -> None:
        """Completes `row` as the mask for output token `index`. mask() then returns `row`. If `computes` is True, the
        row already has the grammar's mask."""
        self._ready, self._row = index, row
        if self.error is None and not self.computes:
            row[:] = 0 if self._extra else self._facts.no_end
        else:
            self._check(index, token_ids, row)
        if self._gap:
            np.bitwise_and(row, self._facts.no_break, out=row)
            np.bitwise_or(row, self._facts.breaks[self._gap], out=row)
        for token_id in self._extra:
            allow(row, token_id)
        if self._extra and index == 0 and self.computes:
            np.bitwise_or(row, self._facts.breaks[1], out=row)  # some families write a line break before the tag

    def _check(self, index: int, token_ids: Sequence[int], row: Bitmask) -> None:
        for _ in range(2):
            if self.error is None and self.matcher.is_error():
                self._start_anew(index, token_ids)
                if self.error is None:
                    self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.error is not None:
            row[:] = 0

    def mask(self, index: int, token_ids: Sequence[int]) -> Bitmask | None:
        """Returns the mask for output token `index`. GrammarMasks.fill must have made this mask before."""
        assert self._ready == index
        return self._row

    @property
    def why_no_token(self) -> str:
        """The error message if no token is allowed."""
        return self.error or (
            "no token can be chosen: structured_outputs and the other parameters exclude all, or logits are not finite"
        )


class GrammarMasks:
    """The memory of masks, and the threads that write the masks.

    Args:
        n_vocab: number of tokens of the vocabulary.
        n_threads: maximum number of threads.
    """

    def __init__(self, n_vocab: int, n_threads: int) -> None:
        self._rows = np.zeros((0, n_words(n_vocab)), np.uint32)
        self._n_threads = n_threads
        self._executor: Any = None

    def fill(self, constrained: Sequence[tuple[GrammarMatcher, int, Sequence[int]]]) -> None:
        """Makes the next mask of each matcher.

        Args:
            constrained: each matcher with the index of its next output token, and with its prompt and output so far.
        """
        if len(constrained) > len(self._rows):
            self._rows = np.zeros((len(constrained), self._rows.shape[1]), np.uint32)
        rows = self._rows
        width, start = rows.strides[0], rows.ctypes.data
        for matcher, index, token_ids in constrained:
            try:
                matcher.advance(index, token_ids)
            except Exception as error:
                matcher.fail(error)
        pairs = [
            (matcher.matcher, at)
            for at, (matcher, _, _) in enumerate(constrained)
            if matcher.error is None and matcher.computes
        ]
        if len(pairs) < _FEW or self._n_threads < 2:
            for matcher, at in pairs:
                try:
                    matcher.unsafe_compute_mask_ptr(start + at * width, width)
                except Exception as error:
                    constrained[at][0].fail(error)
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(min(self._n_threads, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(pairs, start, width, len(rows))
        for at, (matcher, index, token_ids) in enumerate(constrained):
            try:
                matcher.set_mask(index, token_ids, rows[at])
            except Exception as error:
                matcher.fail(error)
                matcher.set_mask(index, token_ids, rows[at])
