"""From what a caller gives to Requests, and from events back to results in order: what LLM and AsyncLLM share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Protocol, TypeGuard

from llamabatch.adapters import AdapterSet, adapter_sets, check_known
from llamabatch.capacity import Plan
from llamabatch.chat import ChatOptions, Conversation, to_tokens
from llamabatch.checks import counted, show
from llamabatch.client import failure
from llamabatch.embed_queue import longest_text
from llamabatch.errors import AdapterError, ConfigError, InputError, PromptError
from llamabatch.llama.model import Model
from llamabatch.request import Request, RequestOutput, SequenceOutput, new_group
from llamabatch.request_checks import check_prompt, check_text, fitted
from llamabatch.sampling_params import SamplingParams

Prompt = str | ListLike[int]
OneParams = SamplingParams | Mapping[str, Any]
Params = OneParams | ListLike[OneParams] | None
OneAdapters = Mapping[str, float] | str | None
Adapters = OneAdapters | list[OneAdapters]

_request_numbers = itertools.count()


def new_id() -> str:
    """An id for a request of this process."""
    return f"request-{next(_request_numbers)}"


_Ids = tuple[str | None, tuple[int, ...]]  # a prompt's text, where it has one, and its tokens
_ToIds = Callable[[Any], _Ids]


@dataclass(frozen=True)
class Refused:
    """A prompt of a list that cannot be run, in its place."""

    request: Request
    error: str


class Submission:
    """The requests of one call, in the order of its prompts, and what has come of them.

    Attributes:
        n: how many prompts there are.
        requests: those to submit.
        refused: the events that end the others.
    """

    def __init__(self, items: ListLike[Request | Refused]) -> None:
        self.requests = [item for item in items if isinstance(item, Request)]
        self.refused = [failure(item.request, item.error) for item in items if isinstance(item, Refused)]
        requests = [item if isinstance(item, Request) else item.request for item in items]
        self._indices = {request.request_id: i for i, request in enumerate(requests)}
        self._outputs: list[RequestOutput | None] = [None] * len(items)
        self.n = self._n_left = len(items)

    def take(self, event: SequenceOutput) -> SequenceOutput:
        """Notes what a step brought one of these requests; returns it with the index of its prompt."""
        index = self._indices[event.request_id]
        if event.finished is not None:
            self._n_left -= self._outputs[index] is None  # a sink that raised is told again
            self._outputs[index] = event.finished
        return event if index == 0 else replace(event, prompt_index=index)

    def raise_refused(self, name: str) -> None:
        """Raises PromptError for the first that cannot be run, named as one of the list `name`."""
        for event in self.refused:
            assert event.finished is not None
            raise PromptError(f"{name}[{self._indices[event.request_id]}]: {event.finished.error}")

    @property
    def done(self) -> bool:
        return self._n_left == 0

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [request_id for request_id, i in self._indices.items() if self._outputs[i] is None]

    @property
    def outputs(self) -> list[RequestOutput]:
        """One for each prompt; only when all are done."""
        return [output for output in self._outputs if output is not None]


class Host(Protocol):
    """What a Front needs of an EngineClient."""

    plan: Plan
    model: Model

    @property
    def adapters(self) -> list[str]: ...


class Front:
    """Makes Submissions for one engine. It checks and tokenizes, and waits for nothing.

    Args:
        cancelled: whether nothing waits for what is being made any more; then CancelledError is raised before the next
            prompt, and within a chat template.
    """

    def __init__(self, client: Host, cancelled: Callable[[], bool] | None = None) -> None:
        self._client = client
        self._cancelled = cancelled
        self._model = client.model
        self._config = client.plan.config
        self._n_ctx = self._config.number("n_ctx")

    def prompts(self, prompts: object, params: Params, adapters: Adapters = None) -> Submission:
        """Of one prompt, or a list of them: texts or token ids. What is wrong with the only one is raised."""
        alone = isinstance(prompts, str) or is_token_ids(prompts)
        items = [prompts] if alone else listed("prompts", prompts)
        return self._submission(items, params, adapters, self._prompt_ids, alone)

    def conversations(
        self, conversations: object, params: Params, options: ChatOptions, adapters: Adapters = None
    ) -> Submission:
        """Of one conversation, or a list of them."""
        alone = is_conversation(conversations)
        items = [conversations] if alone else listed("conversations", conversations)
        return self._submission(items, params, adapters, partial(self._chat_ids, options), alone)

    def either(self, prompts: object, params: Params, options: ChatOptions, adapters: Adapters = None) -> Submission:
        """Of one prompt or conversation, or a list that may hold both."""
        alone = isinstance(prompts, str) or is_token_ids(prompts) or is_conversation(prompts)
        items = [prompts] if alone else listed("prompts", prompts)
        return self._submission(items, params, adapters, partial(self._either_ids, options), alone)

    def texts(self, texts: object, adapters: Adapters = None, *, strict: bool = True) -> Submission:
        """Of one text to embed, or a list of them: texts or token ids.

        Args:
            strict: raise what is wrong with any of them.

        Raises:
            ConfigError: the model gives no embeddings.
        """
        if self._model.cannot_embed is not None:
            raise ConfigError(f"{self._model.path.name} gives no embeddings: it is {self._model.cannot_embed}")
        alone = isinstance(texts, str) or is_token_ids(texts)
        items = [texts] if alone else listed("texts", texts)
        asked = self._submission(items, None, adapters, self._prompt_ids, alone and strict, embed=True)
        if strict:
            asked.raise_refused("texts")
        return asked

    def detokenize(self, token_ids: Any, skip_special_tokens: bool) -> str | list[str]:
        """As LLM.detokenize."""
        if is_token_ids(token_ids) or (isinstance(token_ids, (list, tuple)) and not token_ids):
            return self._model.detokenize(list(map(int, token_ids)), skip_special=skip_special_tokens)
        texts = [self.detokenize(ids, skip_special_tokens) for ids in listed("token_ids", token_ids)]
        return [text for text in texts if isinstance(text, str)]

    def _prompt_ids(self, prompt: object) -> _Ids:
        if isinstance(prompt, str):
            return prompt, tuple(self._model.tokenize(prompt) if prompt else ())
        if is_token_ids(prompt):
            return None, tuple(map(int, prompt))
        if isinstance(prompt, (list, tuple)) and not prompt:
            return None, ()  # refused below, as an empty prompt
        raise PromptError(f"a prompt is a text or a list of token ids, not {show(prompt)}")

    def _chat_ids(self, options: ChatOptions, conversation: Any) -> _Ids:
        return to_tokens(self._model, conversation, options, self._cancelled)

    def _either_ids(self, options: ChatOptions, prompt: object) -> _Ids:
        return self._chat_ids(options, prompt) if is_conversation(prompt) else self._prompt_ids(prompt)

    def _submission(
        self, items: list[Any], params: Params, adapters: Adapters, to_ids: _ToIds, alone: bool, *, embed: bool = False
    ) -> Submission:
        """Args:
        alone: there is one prompt, which was not in a list: raise what is wrong with it.
        """
        if not embed and self._model.cannot_generate is not None:
            raise ConfigError(f"{self._model.path.name} cannot generate text: it is {self._model.cannot_generate}")
        if not items:
            raise PromptError("there is no prompt; give at least one")
        each = zip(items, _params_for(items, params), self._adapters_for(len(items), adapters), strict=True)
        group, arrival = new_group(), time.perf_counter()
        requests: list[Request | Refused] = []
        for item, item_params, item_adapters in each:
            if self._cancelled is not None and self._cancelled():
                raise CancelledError
            text, error = item if isinstance(item, str) else None, None
            request = Request(new_id(), (), item_params, text, arrival, group)
            try:
                text, ids = to_ids(item)
                request = replace(request, prompt=text, prompt_token_ids=ids, adapters=item_adapters, embed=embed)
                if embed:
                    check_text(ids, self._model.n_vocab, longest_text(self._config))
                else:
                    request = fitted(request, self._n_ctx, self._model.vocabulary.bos)
                    check_prompt(request.prompt_token_ids, self._model.n_vocab, self._n_ctx)
                if item_adapters:
                    check_known(item_adapters, self._client.adapters)
            except (PromptError, AdapterError) as refusal:
                if alone:
                    raise
                error = str(refusal)
            requests.append(request if error is None else Refused(request, error))
        return Submission(requests)

    def _adapters_for(self, n: int, adapters: Adapters) -> list[AdapterSet]:
        """One set for each prompt. What is wrong with that of all is raised."""
        sets = adapter_sets(adapters, n)
        if not isinstance(adapters, list) and sets[0]:
            check_known(sets[0], self._client.adapters)
        return sets


def is_token_ids(prompt: object) -> TypeGuard[ListLike[int]]:
    """A non-empty list, tuple or array of whole numbers is one prompt; a list of anything else is a list of them."""
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Iterable) or isinstance(prompt, Iterator):
        return False
    tokens = list(prompt)
    return bool(tokens) and all(isinstance(t, Integral) and not isinstance(t, bool) for t in tokens)


def is_conversation(value: object) -> TypeGuard[Conversation]:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def listed(name: str, values: object) -> list[Any]:
    """The items of a list that a caller gave."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise PromptError(f"{name} is {show(values)}; give one, or a list of them")
    return list(values)


def _params_for(items: list[Any], params: Params) -> list[SamplingParams]:
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [_one_params(params or SamplingParams())] * len(items)
    if not isinstance(params, (list, tuple)):
        raise InputError(f"params is {show(params)}; give SamplingParams, or a list with one for each prompt")
    if len(params) != len(items):
        raise InputError(
            f"there are {len(params)} SamplingParams for {counted(len(items), 'prompt')}; give one, or one for each"
        )
    return [_one_params(given) for given in params]


def _one_params(given: object) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise InputError(f"params holds a {type(given).__name__}; give SamplingParams, or a mapping of their fields")
    for name in given:
        if not isinstance(name, str):
            raise InputError(f"params has the name {show(name)}; names of fields are strings")
    return SamplingParams.from_options(**given)
