"""AsyncLLM: the asyncio front. What could take long runs on threads; the event loop only passes results on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from llamabatch.client.base import Heartbeat
from llamabatch.client.connect import connect
from llamabatch.client.middleware import CountingClient
from llamabatch.config import EngineConfig
from llamabatch.engine.stats import EngineStats
from llamabatch.entrypoints.input_processor import (
    Adapters,
    ErrorPolicy,
    InputProcessor,
    OneAdapters,
    Params,
    Prompt,
    Submission,
    vectors,
)
from llamabatch.entrypoints.scoring import Pairs, Score, Scoring
from llamabatch.entrypoints.shared import CROWDED, ONE_TOKEN, TRIES, monitor, tokens_to_save
from llamabatch.errors import EngineClosedError, EngineError
from llamabatch.planning.capacity import Plan
from llamabatch.request.adapters import adapter_path
from llamabatch.request.chat import ChatOptions, Conversation
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.utils import paths

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions
    from llamabatch.monitor.monitor import Monitor
    from llamabatch.monitor.snapshot import Snapshot

T = TypeVar("T")
_Ask = Callable[[InputProcessor], Submission]

# Tokenizing is one at a time for a model anyway; a second thread and its like keep what is short from queueing.
_N_WORKERS = 4


class AsyncLLM:
    """A GGUF model for asyncio: many tasks at once, whose requests share the batches of one engine.

    ::

        async with AsyncLLM("tiny") as llm:
            [output] = await llm.generate("Once upon a time")

    Making one only checks the options. The model is loaded on a thread by `async with`, by `load`, or by the first
    call. Cancelling a task aborts its requests, whose slots are free after the step that is under way. It may be used
    from several event loops, one after another or at once.

    Args:
        model, **options: as for LLM.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        self._config = EngineConfig.from_options(model, options)
        self._connecting: Future[CountingClient] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(_N_WORKERS, thread_name_prefix="llamabatch-async")
        # an abort waits for no prompt that is being tokenized, nor for one that is on its way to a child
        self._aborting = ThreadPoolExecutor(1, thread_name_prefix="llamabatch-abort")

    async def load(self) -> None:
        """Loads the model, if that has not been done. What fails is tried anew by the next call.

        Raises:
            ModelFileError, ConfigError, MemoryPlanError, SetupError, EngineError; EngineClosedError after aclose().
        """
        await self._client()

    @property
    def plan(self) -> Plan:
        """The options in force; see LLM.plan. Raises EngineError before the model is loaded."""
        if self._connecting is None or not self._connecting.done():
            raise EngineError("the model is not loaded yet; await load() first")
        return self._connecting.result().plan

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> list[RequestOutput]:
        """As LLM.generate; cancelling it aborts the requests."""
        return await self._run(lambda front: front.prompts(prompts, params, adapters, errors))

    async def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> list[RequestOutput]:
        """As LLM.chat; cancelling it aborts the requests."""
        options = ChatOptions(tools, chat_template_kwargs or {})
        return await self._run(lambda front: front.conversations(conversations, params, options, adapters, errors))

    def stream(
        self,
        prompts: Prompt | Conversation | Sequence[Prompt | Conversation],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> AsyncIterator[SequenceOutput]:
        """As LLM.stream, for `async for`. What that raises at the call is raised by the first step of the loop."""
        options = ChatOptions(tools, chat_template_kwargs or {})
        return self._events(lambda front: front.either(prompts, params, options, adapters, errors), stream=True)

    def as_completed(
        self,
        prompts: Prompt | Conversation | Sequence[Prompt | Conversation],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """As LLM.as_completed, for `async for`."""
        options = ChatOptions(tools, chat_template_kwargs or {})
        return self._completed(lambda front: front.either(prompts, params, options, adapters, errors))

    @overload
    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = ...,
    ) -> list[Score]: ...

    @overload
    async def score(
        self, prompt: Pairs, continuations: None = None, *, adapters: OneAdapters = None, errors: ErrorPolicy = ...
    ) -> list[list[Score]]: ...

    async def score(
        self,
        prompt: Prompt | Pairs,
        continuations: Sequence[Prompt] | None = None,
        *,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = "warn",
    ) -> list[Score] | list[list[Score]]:
        """As LLM.score; cancelling it aborts the requests."""
        client = await self._client()
        scoring = await self._on_thread(lambda: Scoring(client, prompt, continuations, adapters, errors))
        scores = scoring.scores(await self._run(lambda _: scoring.submission))
        return scores if continuations is None else scores[0]

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = False,
        adapters: Adapters = None,
        errors: ErrorPolicy = "raise",
        return_errors: bool = False,
    ) -> list[Any]:
        """As LLM.embed; cancelling it aborts the requests."""
        policy: ErrorPolicy = "return" if return_errors else errors
        outputs = await self._run(lambda front: front.texts(texts, adapters, policy))
        return vectors(outputs, normalize=normalize, errors=policy)

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """As LLM.tokenize, of one text."""
        model = (await self._client()).model
        return await self._on_thread(
            partial(model.tokenize, text, add_special=add_special, parse_special=parse_special)
        )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As LLM.detokenize, of one list."""
        front = InputProcessor(await self._client())
        return str(await self._on_thread(partial(front.detokenize, token_ids, skip_special_tokens)))

    async def heartbeats(self) -> list[Heartbeat]:
        """As LLM.heartbeats."""
        return (await self._client()).heartbeats

    async def stats(self) -> EngineStats:
        """As LLM.stats."""
        return await self._on_thread((await self._client()).stats)

    async def monitor(
        self,
        callback: Callable[[Snapshot], object] | None = None,
        *,
        every_s: float = 1.0,
        metrics_file: str | os.PathLike[str] | None = None,
        publish: bool = False,
    ) -> Monitor:
        """As LLM.monitor: `with await llm.monitor(callback):`. The callback is called on the monitor's thread."""
        target = metrics_file and paths.absolute(metrics_file)
        client = await self._client()
        return monitor(client, callback, every_s=every_s, metrics_file=target, publish=publish)

    async def save_prefix(self, prompt: Prompt, path: str | os.PathLike[str]) -> int:
        """As LLM.save_prefix."""
        absolute = paths.absolute(path)
        client = await self._client()
        for _ in range(TRIES):
            [output] = await self.generate(prompt, ONE_TOKEN)
            token_ids = tokens_to_save(output)
            if await self._on_thread(partial(client.call, "save_prefix", token_ids, absolute)):
                return len(token_ids)
        raise EngineError(CROWDED)

    async def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """As LLM.load_prefix."""
        absolute = paths.absolute(path)
        client = await self._client()
        n_tokens: int = await self._on_thread(partial(client.call, "load_prefix", absolute))
        return n_tokens

    async def unload_prefix(self, path: str | os.PathLike[str]) -> None:
        """As LLM.unload_prefix."""
        absolute = paths.absolute(path)
        client = await self._client()
        await self._on_thread(partial(client.call, "unload_prefix", absolute))

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """As LLM.load_adapter."""
        absolute = adapter_path(name, path)
        client = await self._client()
        await self._on_thread(partial(client.call, "load_adapter", name, absolute))

    async def unload_adapter(self, name: str) -> None:
        """As LLM.unload_adapter."""
        client = await self._client()
        await self._on_thread(partial(client.call, "unload_adapter", name))

    async def aclose(self) -> None:
        """Ends what runs with finish_reason "abort" and frees the model. May be called twice."""
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """aclose() for where no event loop runs, or none any more. Waits for the step that is under way, and for a load
        to end."""
        with self._lock:
            self._closed = True
            connecting = self._connecting
        if connecting is not None:
            with contextlib.suppress(Exception):  # it never came to be
                connecting.result().close()
        self._workers.shutdown()
        self._aborting.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.load()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- from requests to results -------------------------------------------------------------------------------

    async def _client(self) -> CountingClient:
        with self._lock:
            self._check_open()
            if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
                self._connecting = self._workers.submit(connect, self._config)
            connecting = self._connecting
        if connecting.done():
            return connecting.result()
        return await asyncio.shield(asyncio.wrap_future(connecting))  # others may wait for it, too

    async def _on_thread(self, do: Callable[[], T]) -> T:
        with self._lock:
            self._check_open()
            future = self._workers.submit(do)
        return await asyncio.wrap_future(future)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    async def _events(self, ask: _Ask, *, stream: bool = False) -> AsyncGenerator[SequenceOutput, None]:
        """Submits all and gives what comes until all have finished; left earlier, it takes back what still runs."""
        call = _Call(await self._client(), asyncio.get_running_loop(), ask, stream)
        try:
            asked = await self._on_thread(call.start)
            for event in asked.take(asked.refused):
                yield event
            while not asked.done:
                for event in asked.take(await call.events.get()):
                    yield event
            asked.conclude()
        finally:
            call.left = True
            if not call.done:
                with contextlib.suppress(RuntimeError):  # closed: everything has ended
                    self._aborting.submit(call.abort)

    async def _completed(self, ask: _Ask) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async with contextlib.aclosing(self._events(ask)) as events:
            async for event in events:
                if event.finished is not None:
                    yield event.prompt_index, event.finished

    async def _run(self, ask: _Ask) -> list[RequestOutput]:
        outputs = {index: output async for index, output in self._completed(ask)}
        return [outputs[index] for index in range(len(outputs))]


class _Call:
    """The requests of one call, between the event loop that waits for them and the engine's thread."""

    def __init__(self, client: CountingClient, loop: asyncio.AbstractEventLoop, ask: _Ask, stream: bool) -> None:
        self.events: asyncio.Queue[list[SequenceOutput]] = asyncio.Queue()
        self.left = False  # nobody waits any more
        self._client = client
        self._loop = loop
        self._ask = ask
        self._stream = stream
        self._asked: Submission | None = None

    @property
    def done(self) -> bool:
        return self._asked is not None and self._asked.done

    def start(self) -> Submission:
        """On a worker's thread: from prompts to submitted requests."""
        asked = self._ask(InputProcessor(self._client, cancelled=lambda: self.left))
        if not self.left:
            self._asked = asked
            self._client.submit(asked.requests, self._tell, stream=self._stream)
            if asked.refused:
                self._client.note_refused(asked.refused)
        if self.left:  # while they were submitted: the abort may have come too early
            self.abort()
        return asked

    def abort(self) -> None:
        """On any thread but the event loop's: takes back what has not ended."""
        if self._asked is not None:
            self._client.abort(self._asked.unfinished)

    def _tell(self, events: list[SequenceOutput]) -> None:
        """On a thread of the client: hands events to the loop."""
        if self.left:
            return
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, events)
        except RuntimeError:  # the loop was closed before its tasks had ended
            self.left = True
            self.abort()
