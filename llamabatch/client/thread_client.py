"""An engine on its own thread, and its queue of commands from callers' threads."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from llamabatch.client.base import CLOSED, EngineMethod, Heartbeat, Outage, emit, emit_last, errors_logged, failure
from llamabatch.config import EngineConfig
from llamabatch.engine.engine import Engine
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import EngineHooks, Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError, EngineError, InputError, describe
from llamabatch.llama.halt import Halt
from llamabatch.llama.model import Model
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.utils.cancellation import cancelled_by
from llamabatch.utils.checks import counted
from llamabatch.utils.lifetime import ForkGuard, Lifetime

logger = logging.getLogger(__name__)

_IDLE_S = 0.02  # seconds between two prefixes written to the disk by an idle engine

_END_FAILED = "the engine could not be ended in good order"
_TRIES = 2  # attempts to answer the remaining requests when an engine ends


class LocalClient:
    """Base class of clients whose engines run in this process. They have no child processes. `model` has adapters."""

    model: Model

    @property
    def pids(self) -> list[int]:
        return []

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return []

    @property
    def adapters(self) -> list[str]:
        return self.model.adapters.names


class ThreadClient(LocalClient):
    """An engine in this process on its own thread. The arguments are as for Engine."""

    def __init__(
        self, config: EngineConfig, *, model: Model | None = None, alone: bool = True, hooks: EngineHooks | None = None
    ) -> None:
        self._commands = CommandQueue()
        started: Future[Engine] = Future()
        loop = _Loop(lambda: Engine(config, model=model, alone=alone, hooks=hooks), self._commands, hooks)
        cancelled = threading.Event()
        with cancelled_by(cancelled):
            context = contextvars.copy_context()
        # A daemon thread, so that a program that never calls close() can end. Lifetime still closes the engine cleanly.
        thread = threading.Thread(target=context.run, args=(loop.serve, started), name="llamabatch-engine", daemon=True)
        try:
            thread.start()  # at an interrupt in this call, the thread may already run
            engine = started.result()
        except BaseException:  # error or interrupt; an interrupted load ends after the current tensor
            cancelled.set()
            self._commands.put_end()
            raise
        finally:
            del started  # the traceback of its error refers to this frame, so the variable would make a cycle
        self.plan = engine.plan
        self.model = engine.model
        self._thread_id = thread.ident
        self._engine = engine  # only for stats() and state(); the engine's thread calls all other methods
        self._lifetime = Lifetime(self, _EngineThread(self._commands, thread, engine.model.halt))

    @property
    def alive(self) -> bool:
        return not self._commands.is_shut

    @property
    def up(self) -> bool:
        return self.alive

    @property
    def outage(self) -> Outage | None:
        return self._commands.outage

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._commands.put(_Submit(requests, sink, stream))

    def abort(self, request_ids: Iterable[str]) -> None:
        with contextlib.suppress(EngineClosedError):  # the engine has ended, and all requests with it
            self._commands.put(_Abort(tuple(request_ids)))

    def stats(self) -> EngineStats:
        self._commands.check_open()
        stats, waiting = self._engine.stats(), self._commands.n_waiting
        return replace(stats, waiting=stats.waiting + waiting) if waiting else stats

    def states(self) -> list[EngineState]:
        self._commands.check_open()
        state, arriving = self._engine.state(), self._commands.n_waiting
        return [replace(state, n_waiting=state.n_waiting + arriving)]

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        if threading.get_ident() == self._thread_id:
            raise EngineError(
                f"{method} was called on the engine's own thread, as from a logits processor, where it would wait for "
                "itself; call it from another one"
            )
        return self.ask(lambda engine: getattr(engine, method)(*arguments)).result()

    def ask(self, function: Callable[[Engine], Any]) -> Future[Any]:
        """Calls a function on the engine's thread between two steps. Returns the future of its result. Raises
        EngineClosedError."""
        answer: Future[Any] = Future()
        self._commands.put(_Call(function, answer))
        return answer

    def close(self) -> None:
        self._lifetime.end()


@dataclass(frozen=True)
class _EngineThread:
    """The thread of an engine: an Endable. CommandQueue.put_end() ends the thread."""

    commands: CommandQueue
    thread: threading.Thread
    halt: Halt

    def drop(self) -> None:
        self.commands.put_end()
        self.halt.now()

    def end(self) -> None:
        self.drop()
        if self.thread is not threading.current_thread():
            self.thread.join()

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()


@dataclass(frozen=True)
class _Owned:
    """A request in the engine, and the command that submitted it."""

    request: Request
    submit: _Submit


class _Loop:
    """The loop of the engine's thread, which owns every request from submit to its last output.

    A request is always in one of three places: in the queue of commands, in the command that runs (_Submit.left), or in
    the table of requests in flight. It leaves the table when its sink has received the last output. Every request
    therefore gets an answer, wherever an error is raised.

    The loop keeps no reference to its client, so that an unused client is collected.
    """

    def __init__(self, make_engine: Callable[[], Engine], commands: CommandQueue, hooks: EngineHooks | None) -> None:
        self._make_engine = make_engine
        self._commands = commands
        self._hooks = hooks
        self._in_flight: dict[str, _Owned] = {}

    def serve(self, started: Future[Engine]) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            started.set_exception(error)
            del started  # the error's traceback refers to this frame, so the variable would make a cycle
            return
        started.set_result(engine)
        error_text = None
        try:
            while self._run_commands(engine):
                if engine.has_work:
                    outputs = engine.step()
                    if self._hooks is not None and outputs:
                        self._hooks.last_token_s = time.perf_counter()
                    self._deliver(engine, outputs)
        except EngineClosedError:  # close() has halted the step
            pass
        except BaseException as error:  # any error: all requests are answered before this thread ends
            error_text = f"the engine failed: {describe(error)}"
            with contextlib.suppress(Exception):
                logger.exception("the engine failed")
                if self._hooks is not None:
                    self._hooks.failed(error_text)
        finally:
            self._end(engine, error_text)

    def _run_commands(self, engine: Engine) -> bool:
        """Runs the queued commands and waits engine.wait_s() seconds for more. Returns False after the last command."""
        while True:
            wait_s = engine.wait_s()
            if wait_s is None and self._in_flight:  # without this error, callers would wait forever
                lost = counted(len(self._in_flight), "request")
                raise EngineError(f"the engine has lost {lost}: a bug in llamabatch")
            if wait_s is None and engine.keep_idle():
                wait_s = _IDLE_S
            try:
                command = self._commands.get(wait_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._run_command(engine, command)
            del command  # the variable would keep the caller's sink, and so the client, alive

    def _run_command(self, engine: Engine, command: _Command) -> None:
        if isinstance(command, _Submit):
            self._add_requests(engine, command)
        elif isinstance(command, _Abort):
            ended = [engine.abort(request_id) for request_id in command.request_ids]
            self._deliver(engine, [output for output in ended if output is not None])
        else:
            try:
                command.answer.set_result(command.function(engine))
            except BaseException as error:  # the caller gets the error
                command.answer.set_exception(error)
                del command  # the error's traceback refers to this frame

    def _add_requests(self, engine: Engine, command: _Submit) -> None:
        while command.left:
            request = command.left[0]
            if request.request_id in self._in_flight:
                emit_last(command.sink, failure(request, f"request id {request.request_id!r} is already in flight"))
                command.left.popleft()
                continue
            self._in_flight[request.request_id] = _Owned(request, command)
            command.left.popleft()
            try:
                engine.add(request, streamed=command.stream)
            except Exception as error:
                if not isinstance(error, InputError):
                    logger.warning("a request could not be added", exc_info=True)
                self._close(failure(request, error))
            finally:
                self._commands.consumed(request)

    def _deliver(self, engine: Engine, outputs: list[SequenceOutput]) -> None:
        by_sink: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        for output in outputs:
            owned = self._in_flight.get(output.request_id)
            if owned is not None and (owned.submit.stream or output.finished is not None):
                sink = owned.submit.sink
                by_sink.setdefault(id(sink), (sink, []))[1].append(output)
        for sink, of_sink in by_sink.values():
            failed = emit(sink, of_sink)
            for request_id, error in failed.items():
                engine.abort(request_id, error)
                self._close(failure(self._in_flight[request_id].request, error))
            for output in of_sink:
                if output.finished is not None:
                    self._in_flight.pop(output.request_id, None)

    def _close(self, output: SequenceOutput) -> None:
        """Emits the last output of a request that has ended outside of a step."""
        emit_last(self._in_flight[output.request_id].submit.sink, output)
        del self._in_flight[output.request_id]

    def _end(self, engine: Engine, error: str | None) -> None:
        """Answers all waiting callers with the tokens so far, and frees the memory."""
        reason = error or CLOSED
        try:
            for _ in range(_TRIES):  # the second attempt is for requests that the first one could not answer
                for owned in list(self._in_flight.values()):
                    with errors_logged(_END_FAILED):
                        self._close(self._last_output(engine, owned.request, error))
        finally:
            self._refuse_commands(reason)
            with errors_logged(_END_FAILED):
                engine.close(error)

    def _last_output(self, engine: Engine, request: Request, error: str | None) -> SequenceOutput:
        try:
            output = engine.abort(request.request_id, error)
        except BaseException:  # the failure may have left the engine in any state
            output = None
        return failure(request, error or CLOSED) if output is None or output.finished is None else output

    def _refuse_commands(self, reason: str) -> None:
        for command in self._commands.shut(reason):
            for _ in range(_TRIES):
                with errors_logged(_END_FAILED):
                    _refuse(command, reason)


def _refuse(command: _Command, reason: str) -> None:
    """Answers a command that the engine will not run. Of a submit that has run in part, answers what is left."""
    if isinstance(command, _Submit):
        while command.left:
            emit_last(command.sink, failure(command.left[0], reason))
            command.left.popleft()
    elif isinstance(command, _Call) and not command.answer.done():
        command.answer.set_exception(EngineClosedError(reason))


@dataclass(frozen=True)
class _Submit:
    requests: list[Request]
    sink: Sink
    stream: bool
    left: deque[Request] = field(init=False)  # requests that are not yet in the engine

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", deque(self.requests))


@dataclass(frozen=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    function: Callable[[Engine], Any]
    answer: Future[Any]


_Command = _Submit | _Abort | _Call


class CommandQueue:
    """A queue of commands for the engine's thread. After `shut` it refuses commands, because no thread would answer
    them.

    A command belongs to the queue until the next command is fetched. So if an error ends the thread, the command that
    runs is answered together with the waiting commands.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard()
        self._shut_because: str | None = None
        self._current: _Command | None = None  # the command that runs now
        # _n_put is the number of submitted continuations. It is changed under the lock. _n_consumed is the number of
        # continuations passed to the engine. It is changed on the engine's thread. Both are read without the lock.
        self._n_put = 0
        self._n_consumed = 0

    @property
    def n_waiting(self) -> int:
        """The number of continuations that are not yet in the engine."""
        return max(0, self._n_put - self._n_consumed)

    def consumed(self, request: Request) -> None:
        """Records that the engine's thread has passed a request to the engine."""
        self._n_consumed += request.params.n_copies

    def check_open(self) -> None:
        """Raises EngineClosedError if the queue is shut."""
        self._fork_guard.check()
        if self._shut_because is not None:
            raise EngineClosedError(self._shut_because)

    def put(self, command: _Command) -> None:
        """Adds a command. Raises EngineClosedError if the queue is shut."""
        self._fork_guard.check()
        with self._lock:
            if self._shut_because is not None:
                raise EngineClosedError(self._shut_because)
            if isinstance(command, _Submit):
                self._n_put += sum(request.params.n_copies for request in command.requests)
            self._queue.put(command)

    def put_end(self) -> None:
        """Adds the end of the commands, which ends the engine's thread."""
        self._queue.put(None)

    def get(self, wait_s: float | None) -> _Command | None:
        """Returns the next command; None at the end.

        Args:
            wait_s: seconds to wait for a command before queue.Empty is raised; None: wait forever.
        """
        self._current = None
        self._current = self._queue.get(block=wait_s != 0, timeout=wait_s)
        return self._current

    @property
    def is_shut(self) -> bool:
        return self._shut_because is not None

    @property
    def outage(self) -> Outage | None:
        """The reason why the queue is shut; None while it is open."""
        return None if self._shut_because is None else Outage(self._shut_because)

    def shut(self, reason: str) -> list[_Command]:
        """Refuses commands from now on. Returns the command that was running and the waiting commands."""
        with self._lock:
            self._shut_because = reason
        left: list[_Command] = [] if self._current is None else [self._current]
        while not self._queue.empty():
            command = self._queue.get()
            if command is not None:
                left.append(command)
        return left
