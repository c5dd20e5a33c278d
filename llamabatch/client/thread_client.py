"""Commands of callers' threads to the thread that owns an engine.

A command is the mailbox's until the next one is fetched, so that one which could not be carried out to its end is
answered with those that still wait.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from llamabatch.client.base import (
    _CLOSED,
    _TRIES,
    _UNTIDY,
    EngineMethod,
    Heartbeat,
    failure,
    logger,
    said_only,
    tell,
    tell_end,
)
from llamabatch.config import EngineConfig
from llamabatch.engine.engine import Engine
from llamabatch.engine.hooks import EngineHooks, Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError, EngineError, InputError, describe
from llamabatch.llama.model import Model
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.utils.checks import counted
from llamabatch.utils.lifetime import ForkGuard, Lifetime


@dataclass(frozen=True)
class Submit:
    requests: list[Request]
    sink: Sink
    stream: bool
    left: deque[Request] = field(init=False)  # not taken in yet

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", deque(self.requests))


@dataclass(frozen=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    ask: Callable[[Engine], Any]
    answer: Future[Any]


Command = Submit | Abort | Question


class CommandQueue:
    """Commands for the engine's thread. After `shut` none gets in, so that none is left unanswered."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._home = ForkGuard()
        self._shut_because: str | None = None
        self._current: Command | None = None  # being carried out
        self._n_put = 0  # continuations that came in, and of those how many
        self._n_taken = 0  # went on to the engine; each is counted by one side, so that neither waits for the other

    @property
    def n_waiting(self) -> int:
        """Continuations that the engine does not know of yet."""
        return max(0, self._n_put - self._n_taken)

    def took(self, request: Request) -> None:
        """The engine's thread has handed it on."""
        self._n_taken += request.params.n_copies

    def check_open(self) -> None:
        """Raises EngineClosedError if it is shut."""
        self._home.check()
        if self._shut_because is not None:
            raise EngineClosedError(self._shut_because)

    def put(self, command: Command) -> None:
        """Raises EngineClosedError once it is shut."""
        self._home.check()
        with self._lock:
            if self._shut_because is not None:
                raise EngineClosedError(self._shut_because)
            if isinstance(command, Submit):
                self._n_put += sum(request.params.n_copies for request in command.requests)
            self._queue.put(command)

    def put_end(self) -> None:
        """The engine's thread ends when it comes to this."""
        self._queue.put(None)

    def get(self, wait_s: float | None) -> Command | None:
        """The next command, None at the end. Raises queue.Empty if none comes in that time; None: waits for ever."""
        self._current = None
        self._current = self._queue.get(block=wait_s != 0, timeout=wait_s)
        return self._current

    @property
    def is_shut(self) -> bool:
        return self._shut_because is not None

    def shut(self, reason: str) -> list[Command]:
        """Lets nothing more in; returns what had come in before, from the command that was being carried out on."""
        with self._lock:
            self._shut_because = reason
        left: list[Command] = [] if self._current is None else [self._current]
        while not self._queue.empty():
            command = self._queue.get()
            if command is not None:
                left.append(command)
        return left


# --- a thread ---------------------------------------------------------------------------------------------------


class InThisProcess:
    """The part of an EngineClient that is alike wherever the engines are in this process."""

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


class ThreadClient(InThisProcess):
    """An engine in this process, owned by one thread of its own. The arguments are those of Engine."""

    def __init__(
        self, config: EngineConfig, *, model: Model | None = None, alone: bool = True, watch: EngineHooks | None = None
    ) -> None:
        self._mailbox = CommandQueue()
        started: Future[Engine] = Future()
        loop = _Loop(lambda: Engine(config, model=model, alone=alone, hooks=watch), self._mailbox, watch)
        # a daemon, so that a program which forgets close() can end; its lifetime still closes it in good order
        thread = threading.Thread(target=loop.serve, args=(started,), name="llamabatch-engine", daemon=True)
        try:
            thread.start()  # an interrupt may come before it returns, when the thread already runs
            engine = started.result()
        except BaseException:  # refused, or interrupted: then the model is freed as soon as it is loaded
            self._mailbox.put_end()
            raise
        self.plan = engine.plan
        self.model = engine.model
        self._engine = engine  # for its figures alone: all else is for its thread
        self._lifetime = Lifetime(self, _EngineThread(self._mailbox, thread))

    @property
    def alive(self) -> bool:
        return not self._mailbox.is_shut

    @property
    def up(self) -> bool:
        return self.alive

    def revive(self) -> None:
        """An engine of this process that has failed stays gone."""

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._mailbox.put(Submit(requests, sink, stream))

    def abort(self, request_ids: Iterable[str]) -> None:
        with contextlib.suppress(EngineClosedError):  # then they have ended
            self._mailbox.put(Abort(tuple(request_ids)))

    def stats(self) -> EngineStats:
        self._mailbox.check_open()
        stats, waiting = self._engine.stats(), self._mailbox.n_waiting
        return replace(stats, waiting=stats.waiting + waiting) if waiting else stats

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        return self.ask(lambda engine: getattr(engine, method)(*arguments)).result()

    def ask(self, question: Callable[[Engine], Any]) -> Future[Any]:
        """Has the engine's thread call this between two steps. Raises EngineClosedError."""
        answer: Future[Any] = Future()
        self._mailbox.put(Question(question, answer))
        return answer

    def close(self) -> None:
        self._lifetime.end()


@dataclass(frozen=True)
class _EngineThread:
    """An Endable."""

    mailbox: CommandQueue
    thread: threading.Thread

    def drop(self) -> None:
        self.mailbox.put_end()

    def end(self) -> None:
        self.mailbox.put_end()
        if self.thread is not threading.current_thread():
            self.thread.join()

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()


@dataclass(frozen=True)
class _Owned:
    """A request that the engine has, and the call that it came with."""

    request: Request
    submit: Submit


class _Loop:
    """The engine's thread, which owns every request from submit to its last output: a request stands in the mailbox, in
    the command being carried out (Submit.left), or in the table of those in flight, which it leaves when its sink has
    its last output. So all can be answered whatever was raised, and wherever.

    It holds no reference to its client, so that a forgotten client is collected.
    """

    def __init__(self, make_engine: Callable[[], Engine], mailbox: CommandQueue, watch: EngineHooks | None) -> None:
        self._make_engine = make_engine
        self._mailbox = mailbox
        self._watch = watch
        self._in_flight: dict[str, _Owned] = {}

    def serve(self, started: Future[Engine]) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(engine)
        error_text = None
        try:
            while self._obey(engine):
                if engine.has_work:
                    outputs = engine.step()
                    if self._watch is not None and outputs:
                        self._watch.last_token_s = time.perf_counter()
                    self._deliver(engine, outputs)
        except BaseException as error:  # of any kind: all are answered before this thread ends
            error_text = f"the engine failed: {describe(error)}"
            with contextlib.suppress(Exception):
                logger.exception("the engine failed")
                if self._watch is not None:
                    self._watch.failed(error_text)
        finally:
            self._end(engine, error_text)

    def _obey(self, engine: Engine) -> bool:
        """Carries out what is in the mailbox, waiting while there is nothing to compute, or for company; False at the
        end."""
        while True:
            wait_s = engine.wait_s()
            if wait_s is None and self._in_flight:  # else their callers would wait for ever
                raise EngineError(f"the engine has lost {counted(len(self._in_flight), 'request')}: a bug of ours")
            try:
                command = self._mailbox.get(wait_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._carry_out(engine, command)

    def _carry_out(self, engine: Engine, command: Command) -> None:
        if isinstance(command, Submit):
            self._take_in(engine, command)
        elif isinstance(command, Abort):
            ended = [engine.abort(request_id) for request_id in command.request_ids]
            self._deliver(engine, [output for output in ended if output is not None])
        else:
            try:
                command.answer.set_result(command.ask(engine))
            except BaseException as error:  # it is the asker's
                command.answer.set_exception(error)

    def _take_in(self, engine: Engine, command: Submit) -> None:
        while command.left:
            request = command.left[0]
            if request.request_id in self._in_flight:
                tell_end(command.sink, failure(request, f"request id {request.request_id!r} is already in flight"))
                command.left.popleft()
                continue
            self._in_flight[request.request_id] = _Owned(request, command)
            command.left.popleft()
            try:
                engine.add(request)
            except Exception as error:
                if not isinstance(error, InputError):
                    logger.warning("a request could not be taken in", exc_info=True)
                self._close(failure(request, describe(error)))
            finally:
                self._mailbox.took(request)

    def _deliver(self, engine: Engine, outputs: list[SequenceOutput]) -> None:
        by_submit: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        for output in outputs:
            owned = self._in_flight.get(output.request_id)
            if owned is not None and (owned.submit.stream or output.finished is not None):
                by_submit.setdefault(id(owned.submit), (owned.submit.sink, []))[1].append(output)
        for sink, told in by_submit.values():
            failed = tell(sink, told)
            for request_id, error in failed.items():
                engine.abort(request_id, error)
                self._close(failure(self._in_flight[request_id].request, error))
            for output in told:
                if output.finished is not None:
                    self._in_flight.pop(output.request_id, None)

    def _close(self, output: SequenceOutput) -> None:
        """The last output of a request in flight that ended outside of a step."""
        tell_end(self._in_flight[output.request_id].submit.sink, output)
        del self._in_flight[output.request_id]

    def _end(self, engine: Engine, error: str | None) -> None:
        """Whatever happened: everybody who waits gets an answer, with what there is, and the memory is given back."""
        reason = error or _CLOSED
        try:
            for _ in range(_TRIES):  # a second one for what a first one could not do
                for owned in list(self._in_flight.values()):
                    with said_only(_UNTIDY):
                        self._close(self._last_output(engine, owned.request, error))
        finally:
            self._answer_mailbox(reason)
            with said_only(_UNTIDY):
                engine.close()

    def _last_output(self, engine: Engine, request: Request, error: str | None) -> SequenceOutput:
        try:
            output = engine.abort(request.request_id, error)
        except BaseException:  # the failure may have left it in any state
            output = None
        return failure(request, error or _CLOSED) if output is None or output.finished is None else output

    def _answer_mailbox(self, reason: str) -> None:
        for command in self._mailbox.shut(reason):
            for _ in range(_TRIES):
                with said_only(_UNTIDY):
                    _refuse(command, reason)


def _refuse(command: Command, reason: str) -> None:
    """Answers what is left of a command that the engine will not carry out any more."""
    if isinstance(command, Submit):
        while command.left:
            tell_end(command.sink, failure(command.left[0], reason))
            command.left.popleft()
    elif isinstance(command, Question) and not command.answer.done():
        command.answer.set_exception(EngineClosedError(reason))
