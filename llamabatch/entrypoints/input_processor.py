"""From what a caller gives to Requests, and from events back to results in order: what LLM and AsyncLLM share."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from llamabatch.client.base import failure
from llamabatch.engine.embedding import longest_text
from llamabatch.engine.validation import check_params, check_prompt, check_text, fitted
from llamabatch.errors import (
    AdapterError,
    ConfigError,
    EngineError,
    InputError,
    LlamaBatchError,
    PromptError,
    PromptWarning,
    SamplingError,
)
from llamabatch.llama.model import Model
from llamabatch.planning.capacity import Plan
from llamabatch.request.adapters import AdapterSet, adapter_sets, check_known
from llamabatch.request.chat import ChatOptions, Conversation, to_tokens
from llamabatch.request.logprobs import check_logprobs
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request, new_group
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.checks import choice, counted, items, show

Prompt = str | Sequence[int]
OneParams = SamplingParams | Mapping[str, Any]
Params = OneParams | Sequence[OneParams] | None
OneAdapters = Mapping[str, float] | str | None
Adapters = OneAdapters | list[OneAdapters]

_request_numbers = itertools.count()


def new_id() -> str:
    """An id for a request of this process."""
    return f"request-{next(_request_numbers)}"


ErrorPolicy = Literal["warn", "raise", "return"]
ERROR_POLICIES = ("warn", "raise", "return")

_Ids = tuple[str | None, tuple[int, ...]]  # a prompt's text, where it has one, and its tokens
_ToIds = Callable[[Any], _Ids]


@dataclass(frozen=True)
class Refused:
    """A prompt of a list that cannot be run, in its place."""

    request: Request
    error: InputError


class Submission:
    """The requests of one call, in the order of its prompts, and what has come of them.

    Args:
        items: one for each prompt.
        noun: "prompt", for messages.
        errors: what a failure does. "warn": one warning when all have ended, and the first error raised where all
            failed; "raise": the first is raised as soon as it is known; "return": neither.
        label: the place of a prompt for messages, by its index; None: there is one prompt, which was not in a list.

    Attributes:
        n: how many prompts there are.
        requests: those to submit.
        refused: the events that end the others.

    Raises:
        InputError: `errors` is none of these; or prompts that cannot be run must be raised before any is run.
    """

    def __init__(
        self,
        items: Sequence[Request | Refused],
        noun: str,
        errors: ErrorPolicy,
        label: Callable[[int], str] | None,
    ) -> None:
        self.errors = choice(InputError, "errors", errors, ERROR_POLICIES)
        self.requests = [item for item in items if isinstance(item, Request)]
        self.refused = [failure(item.request, str(item.error)) for item in items if isinstance(item, Refused)]
        requests = [item if isinstance(item, Request) else item.request for item in items]
        self._noun = noun
        self._label = label
        self._indices = {request.request_id: i for i, request in enumerate(requests)}
        self._outputs: list[RequestOutput | None] = [None] * len(items)
        self._failures: dict[int, LlamaBatchError] = {
            i: item.error for i, item in enumerate(items) if isinstance(item, Refused)
        }
        self.n = self._n_left = len(items)
        if self._failures and (self.errors == "raise" or (self.errors == "warn" and len(self._failures) == self.n)):
            for event in self.refused:
                self._note(event)
            raise self._error()

    def take(self, events: Sequence[SequenceOutput]) -> Iterator[SequenceOutput]:
        """Notes what a step brought these requests; gives it on with the index of its prompt.

        Raises:
            EngineError: one of them failed, and errors is "raise".
        """
        for event in [self._note(event) for event in events]:
            if self.errors == "raise" and event.finished is not None and event.finished.error is not None:
                raise self._error()
            yield event

    def _note(self, event: SequenceOutput) -> SequenceOutput:
        index = self._indices[event.request_id]
        if event.finished is not None:
            self._n_left -= self._outputs[index] is None  # a sink that raised is told again
            self._outputs[index] = event.finished
            if event.finished.error is not None:
                self._failures.setdefault(index, EngineError(event.finished.error))
        return event if index == 0 else replace(event, prompt_index=index)

    def conclude(self) -> None:
        """All have ended: warns of those that failed, or raises the first error where all did; with errors="warn"."""
        if self.errors != "warn" or not self._failures:
            return
        if len(self._failures) == self.n:
            raise self._error()
        first = min(self._failures)
        message = (
            f"{len(self._failures):,} of {counted(self.n, self._noun)} failed, first: "
            f"{self._place(first)}{self._failures[first]}"
        )
        warning = PromptWarning(message)
        warning.outputs = tuple(self._outputs)
        warnings.warn(warning, stacklevel=_caller_level())

    def _error(self) -> LlamaBatchError:
        """What is raised: the error of the first that failed."""
        first = min(self._failures)
        cause = self._failures[first]
        everyone = f"all {counted(self.n, self._noun)} failed, first: " if 1 < self.n == len(self._failures) else ""
        error = type(cause)(f"{everyone}{self._place(first)}{cause}")
        error.outputs = tuple(self._outputs)
        return error

    def _place(self, index: int) -> str:
        return "" if self._label is None else f"{self._label(index)}: "

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


def _caller_level() -> int:
    """The stacklevel with which the function that calls this one warns of the line that called llamabatch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "llamabatch":
        level, frame = level + 1, frame.f_back
    return level


class Host(Protocol):
    """What a Front needs of an EngineClient."""

    plan: Plan
    model: Model

    @property
    def adapters(self) -> list[str]: ...


class InputProcessor:
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

    def prompts(
        self, prompts: object, params: Params, adapters: Adapters = None, errors: ErrorPolicy = "warn"
    ) -> Submission:
        """Of one prompt, or a list of them: texts or token ids."""
        given, alone = _texts_or_ids("prompts", prompts, "; conversations go to chat()")
        return self._submission(given, params, adapters, self._prompt_ids, alone, errors)

    def conversations(
        self,
        conversations: object,
        params: Params,
        options: ChatOptions,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> Submission:
        """Of one conversation, or a list of them."""
        alone = is_conversation(conversations)
        given = [conversations] if alone else listed("conversations", conversations)
        if is_token_ids(given) or all_are(given, lambda item: isinstance(item, str) or is_token_ids(item)):
            raise PromptError(
                f"conversations holds {show(first_of(given))}; give [{{'role': 'user', 'content': …}}], or a list of "
                "such lists; texts and token ids go to generate()"
            )
        to_ids = partial(self._chat_ids, options)
        return self._submission(given, params, adapters, to_ids, alone, errors, name="conversations")

    def either(
        self,
        prompts: object,
        params: Params,
        options: ChatOptions,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> Submission:
        """Of one prompt or conversation, or a list that may hold both."""
        alone = isinstance(prompts, str) or is_token_ids(prompts) or is_conversation(prompts)
        given = [prompts] if alone else listed("prompts", prompts)
        return self._submission(given, params, adapters, partial(self._either_ids, options), alone, errors)

    def texts(self, texts: object, adapters: Adapters = None, errors: ErrorPolicy = "raise") -> Submission:
        """Of one text to embed, or a list of them: texts or token ids.

        Raises:
            ConfigError: the model gives no embeddings.
        """
        if self._model.cannot_embed is not None:
            raise ConfigError(f"{self._model.path.name} gives no embeddings: it is {self._model.cannot_embed}")
        given, alone = _texts_or_ids("texts", texts)
        return self._submission(given, None, adapters, self._prompt_ids, alone, errors, name="texts", embed=True)

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
        # a column of a Parquet file holds arrays of messages
        messages = list(conversation) if is_conversation(conversation) else conversation
        return to_tokens(self._model, messages, options, self._cancelled)

    def _either_ids(self, options: ChatOptions, prompt: object) -> _Ids:
        return self._chat_ids(options, prompt) if is_conversation(prompt) else self._prompt_ids(prompt)

    def _submission(
        self,
        items: list[Any],
        params: Params,
        adapters: Adapters,
        to_ids: _ToIds,
        alone: bool,
        errors: ErrorPolicy,
        *,
        name: str = "prompts",
        embed: bool = False,
    ) -> Submission:
        """Args:
        alone: there is one prompt, which was not in a list.
        name: of the argument that holds the prompts, for messages.
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
            request = Request(new_id(), (), item_params, item if isinstance(item, str) else None, arrival, group)
            try:
                text, ids = to_ids(item)
                request = replace(request, prompt=text, prompt_token_ids=ids, adapters=item_adapters, embed=embed)
                requests.append(self._checked(request))
            except (PromptError, AdapterError, SamplingError) as refusal:
                requests.append(Refused(request, refusal))
        return Submission(requests, name.removesuffix("s"), errors, None if alone else lambda i: f"{name}[{i}]")

    def _checked(self, request: Request) -> Request:
        """The request as it can be run. Raises PromptError, AdapterError, SamplingError."""
        if request.embed:
            check_text(request.prompt_token_ids, self._model.n_vocab, longest_text(self._config))
        else:
            request = fitted(request, self._n_ctx, self._model.vocabulary.bos)
            check_prompt(request.prompt_token_ids, self._model.n_vocab, self._n_ctx)
            check_params(request.params, self._model.n_vocab)
            check_logprobs(request.params, len(request.prompt_token_ids), self._n_ctx)
        if request.adapters:
            check_known(request.adapters, self._client.adapters)
        return request

    def _adapters_for(self, n: int, adapters: Adapters) -> list[AdapterSet]:
        """One set for each prompt. What is wrong with that of all is raised."""
        sets = adapter_sets(adapters, n)
        if not isinstance(adapters, list) and sets[0]:
            check_known(sets[0], self._client.adapters)
        return sets


def is_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """A non-empty list, tuple or array of whole numbers is one prompt; a list of anything else is a list of them."""
    if isinstance(prompt, Iterator) or _is_table(prompt):
        return False
    tokens = items(prompt, sys.maxsize)
    return bool(tokens) and all(isinstance(t, Integral) and not isinstance(t, bool) for t in tokens or ())


def is_conversation(value: object) -> TypeGuard[Conversation]:
    """A list, tuple or array whose first message is a mapping, and none of whose messages is a list of some kind."""
    if isinstance(value, Iterator):
        return False
    messages = items(value, sys.maxsize) or []
    return isinstance(first_of(messages), Mapping) and all(items(message, 0) is None for message in messages)


def listed(name: str, values: object) -> list[Any]:
    """The items of a list, array, Series, generator or the like that a caller gave."""
    if _is_table(values):
        raise PromptError(f"{name} is a table, a {type(values).__name__}; give one of its columns")
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not isinstance(values, Iterable):
        raise PromptError(f"{name} is {show(values)}; give one, or a list of them")
    if getattr(values, "ndim", 1) == 0:
        raise PromptError(f"{name} is {show(values)}, an array without dimensions; give one, or a list of them")
    to_pylist = getattr(values, "to_pylist", None)  # of pyarrow, whose own items are not Python's
    return list(to_pylist() if callable(to_pylist) else values)


def _is_table(values: object) -> bool:
    """A DataFrame or the like, whose items are the names of its columns."""
    return hasattr(type(values), "columns")


def _texts_or_ids(name: str, values: object, elsewhere: str = "") -> tuple[list[Any], bool]:
    """The prompts of a call that takes texts or token ids; and whether there is one alone, which is in no list.

    Raises:
        PromptError: conversations were given, or rows of a table.
    """
    if isinstance(values, str) or is_token_ids(values):
        return [values], True
    given = listed(name, values)
    if is_token_ids(given):  # they came out of a generator
        return [given], True
    if all_are(given, lambda item: isinstance(item, Mapping) or is_conversation(item)):
        raise PromptError(f"{name} holds {show(first_of(given))}; give texts or token ids{elsewhere}")
    return given, False


def all_are(given: list[Any], are: Callable[[Any], bool]) -> bool:
    """Of those items that are no empty cells of a table; False where all are."""
    return first_of(given) is not None and all(are(item) for item in given if not _is_missing(item))


def first_of(given: list[Any]) -> Any:
    return next((item for item in given if not _is_missing(item)), None)


def _is_missing(cell: object) -> bool:
    """None, NaN, and what pandas has for them."""
    if isinstance(cell, Real):
        return bool(cell != cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


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


# ----------------------------------------------------------------------------------------------------
# From the outputs of embedding requests to numpy arrays: what LLM and AsyncLLM share.


Vector = npt.NDArray[np.float32]


def vectors(outputs: Iterable[RequestOutput], *, normalize: bool, errors: ErrorPolicy) -> list[Any]:
    """One array of shape (n_embd,) for each output; where it has an error, that error.

    Raises:
        EngineError: an output has an error, or was aborted, and errors is "raise".
    """
    return [_vector(output, normalize, errors) for output in outputs]


def _vector(output: RequestOutput, normalize: bool, errors: ErrorPolicy) -> Vector | LlamaBatchError:
    if output.embedding is None:
        if errors == "raise":
            raise EngineError(output.error or "it was aborted")
        return LlamaBatchError(output.error or "it was aborted")
    vector: Vector = np.array(output.embedding, np.float32)
    length = float(np.linalg.norm(vector)) if normalize else 0.0
    return vector / np.float32(length) if length > 0 else vector
