"""LLM: the synchronous front. A list of prompts in, a list of results out."""

from __future__ import annotations

import itertools
import os
import queue
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard

from llamabatch.capacity import Plan
from llamabatch.chat import Conversation, to_tokens
from llamabatch.checks import show
from llamabatch.client import EngineClient, connect
from llamabatch.config import EngineConfig
from llamabatch.errors import InputError, PromptError
from llamabatch.progress import ProgressBar
from llamabatch.request import Request, RequestOutput, SequenceOutput, check_prompt, new_group
from llamabatch.sampling_params import SamplingParams
from llamabatch.stats import EngineStats

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions

Prompt = str | ListLike[int]
Params = SamplingParams | ListLike[SamplingParams] | None

_request_numbers = itertools.count()


class LLM:
    """A GGUF model that runs many prompts at once. Its methods may be called from several threads.

    Args:
        model: path of a .gguf file, or "tiny" for the bundled one.
        **options: see EngineConfig; unknown ones are refused by name. What "auto" became stands in `plan`.

    Raises:
        ModelFileError, ConfigError, MemoryPlanError, SetupError, EngineError.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        self._client: EngineClient = connect(EngineConfig.from_options(model, options))

    @property
    def plan(self) -> Plan:
        """The options in force, the memory they take, and why each open one got its value."""
        return self._client.plan

    def generate(
        self, prompts: Prompt | ListLike[Prompt], params: Params = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: one prompt or a list; each a text, or the token ids of one.
            params: one for all, or a list with one for each; None: the defaults.
            progress: a progress bar on stderr, where that is a terminal.

        Returns:
            One RequestOutput a prompt, in the order of the prompts. In a list, a prompt that cannot be run gives an
            output with finish_reason "error" and `error` set, and the others finish.

        Raises:
            PromptError: there is no prompt, or the only one (not in a list) cannot be run.
            EngineClosedError: after close().
        """
        alone = isinstance(prompts, str) or _is_token_ids(prompts)
        items: list[Any] = [prompts] if alone else _listed("prompts", prompts)
        return self._run(self._requests(items, params, self._prompt_ids, strict=alone), progress)

    def chat(
        self,
        conversations: Conversation | ListLike[Conversation],
        params: Params = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's own chat template. As `generate`, but for:

        Args:
            conversations: one conversation, a list of {"role": …, "content": …}, or a list of conversations.

        Raises:
            ConfigError: the model has no chat template.
        """
        alone = _is_conversation(conversations)
        items: list[Any] = [conversations] if alone else _listed("conversations", conversations)
        return self._run(self._requests(items, params, self._chat_ids, strict=alone), progress)

    def stream(self, prompt: Prompt | Conversation, params: SamplingParams | None = None) -> Iterator[SequenceOutput]:
        """One prompt or conversation, token by token; the last piece has `finished` set. Leaving the loop aborts it.

        Raises:
            PromptError: the prompt cannot be run.
        """
        to_ids = self._chat_ids if _is_conversation(prompt) else self._prompt_ids
        [item] = self._requests([prompt], params, to_ids, strict=True)
        assert isinstance(item, Request)
        return self._pieces(item)

    def _pieces(self, item: Request) -> Iterator[SequenceOutput]:
        events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
        finished = False
        try:
            self._client.submit([item], events.put, stream=True)
            while not finished:
                for event in events.get():
                    finished = event.finished is not None
                    yield event
        finally:
            if not finished:
                self._client.abort([item.request_id])

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Text to token ids; parse_special reads names of special tokens in the text as those tokens.

        Raises:
            PromptError: not a text, or a text of more than 64 MiB.
        """
        if not isinstance(text, str):
            raise PromptError(f"text is {show(text)}; give a str")
        return self._client.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def stats(self) -> EngineStats:
        """What the engine has done since it started. Raises EngineClosedError."""
        return self._client.stats()

    def close(self) -> None:
        """Ends what runs and frees the model. May be called twice; a forgotten LLM is closed when it is collected."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- from prompts to requests -------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: object) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(self._client.model.tokenize(prompt) if prompt else ())
        if _is_token_ids(prompt):
            return None, tuple(map(int, prompt))
        if isinstance(prompt, (list, tuple)) and not prompt:
            return None, ()  # refused below, as an empty prompt
        raise PromptError(f"a prompt is a text or a list of token ids, not {show(prompt)}")

    def _chat_ids(self, conversation: Any) -> tuple[str | None, tuple[int, ...]]:
        return to_tokens(self._client.model, conversation)

    def _requests(self, items: list[Any], params: Params, to_ids: Any, *, strict: bool) -> list[Request | Refused]:
        if not items:
            raise PromptError("there is no prompt; give at least one")
        each = _params_for(items, params)
        group, arrival = new_group(), time.perf_counter()
        requests: list[Request | Refused] = []
        for item, item_params in zip(items, each, strict=True):
            text, ids = item if isinstance(item, str) else None, ()
            error = None
            try:
                text, ids = to_ids(item)
                check_prompt(ids, self._client.model.n_vocab, self.plan.config.number("n_ctx"))
            except PromptError as refusal:
                if strict:
                    raise
                error = str(refusal)
            request = Request(f"request-{next(_request_numbers)}", ids, item_params, text, arrival, group)
            requests.append(request if error is None else Refused(request, error))
        return requests

    def _run(self, items: list[Request | Refused], progress: bool) -> list[RequestOutput]:
        """Submits all, waits for all; interrupted, it takes back what still runs and leaves the engine usable."""
        outputs: dict[str, RequestOutput] = {}
        events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
        requests = [item for item in items if isinstance(item, Request)]
        try:
            self._client.submit(requests, events.put)
            with ProgressBar(len(requests), shown=progress) as bar:
                while len(outputs) < len(requests):
                    for event in events.get():
                        assert event.finished is not None
                        outputs[event.request_id] = event.finished
                        bar.advance(len(event.finished.token_ids))
        except BaseException:
            self._client.abort(r.request_id for r in requests if r.request_id not in outputs)
            raise
        return [
            outputs[item.request_id] if isinstance(item, Request) else RequestOutput.failed(item.request, item.error)
            for item in items
        ]


class Refused:
    """A prompt of a list that cannot be run, in its place."""

    def __init__(self, request: Request, error: str) -> None:
        self.request = request
        self.error = error


def _is_token_ids(prompt: object) -> TypeGuard[ListLike[int]]:
    """A non-empty list, tuple or array of whole numbers is one prompt; a list of anything else is a list of them."""
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Iterable) or isinstance(prompt, Iterator):
        return False
    tokens = list(prompt)
    return bool(tokens) and all(isinstance(t, Integral) and not isinstance(t, bool) for t in tokens)


def _is_conversation(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _listed(name: str, values: object) -> list[Any]:
    """The items of a list that a caller gave."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise PromptError(f"{name} is {show(values)}; give one, or a list of them")
    return list(values)


def _params_for(items: list[Any], params: Params) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(items)
    if not isinstance(params, (list, tuple)):
        raise InputError(f"params is {show(params)}; give SamplingParams, or a list with one for each prompt")
    if len(params) != len(items):
        raise InputError(f"there are {len(params)} SamplingParams for {len(items)} prompts; give one, or one for each")
    for given in params:
        if not isinstance(given, SamplingParams):
            raise InputError(f"params holds a {type(given).__name__}; give SamplingParams")
    return list(params)
