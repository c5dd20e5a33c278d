"""AsyncLLM: the asyncio entry point. Slow work runs on threads; the event loop only passes results on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from llamabatch.chat.messages import Conversation
from llamabatch.chat.options import ChatKeywords, TemplateKeywords, chat_options
from llamabatch.client.base import Heartbeat
from llamabatch.client.front_client import FrontClient
from llamabatch.config import EngineConfig
from llamabatch.engine.stats import EngineStats
from llamabatch.entrypoints.classification import Classification, RerankResult, check_rerank, classified, reranked
from llamabatch.entrypoints.event_loop import Call, Load, Prepare, ended
from llamabatch.entrypoints.input_processor import Adapters, InputProcessor, OneAdapters, Params, place_of
from llamabatch.entrypoints.prompts import Prompt
from llamabatch.entrypoints.saved_prefix import CROWDED, ONE_TOKEN, TRIES, tokens_to_save
from llamabatch.entrypoints.scoring import Pairs, Score, Scoring
from llamabatch.entrypoints.submission import ErrorPolicy, Outputs, Submission, Vector, token_vectors, vectors
from llamabatch.entrypoints.title import described, unpicklable
from llamabatch.errors import EngineClosedError, EngineError, InputError, LlamaBatchError
from llamabatch.gguf.header import MetadataValue, metadata_of
from llamabatch.gguf.resolve import fetch
from llamabatch.planning.plan import Plan
from llamabatch.request.adapters import adapter_path
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.vocab import Vocab
from llamabatch.utils import paths
from llamabatch.utils.absent import absent
from llamabatch.utils.aliases import also_named, model_named, takes_keywords, takes_names
from llamabatch.utils.checks import boolean
from llamabatch.utils.late_import import late_import
from llamabatch.utils.other_names import OF_LLM

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from llamabatch.config import EngineOptions
    from llamabatch.monitor.monitor import Monitor
    from llamabatch.monitor.snapshot import Snapshot

T = TypeVar("T")

# Number of threads for slow work. Several threads tokenize no faster than one, because a model tokenizes one text at a
# time. But with several threads, a short call need not wait for a long one.
_N_WORKERS = 4


class AsyncLLM:
    """A GGUF model for asyncio. The requests of many tasks share the batches of one engine.

    ::

        async with AsyncLLM("tiny") as llm:
            [output] = await llm.generate("Once upon a time")

    The constructor only checks the options. `async with`, `load`, or the first call loads the model on a thread.
    Cancelling a task aborts its requests; their slots are free after the current step. One AsyncLLM can serve several
    event loops, one after another or at once.

    Args:
        model, **options: as for LLM.

    Raises:
        ConfigError: an option is invalid.
    """

    @takes_names(model_named)
    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        self._config = EngineConfig.from_options(model, options)
        self._load = Load(self._config)
        self._loading: Future[None] | None = None
        self._closed = False
        weakref.finalize(self, self._load.cancelled.set).atexit = False
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(_N_WORKERS, thread_name_prefix="llamabatch-async")
        # Aborts have their own thread, because they must not wait while a prompt is tokenized or sent to a child.
        self._aborting = ThreadPoolExecutor(1, thread_name_prefix="llamabatch-abort")

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Makes an AsyncLLM for a model on Hugging Face's hub; arguments as for LLM.from_pretrained. The download is
        part of loading: it runs on a thread, and `load` raises its errors.

        Raises:
            ConfigError: an option is invalid.
        """
        llm = cls(f"{paths.HUB}{repo_id}", **options)
        folder = None if cache_dir is None else paths.absolute(cache_dir)
        llm._load.download = partial(
            fetch, repo_id, filename, revision=revision, cache_dir=folder, local_files_only=local_files_only
        )
        return llm

    async def load(self) -> None:
        """Loads the model unless it is loaded. After a failure the next call tries again.

        Raises:
            ModelFileError, ConfigError, MemoryPlanError, SetupError, EngineError; EngineClosedError after aclose().
        """
        await self._client()

    _vocab: Vocab | None = None

    @property
    def n_ctx(self) -> int:
        """The same as LLM.n_ctx. Raises EngineError before the model is loaded."""
        return self.plan.config.n_ctx

    async def vocab(self) -> Vocab:
        """Returns the vocabulary, as LLM.vocab."""
        client = await self._client()

        def read() -> Vocab:
            with client.awake():
                return Vocab(client.model)

        if self._vocab is None or self._vocab.source is not client.model or client.is_asleep:
            self._vocab = await self._on_thread(read)
        return self._vocab

    async def metadata(self) -> Mapping[str, MetadataValue]:
        """Returns the values of the GGUF's header, as LLM.metadata."""
        model = (await self._client()).model
        return await self._on_thread(lambda: metadata_of(model.header))

    @property
    def plan(self) -> Plan:
        """The same as LLM.plan. Raises EngineError before the model is loaded."""
        if self._loading is None or not self._loading.done():
            raise EngineError("the model is not loaded yet; await load() first")
        return self._loaded(self._loading).plan

    @also_named(place_of, sampling_params="params")  # vLLM's names
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> list[RequestOutput]:
        """Continues prompts, as LLM.generate. Cancelling the call aborts its requests."""
        return await self._run(lambda inputs: inputs.prompts(prompts, params, adapters, errors))

    @also_named(place_of, sampling_params="params", messages="conversations")
    @takes_keywords(ChatKeywords, chat_options)
    async def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        **options: Unpack[ChatKeywords],
    ) -> list[RequestOutput]:
        """Answers conversations, as LLM.chat. Cancelling the call aborts its requests."""
        return await self._run(
            lambda inputs: inputs.conversations(conversations, params, chat_options(**options), adapters, errors)
        )

    @also_named(place_of, sampling_params="params")
    @takes_keywords(ChatKeywords, chat_options)
    def stream(
        self,
        prompts: Prompt | Conversation | Sequence[Prompt | Conversation],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        **options: Unpack[ChatKeywords],
    ) -> AsyncIterator[SequenceOutput]:
        """Yields outputs token by token, as LLM.stream, for `async for`. Errors are raised during the
        iteration, never at the call."""
        return self._events(
            lambda inputs: inputs.either(prompts, params, chat_options(**options), adapters, errors), stream=True
        )

    @also_named(place_of, sampling_params="params")
    @takes_keywords(ChatKeywords, chat_options)
    def as_completed(
        self,
        prompts: Prompt | Conversation | Sequence[Prompt | Conversation],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        **options: Unpack[ChatKeywords],
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yields pairs of index and output as prompts finish, as LLM.as_completed, for `async for`."""
        return self._completed(lambda inputs: inputs.either(prompts, params, chat_options(**options), adapters, errors))

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
        """Returns the logprobs of continuations, as LLM.score. Cancelling the call aborts its requests."""
        client = await self._client()

        def prepare() -> Scoring:
            with client.awake():
                return Scoring(client, prompt, continuations, adapters, errors)

        scoring = await self._on_thread(prepare)
        scores = scoring.scores(await self._run(lambda _: scoring.submission))
        return scores if continuations is None else scores[0]

    @overload
    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = ...,
        dimensions: int | None = ...,
        pooling: str | None = ...,
        adapters: Adapters = ...,
        errors: Literal["raise"] = ...,
        return_errors: Literal[False] = ...,
    ) -> list[Vector]: ...

    @overload
    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = ...,
        dimensions: int | None = ...,
        pooling: str | None = ...,
        adapters: Adapters = ...,
        errors: ErrorPolicy = ...,
        return_errors: bool = ...,
    ) -> list[Vector | LlamaBatchError]: ...

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        pooling: str | None = None,
        adapters: Adapters = None,
        errors: ErrorPolicy = "raise",
        return_errors: bool = False,
    ) -> list[Any]:
        """Returns a vector for each text, as LLM.embed. Cancelling the call aborts its requests."""
        policy: ErrorPolicy = "return" if return_errors else errors
        outputs = await self._run(
            lambda inputs: inputs.texts(texts, adapters, policy, dimensions=dimensions, pooling=pooling)
        )
        n_embd = token_vectors((await self._client()).model)
        return vectors(outputs, normalize=normalize, errors=policy, dimensions=dimensions, n_embd=n_embd)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        use_activation: bool = True,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = "raise",
    ) -> list[RerankResult]:
        """Ranks documents, as LLM.rerank. Cancelling the call aborts its requests."""
        most = check_rerank(query, top_n, use_activation)
        given: list[Any] = []

        def prepare(inputs: InputProcessor) -> Submission:
            found, submission = inputs.documents(query, documents, adapters, errors)
            given.extend(found)
            return submission

        outputs, model = await self._run(prepare), (await self._client()).model
        return reranked(model, given, outputs, top_n=most, use_activation=use_activation, errors=errors)

    @overload
    async def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = ...,
        adapters: Adapters = ...,
        errors: Literal["raise"] = ...,
    ) -> list[Classification]: ...

    @overload
    async def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = ...,
        adapters: Adapters = ...,
        errors: ErrorPolicy = ...,
    ) -> list[Classification | LlamaBatchError]: ...

    async def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = True,
        adapters: Adapters = None,
        errors: ErrorPolicy = "raise",
    ) -> list[Any]:
        """Classifies texts, as LLM.classify. Cancelling the call aborts its requests."""
        boolean(InputError, "use_activation", use_activation)
        outputs = await self._run(lambda inputs: inputs.texts_to_classify(texts, adapters, errors))
        return classified((await self._client()).model, outputs, use_activation=use_activation, errors=errors)

    @overload
    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    @overload
    async def tokenize(
        self, text: list[str] | tuple[str, ...], *, add_special: bool = True, parse_special: bool = False
    ) -> list[list[int]]: ...

    async def tokenize(
        self, text: str | list[str] | tuple[str, ...], *, add_special: bool = True, parse_special: bool = False
    ) -> list[int] | list[list[int]]:
        """Turns text into token ids, as LLM.tokenize."""
        tokens: list[int] | list[list[int]] = await self._prepared(
            lambda inputs: inputs.tokenize(text, add_special, parse_special)
        )
        return tokens

    @overload
    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @overload
    async def detokenize(
        self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]: ...

    async def detokenize(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> str | list[str]:
        """Turns token ids into text, as LLM.detokenize."""
        text: str | list[str] = await self._prepared(lambda inputs: inputs.detokenize(token_ids, skip_special_tokens))
        return text

    @takes_keywords(TemplateKeywords, chat_options)
    async def apply_chat_template(
        self,
        conversation: Conversation,
        **options: Unpack[TemplateKeywords],
    ) -> str:
        """Returns the prompt text of a conversation, as LLM.apply_chat_template. Cancelling stops the template."""
        left, asked = threading.Event(), chat_options(**options)
        try:
            return await self._prepared(lambda inputs: inputs.chat_text(conversation, asked), left.is_set)
        finally:
            left.set()

    async def adapters(self) -> list[str]:
        """Returns the names of the loaded adapters."""
        return (await self._client()).adapters

    async def heartbeats(self) -> list[Heartbeat]:
        """Returns the state of each child process, as LLM.heartbeats."""
        return (await self._client()).heartbeats

    async def stats(self) -> EngineStats:
        """Returns counts and the state of the engine, as LLM.stats."""
        return await self._on_thread((await self._client()).stats)

    async def monitor(
        self,
        callback: Callable[[Snapshot], object] | None = None,
        *,
        every_s: float = 1.0,
        metrics_file: str | os.PathLike[str] | None = None,
        publish: bool = False,
    ) -> Monitor:
        """Samples engine and machine on a thread, as LLM.monitor: `with await llm.monitor(callback):`."""
        with late_import("the code of the monitor"):
            from llamabatch.monitor.monitor import monitor_client  # late: most programs do not need psutil

        target = metrics_file and paths.absolute(metrics_file)
        client = await self._client()
        return monitor_client(client, callback, every_s=every_s, metrics_file=target, publish=publish)

    async def save_prefix(self, prompt: Prompt, path: str | os.PathLike[str]) -> int:
        """Computes a prompt and saves its KV cells to a file, as LLM.save_prefix."""
        absolute = paths.absolute(path)
        client = await self._client()
        for _ in range(TRIES):
            [output] = await self.generate(prompt, ONE_TOKEN)
            token_ids = tokens_to_save(output.prompt_token_ids)
            if await self._on_thread(partial(client.call, "save_prefix", token_ids, absolute)):
                return len(token_ids)
        raise EngineError(CROWDED)

    async def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """Loads a saved prefix into memory, as LLM.load_prefix."""
        absolute = paths.absolute(path)
        client = await self._client()
        n_tokens: int = await self._on_thread(partial(client.call, "load_prefix", absolute))
        return n_tokens

    async def unload_prefix(self, path: str | os.PathLike[str]) -> None:
        """Frees a loaded prefix, as LLM.unload_prefix."""
        absolute = paths.absolute(path)
        client = await self._client()
        await self._on_thread(partial(client.call, "unload_prefix", absolute))

    async def reset_prefix_cache(self) -> bool:
        """Drops the KV cells of finished requests, as LLM.reset_prefix_cache."""
        client = await self._client()
        done: bool = await self._on_thread(partial(client.call, "reset_prefix_cache"))
        return done

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA or a control vector, as LLM.load_adapter."""
        absolute = adapter_path(name, path)
        client = await self._client()
        await self._on_thread(partial(client.call, "load_adapter", name, absolute))

    async def unload_adapter(self, name: str) -> None:
        """Frees an adapter, as LLM.unload_adapter."""
        client = await self._client()
        await self._on_thread(partial(client.call, "unload_adapter", name))

    async def sleep(self) -> None:
        """Frees the model until the next use, as LLM.sleep. Does nothing before the model is loaded."""
        client = self._load.client
        await self._on_thread((lambda: None) if client is None else client.sleep)

    async def wake(self) -> None:
        """Loads the model unless it is loaded and awake, as LLM.wake."""
        await self._prepared(lambda _: None)

    @property
    def is_asleep(self) -> bool:
        """True from sleep() until the next use; False before the model is loaded."""
        client = self._load.client
        return client is not None and client.is_asleep

    async def aclose(self) -> None:
        """Ends all requests with finish_reason "abort" and frees the model. May be called twice."""
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """Closes as aclose does, but needs no event loop. Stops a load or the current step; on a GPU, waits for the
        step.
        """
        with self._lock:
            self._closed = True
            self._load.cancelled.set()
            loading = self._loading
        if loading is not None:
            with contextlib.suppress(Exception):  # after a failed load there is nothing to close
                self._loaded(loading).close()
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

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names

        def __getattr__(self, name: str) -> Any:
            raise absent(self, name, OF_LLM)

    def __reduce__(self) -> NoReturn:
        raise unpicklable(type(self).__name__)

    def __repr__(self) -> str:
        loading = self._loading
        is_there = loading is not None and loading.done() and loading.exception() is None
        plan = self._loaded(loading).plan if loading is not None and is_there else None
        state = "closed" if self._closed else "asleep" if self.is_asleep else ""
        return described(type(self).__name__, plan, self._config.model, state=state)

    async def _client(self) -> FrontClient:
        with self._lock:
            self._check_open()
            if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
                self._loading = self._workers.submit(self._load.run)
            loading = self._loading
        if not loading.done():
            await ended(loading)
        return self._loaded(loading)

    def _loaded(self, loading: Future[None]) -> FrontClient:
        """Waits for a load and returns its client. Raises the error of the load."""
        loading.result()
        assert self._load.client is not None
        return self._load.client

    async def _prepared(self, prepare: Callable[[InputProcessor], T], left: Callable[[], bool] | None = None) -> T:
        """Wakes the model and returns the result of `prepare`, both on a worker's thread."""
        client = await self._client()

        def run() -> T:
            with client.awake():
                return prepare(InputProcessor(client, left))

        return await self._on_thread(run)

    async def _on_thread(self, do: Callable[[], T]) -> T:
        # A variable for the future would make a cycle: the traceback of the future's error refers to this frame.
        return await asyncio.wrap_future(self._submitted(do))

    def _submitted(self, do: Callable[[], T]) -> Future[T]:
        with self._lock:
            self._check_open()
            return self._workers.submit(do)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    async def _events(self, prepare: Prepare, *, stream: bool = False) -> AsyncGenerator[SequenceOutput, None]:
        """Submits all requests and yields their events until all have ended. Closing the generator aborts the rest."""
        call = Call(await self._client(), asyncio.get_running_loop(), prepare, stream)
        try:
            submission = await self._on_thread(call.start)
            for event in submission.record(submission.refused):
                yield event
            while not submission.done:
                for event in submission.record(await call.events.get()):
                    yield event
            submission.conclude()
        finally:
            call.left = True
            if not call.done:
                with contextlib.suppress(RuntimeError):  # the executor is shut down, so all requests have ended
                    self._aborting.submit(call.abort)

    async def _completed(self, prepare: Prepare) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async with contextlib.aclosing(self._events(prepare)) as events:
            async for event in events:
                if event.finished is not None:
                    yield event.prompt_index, event.finished

    async def _run(self, prepare: Prepare) -> list[RequestOutput]:
        outputs = {index: output async for index, output in self._completed(prepare)}
        return Outputs(outputs[index] for index in range(len(outputs)))
