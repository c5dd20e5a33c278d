"""What LLM and its kin talk to: an engine behind a thread, in a child process, or several behind a router.

All three take requests by queue and give results through a sink, a function that is called with a list of
SequenceOutputs after each step that brought some, from a thread of the client's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from llamabatch.capacity import Plan
from llamabatch.checks import counted
from llamabatch.config import EngineConfig
from llamabatch.engine import Engine
from llamabatch.errors import EngineClosedError, EngineError, InputError, describe
from llamabatch.heartbeat import Heartbeat
from llamabatch.lifetime import Lifetime, settle
from llamabatch.llama.model import Model
from llamabatch.mailbox import Abort, Command, Mailbox, Question, Submit
from llamabatch.mailbox import Sink as Sink
from llamabatch.model_file import local
from llamabatch.request import Request, RequestOutput, SequenceOutput
from llamabatch.stats import EngineStats
from llamabatch.watch import Watch

if TYPE_CHECKING:
    from llamabatch.counting_client import CountingClient

logger = logging.getLogger(__name__)

_CLOSED = "the engine is closed"
_UNTIDY = "the engine could not be ended in good order"
_TRIES = 2  # to answer what is left when an engine ends


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
            sink: must not raise. One that does gets the same outputs again, each alone, and the request whose output
                makes it raise alone ends with that error, of which the sink is told once.
            stream: tell the sink of every token; otherwise of finished requests only.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
            QueueFull: more than max_queue would wait; nothing was taken in.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests; their outputs come through their sinks. Unknown and finished ids are ignored."""

    def stats(self) -> EngineStats:
        """Counts since the start, as they are now: no step is waited for, and sinks may ask, too.

        Of an engine in a child process a sink gets what was last asked for elsewhere.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
        """

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that have engines; none where they are in this process."""

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """How each child is that has an engine; none where they are in this process."""

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""

    def save_prefix(self, token_ids: list[int], path: str) -> bool:
        """As Engine.save_prefix; `path` is absolute."""

    def load_prefix(self, path: str) -> int:
        """As Engine.load_prefix, in all engines."""

    def unload_prefix(self, path: str) -> None:
        """As Engine.unload_prefix."""

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA or a control vector. Raises AdapterError, ModelFileError, EngineClosedError."""

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter. Raises AdapterError if it is not loaded or in use, EngineClosedError."""

    def close(self) -> None:
        """Ends all requests with finish_reason "abort" (in a child: "error") and frees everything. May be called twice.

        Not from a sink; nor what else waits for the engine: load_adapter(), unload_adapter().
        """


def failure(request: Request, error: str) -> SequenceOutput:
    """The event that ends a request which never ran."""
    return SequenceOutput(request.request_id, (), "", RequestOutput.failed(request, error))


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
        self, config: EngineConfig, *, model: Model | None = None, alone: bool = True, watch: Watch | None = None
    ) -> None:
        self._mailbox = Mailbox()
        started: Future[Engine] = Future()
        loop = _Loop(lambda: Engine(config, model=model, alone=alone, watch=watch), self._mailbox, watch)
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

    def save_prefix(self, token_ids: list[int], path: str) -> bool:
        saved: bool = self.ask(lambda engine: engine.save_prefix(token_ids, path)).result()
        return saved

    def load_prefix(self, path: str) -> int:
        n_tokens: int = self.ask(lambda engine: engine.load_prefix(path)).result()
        return n_tokens

    def unload_prefix(self, path: str) -> None:
        self.ask(lambda engine: engine.unload_prefix(path)).result()

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        self.ask(lambda engine: engine.load_adapter(name, path)).result()

    def unload_adapter(self, name: str) -> None:
        self.ask(lambda engine: engine.unload_adapter(name)).result()

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

    mailbox: Mailbox
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

    def __init__(self, make_engine: Callable[[], Engine], mailbox: Mailbox, watch: Watch | None) -> None:
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


@contextlib.contextmanager
def said_only(what: str) -> Iterator[None]:
    """Logs an exception and keeps it from what comes after, because requests are still to be answered there."""
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):
            logger.exception(what)


class _Depth(threading.local):
    now = 0


_depth = _Depth()  # of the sinks that this thread is in


def tell(sink: Sink, outputs: list[SequenceOutput]) -> dict[str, str]:
    """Hands outputs to a sink.

    One that raises gets each output once more, alone, so that the outputs of a call do not suffer from one of them.

    Returns:
        Of each request whose output alone makes the sink raise: its id, and the error that it ends with.
    """
    if not outputs or (error := _call(sink, outputs)) is None:
        return {}
    if len(outputs) == 1:
        return {outputs[0].request_id: error}
    failed: dict[str, str] = {}
    for output in outputs:
        if output.request_id not in failed and (error := _call(sink, [output])) is not None:
            failed[output.request_id] = error
    return failed


def tell_end(sink: Sink, output: SequenceOutput) -> None:
    """Hands a sink the error or abort that ends a request, and once more if the sink raises."""
    if _call(sink, [output]) is not None:
        _call(sink, [output])


def _call(sink: Sink, outputs: list[SequenceOutput]) -> str | None:
    """None, or the error of a sink that raised, which must not take the engine and other requests down."""
    _depth.now += 1
    try:
        sink(outputs)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, in a call whose own requests these are
        logger.exception("a result could not be delivered")
        return f"the result could not be delivered: {describe(error)}"
    finally:
        _depth.now -= 1
    return None


def in_a_sink() -> bool:
    """Is this thread telling somebody of results? Then it must not wait for an answer that such a thread brings."""
    return _depth.now > 0


# --- which kind -------------------------------------------------------------------------------------------------


def connect(config: EngineConfig) -> CountingClient:
    """The client that a config asks for."""
    from llamabatch.bounded_client import BoundedClient
    from llamabatch.counting_client import CountingClient

    client = _connect(config)
    return CountingClient(client if config.max_queue is None else BoundedClient(client, config.max_queue))


def _connect(config: EngineConfig) -> EngineClient:
    settle()
    draft = config.draft_model and local(config.draft_model)
    config = replace(config, model=local(config.model), draft_model=draft)
    if config.strategy != "multi-instance" and not config.isolate:
        return connect_here(config)
    from llamabatch.child_client import ChildClient, RouterClient  # they start programs; most users need neither

    return RouterClient(config) if config.strategy == "multi-instance" else ChildClient(config)


def connect_here(config: EngineConfig, watch: Watch | None = None) -> EngineClient:
    """One engine in this process, or as many as the plan says, which share the weights."""
    from llamabatch.threads_client import ThreadsClient

    first = ThreadClient(config, alone=False, watch=watch)
    return first if first.plan.config.instances == 1 else ThreadsClient(first, watch)
