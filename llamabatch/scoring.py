"""Scores: how likely a model finds given continuations of a prompt. Nothing is sampled."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

from llamabatch.adapters import adapter_set, check_known
from llamabatch.checks import show
from llamabatch.client import EngineClient
from llamabatch.errors import PromptError
from llamabatch.front import OneAdapters, Prompt, Refused, Submission, is_token_ids, listed, new_id
from llamabatch.prefix import common_length
from llamabatch.request import Request, RequestOutput, new_group
from llamabatch.request_checks import check_prompt
from llamabatch.sampling_params import SamplingParams

# Of each token its own logprob and rank, and no likelier ones beside it.
_PARAMS = SamplingParams(max_tokens=1, prompt_logprobs=0)

Pairs = ListLike[tuple[Prompt, ListLike[Prompt]]]


@dataclass(frozen=True)
class Score:
    """How likely one continuation is.

    Attributes:
        logprob: natural logarithm of its probability, given the prompt: the sum of `token_logprobs`; NaN where it could
            not be scored.
        is_greedy: each of its tokens is the likeliest at its place, so that greedy sampling would give it.
        token_ids: its tokens, those from the first on in which prompt and continuation together differ from the prompt.
        token_logprobs: the logprob of each, given all before it: log softmax of the model's own logits.
        error: why it could not be scored, else None.
    """

    logprob: float
    is_greedy: bool
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation."""
        return len(self.token_ids)

    @classmethod
    def of(cls, request: Request, output: RequestOutput) -> Score:
        """What came of a request to score."""
        first, told = request.score_from or 0, output.prompt_logprobs
        if output.error is not None or told is None:
            return cls(math.nan, False, (), (), output.error or f"ended early: {output.finish_reason}")
        token_ids = request.prompt_token_ids[first:]
        found = [one[token] for token, one in zip(token_ids, told[first:], strict=True) if one is not None]
        logprobs = tuple(logprob.logprob for logprob in found)
        return cls(math.fsum(logprobs), all(logprob.rank == 1 for logprob in found), token_ids, logprobs)


class Scoring:
    """The requests of one call to score, and how their outputs become scores.

    Args:
        client: for its model's tokenizer, n_ctx and the adapters that it has.
        prompt: a text or token ids; or, with `continuations` None, a list of (prompt, continuations).
        continuations: texts or token ids.
        adapters: what the model is to compute all of it with.

    Attributes:
        submission: to be run.

    Raises:
        AdapterError: an adapter that is not loaded.
        PromptError: nothing to score; or, unless it is a list of pairs, one that cannot be scored.
    """

    def __init__(
        self, client: EngineClient, prompt: object, continuations: object = None, adapters: OneAdapters = None
    ) -> None:
        self._model = client.model
        self._n_ctx = client.plan.config.number("n_ctx")
        self._adapters = adapter_set(adapters)
        check_known(self._adapters, client.adapters)
        self._strict = continuations is not None
        pairs = [(prompt, continuations)] if self._strict else [_pair(item) for item in listed("prompt", prompt)]
        if not pairs:
            raise PromptError("there is nothing to score; give at least one (prompt, continuations)")
        group, arrival = new_group(), time.perf_counter()
        self._lengths: list[int] = []  # continuations of each pair
        items: list[Request | Refused] = []
        for each_prompt, each_continuations in pairs:
            wanted = listed("continuations", each_continuations)
            if not wanted or is_token_ids(each_continuations):
                raise PromptError(f"continuations is {show(each_continuations)}; give a list of texts or token ids")
            head = self._head(each_prompt)
            items += [self._item(each_prompt, head, continuation, arrival, group) for continuation in wanted]
            self._lengths.append(len(wanted))
        self._requests = [item if isinstance(item, Request) else item.request for item in items]
        self.submission = Submission(items)

    def scores(self, outputs: ListLike[RequestOutput]) -> list[list[Score]]:
        """One list a pair, from the outputs of the submission."""
        found = map(Score.of, self._requests, outputs)
        return [list(itertools.islice(found, length)) for length in self._lengths]

    def _head(self, prompt: object) -> tuple[int, ...] | str:
        """The tokens of a prompt, or why it is none."""
        if isinstance(prompt, str):
            return tuple(self._model.tokenize(prompt))
        if is_token_ids(prompt):
            return tuple(map(int, prompt))
        return f"a prompt is a text or a list of token ids, not {show(prompt)}"

    def _item(
        self, prompt: Any, head: tuple[int, ...] | str, continuation: Any, arrival: float, group: int
    ) -> Request | Refused:
        text = prompt + continuation if isinstance(prompt, str) and isinstance(continuation, str) else None
        try:
            if isinstance(head, str):
                raise PromptError(head)
            ids, first = self._tokens(prompt, head, continuation)
            return Request(new_id(), ids, _PARAMS, text, arrival, group, score_from=first, adapters=self._adapters)
        except PromptError as error:
            if self._strict:
                raise
            return Refused(Request(new_id(), (), _PARAMS, text, arrival, group), str(error))

    def _tokens(self, prompt: Any, head: tuple[int, ...], continuation: Any) -> tuple[tuple[int, ...], int]:
        """Prompt and continuation, and the first token that is scored.

        Two texts are tokenized as one, since a token may reach across the border between them; what that changes in the
        prompt counts as continuation. Token ids are taken as they are.
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
        else:
            raise PromptError(f"a continuation is a text or a list of token ids, not {show(continuation)}")
        first = common_length(ids, head)
        if first == len(ids):
            raise PromptError(f"the continuation {show(continuation)} has no token of its own")
        if first == 0:
            raise PromptError("no token comes before the continuation; give a longer prompt, or token ids")
        check_prompt(ids, self._model.n_vocab, self._n_ctx)
        return ids, first


def _pair(item: object) -> tuple[object, object]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise PromptError(f"prompt holds {show(item)}; without continuations give a list of (prompt, continuations)")
    return item[0], item[1]
