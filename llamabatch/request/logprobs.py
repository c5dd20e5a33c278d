"""Logprobs of tokens, and LogprobRecord: the logprobs of one sequence. Pure Python."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from llamabatch.request.sampling_params import SamplingParams


class Logprob(NamedTuple):
    """The probability of one token at its place.

    Attributes:
        logprob: natural logarithm of the probability. This is the log softmax of the model's own logits, before
            logit_bias, penalties, masks and temperature. With SamplingParams.post_sampling_probs, the probability is
            the one after all of these steps.
        rank: 1 for the likeliest token of the vocabulary; of equally likely tokens the lower id has the better rank.
        decoded_token: the token's text, or the name of a special token; U+FFFD for bytes that are not a whole
            character.
    """

    logprob: float
    rank: int
    decoded_token: str


class TextOffsets:
    """The offsets of tokens in their text, in characters. A token that continues a character has the offset of this
    character.

    Args:
        at: the offset of the first token.
        errors: how to treat bytes that are not UTF-8, as in bytes.decode.
    """

    def __init__(self, at: int = 0, errors: str = "replace") -> None:
        self.at = at
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def add(self, data: bytes) -> int:
        """Returns the offset of the next token. `data` contains the bytes of this token."""
        at = self.at
        self.at += len(self._decoder.decode(data))
        return at


# Logprobs at one place, by token id. Order: the token itself, the likeliest tokens, the tokens named in the request.
TokenLogprobs = dict[int, Logprob]


class FlatLogprobs(Sequence[Any]):
    """A sequence of TokenLogprobs, one for each place, stored in arrays. vLLM has a class of this name, too.

    A logprob takes about 25 bytes in an array, and 200 bytes as an object. Each access to a place makes a new dict, or
    returns None if the place has no logprobs. A FlatLogprobs equals a list or a tuple if the items are equal. A deep
    copy, as dataclasses.asdict makes it, is a tuple.
    """

    __slots__ = ("_ends", "_lengths", "_logprobs", "_ranks", "_texts", "_token_ids")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, places: Iterable[TokenLogprobs | None] = ()) -> None:
        self._ends = array("q")  # for each place: the end of its entries in the next three arrays
        self._token_ids = array("i")
        self._logprobs = array("d")
        self._ranks = array("i")
        self._lengths = array("I")  # lengths of the tokens' texts
        self._texts: list[str] = []  # for each place: the joined texts of its tokens
        self.extend(places)

    def append(self, given: TokenLogprobs | None) -> None:
        """Adds a place."""
        text = ""
        if given:
            logprobs, ranks, texts = zip(*given.values(), strict=True)
            self._token_ids.extend(given)
            self._logprobs.extend(logprobs)
            self._ranks.extend(ranks)
            self._lengths.extend(map(len, texts))
            text = "".join(texts)
        self._texts.append(text)
        self._ends.append(len(self._token_ids))

    def extend(self, places: Iterable[TokenLogprobs | None]) -> None:
        """Adds places."""
        if not isinstance(places, FlatLogprobs):
            for given in places:
                self.append(given)
            return
        before = self.n_logprobs
        self._ends.extend([before + end for end in places._ends])
        self._token_ids.extend(places._token_ids)
        self._logprobs.extend(places._logprobs)
        self._ranks.extend(places._ranks)
        self._lengths.extend(places._lengths)
        self._texts += places._texts

    @property
    def n_logprobs(self) -> int:
        """The number of logprobs at all places together."""
        return len(self._token_ids)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple([self._at(place) for place in range(*at.indices(len(self)))])
        if not -len(self) <= at < len(self):
            raise IndexError(f"place {at} of {len(self)}")
        return self._at(at % len(self))

    def _at(self, place: int) -> TokenLogprobs | None:
        found: TokenLogprobs = {}
        text, end = self._texts[place], 0
        for at in range(self._ends[place - 1] if place else 0, self._ends[place]):
            start, end = end, end + self._lengths[at]
            found[self._token_ids[at]] = Logprob(self._logprobs[at], self._ranks[at], text[start:end])
        return found or None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (FlatLogprobs, list, tuple)) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __add__(self, other: tuple[TokenLogprobs | None, ...]) -> tuple[TokenLogprobs | None, ...]:
        return (*self, *other)

    def __radd__(self, other: tuple[TokenLogprobs | None, ...]) -> tuple[TokenLogprobs | None, ...]:
        return (*other, *self)

    def __reduce__(self) -> tuple[Callable[[tuple[Any, ...]], FlatLogprobs], tuple[Any, ...]]:
        return FlatLogprobs.of_parts, (self.parts(),)

    def __deepcopy__(self, memo: object) -> tuple[TokenLogprobs | None, ...]:
        return tuple(self)

    def parts(self) -> tuple[Any, ...]:
        """Returns the arrays as bytes, and the texts, to send them to another process of this machine."""
        arrays: tuple[array[Any], ...] = (self._ends, self._token_ids, self._logprobs, self._ranks, self._lengths)
        return (*[each.tobytes() for each in arrays], tuple(self._texts))

    @classmethod
    def of_parts(cls, parts: tuple[Any, ...]) -> FlatLogprobs:
        """Makes a FlatLogprobs from the result of parts()."""
        made = cls()
        *arrays, texts = parts
        own: tuple[array[Any], ...] = (made._ends, made._token_ids, made._logprobs, made._ranks, made._lengths)
        for each, data in zip(own, arrays, strict=True):
            each.frombytes(data)
        made._texts = list(texts)
        return made


def count(places: Sequence[TokenLogprobs | None] | None) -> int:
    """Returns the number of logprobs at all places together; 0 for None."""
    if isinstance(places, FlatLogprobs):
        return places.n_logprobs
    return sum([len(each) for each in places or () if each])


class RowLogprobs(NamedTuple):
    """Logprobs of one output row. First comes a given token, then come the likeliest tokens in order.

    Attributes:
        rank: rank of the given token.
        others: (id, logprob, rank) of further tokens.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int
    others: Sequence[tuple[int, float, int]] = ()

    def named(self, token_bytes: Callable[[int], bytes]) -> TokenLogprobs:
        """Returns each token with its logprob, rank and text."""
        texts = [token_bytes(token_id).decode("utf-8", errors="replace") for token_id in self.token_ids]
        ranks = (self.rank, *range(1, len(texts)))
        found = dict(zip(self.token_ids, map(Logprob, self.logprobs, ranks, texts), strict=True))
        for token_id, logprob, rank in self.others:
            if token_id not in found:
                found[token_id] = Logprob(logprob, rank, token_bytes(token_id).decode("utf-8", errors="replace"))
        return found


SampleLogprobs = FlatLogprobs | None  # an item for each output token; None: not asked for


class LogprobRecord:
    """The logprobs of one sequence. A sequence that asks for no logprobs has no record.

    Args:
        prompt: tokens of the prompt; the row at position i - 1 has the logprob of token i.
        prompt_top: number of likeliest tokens for each token of the prompt; None: no logprobs of the prompt.
        top: number of likeliest tokens for each output token; CUMULATIVE: only the sum of the output's logprobs; None:
            no logprobs of the output.
        others: ids of further tokens whose logprobs are recorded for each output token.
        first: index of the first prompt token that has a logprob.
        post_sampling: True: logprobs of output tokens come from the distribution after all samplers.
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
        self._asks_prompt = prompt_top is not None
        self._prompt_rows = FlatLogprobs([None] * (first if prompt_top is not None else 0))
        self._sum = 0.0
        self._tokens = FlatLogprobs()

    @classmethod
    def of_request(
        cls,
        params: SamplingParams,
        prompt: tuple[int, ...],
        token_bytes: Callable[[int], bytes],
        n_vocab: int,
        *,
        ranked: bool = False,
        score_from: int | None = None,
    ) -> LogprobRecord | None:
        """Returns the record of a sequence; None if the request asks for no logprobs.

        Args:
            ranked: True: the sum of the output's logprobs is needed for best_of, even if the request asks for no
                logprobs.
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
        """The position of the first unread row inside the prompt. Cells before this row may be copied."""
        return (len(self._prompt_rows) if self._asks_prompt else len(self._prompt)) - 1

    @property
    def prompt_is_read(self) -> bool:
        """True if all rows of the prompt have been read. The row of the last prompt token does not count."""
        return self.next_row >= len(self._prompt) - 1

    def rows_of(self, start: int, end: int) -> int:
        """Returns the number of rows at positions start .. end - 1 that are inside the prompt and still to be read."""
        return max(0, min(end, len(self._prompt) - 1) - max(start, self.next_row))

    def targets(self, end: int, count: int) -> tuple[int, ...]:
        """Returns the prompt tokens whose logprobs are in the `count` rows before position `end`."""
        end = min(end, len(self._prompt) - 1)
        return self._prompt[end - count + 1 : end + 1]

    def add_prompt(self, rows: Sequence[RowLogprobs]) -> None:
        """Adds the next rows inside the prompt."""
        self._prompt_rows.extend([row.named(self._token_bytes) for row in rows])

    def add(self, rows: Sequence[RowLogprobs]) -> SampleLogprobs:
        """Adds the rows of sampled tokens. Returns the logprobs of these tokens."""
        for row in rows:
            self._sum += row.logprobs[0]
        if self.top is None or self.top == self.CUMULATIVE:
            return None
        found = FlatLogprobs([row.named(self._token_bytes) for row in rows])
        self._tokens.extend(found)
        return found

    def resume(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds the logprobs of output tokens that another engine has sampled."""
        for one in logprobs:
            self._sum += next(iter(one.values())).logprob  # the sampled token is first
        self._tokens.extend(logprobs)

    @property
    def cumulative(self) -> float | None:
        """The sum of the logprobs of the output; None if the request does not need this sum."""
        return None if self.top is None else self._sum

    def of_output(self) -> SampleLogprobs:
        """Returns the logprobs of each output token; None if the request does not ask for them."""
        return None if self.top is None or self.top == self.CUMULATIVE else self._tokens

    def of_prompt(self) -> FlatLogprobs | None:
        """Returns the logprobs of each prompt token, None for unscored tokens. Returns None until all rows are read."""
        if not self._asks_prompt or not self.prompt_is_read:
            return None
        return self._prompt_rows
