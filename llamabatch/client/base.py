"""The interface of an engine to its callers, and the delivery of outputs to sinks.

Three kinds of client have this interface: an engine behind a thread, an engine in a child process, and several engines
behind a router. All put requests into a queue. After each step with outputs, a thread of the client calls the sinks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import describe
from llamabatch.llama.model import Model
from llamabatch.planning.plan import Plan
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request

logger = logging.getLogger(__name__)

# These times are in seconds. If a sink raises at the last output of a request, this output is delivered again: at once,
# and then after _FIRST_WAIT_S. Each later wait is twice the previous one, up to _LONGEST_WAIT_S. After _PATIENCE_S the
# output is dropped.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _PATIENCE_S = 0.05, 10.0, 60.0

CLOSED = "the engine is closed"

EngineMethod = Literal[
    "save_prefix", "load_prefix", "unload_prefix", "reset_prefix_cache", "load_adapter", "unload_adapter"
]


class EngineClient(Protocol):
    """The interface of one or several engines. Any thread may call its methods.

    Attributes:
        plan: the options in force, with the reason for each.
        model: the vocabulary, tokenizer and chat template of the model. The weights may be in another process.
    """

    plan: Plan
    model: Model

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        """Queues requests. Each request ends in exactly one output with `finished` set, even after an error.

        Args:
            sink: Gets the outputs of all its requests together after a step, including requests of other calls with the
                same sink. It must not raise. A sink that raises gets the same outputs again, one by one. If it raises
                again at an output, the request of this output ends, and the sink gets one last output with the sink's
                error.
            stream: True: the sink gets every token; False: only finished requests.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
            QueueFull: more than max_queue continuations would wait; no request was queued.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests; their outputs come through their sinks. Unknown and finished ids are ignored."""

    def stats(self) -> EngineStats:
        """Returns the counts since the start, without waiting for a step. Sinks may also call it.

        If the engine is in a child process, a call in a sink returns the last counts sent by the child.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
        """

    def states(self) -> list[EngineState]:
        """Returns the slots and the queue of each engine, without waiting for a step. Sinks must not call it.

        An engine that is being replaced is left out.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
        """

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        """Calls a method of Engine between two steps and returns its result. Paths among the arguments are absolute.

        With several engines, save_prefix runs in one engine after another, until one of them still has the KV cells.
        All other methods run in every engine.

        Raises:
            The errors of the Engine method; EngineClosedError: the client was closed, or its engine died.
        """

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that have engines; empty if the engines are in this process."""

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """The state of each child that has an engine; empty if the engines are in this process."""

    @property
    def outage(self) -> Outage | None:
        """The reason why no engine accepts requests. None while an engine accepts requests, or a dead one is being
        replaced.
        """

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""

    def close(self) -> None:
        """Ends all requests with finish_reason "abort" (in a child: "error") and frees everything. May be called twice.

        Neither close() nor call() may be used in a sink, because both wait for the engine.
        """


@dataclass(frozen=True)
class Heartbeat:
    """State of one child process.

    Attributes:
        pid: id of the present process; None while there is none.
        up: the process accepts requests; False while a dead process is being replaced.
        silent_s: seconds since its last sign of life, None before the first. The process sends at least one a second.
        last_token_s: seconds since the last token of its engine; None before the first.
        restarts: number of processes that replaced a dead one.
    """

    pid: int | None
    up: bool
    silent_s: float | None
    last_token_s: float | None
    restarts: int


@dataclass(frozen=True)
class Outage:
    """An engine that is gone, and is not being replaced at the moment.

    Attributes:
        reason: the message of the error raised by calls.
        retry_in_s: seconds until another engine starts; None: no other engine will start.
    """

    reason: str
    retry_in_s: float | None = None


def failure(request: Request, error: Exception | str) -> SequenceOutput:
    """Returns the only output of a request that could not run."""
    return SequenceOutput(request.request_id, (), "", RequestOutput.failed(request, error))


S = TypeVar("S", bound=Sink)


class SharedSinks(Generic[S]):
    """Wrappers around the sinks of callers. Each sink always has the same wrapper, so that the outputs of all its
    requests stay together. A wrapper lives as long as a request in flight uses it.

    This object keeps no reference to its client. Such a reference would make a cycle of the client and its sinks. The
    client, with the gigabytes of its engine, would then stay in memory until a garbage collection.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, S] = weakref.WeakValueDictionary()

    def of(self, sink: Sink, around: Callable[[Sink], S]) -> S:
        """Returns the wrapper of a sink.

        Args:
            around: makes the wrapper. The wrapper must keep the sink alive.
        """
        made = self._made.get(id(sink))
        if made is None:  # two threads may each make a wrapper; then only groups of outputs are split
            made = self._made[id(sink)] = around(sink)
        return made


def emit(sink: Sink, outputs: list[SequenceOutput]) -> dict[str, str]:
    """Calls a sink with outputs. If the sink raises, it gets each output again, one by one. One bad output then
    does not block good outputs.

    Returns:
        The errors that the sink raised when it got one output alone, by request id.
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


def emit_last(sink: Sink, output: SequenceOutput) -> None:
    """Calls a sink with the error or abort that ends a request. Repeats the call while the sink raises, because a
    caller waits for this output.

    The second call follows at once. Later calls come from another thread, so that other requests continue.
    """
    if _call(sink, [output]) is not None and _call(sink, [output]) is not None:
        _undelivered.add(sink, output)


_UNDELIVERED = "the result could not be delivered"


class _Undelivered:
    """Last outputs whose sinks have raised. One thread tries to deliver each output again for a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[tuple[float, Sink, SequenceOutput]] = []  # (time.monotonic() of the deadline, sink, output)
        self._is_trying = False
        self._added = threading.Event()

    def add(self, sink: Sink, output: SequenceOutput) -> None:
        self._added.set()
        with self._lock:
            self._left.append((time.monotonic() + _PATIENCE_S, sink, output))
            if self._is_trying:
                return
            try:
                threading.Thread(target=self._try, name="llamabatch-undelivered", daemon=True).start()
                self._is_trying = True
            except Exception:  # no thread can be started; the next call of add() tries again
                logger.exception("a last output could not be delivered yet")

    def _try(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            if self._added.wait(wait_s):
                wait_s = _FIRST_WAIT_S
                self._added.clear()
                time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            with self._lock:
                tried, self._left = self._left, []
            failed = [
                (until_s, sink, output)
                for until_s, sink, output in tried
                if _call(sink, [output]) is not None and time.monotonic() < until_s
            ]
            with self._lock:
                self._left += failed
                if not self._left:
                    self._is_trying = False
                    return
            del tried, failed  # sinks that have received their output must not stay alive during the wait


def in_a_sink() -> bool:
    """Returns True while this thread calls a sink. Such a thread delivers answers and must not wait for an answer."""
    return _depth.now > 0


@contextlib.contextmanager
def errors_logged(message: str) -> Iterator[None]:
    """Logs an exception instead of raising it, because requests must still be answered afterwards."""
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):
            logger.exception(message)


class _Depth(threading.local):
    now = 0


_depth = _Depth()  # number of sinks being called by this thread
_undelivered = _Undelivered()


def _call(sink: Sink, outputs: list[SequenceOutput]) -> str | None:
    """Calls a sink; returns its error, or None. The error must not end the engine and other requests."""
    _depth.now += 1
    try:
        sink(outputs)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C interrupts the call that submitted these requests
        with contextlib.suppress(Exception):  # logging may run out of memory, like the sink
            logger.exception(_UNDELIVERED)
            return f"{_UNDELIVERED}: {describe(error)}"
        return _UNDELIVERED
    finally:
        _depth.now -= 1
    return None
