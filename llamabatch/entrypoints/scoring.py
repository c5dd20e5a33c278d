"""Scores: logprobs of given continuations of a prompt. Nothing is sampled."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.client.base import EngineClient
from llamabatch.engine.validation import RequestLimits, validate
from llamabatch.entrypoints.input_processor import (
    OneAdapters,
    all_are,
    first_of,
    listed,
    new_id,
)
from llamabatch.entrypoints.prompts import FORMS, Prompt, is_prompt_mapping, is_token_ids, read_mapping
from llamabatch.entrypoints.submission import ErrorPolicy, Refused, Submission
from llamabatch.errors import ConfigError, PromptError
from llamabatch.request.adapters import adapter_set, check_known
from llamabatch.request.outputs import RequestOutput
from llamabatch.request.request import Request, new_group
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.common_prefix import common_length
from llamabatch.utils.brief import brief
from llamabatch.utils.checks import items, show

# prompt_logprobs=0 gives the logprob and rank of each prompt token, without its alternatives.
_PARAMS = SamplingParams(max_tokens=1, prompt_logprobs=0)

Pairs = Sequence[tuple[Prompt, Sequence[Prompt]]]


@dataclass(frozen=True)
class Score:
    """The logprob of one continuation.

    Attributes:
        logprob: the natural logarithm of the continuation's probability, given the prompt. It is the sum of
            `token_logprobs`; NaN if the continuation failed.
        is_greedy: True if greedy sampling would give the continuation: each token is the most likely at its place.
        token_ids: the continuation's tokens. The prompt's last tokens may change when prompt and continuation are
            tokenized together; the changed tokens are included here.
        token_logprobs: the logprob of each token, given all tokens before it: log softmax of the model's own logits.
        error: the reason why the continuation failed, else None.
    """

    logprob: float
    is_greedy: bool
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    error: str | None = None

    def __repr__(self) -> str:
        return brief(self)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the continuation."""
        return len(self.token_ids)

    @classmethod
    def of(cls, request: Request, output: RequestOutput) -> Score:
        """Returns the score from a request and its output."""
        first, logprobs_of = request.score_from or 0, output.prompt_logprobs
        if output.error is not None or logprobs_of is None:
            return cls(math.nan, False, (), (), output.error or f"ended early: {output.finish_reason}")
        token_ids = request.prompt_token_ids[first:]
        found = [one[token] for token, one in zip(token_ids, logprobs_of[first:], strict=True) if one is not None]
        logprobs = tuple(logprob.logprob for logprob in found)
        return cls(math.fsum(logprobs), all(logprob.rank == 1 for logprob in found), token_ids, logprobs)


class Scoring:
    """The requests of one call of score(), and the scores made from their outputs.

    Args:
        client: the engine, for its model's tokenizer, its n_ctx and the names of its adapters.
        prompt: a text or token ids; without `continuations`, a list of (prompt, continuations).
        continuations: texts or token ids.
        adapters: adapters of all the requests.
        errors: as in Submission.

    Attributes:
        submission: the requests, ready to run.

    Raises:
        ConfigError: the model is an encoder.
        AdapterError: an adapter is not loaded.
        PromptError: there is nothing to score; or a continuation is refused, and `errors` makes this an exception.
    """

    def __init__(
        self,
        client: EngineClient,
        prompt: object,
        continuations: object = None,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = "warn",
    ) -> None:
        self._model = client.model
        if self._model.cannot_generate is not None:
            raise ConfigError(f"{self._model.path.name} cannot score texts: it is {self._model.cannot_generate}")
        self._limits = RequestLimits.of(client.plan.config, client.model)
        self._adapters, self._loaded = adapter_set(adapters), client.adapters
        check_known(self._adapters, self._loaded)
        self._group, self._arrival = new_group(), time.perf_counter()
        self._items: list[Request | Refused] = []
        self._labels: list[str] = []
        self._lengths: list[int] = []  # number of continuations of each pair
        if continuations is not None:
            self._add(prompt, _continuations(continuations), "")
        else:
            for number, pair in enumerate(_pairs(prompt)):
                self._add_pair(pair, f"prompt[{number}]")
        self._requests = [item if isinstance(item, Request) else item.request for item in self._items]
        self.submission = Submission(self._items, "continuation", errors, self._labels.__getitem__)

    def scores(self, outputs: Sequence[RequestOutput]) -> list[list[Score]]:
        """Returns one list for each pair of prompt and continuations, with one Score for each continuation.

        Args:
            outputs: the outputs of `submission`.
        """
        found = map(Score.of, self._requests, outputs)
        return [list(itertools.islice(found, length)) for length in self._lengths]

    def _add_pair(self, pair: object, label: str) -> None:
        parts = items(pair, 3)
        if parts is None or len(parts) != 2:
            error = PromptError(f"the pair is {show(pair)}; give (prompt, continuations)")
        else:
            try:
                self._add(parts[0], _continuations(parts[1]), f"{label}, ")
                return
            except PromptError as refusal:
                error = refusal
        self._items.append(self._refused(None, error))
        self._labels.append(label)
        self._lengths.append(1)

    def _add(self, prompt: object, continuations: list[Any], label: str) -> None:
        prompt = _unwrapped(prompt)
        head = self._head(prompt)
        for number, continuation in enumerate(map(_unwrapped, continuations)):
            text = prompt + continuation if isinstance(prompt, str) and isinstance(continuation, str) else None
            self._items.append(self._item(prompt, head, continuation, text))
            self._labels.append(f"{label}continuations[{number}]")
        self._lengths.append(len(continuations))

    def _head(self, prompt: object) -> tuple[int, ...] | PromptError:
        """Returns the tokens of a prompt, or its error."""
        if isinstance(prompt, PromptError):
            return prompt
        try:
            if isinstance(prompt, str):
                return tuple(self._model.tokenize(prompt))
            if is_token_ids(prompt):
                return tuple(map(int, prompt))
        except PromptError as refusal:
            return refusal
        return PromptError(f"a prompt is {FORMS}, not {show(prompt)}")

    def _item(
        self, prompt: Any, head: tuple[int, ...] | PromptError, continuation: Any, text: str | None
    ) -> Request | Refused:
        if isinstance(head, PromptError):
            return self._refused(text, head)
        try:
            ids, first = self._tokens(prompt, head, continuation)
            request = Request(
                new_id(), ids, _PARAMS, text, self._arrival, self._group, score_from=first, adapters=self._adapters
            )
            return validate(request, self._limits, self._model, self._loaded)
        except PromptError as refusal:
            return self._refused(text, refusal)

    def _refused(self, text: str | None, error: PromptError) -> Refused:
        return Refused(Request(new_id(), (), _PARAMS, text, self._arrival, self._group), error)

    def _tokens(self, prompt: Any, head: tuple[int, ...], continuation: Any) -> tuple[tuple[int, ...], int]:
        """Returns the tokens of prompt and continuation, and the index of the first token to score.

        Two texts are tokenized together, because a token may span the border between them. If this changes the last
        tokens of the prompt, the changed tokens count as continuation. Token ids given by the caller do not change.
        """
        if isinstance(continuation, str):
            if isinstance(prompt, str):
                ids = tuple(self._model.tokenize(prompt + continuation))
            else:
                ids = head + tuple(self._model.tokenize(continuation, add_special=False))
        elif is_token_ids(continuation):
            ids = head + tuple(map(int, continuation))
        elif isinstance(continuation, (list, tuple)) and not continuation:
            ids = head
        elif isinstance(continuation, PromptError):
            raise continuation
        else:
            raise PromptError(f"a continuation is {FORMS}, not {show(continuation)}")
        first = common_length(ids, head)
        if first == len(ids):
            raise PromptError(f"the continuation {show(continuation)} adds no token to the prompt")
        if first == 0:
            raise PromptError("no token comes before the continuation; give a longer prompt, or token ids")
        return ids, first


def _unwrapped(value: object) -> object:
    """Returns the ids, the text or the PromptError of a prompt mapping. Returns any other value unchanged."""
    if not is_prompt_mapping(value):
        return value
    try:
        text, ids = read_mapping(value)
    except PromptError as error:
        return error
    return text if ids is None else ids


def _pairs(given: object) -> list[Any]:
    """Returns the list of (prompt, continuations) given in place of a prompt. Raises PromptError for anything else."""
    pairs = listed("prompt", given)
    if not pairs:
        raise PromptError("there is nothing to score; give at least one (prompt, continuations)")
    if is_token_ids(pairs) or all_are(pairs, lambda pair: isinstance(pair, (str, Mapping)) or is_token_ids(pair)):
        raise PromptError(
            f"prompt holds {show(first_of(pairs))}; without continuations give a list of (prompt, continuations)"
        )
    return pairs


def _continuations(given: object) -> list[Any]:
    wanted = listed("continuations", given)
    if not wanted or is_token_ids(wanted):
        raise PromptError(f"continuations is {show(given)}; give a list of texts or token ids")
    return wanted
