"""What LLM and its kin talk to: an engine behind a thread, in a child process, or several behind a router.

All three take requests by queue and give results through a sink, a function that is called with a list of
SequenceOutputs after each step that brought some, from a thread of the client's own.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from llamabatch.capacity import Plan
from llamabatch.config import EngineConfig
from llamabatch.engine import Engine
from llamabatch.errors import EngineClosedError, InputError
from llamabatch.llama.model import Model
from llamabatch.request import Request, RequestOutput, SequenceOutput
from llamabatch.stats import EngineStats

logger = logging.getLogger(__name__)

Sink = Callable[[list[SequenceOutput]], None]


class EngineClient(Protocol):
    """The one way to an engine. Safe to call from any thread.

    Attributes:
        plan: the options in force, and why.
        model: for its vocabulary, tokenizer and chat template; its weights may be elsewhere.
    """

    plan: Plan
    model: Model

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        """Takes requests in. Each ends in exactly one output with `finished` set, be it an error.

        Args:
            stream: tell the sink of every token; otherwise of finished requests only.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests; their outputs come through their sinks. Unknown and finished ids are ignored."""

    def stats(self) -> EngineStats:
        """Counts since the start. Raises EngineClosedError."""

    def close(self) -> None:
        """Ends all requests with finish_reason "abort" and frees everything. May be called twice."""


def failure(request: Request, error: str) -> SequenceOutput:
    """The event that ends a request which never ran."""
    return SequenceOutput(request.request_id, (), "", RequestOutput.failed(request, error))


# --- a thread ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Submit:
    requests: list[Request]
    sink: Sink
    stream: bool


@dataclass(frozen=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class _Stats:
    answer: Future[EngineStats]


_Command = _Submit | _Abort | _Stats | None  # None: the end


class ThreadClient:
    """An engine in this process, owned by one thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        started: Future[Engine] = Future()
        loop = _Loop(config, self._commands)
        # a daemon, so that a program which forgets close() can end; the finalizer still closes it in good order
        self._thread = threading.Thread(target=loop.serve, args=(started,), name="llamabatch-engine", daemon=True)
        self._thread.start()
        engine = started.result()
        self.plan = engine.plan
        self.model = engine.model
        self._finalizer = weakref.finalize(self, _stop, self._commands, self._thread)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._check_open()
        self._commands.put(_Submit(requests, sink, stream))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._commands.put(_Abort(tuple(request_ids)))

    def stats(self) -> EngineStats:
        self._check_open()
        answer: Future[EngineStats] = Future()
        self._commands.put(_Stats(answer))
        return answer.result()

    def close(self) -> None:
        self._finalizer()

    def _check_open(self) -> None:
        if not self._finalizer.alive or not self._thread.is_alive():
            raise EngineClosedError("the engine is closed")


def _stop(commands: queue.SimpleQueue[_Command], thread: threading.Thread) -> None:
    commands.put(None)
    if thread is not threading.current_thread():  # a garbage collection may run on the engine's own thread
        thread.join()


class _Loop:
    """What the engine's thread does. It holds no reference to its client, so that a forgotten client is collected."""

    def __init__(self, config: EngineConfig, commands: queue.SimpleQueue[_Command]) -> None:
        self._config = config
        self._commands = commands
        self._sinks: dict[str, _Submit] = {}
        self._requests: dict[str, Request] = {}

    def serve(self, started: Future[Engine]) -> None:
        try:
            engine = Engine(self._config)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(engine)
        reason = "the engine is closed"
        try:
            while self._obey(engine):
                if engine.has_work:
                    self._deliver(engine.step())
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {error}"
        finally:
            self._end(engine, reason)

    def _obey(self, engine: Engine) -> bool:
        """Carries out what is in the queue, waiting while there is nothing to compute; False at the end."""
        wait = not engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._carry_out(engine, command)
            wait = False

    def _carry_out(self, engine: Engine, command: _Submit | _Abort | _Stats) -> None:
        if isinstance(command, _Submit):
            self._take_in(engine, command)
        elif isinstance(command, _Abort):
            ended = [engine.abort(request_id) for request_id in command.request_ids]
            self._deliver([output for output in ended if output is not None])
        else:
            command.answer.set_result(engine.stats())

    def _take_in(self, engine: Engine, command: _Submit) -> None:
        refused = []
        for request in command.requests:
            try:
                engine.add(request)
            except (InputError, ValueError) as error:
                refused.append(failure(request, str(error)))
                continue
            self._sinks[request.request_id] = command
            self._requests[request.request_id] = request
        if refused:
            _tell(command.sink, refused)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        by_submit: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        for output in outputs:
            command = self._sinks[output.request_id]
            if output.finished is not None:
                del self._sinks[output.request_id], self._requests[output.request_id]
            if command.stream or output.finished is not None:
                by_submit.setdefault(id(command), (command.sink, []))[1].append(output)
        for sink, told in by_submit.values():
            _tell(sink, told)

    def _end(self, engine: Engine, reason: str) -> None:
        """Whatever happened: everybody who waits gets an answer, and the memory is given back."""
        for request_id, request in list(self._requests.items()):
            _tell(self._sinks[request_id].sink, [failure(request, reason)])
        engine.close()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Submit):
                _tell(command.sink, [failure(request, reason) for request in command.requests])
            elif isinstance(command, _Stats):
                command.answer.set_exception(EngineClosedError(reason))


def _tell(sink: Sink, outputs: list[SequenceOutput]) -> None:
    """A sink that raises must not take the engine and other people's requests down."""
    try:
        sink(outputs)
    except Exception:
        logger.exception("a result could not be delivered")


# --- which kind -------------------------------------------------------------------------------------------------


def connect(config: EngineConfig) -> EngineClient:
    """The client that a config asks for."""
    from llamabatch.child_client import ChildClient, RouterClient  # they start programs; most users need neither

    if config.strategy == "multi-instance":
        return RouterClient(config)
    return ChildClient(config) if config.isolate else ThreadClient(config)
