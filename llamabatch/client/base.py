"""The interface of an engine to its callers, and how outputs reach their sinks.

Three kinds of client have it: an engine behind a thread, an engine in a child process, and several engines behind a
router. All take requests by queue and emit outputs through sinks, after each step that brought some, on a thread of the
client's own.
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
from llamabatch.planning.capacity import Plan
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request

logger = logging.getLogger(__name__)

# Of a last output whose sink raises: the wait before its third delivery, seconds; each later wait is twice the one
# before, up to the longest; and the time after which the sink is taken for one that always raises.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _PATIENCE_S = 0.05, 10.0, 60.0

EngineMethod = Literal[
    "save_prefix", "load_prefix", "unload_prefix", "reset_prefix_cache", "load_adapter", "unload_adapter"
]


class EngineClient(Protocol):
    """The one way to an engine. Safe to call from any thread.

    Attributes:
        plan: the options in force, and why.
        model: for its vocabulary, tokenizer and chat template; its weights may be elsewhere.
    """

    plan: Plan
    model: Model

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        """Queues requests. Each ends in exactly one output with `finished` set, be it an error.

        Args:
            sink: gets the outputs of all its requests together after a step, also of those that other calls submitted
                with the same object. It must not raise. One that does gets the same outputs again, each alone, and the
                request whose output makes it raise alone ends with that error, which the sink gets once.
            stream: emit every token; otherwise finished requests only.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
            QueueFull: more than max_queue would wait; no request was queued.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests; their outputs come through their sinks. Unknown and finished ids are ignored."""

    def stats(self) -> EngineStats:
        """Counts since the start, as they are now: no step is waited for, and sinks may call it, too.

        In a sink, the figures of an engine in a child process are the last that came.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
        """

    def states(self) -> list[EngineState]:
        """The slots and the queue of each engine, as they are now: no step is waited for. Not in a sink.

        An engine that is being replaced is left out.

        Raises:
            EngineClosedError: the client was closed, or its engine died.
        """

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        """Calls a method of Engine between two steps and returns its answer; paths among the arguments are absolute.

        Over several engines, save_prefix ends at the first that still has the cells, and the others run in all of them.

        Raises:
            As the method of Engine; EngineClosedError: the client was closed, or its engine died.
        """

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that have engines; empty if the engines are in this process."""

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """One for each child that has an engine; empty if the engines are in this process."""

    @property
    def outage(self) -> Outage | None:
        """The reason that no engine takes requests; None while one does, or while one that died is being replaced."""

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""

    def close(self) -> None:
        """Ends all requests with finish_reason "abort" (in a child: "error") and frees everything. May be called twice.

        Neither close() nor call() may be used in a sink, as both wait for the engine.
        """


@dataclass(frozen=True)
class Heartbeat:
    """State of one child process.

    Attributes:
        pid: of the present process; None while there is none.
        up: it takes requests; False while one that died is being replaced.
        silent_s: seconds since its last sign of life, of which it sends one a second at least. None before the first.
        last_token_s: seconds since its engine last brought a token; None before the first.
        restarts: processes that took the place of one that died.
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
        reason: the error of calls.
        retry_in_s: seconds until another engine is started; None: none will be.
    """

    reason: str
    retry_in_s: float | None = None


def failure(request: Request, error: Exception | str) -> SequenceOutput:
    """The output that ends a request which never ran."""
    return SequenceOutput(request.request_id, (), "", RequestOutput.failed(request, error))


S = TypeVar("S", bound=Sink)


class SharedSinks(Generic[S]):
    """Sinks around the sinks of callers: of one sink always the same one, so that the outputs of all its requests still
    go on together. Each lives as long as a request in flight has it.

    This keeps no reference to its client. A client in a cycle with its sinks would be freed by the next garbage
    collection only, and so would the gigabytes of its engine.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, S] = weakref.WeakValueDictionary()

    def of(self, sink: Sink, around: Callable[[Sink], S]) -> S:
        """The sink around this one.

        Args:
            around: makes that sink, which keeps this one alive.
        """
        made = self._made.get(id(sink))
        if made is None:  # made by two threads at once, the two only group less
            made = self._made[id(sink)] = around(sink)
        return made


def emit(sink: Sink, outputs: list[SequenceOutput]) -> dict[str, str]:
    """Calls a sink with outputs. One that raises gets each output once more, alone, so that one output does not hold up
    the others.

    Returns:
        The errors of the requests whose output alone makes the sink raise, by request id.
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
    """Calls a sink with the error or abort that ends a request, and again while the sink raises: a caller waits for it.

    The second call follows at once, later ones come from another thread, so that other requests go on.
    """
    if _call(sink, [output]) is not None and _call(sink, [output]) is not None:
        _undelivered.add(sink, output)


_UNDELIVERED = "the result could not be delivered"


class _Undelivered:
    """Last outputs whose sinks have raised, for want of memory, say. One thread tries them again, for a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[tuple[float, Sink, SequenceOutput]] = []  # with the time.monotonic() of their ends
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
            except Exception:  # no thread can be started; the next output tries again, with this one
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
            del tried, failed  # while this waits, no sink is kept that has its output


def in_a_sink() -> bool:
    """This thread is calling a sink, and must not wait for an answer that such a thread brings."""
    return _depth.now > 0


@contextlib.contextmanager
def errors_logged(message: str) -> Iterator[None]:
    """Logs an exception instead of raising it, as requests are still to be answered after it."""
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):
            logger.exception(message)


class _Depth(threading.local):
    now = 0


_depth = _Depth()  # of sinks that this thread is in
_undelivered = _Undelivered()


def _call(sink: Sink, outputs: list[SequenceOutput]) -> str | None:
    """None, or the error of a sink that raised, which must not end the engine and other requests."""
    _depth.now += 1
    try:
        sink(outputs)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, in the call that submitted these requests
        with contextlib.suppress(Exception):  # memory that a sink lacks may be lacking here, too
            logger.exception(_UNDELIVERED)
            return f"{_UNDELIVERED}: {describe(error)}"
        return _UNDELIVERED
    finally:
        _depth.now -= 1
    return None
