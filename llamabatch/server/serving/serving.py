"""Serving: one loaded model behind a server, its states, and the path of a request from a handler to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from llamabatch.chat.conversation import check_template
from llamabatch.chat.named_templates import DEFAULT
from llamabatch.client.base import Outage, errors_logged
from llamabatch.client.connect import connect as connect_engine
from llamabatch.client.front_client import FrontClient, slots_of
from llamabatch.config import EngineConfig
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import ConfigError, ContextLengthError, EngineClosedError, LlamaBatchError, QueueFull
from llamabatch.llama.kv_state import fingerprint as file_fingerprint
from llamabatch.llama.model import Model
from llamabatch.planning.plan import Plan
from llamabatch.planning.profile_store import library_id
from llamabatch.request.structured_outputs import Structure
from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.keys import key_use
from llamabatch.server.http.private_paths import remember
from llamabatch.server.options import ServerOptions
from llamabatch.server.serving.admission import Admission
from llamabatch.server.serving.bounded_model import for_prompts
from llamabatch.server.serving.checks import (
    check_answer,
    check_bad_words,
    check_deadlines,
    check_grammars,
    check_size,
    structures,
    with_cure,
)
from llamabatch.server.serving.dispatcher import OutputDispatcher, RequestStream
from llamabatch.utils.version import __version__

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from llamabatch.request.outputs import RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["loading", "ready", "restarting", "draining", "failed"]
Prepare = Callable[[InputProcessor], Submission]
Connect = Callable[[EngineConfig], FrontClient]

_LOOK_S = 0.02  # seconds between two checks for the end of all calls
_AFTER_ABORT_S = 10.0  # seconds to wait for aborted requests; a running step may take as long
_RETRY_AFTER_S = {"loading": 5, "draining": 10, "failed": 30}
_LONGEST_RETRY_S = 60  # the longest Retry-After, in seconds, for states that are not in _RETRY_AFTER_S
_MESSAGES = {
    "loading": "the model is being loaded; try again in a moment",
    "restarting": "the engine's process ended and another one is being started; requests that come now wait for it",
    "draining": "the server is shutting down and takes no new work; send the request to another one",
    "failed": "the engine has ended",
}
# These options are not part of the fingerprint. Except for `model`, they change neither the text nor its probabilities.
# In place of `model`, the fingerprint has the digest of the model's file.
_WITHOUT_EFFECT_ON_TEXT = (
    *("model", "draft_model", "max_queue", "log_file", "verbose", "isolate", "trial", "sha256", "profile"),
)


class TextFiles(Protocol):
    """Saves and loads the texts of requests with an id_slot. SlotFiles implements this protocol."""

    def noted(self, number: int) -> Callable[[RequestOutput], None] | None: ...

    async def save(self, number: int, name: object) -> tuple[int, int]: ...

    async def restore(self, number: int, name: object) -> tuple[int, int]: ...

    async def erase(self, number: int) -> int: ...


class Part(Protocol):
    """Work of a server in addition to requests. All methods are called on threads, and may be called more than once."""

    def open(self) -> None:
        """Prepares the work. Called before the model is loaded. If this method raises, the load fails."""

    def start(self) -> None:
        """Starts the work, once the model is ready. Raises nothing."""

    def stop(self) -> None:
        """Stops the work. Called before requests are drained, and before the model is freed."""

    @property
    def has_work(self) -> bool:
        """True while the part uses the model, or will use it soon. Does not wait for a disk."""


@dataclass
class _Host:
    """An engine for an InputProcessor, with a BoundedModel in place of the model."""

    plan: Plan
    model: Any
    client: FrontClient

    @property
    def adapters(self) -> list[str]:
        return self.client.adapters


class Serving:
    """One model that is loaded, served, and closed.

    Call its methods on an event loop, unless their docstrings name other threads.

    Args:
        config: the engine's options.
        options: the server's options.
        connect: starts the engine; tests pass another function.

    Attributes:
        config: as given.
        options: as given, until set_options replaces them.
        load_error: the exception of the load; None: no exception so far.
        created: time.time() of the start, in whole seconds.
        parts: work that starts and stops with the model.
        slot_files: saves and loads the texts of slots; None: the server has no slot_save_path.
    """

    def __init__(self, config: EngineConfig, options: ServerOptions, connect: Connect = connect_engine) -> None:
        remember(config, options)
        self.config = config
        self.options = options
        self.load_error: BaseException | None = None
        self.created = int(time.time())
        self._connect = connect
        self._state: State = "loading"
        self._client: FrontClient | None = None
        self.parts: list[Part] = []
        self._admission: Admission | None = None
        self._fingerprint: str | None = None
        self._loaded: Future[None] | None = None
        self._n_loading = 0
        self._load_s = 0.0  # duration of the load
        self._dispatchers: dict[asyncio.AbstractEventLoop, OutputDispatcher] = {}
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._media_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._media_places = weakref.WeakKeyDictionary()
        self._open: set[object] = set()  # running calls, added before their prompts are read
        self._answers: set[RequestStream] = set()  # streams whose responses are not completely sent
        self._lock = threading.Lock()
        self.slot_files: TextFiles | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._aborting: ThreadPoolExecutor | None = None

    # Handlers read these properties. `client`, `plan` and `model` raise ApiError (503) before the model is loaded.

    @property
    def client(self) -> FrontClient:
        if self._client is None:
            raise self.unavailable()
        return self._client

    @property
    def plan(self) -> Plan:
        return self.client.plan

    @property
    def model(self) -> Model:
        return self.client.model

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names: served_model_names, or the name of the model's file. Answers contain the first name."""
        return self.options.served_model_names or (_plain_name(self.config.model),)

    @property
    def fingerprint(self) -> str:
        """A digest of the model file, build, options and version. The text for a request depends on all of them."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self.client)
        return self._fingerprint

    @property
    def is_loading(self) -> bool:
        """True while a model loads, even if close() has been called."""
        return self._n_loading > 0

    @property
    def n_open(self) -> int:
        """The number of running calls."""
        return len(self._open)

    @property
    def dispatcher(self) -> OutputDispatcher:
        """The dispatcher of the running event loop."""
        loop = asyncio.get_running_loop()
        dispatcher = self._dispatchers.get(loop)
        if dispatcher is None:
            for other in [other for other in self._dispatchers if other.is_closed()]:
                del self._dispatchers[other]
            dispatcher = self._dispatchers[loop] = OutputDispatcher(loop, self.abort)
        return dispatcher

    def unavailable(self) -> ApiError:
        """Returns the error for calls while the model is not available."""
        state, error = self.state, self.error
        message = _MESSAGES.get(state, "the model is not there")
        if state == "failed" and error is not None:
            message = f"{message}: {error}"
        outage = self.outage
        usual_s = min(_LONGEST_RETRY_S, max(1, math.ceil(self._load_s)))  # a new engine should load as fast as the last
        retry_s = _RETRY_AFTER_S.get(state, usual_s)
        if outage is not None and outage.retry_in_s is not None:
            retry_s = max(1, math.ceil(outage.retry_in_s))
        return unavailable(state, message, retry_s)

    @property
    def state(self) -> State:
        """The state: "loading", "ready", "restarting", "draining" or "failed". Restarting: dead engines are being
        replaced, and requests wait. Draining: no new requests are accepted. Failed: the load raised, or the engine has
        ended, perhaps only until the next restart."""
        client = self._client
        if self._state != "ready" or client is None:
            return self._state
        if client.outage is not None:
            return "failed"
        beats = client.heartbeats
        return "restarting" if beats and not any(beat.up for beat in beats) else "ready"

    @property
    def error(self) -> BaseException | None:
        """The cause of the state "failed"; None in other states."""
        outage = self.outage
        return self.load_error if outage is None else EngineClosedError(outage.reason)

    @property
    def outage(self) -> Outage | None:
        """The outage of an engine that has ended; None: the engine runs, loads or restarts, or the server ends."""
        client = self._client
        return client.outage if client is not None and self._state == "ready" else None

    @property
    def admission(self) -> Admission:
        """The Admission, which estimates the wait of a new request. Raises ApiError (503) before the model is
        loaded."""
        if self._admission is None:
            raise self.unavailable()
        return self._admission

    def check_ready(self) -> None:
        """Raises ApiError (503) if the state is neither "ready" nor "restarting". Starts the load if no lifespan has
        started the load, as in an application that is mounted in another application."""
        if self._loaded is None:
            self.start()
        if self.state not in ("ready", "restarting"):
            raise self.unavailable()

    def start(self) -> Future[None]:
        """Starts to load the model on a thread, unless the load has started. The future is done when the load ends."""
        with self._lock:
            if self._loaded is None:
                self._state, self.load_error = "loading", None
                self._workers = ThreadPoolExecutor(self.options.threads, thread_name_prefix="llamabatch-server")
                # Aborts have their own thread, so that no abort waits while a prompt is tokenized.
                self._aborting = ThreadPoolExecutor(1, thread_name_prefix="llamabatch-abort")
                self._loaded = Future()
                self._loaded.set_running_or_notify_cancel()  # a waiter cannot cancel the load
                load = partial(self._load, self._loaded)
                threading.Thread(target=load, name="llamabatch-load", daemon=True).start()
            return self._loaded

    def _load(self, loaded: Future[None]) -> None:
        self._n_loading += 1
        try:
            self._load_now(loaded)
        finally:
            self._n_loading -= 1

    def _load_now(self, loaded: Future[None]) -> None:
        began_s = time.monotonic()
        try:
            for part in self.parts:
                part.open()
            client = self._connect(self.config)
            self._load_s = time.monotonic() - began_s
        except BaseException as error:
            self._stop_parts()
            if not isinstance(error, LlamaBatchError):
                logger.exception("the model could not be loaded")
            self.load_error = error
            self._state = "failed"
            loaded.set_exception(error)
            return
        try:
            self._check_template(client.model)
            config = client.plan.config
            in_flight = client.in_flight
            admission = Admission(slots_of(config), lambda: in_flight.n_continuations, preempt=config.preempt)
            in_flight.watch(admission)
            with self._lock:
                is_wanted = self._loaded is loaded
                if is_wanted:
                    self._client, self._admission = client, admission
                    if self._state == "loading":
                        self._state = "ready"
            if is_wanted:
                with errors_logged("the fingerprint of the model could not be made"):
                    self._fingerprint = fingerprint_of(client)
                if self._state == "ready":
                    for part in self.parts:
                        part.start()
                if self._loaded is not loaded:  # close() was called after the load
                    self._stop_parts()
            else:  # close() was called during the load
                client.close()
        finally:
            loaded.set_result(None)

    def _check_template(self, model: Model) -> None:
        """Sets llama-server's default template if the model has none. Warns if the model's template is broken."""
        if self.options.chat_template is not None:
            return
        name = _plain_name(self.config.model)
        if model.chat_template is not None:
            try:
                check_template(model.chat_template)
            except ConfigError as error:
                logger.warning("%s: %s; chats are refused (--chat-template gives another)", name, error)
        elif not model.pools_only:
            logger.warning("%s has no chat template: chats take %s (--chat-template gives another)", name, DEFAULT)
            self.set_options(chat_template=DEFAULT)

    def set_options(self, **changes: Any) -> None:
        """Sets options of the server for later requests. If a value is bad, raises ConfigError and sets no option."""
        # `api_keys` already contains the keys of the file, and the file may be gone by now.
        self.options = replace(self.options, api_key_file=None, **changes)

    async def on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that takes long, or that queries the engine, on a worker thread."""
        workers = self._workers
        if workers is None:
            raise self.unavailable()
        try:
            future = workers.submit(function, *arguments)
        except RuntimeError as error:  # the pool is shut down
            raise self.unavailable() from error
        return await asyncio.wrap_future(future)

    async def in_turn(self, function: Callable[[], T]) -> T:
        """Calls functions as on_thread does, but one at a time: for work that needs much memory or blocks threads."""
        loop = asyncio.get_running_loop()
        turn = self._turns.get(loop)
        if turn is None:
            turn = self._turns[loop] = asyncio.Lock()
        async with turn:
            return await self.on_thread(function)

    async def _with_media(self, function: Callable[[], T]) -> T:
        """Calls a function as on_thread does, but on at most half of the threads at once."""
        loop = asyncio.get_running_loop()
        places = self._media_places.get(loop)
        if places is None:
            places = self._media_places[loop] = asyncio.Semaphore(max(1, self.options.threads // 2))
        async with places:
            return await self.on_thread(function)

    async def submit(
        self,
        prepare: Prepare,
        n_prompts: int = 1,
        n: int = 1,
        *,
        cuts: bool = False,
        stream: bool = False,
        media: bool = False,
        noted: Callable[[RequestOutput], None] | None = None,
    ) -> RequestStream:
        """Makes requests and submits them, on worker threads.

        Unfinished requests are aborted when the caller's task ends or is cancelled.

        Args:
            prepare: makes the Submission. The stream has the errors policy of the Submission.
            n_prompts, n: number of prompts, and of continuations per prompt. Too many continuations are refused before
                any work.
            cuts: True: long prompts are cut.
            stream: True: the stream has the tokens of each step. False: the stream has only whole outputs.
            noted: a function that is called with each whole output.
            media: True if a prompt has media. Half of the threads may decode media; the other half stays free for text.

        Raises:
            ApiError: the model is not available (503). QueueFull, EngineClosedError and the errors of `prepare` are
                raised as well.
        """
        self.check_ready()
        check_size(n_prompts * n, self.admission.n_slots, self.config.max_queue)
        dispatcher, call = self.dispatcher, RequestStream(self.dispatcher, self.abort)
        task = asyncio.current_task()
        assert task is not None
        use = key_use.get()
        call.spend = None if use is None else use.spend
        call.noted = noted
        self._open.add(call)
        self._answers.add(call)
        task.add_done_callback(lambda _: self._answers.discard(call))  # the task ends when the response is sent

        def end(_: object) -> None:
            call.abort()
            self._open.discard(call)

        task.add_done_callback(end)
        call.on_end = partial(self._forget, task, end, call)
        try:
            make = partial(self._make, prepare, n_prompts, cuts, call, dispatcher, stream)
            forms = await (self._with_media(make) if media else self.on_thread(make))
            if forms:
                await check_grammars(forms, self.model)
                await self.on_thread(self._send, call, dispatcher, stream)
        except BaseException:
            call.abort()
            self._forget(task, end, call)
            raise
        call.started()
        return call

    def _forget(self, task: asyncio.Task[Any], end: Callable[[object], None], call: RequestStream) -> None:
        task.remove_done_callback(end)
        self._open.discard(call)

    def _make(
        self,
        prepare: Prepare,
        n_prompts: int,
        cuts: bool,
        call: RequestStream,
        dispatcher: OutputDispatcher,
        stream: bool,
    ) -> list[Structure]:
        """Makes the requests, on a worker thread. Returns the structured outputs that must be checked before the
        requests are submitted. Without structured outputs, submits the requests at once."""
        client = self.client
        host = _Host(client.plan, for_prompts(client.model, client.plan.config.n_ctx, n_prompts, cuts=cuts), client)
        try:
            submission = prepare(InputProcessor(host, lambda: call.has_left, client.next_seed))
        except ContextLengthError as error:
            raise with_cure(error, client.model, client.plan) from None
        call.submission = submission
        held, config = sum(each.n_logprobs for each in list(self._answers)), client.plan.config
        most = 2 * self.options.max_bodies_bytes
        check_answer(submission.requests, config.n_ctx, client.model.n_vocab, held, most)
        check_bad_words(submission.requests, client.model)
        forms = structures(submission.requests)
        if not forms:
            self._send(call, dispatcher, stream)
        return forms

    def _send(self, call: RequestStream, dispatcher: OutputDispatcher, stream: bool) -> None:
        """Submits the requests, on a worker thread."""
        client, admission, submission = self.client, self.admission, call.submission
        assert submission is not None
        if call.has_left:
            raise CancelledError
        requests, now = submission.requests, time.perf_counter()
        check_deadlines(requests, admission, now)
        ids = [request.request_id for request in requests]
        dispatcher.add(call, ids)
        try:
            client.submit(requests, dispatcher.sink, stream=stream)
        except BaseException as error:
            dispatcher.remove(ids)
            if isinstance(error, QueueFull):
                wanted = sum(request.params.n_copies for request in requests)
                error.retry_after_s = admission.retry_after_s(wanted, now)
            raise
        if call.spend is not None:
            call.spend(sum(len(request.prompt_token_ids) for request in requests))
        if submission.refused:
            client.count_refused(submission.refused)
        if call.has_left:  # the reader left during the submission, so its abort may have come too early
            dispatcher.remove(ids)
            client.abort(ids)

    def abort(self, request_ids: list[str]) -> None:
        """Aborts requests without waiting. May be called on any thread."""
        client, aborting = self._client, self._aborting
        if client is not None and aborting is not None and request_ids:
            with contextlib.suppress(RuntimeError):  # the pool is shut down, so all requests have ended
                aborting.submit(client.abort, request_ids)

    async def drain(self, seconds: float) -> None:
        """Refuses new work, waits for running calls, and aborts calls that still run after `seconds`."""
        if self._state in ("ready", "loading"):
            self._state = "draining"
        await asyncio.to_thread(self._stop_parts)
        until = time.monotonic() + seconds
        while self._open and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        if self._open:
            logger.warning("%d calls were still running after %g s and are ended", len(self._open), seconds)
        await self._abort_all()

    async def _abort_all(self) -> None:
        for dispatcher in list(self._dispatchers.values()):
            ids = dispatcher.request_ids
            self.abort(ids)  # the streams of these requests end with finish_reason "abort"
        until = time.monotonic() + _AFTER_ABORT_S
        while self._open and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)

    async def aclose(self) -> None:
        """Ends all requests and frees the model. May be called twice. `start` may be called again."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Closes the Serving as aclose does. May be called on any thread except the thread of a sink. Does not wait for
        a load."""
        self._stop_parts()
        with self._lock:
            client, self._client = self._client, None
            self._loaded = None  # a running load closes its own client when it sees this
            workers, self._workers = self._workers, None
            aborting, self._aborting = self._aborting, None
            if self._state != "failed":
                self._state = "draining"
        if client is not None:
            client.close()
        for pool in (workers, aborting):
            if pool is not None:
                pool.shutdown()

    def _stop_parts(self) -> None:
        for part in self.parts:
            part.stop()


def unavailable(state: str, message: str | None = None, retry_s: int | None = None) -> ApiError:
    """Returns the error for calls while the server is in a state without a usable model."""
    headers = {"Retry-After": str(_RETRY_AFTER_S[state] if retry_s is None else retry_s)}
    found = _MESSAGES[state] if message is None else message
    return ApiError(503, found, type="unavailable_error", code=f"model_{state}", headers=headers)


def serving_of(request: HttpRequest) -> Serving:
    """Returns the Serving of the application that received a request."""
    serving: Serving = request.app.state.serving
    return serving


def fingerprint_of(client: FrontClient) -> str:
    """Returns `fp_` and twelve hexadecimal digits, in the form of OpenAI's system_fingerprint."""
    config = client.plan.config
    options = {name: repr(value) for name, value in sorted(vars(config).items()) if name not in _WITHOUT_EFFECT_ON_TEXT}
    adapters = [(name, file_fingerprint_or_none(path)) for name, path in config.adapters]
    parts = [__version__, library_id(), file_fingerprint_or_none(client.model.path), options, adapters]
    digest = hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=6)
    return f"fp_{digest.hexdigest()}"


def file_fingerprint_or_none(path: Any) -> str | None:
    try:
        return file_fingerprint(Path(path))
    except (OSError, LlamaBatchError):
        return None


@cache
def _plain_name(model: str) -> str:
    """Returns the name of a file without folder and ending. Returns a name on Hugging Face's hub unchanged."""
    if ":" in model and not model.endswith(".gguf") and not os.path.isabs(model):
        return model
    name = PurePath(model).name
    return name.removesuffix(".gguf") or model
