"""Logprobs: what is told of a token, and what a sequence that asked keeps of them. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llamabatch.request.sampling_params import SamplingParams


class Logprob(NamedTuple):
    """How likely one token was at its place, for the model alone.

    Attributes:
        logprob: natural logarithm of its probability: log softmax of the model's own logits, before logit_bias,
            penalties, masks and temperature.
        rank: 1 for the likeliest token of the vocabulary; of equally likely ones the lower id counts as likelier.
        decoded_token: its text, of special tokens their name; U+FFFD for bytes that are no whole character.
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # the token that came first, then the likeliest, which may name it again
Told = tuple[TokenLogprobs, ...] | None  # of output tokens, one each; None: nothing was asked for


class RowLogprobs(NamedTuple):
    """What the runner read from one output row: a token, then the likeliest ones in order; `rank` is the first's."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int

    def named(self, token_bytes: Callable[[int], bytes]) -> TokenLogprobs:
        """For those who asked: each token with its rank and text."""
        texts = [token_bytes(token_id).decode("utf-8", errors="replace") for token_id in self.token_ids]
        ranks = (self.rank, *range(1, len(texts)))
        return dict(zip(self.token_ids, map(Logprob, self.logprobs, ranks, texts), strict=True))


class LogprobRecord:
    """The logprobs of one sequence; only those that ask for any have one.

    Args:
        prompt: its tokens; the row at position i - 1 tells how likely token i was.
        prompt_top: so many likeliest tokens beside each token of the prompt; None: nothing of the prompt.
        top: the same for output tokens; CUMULATIVE: nothing but the sum of their logprobs; None: nothing.
        first: the first token of the prompt that is asked about.
    """

    CUMULATIVE = -1

    def __init__(
        self,
        prompt: tuple[int, ...],
        token_bytes: Callable[[int], bytes],
        *,
        prompt_top: int | None,
        top: int | None,
        first: int = 1,
    ) -> None:
        self.top = top
        self.prompt_top = prompt_top or 0
        self._prompt = prompt
        self._token_bytes = token_bytes
        self._first = first if prompt_top is not None else len(prompt)
        self._asks_prompt = prompt_top is not None
        self._prompt_rows: list[TokenLogprobs] = []
        self._sum = 0.0
        self._tokens: list[TokenLogprobs] = []

    @classmethod
    def asked_for(
        cls,
        params: SamplingParams,
        prompt: tuple[int, ...],
        token_bytes: Callable[[int], bytes],
        *,
        ranked: bool = False,
        score_from: int | None = None,
    ) -> LogprobRecord | None:
        """The record of a sequence; None where it asks for none.

        Args:
            ranked: the sum is wanted at least.
            score_from: the first token of the prompt whose logprob is; nothing of any output.
        """
        if score_from is not None:
            return cls(prompt, token_bytes, prompt_top=params.prompt_logprobs or 0, top=None, first=score_from)
        if params.logprobs is None and params.prompt_logprobs is None and not ranked:
            return None
        top = cls.CUMULATIVE if params.logprobs is None and ranked else params.logprobs
        return cls(prompt, token_bytes, prompt_top=params.prompt_logprobs, top=top)

    @property
    def next_row(self) -> int:
        """Position of the first row inside the prompt that is still to be read; cells before it may be copies."""
        return self._first - 1 + len(self._prompt_rows)

    @property
    def prompt_is_read(self) -> bool:
        return self.next_row >= len(self._prompt) - 1

    def rows_of(self, start: int, end: int) -> int:
        """How many rows of positions start .. end - 1 are still to be read inside the prompt."""
        return max(0, min(end, len(self._prompt) - 1) - max(start, self.next_row))

    def targets(self, end: int, count: int) -> tuple[int, ...]:
        """The tokens that the last `count` rows inside the prompt before position `end` tell of."""
        end = min(end, len(self._prompt) - 1)
        return self._prompt[end - count + 1 : end + 1]

    def take_prompt(self, rows: Sequence[RowLogprobs]) -> None:
        """The next rows inside the prompt."""
        self._prompt_rows += [row.named(self._token_bytes) for row in rows]

    def take(self, rows: Sequence[RowLogprobs]) -> Told:
        """The rows that output tokens were drawn from; returns what is told of these tokens."""
        for row in rows:
            self._sum += row.logprobs[0]
        if self.top is None or self.top == self.CUMULATIVE:
            return None
        told = tuple(row.named(self._token_bytes) for row in rows)
        self._tokens += told
        return told

    def take_up(self, told: tuple[TokenLogprobs, ...]) -> None:
        """What was told of output tokens that are known from the beginning."""
        for one in told:
            self._sum += next(iter(one.values())).logprob  # the token that came stands first
        self._tokens += told

    @property
    def cumulative(self) -> float | None:
        return None if self.top is None else self._sum

    def of_output(self) -> Told:
        return None if self.top is None or self.top == self.CUMULATIVE else tuple(self._tokens)

    def of_prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One for each token of the prompt, None for those that were not asked about; None before all are known."""
        if not self._asks_prompt or not self.prompt_is_read:
            return None
        return (None,) * self._first + tuple(self._prompt_rows)
