"""Keeps an engine in a child process, and puts another in its place when it dies. What its callers asked for goes on.

The supervisor owns the requests; a child only has them for as long as it lives. One thread, the keeper, starts the
children one after another and watches them; what a child says comes in on that child's reading thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from llamabatch.client.base import EngineMethod, Heartbeat, in_a_sink, tell
from llamabatch.client.crash_triage import TrackedRequest
from llamabatch.client.in_flight import InFlight
from llamabatch.client.restart_policy import RESTARTS, RestartPolicy, Restarts, Silence
from llamabatch.client.spawn import WORKER, Child, Listener
from llamabatch.config import EngineConfig
from llamabatch.engine.hooks import Failover, Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError, EngineError, describe
from llamabatch.request.request import Request
from llamabatch.utils.lifetime import ForkGuard

# ----------------------------------------------------------------------------------------------------
# What a child was told to load, so that the one that takes its place loads it again. Pure Python.


class LoadedResources:
    """Adapters and prefixes, kept by the messages that load and unload them.

    Args:
        adapters: names and paths that the first child loads by itself.
    """

    def __init__(self, adapters: tuple[tuple[str, str], ...]) -> None:
        self._adapters = dict(adapters)
        self._prefixes: dict[str, None] = {}

    def note(self, kind: str, *arguments: str) -> None:
        """A child has done what this message asks for."""
        if kind == "load_adapter":
            self._adapters[arguments[0]] = arguments[1]
        elif kind == "unload_adapter":
            self._adapters.pop(arguments[0], None)
        elif kind == "load_prefix":
            self._prefixes[arguments[0]] = None
        elif kind == "unload_prefix":
            self._prefixes.pop(arguments[0], None)

    def messages(self) -> list[tuple[str, ...]]:
        """What makes a new child the same."""
        adapters = [("load_adapter", name, path) for name, path in self._adapters.items()]
        return [*adapters, *(("load_prefix", path) for path in self._prefixes)]


logger = logging.getLogger(__name__)

_CLOSED = "the engine is closed"
_TICK_S = 1.0
_SHORT_TICK_S = 0.1  # while requests wait here and not in a child

StartChild = Callable[[EngineConfig, dict[str, str], str, Listener], Child]


class Supervisor:
    """What an EngineClient does, over one child at a time. Safe to call from any thread.

    Args:
        config: without "auto".
        environment: variables for the child, in addition to this process's.
        program: the module that a child runs; it speaks the wire.
        start_child: makes a Child; tests have others.

    Attributes:
        heir: gets what no child has begun when there will be none any more; without one, that ends as errors.
    """

    def __init__(
        self,
        config: EngineConfig,
        environment: dict[str, str] | None = None,
        program: str = WORKER,
        policy: RestartPolicy = RESTARTS,
        start_child: StartChild = Child,
    ) -> None:
        self.failover: weakref.WeakMethod[Failover] | None = None  # its owner may be collected
        self._config = config
        self._environment = environment or {}
        self._program = program
        self._policy = policy
        self._start_child = start_child
        self._restarts = Restarts(policy)
        self._loaded = LoadedResources(config.adapters)
        self._past = EngineStats()  # of children that have ended
        self._last = EngineStats()  # what the present one has said of itself
        self._home = ForkGuard()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight = InFlight(self._lock)
        self._child: Child | None = None
        self._is_up = False  # the child takes requests
        self._closing = False
        self._gone: str | None = None  # why there is no child any more, and will be none unless a call brings one
        self._has_ended = False  # the keeper has
        self._events: queue.SimpleQueue[tuple[str, Child | None]] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._keeper = threading.Thread(target=self._keep, name="llamabatch-supervisor", daemon=True)

    # --- from its client ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the first child; wait_until_ready waits for it."""
        self._keeper.start()

    def wait_until_ready(self) -> None:
        """Raises what the first child raised while it started."""
        self._started.result()

    @property
    def alive(self) -> bool:
        """Does it take requests, be it that they wait for the next child?"""
        with self._lock:
            return not self._closing and (self._gone is None or self._retry_in() == 0)

    @property
    def up(self) -> bool:
        """Is there a child that computes?"""
        return self._is_up

    @property
    def pid(self) -> int | None:
        """Of the present child."""
        child = self._child
        return None if child is None else child.pid

    @property
    def heartbeat(self) -> Heartbeat:
        """How the present child is."""
        with self._lock:
            child, total = self._child, self._restarts.total
            return Heartbeat(None, False, None, None, total) if child is None else child.heartbeat(self._is_up, total)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        """As EngineClient.submit."""
        self._home.check()
        own: list[TrackedRequest] = []
        child = None
        try:
            with self._lock:
                self._revive()
                refused = self._in_flight.add(requests, sink, stream, own)
                child, taken = self._take(own)
            tell(sink, refused)
            self._in_flight.send(child, taken)
        except BaseException:
            self._in_flight.forget(own)
            if child is not None:
                child.abort([ticket.request.request_id for ticket in own])
            raise

    def revive(self) -> None:
        """Has another child tried where there is none any more, if it is time for one; returns at once."""
        with contextlib.suppress(EngineClosedError), self._lock:
            self._revive()

    def abort(self, request_ids: Iterable[str]) -> None:
        """As EngineClient.abort; what is in no child ends here and now."""
        if not self._home.is_here:
            return
        inside, child = self._in_flight.abort(request_ids), self._child
        if inside and child is not None:  # another child by now? then they have ended with the one before
            child.abort(inside)

    def stats(self) -> EngineStats:
        """As EngineClient.stats: of all children together, also while there is none because it has given up."""
        self._home.check()
        with self._lock:
            if self._gone is None or self._retry_in() is None:
                self._check_alive()
            child = self._child if self._is_up else None
        if child is not None and not in_a_sink():  # whoever asks from one gets what was last told
            try:
                child.ask("stats").result()  # before the answer came the figures
            except EngineClosedError:
                if not self._outlives(child):
                    raise
        with self._lock:
            counted = self._past + self._last
            waiting = counted.waiting + self._in_flight.n_unsent
            return replace(counted, waiting=waiting, restarts=self._restarts.total)

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        """Sends a call to the child, or to the next one, and waits for its answer.

        Raises:
            What the child refuses it with; EngineError if the child ended before it answered; EngineClosedError if
            there is none and will be none.
        """
        self._home.check()
        with self._changed:
            self._revive()
            self._changed.wait_for(lambda: self._is_up or self._gone is not None)
            self._check_alive()
            child = self._child
        assert child is not None
        try:
            answer = child.ask(method, *arguments).result()
        except EngineClosedError as error:
            if not self._outlives(child):
                raise
            raise EngineError(f"{method}: {error}") from error
        with self._lock:
            self._loaded.note(method, *arguments)
        return answer

    def ask_to_end(self) -> None:
        """Returns at once."""
        self._closing = True
        child = self._child
        if child is not None:
            if self._is_up:
                child.ask_to_end()
            else:  # it is still loading
                child.kill()
        self._events.put(("close", None))

    def wait(self, deadline: float) -> None:
        """Until all has ended, or time.monotonic() reaches the deadline."""
        if self._keeper.is_alive() and self._keeper is not threading.current_thread():
            self._keeper.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kills the child if it still runs, and leaves nothing behind."""
        self.drop()
        if self._keeper.is_alive() and self._keeper is not threading.current_thread():
            self._keeper.join()

    def drop(self) -> None:
        """Kills the child and waits for nobody; the keeper clears up."""
        self._closing = True
        child = self._child
        if child is not None:
            child.kill()
        self._events.put(("close", None))

    @property
    def ended(self) -> bool:
        return not self._keeper.is_alive()

    # --- from the child, on its reading thread ------------------------------------------------------------------

    def is_ready(self, child: Child) -> None:
        self._events.put(("ready", child))

    def is_gone(self, child: Child) -> None:
        self._events.put(("gone", child))

    def has_admitted(self, child: Child, request_ids: list[str]) -> None:
        self._in_flight.admitted(request_ids)

    def has_stats(self, child: Child, packed: dict[str, Any]) -> None:
        stats = EngineStats.from_wire(packed)
        with self._lock:
            self._last = stats

    def has_outputs(self, child: Child, packed: list[list[Any]]) -> None:
        was_trying = self._in_flight.is_trying
        if self._in_flight.outputs(packed):
            with self._lock:
                self._restarts.worked()
        if was_trying or self._in_flight.has_unwanted:
            self._events.put(("next", child))  # the keeper sends: this thread must go on reading

    # --- the keeper ---------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """One child after another, until there is a reason to stop."""
        reason = _CLOSED
        try:
            while not self._closing:
                how, never_ready = self._live()
                if self._closing:
                    break
                if not self._started.done():
                    self._started.set_exception(never_ready or EngineError(how))
                    reason = how
                    break
                wait_s = self._restarts.after_death()
                if wait_s is None:
                    reason = self._restarts.too_often(how)
                    logger.error("%s; there is no other one until a call asks for it", reason)
                    if not self._give_up(reason):
                        break
                    reason = _CLOSED
                    continue
                logger.warning("the engine process ended: %s; another one is started", how)
                self._on_child_death()
                self._wait(wait_s)
        except BaseException as error:  # of any kind: all are answered before this thread ends
            reason = f"the supervisor failed: {describe(error)}"
            with contextlib.suppress(Exception):
                logger.exception("the supervisor failed")
        finally:
            self._stop(reason)

    def _live(self) -> tuple[str, BaseException | None]:
        """The life of one child: how it ended, and what it raised if it never came to be."""
        is_first = not self._started.done()
        config = self._config if is_first else replace(self._config, adapters=())
        try:
            child = self._start_child(config, self._environment, self._program, self)
        except Exception as error:  # descriptors, processes, threads or memory are used up
            why = describe(error)
            return f"it could not be started: {why}", EngineError(f"no engine process could be started: {why}")
        with self._lock:
            self._child = child
        if self._closing:
            child.kill()
        try:
            self._attend(child)
        finally:
            with self._lock:
                self._is_up = False
            child.end()
        failed = child.ready.exception()
        return child.how if failed is None else str(failed), failed

    def _attend(self, child: Child) -> None:
        """Until it is gone."""
        silence = Silence()
        while True:
            try:
                kind, who = self._events.get(timeout=self._tick_s())
            except queue.Empty:
                kind, who = "tick", None
            if kind == "gone" and who is child:
                return
            if kind == "ready" and who is child and not self._closing:
                self._open(child)
            if kind == "tick":
                self._in_flight.end_late()
                limit_s = self._policy.hang_s if child.beats else self._policy.start_s
                if silence.look(child.heard, child.busy, time.monotonic()) > limit_s:
                    child.kill(f"it gave no sign of life for {limit_s:g} s")
            unwanted = self._in_flight.unwanted()
            if unwanted:
                child.abort(unwanted)
            self._in_flight.send(*self._take())

    def _tick_s(self) -> float:
        return _SHORT_TICK_S if self._in_flight.n_unsent else _TICK_S

    def _open(self, child: Child) -> None:
        """It takes requests now; what its predecessors had loaded comes first, as messages keep their order."""
        if self._started.done():
            with self._lock:
                messages = self._loaded.messages()
            for kind, *arguments in messages:
                try:
                    child.ask(kind, *arguments).add_done_callback(_warn)
                except EngineClosedError:
                    return
        with self._changed:
            self._is_up = True
            self._changed.notify_all()
        if not self._started.done():
            self._started.set_result(None)

    def _on_child_death(self) -> None:
        """What the end of a child means for the requests that it had."""
        with self._changed:
            how, from_outside = ("", False) if self._child is None else (self._child.how, self._child.from_outside)
            self._child = None
            self._past, self._last = self._past + self._last.of_the_past(), EngineStats()
            self._changed.notify_all()
        self._in_flight.child_died(how, from_outside)

    def _wait(self, wait_s: float) -> None:
        """Before the next child; requests may still be aborted, or reach their deadlines."""
        until = time.monotonic() + wait_s
        while not self._closing and time.monotonic() < until:
            try:
                self._events.get(timeout=min(_SHORT_TICK_S, max(0.0, until - time.monotonic())))
            except queue.Empty:
                self._in_flight.end_late()

    def _give_up(self, reason: str) -> bool:
        """Ends or gives away all requests, then waits until a call asks for another child; False: there is to be
        none."""
        self._on_child_death()
        with self._changed:
            self._restarts.given_up(time.monotonic())
            if self._retry_in() is None:
                return False
            self._gone = reason
            self._changed.notify_all()
        self._answer_all(reason)
        while self._gone is not None and not self._closing:
            self._events.get()
        return not self._closing

    def _stop(self, reason: str) -> None:
        """Nobody may wait for ever."""
        with self._changed:
            self._gone = reason
            self._has_ended = True
            self._changed.notify_all()
        try:
            if not self._started.done():
                self._started.set_exception(EngineClosedError(reason))
        finally:
            self._answer_all(reason)

    def _answer_all(self, reason: str) -> None:
        failover = None if self.failover is None or self._closing else self.failover()
        try:
            if failover is not None:
                self._in_flight.hand_over(failover, reason)
        finally:
            self._in_flight.end_all(reason)

    # --- both ---------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._gone is not None:
            retry_in = self._retry_in()
            when = "" if retry_in is None else f"; a call in {math.ceil(retry_in)} s tries another one"
            raise EngineClosedError(self._gone + when)
        if self._closing:
            raise EngineClosedError(_CLOSED)

    def _retry_in(self) -> float | None:
        """Seconds until a call may bring another child; None: never."""
        return None if self._closing or self._has_ended else self._restarts.retry_in(time.monotonic())

    def _revive(self) -> None:
        """Where there is no child any more, has the keeper start one if it is time for that. Raises
        EngineClosedError."""
        if self._gone is not None and self._retry_in() == 0:
            self._gone = None
            self._restarts.retried()
            self._events.put(("revive", None))
        self._check_alive()

    def _outlives(self, child: Child) -> bool:
        """Waits until this child has been buried; False if nothing comes after it."""
        with self._changed:
            self._changed.wait_for(lambda: self._child is not child or self._gone is not None)
            return self._gone is None

    def _take(self, only: list[TrackedRequest] | None = None) -> tuple[Child | None, list[TrackedRequest]]:
        """Whoever may go into the child now, of all or of some."""
        with self._lock:
            if self._child is None or not self._is_up:
                return None, []
            return self._child, self._in_flight.take(only)


def _warn(answer: Future[Any]) -> None:
    error = answer.exception()
    if error is not None and not isinstance(error, EngineClosedError):
        logger.warning("what was loaded before the engine process ended could not be loaded again: %s", error)
