"""Logprobs of tokens, and the record of them that a sequence keeps. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llamabatch.request.sampling_params import SamplingParams


class Logprob(NamedTuple):
    """Probability of one token at its place, for the model alone, unless SamplingParams.post_sampling_probs is True.

    Attributes:
        logprob: natural logarithm of its probability: log softmax of the model's own logits, before logit_bias,
            penalties, masks and temperature.
        rank: 1 for the likeliest token of the vocabulary; of equally likely ones the lower id counts as likelier.
        decoded_token: its text, the name of a special token; U+FFFD for bytes that are no whole character.
    """

    logprob: float
    rank: int
    decoded_token: str


# The token itself first, then the likeliest, which may name it again, then those that were asked for by id.
TokenLogprobs = dict[int, Logprob]
SampleLogprobs = tuple[TokenLogprobs, ...] | None  # one for each output token; None: not asked for


class RowLogprobs(NamedTuple):
    """Logprobs of one output row: of a token with its `rank`, then of the likeliest ones in order.

    Attributes:
        others: (id, logprob, rank) of further tokens.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int
    others: Sequence[tuple[int, float, int]] = ()

    def named(self, token_bytes: Callable[[int], bytes]) -> TokenLogprobs:
        """Each token with its rank and text."""
        texts = [token_bytes(token_id).decode("utf-8", errors="replace") for token_id in self.token_ids]
        ranks = (self.rank, *range(1, len(texts)))
        found = dict(zip(self.token_ids, map(Logprob, self.logprobs, ranks, texts), strict=True))
        for token_id, logprob, rank in self.others:
            if token_id not in found:
                found[token_id] = Logprob(logprob, rank, token_bytes(token_id).decode("utf-8", errors="replace"))
        return found


class LogprobRecord:
    """The logprobs of one sequence; a sequence that asks for none has no record.

    Args:
        prompt: its tokens; the row at position i - 1 holds the logprob of token i.
        prompt_top: number of likeliest tokens for each token of the prompt; None: no logprobs of the prompt.
        top: the same for output tokens; CUMULATIVE: the sum of their logprobs alone; None: nothing.
        others: further tokens whose logprobs come with each output token.
        first: index of the first token of the prompt with a logprob.
        post_sampling: those of output tokens are of the distribution that they are drawn from.
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
        others: tuple[int, ...] = (),
        post_sampling: bool = False,
    ) -> None:
        self.top = top
        self.others = others
        self.post_sampling = post_sampling
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
        n_vocab: int,
        *,
        ranked: bool = False,
        score_from: int | None = None,
    ) -> LogprobRecord | None:
        """The record of a sequence; None where it asks for none.

        Args:
            ranked: best_of needs the sum at least.
            score_from: index of the first prompt token to score; the output has no logprobs then.
        """
        prompt_top = n_vocab if params.prompt_logprobs == -1 else params.prompt_logprobs
        if score_from is not None:
            return cls(prompt, token_bytes, prompt_top=prompt_top or 0, top=None, first=score_from)
        top = n_vocab if params.logprobs == -1 else params.logprobs
        if top is None and params.wants_logprobs:
            top = 0
        if top is None and ranked:
            top = cls.CUMULATIVE
        if top is None and prompt_top is None:
            return None
        return cls(
            prompt,
            token_bytes,
            prompt_top=prompt_top,
            top=top,
            others=params.logprob_ids,
            post_sampling=params.post_sampling_probs,
        )

    @property
    def next_row(self) -> int:
        """Position of the first row inside the prompt that is still to be read; cells before it may be copies."""
        return self._first - 1 + len(self._prompt_rows)

    @property
    def prompt_is_read(self) -> bool:
        """True if all rows inside the prompt have been read."""
        return self.next_row >= len(self._prompt) - 1

    def rows_of(self, start: int, end: int) -> int:
        """Number of rows inside the prompt, of positions start .. end - 1, that are still to be read."""
        return max(0, min(end, len(self._prompt) - 1) - max(start, self.next_row))

    def targets(self, end: int, count: int) -> tuple[int, ...]:
        """The tokens of which the last `count` rows inside the prompt before position `end` hold the logprobs."""
        end = min(end, len(self._prompt) - 1)
        return self._prompt[end - count + 1 : end + 1]

    def add_prompt(self, rows: Sequence[RowLogprobs]) -> None:
        """Adds the next rows inside the prompt."""
        self._prompt_rows += [row.named(self._token_bytes) for row in rows]

    def add(self, rows: Sequence[RowLogprobs]) -> SampleLogprobs:
        """Adds the rows of sampled tokens; returns the logprobs of these tokens."""
        for row in rows:
            self._sum += row.logprobs[0]
        if self.top is None or self.top == self.CUMULATIVE:
            return None
        found = tuple(row.named(self._token_bytes) for row in rows)
        self._tokens += found
        return found

    def resume(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Adds the logprobs of output tokens that another engine has sampled."""
        for one in logprobs:
            self._sum += next(iter(one.values())).logprob  # the sampled token stands first
        self._tokens += logprobs

    @property
    def cumulative(self) -> float | None:
        """Sum of the logprobs of the output; None where none are asked for."""
        return None if self.top is None else self._sum

    def of_output(self) -> SampleLogprobs:
        """One for each output token; None where none are asked for."""
        return None if self.top is None or self.top == self.CUMULATIVE else tuple(self._tokens)

    def of_prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One for each token of the prompt, None for those before the first to score; None before all rows are read."""
        if not self._asks_prompt or not self.prompt_is_read:
            return None
        return (None,) * self._first + tuple(self._prompt_rows)
