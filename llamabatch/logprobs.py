"""Logprobs: what is told of a token, and what a sequence that asked keeps of them. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import NamedTuple


class Logprob(NamedTuple):
    """How likely one token was at its place, for the model alone.

    Attributes:
        logprob: natural logarithm of its probability: log softmax of the model's own logits, before logit_bias,
            penalties, masks and temperature.
        rank: 1 for the likeliest token of the vocabulary; of equally likely ones the lower id counts as likelier.
        decoded_token: its text; U+FFFD for bytes that are no whole character, "" for special tokens.
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # the token that came first, then the likeliest, which may name it again


class RowLogprobs(NamedTuple):
    """What the runner read from one output row: a token, then the likeliest ones in order; `rank` is the first's."""

    token_ids: ListLike[int]
    logprobs: ListLike[float]
    rank: int

    def named(self, token_bytes: Callable[[int], bytes]) -> TokenLogprobs:
        """For those who asked: each token with its rank and text."""
        texts = [token_bytes(token_id).decode("utf-8", errors="replace") for token_id in self.token_ids]
        ranks = (self.rank, *range(1, len(texts)))
        return dict(zip(self.token_ids, map(Logprob, self.logprobs, ranks, texts), strict=True))


class LogprobRecord:
    """The logprobs of one sequence; only those that ask for any have one.

    Args:
        prompt: all tokens that could be looked up in prompt rows.
        prompt_first: the first token of the prompt whose logprob is wanted, 1 or later; None: of none.
        prompt_top: so many likeliest tokens beside each token of the prompt.
        top: the same for output tokens; CUMULATIVE: nothing but the sum of their logprobs; None: nothing.
    """

    CUMULATIVE = -1

    def __init__(
        self,
        prompt: tuple[int, ...],
        token_bytes: Callable[[int], bytes],
        *,
        prompt_first: int | None,
        prompt_top: int = 0,
        top: int | None,
    ) -> None:
        self.top = top
        self.prompt_top = prompt_top
        self.cumulative = 0.0
        self.tokens: list[TokenLogprobs] = []
        self._prompt = prompt
        self._token_bytes = token_bytes
        # of prompt tokens: the row at position i - 1 tells of token i
        self._prompt_first = len(prompt) if prompt_first is None else prompt_first
        self._prompt_rows: list[TokenLogprobs] = []

    @property
    def next_row(self) -> int:
        """Position of the first row inside the prompt that has not been read; cells before it may be copies."""
        return self._prompt_first - 1 + len(self._prompt_rows)

    @property
    def prompt_rows_left(self) -> int:
        return len(self._prompt) - 1 - self.next_row

    def rows_of(self, start: int, end: int) -> int:
        """How many rows of positions start .. end - 1 are still to be read inside the prompt."""
        return max(0, min(end, len(self._prompt) - 1) - max(start, self.next_row))

    def targets(self, end: int, count: int) -> tuple[int, ...]:
        """The tokens that come after the `count` positions before `end`."""
        return self._prompt[end - count + 1 : end + 1]

    def take_prompt(self, rows: ListLike[RowLogprobs]) -> None:
        """The next rows inside the prompt."""
        self._prompt_rows.extend(row.named(self._token_bytes) for row in rows)

    def take(self, rows: ListLike[RowLogprobs]) -> tuple[TokenLogprobs, ...] | None:
        """The rows that output tokens were drawn from; returns what is told of these tokens."""
        for row in rows:
            self.cumulative += row.logprobs[0]
        if self.top is None or self.top == self.CUMULATIVE:
            return None
        told = [row.named(self._token_bytes) for row in rows]
        self.tokens += told
        return tuple(told)

    def of_prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One for each token of the prompt, None for those that were not asked for; None if it did not come so far."""
        if self._prompt_first >= len(self._prompt) or self.prompt_rows_left > 0:
            return None
        return (None,) * self._prompt_first + tuple(self._prompt_rows)
