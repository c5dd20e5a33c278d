"""Keeps outputs to their grammars. The masks of all constrained rows of a call are made together."""

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

_MOST_SECONDS = 0.02  # the most computing time to compile a grammar within a step
_FEW = 4  # below this many rows one thread is faster than several: a mask takes 5 to 50 us


class VocabularyFacts:
    """Masks for the tokens around an answer that follows thinking.

    Args:
        tokens: bytes of each token, or the name of a special token.
        eog_ids: tokens that end a generation.
        spell: returns the tokens of a text.

    Attributes:
        no_end: all tokens except eog_ids.
        no_break: all tokens except those that begin with a line break.
        breaks: by a number of line breaks, the tokens that consist of at most this many line breaks.
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
    """A grammar compiled for a vocabulary, for any number of sequences.

    The sequences share what the lexer has learnt, which is most of the work. The states of a shared lexer are limited.
    A sequence that reaches the limit gets its own lexer, so that no request's text can end another request.

    Args:
        make: returns a new LLMatcher at its beginning.
        vocabulary: needed if the grammar applies after thinking.
        left_out: functions that no call names, because their schemas cannot be held: "function 'f'".

    Attributes:
        first: an LLMatcher at its beginning; copies of it share its lexer.
        spent: the lexer is full and takes long to make, so that the next request should compile the grammar again.
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
        """The error of the grammar; empty if it has none."""
        return reason(self.first.get_error()) if self.first.is_error() else ""

    def own(self, full: Any) -> Any | None:
        """Returns a matcher at its beginning with a lexer of its own, in place of a copy of `full`. Later sequences get
        a new shared lexer, too. Returns None if making a lexer would keep other requests waiting."""
        if self._seconds > _MOST_SECONDS:
            self.spent = True
            return None
        if self.first is full:
            self.first = self._make()
        return self._make()


class GrammarMatcher:
    """The position of one sequence in its grammar; a source of masks.

    It reads the tokens of the sequence and keeps none, so that preemption and dropped tokens need no extra care.

    Args:
        reasoning: the thinking after which the grammar applies; None: it applies from the first token on.

    Attributes:
        error: reason why the grammar cannot be followed any further, mostly its cost. It then allows no token.
        computes: the matcher has to write the mask of the next token; otherwise the mask is known without the grammar.
    """

    __slots__ = (
        *("_begin", "_compiled", "_extra", "_gap", "_num_consumed", "_ready", "_reasoning", "_rest", "_row", "_source"),
        *("computes", "error", "matcher"),
    )

    def __init__(self, compiled: Compiled, reasoning: ReasoningTracker | None = None) -> None:
        self._source: Any = compiled.first  # None: the matcher has a lexer of its own
        self.matcher = self._source.deep_copy()
        self.error: str | None = None
        self.computes = True
        self._compiled = compiled
        self._reasoning = reasoning
        self._begin = 0  # output tokens before the first that the matcher consumed
        self._rest = b""  # end of the token before _begin, which the matcher consumed as well
        self._num_consumed = 0  # output tokens
        self._gap = 0  # line breaks that may come before the answer
        self._extra: list[int] = []  # tokens of the tag that begins the thinking, or of the header of a message
        self._ready = -1  # the output token that _row is for
        self._row: Bitmask | None = None

    def fail(self, error: Exception) -> None:
        """Ends this sequence with its next token. Other rows of the call are not affected."""
        self.error = f"{CANNOT_FOLLOW}: {describe(error)}"

    def advance(self, index: int, token_ids: Sequence[int]) -> None:
        """Consumes the output tokens before `index`, the last of which ends token_ids."""
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
        if self._num_consumed > index:  # the text was cut back
            self.matcher.rollback(self._num_consumed - index)
            self._num_consumed = index
        while self._num_consumed < index:
            self.matcher.consume_token(token_ids[self._num_consumed - index])
            self._num_consumed += 1

    def _begin_at(self, begin: int, rest: bytes) -> None:
        """Sets the matcher to the beginning of an answer. Its first bytes, `rest`, came with the token before it."""
        self.matcher = self._compiled.first.deep_copy()
        self._source, self._num_consumed = self._compiled.first, 0
        self._begin, self._rest = begin, rest
        if rest:
            self.matcher.consume_tokens(self._facts.spell(rest))

    def _may_consume(self, token_ids: Sequence[int]) -> bool:
        """True if the grammar allows an answer that begins with these tokens."""
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
        """Turns `row`, which the matcher wrote, into the mask for output token `index`, until it is written again."""
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
        """Returns the mask for output token `index`, as a MaskSource. GrammarMasks.fill must have made it ready."""
        assert self._ready == index
        return self._row

    @property
    def why_no_token(self) -> str:
        """The error of a request for which no token may come."""
        return self.error or (
            "no token can be chosen: structured_outputs and the other parameters exclude all, or logits are not finite"
        )


class GrammarMasks:
    """The memory that masks are written to, in place, and the threads that write them.

    Args:
        n_vocab: tokens of the vocabulary.
        n_threads: the most threads.
    """

    def __init__(self, n_vocab: int, n_threads: int) -> None:
        self._rows = np.zeros((0, n_words(n_vocab)), np.uint32)
        self._n_threads = n_threads
        self._executor: Any = None

    def fill(self, constrained: Sequence[tuple[GrammarMatcher, int, Sequence[int]]]) -> None:
        """Makes the next mask of each matcher, given with the index of its next output token and its tokens so far."""
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
