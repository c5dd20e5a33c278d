"""A supervisor keeps an engine in a child process and replaces the process when it dies. Requests in flight continue.

The supervisor owns the requests; a child only has copies. The supervisor's thread starts the children one after another
and watches them. A second thread for each child receives its messages.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from llamabatch.client.base import CLOSED, EngineMethod, Heartbeat, Outage, emit, in_a_sink
from llamabatch.client.crash_triage import CrashTriage, TrackedRequest
from llamabatch.client.loaded_resources import LoadedResources
from llamabatch.client.restart_policy import RESTARTS, RestartPolicy, Restarts, Silence, none_can_start
from llamabatch.client.spawn import WORKER, Child, Listener
from llamabatch.client.wire import unpack_state
from llamabatch.config import EngineConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Failover, Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError, EngineError, InputError, LlamaBatchError, describe
from llamabatch.gguf.resolve import model_identity, resolve
from llamabatch.request.request import Request
from llamabatch.utils.cancellation import result_of
from llamabatch.utils.lifetime import ForkGuard

logger = logging.getLogger(__name__)

_TICK_S = 1.0  # seconds between two checks of the child
_SHORT_TICK_S = 0.1  # seconds between two checks while requests wait for a child

StartChild = Callable[[EngineConfig, dict[str, str], str, Listener], Child]


class Supervisor:
    """An engine in one child process at a time, with the methods of EngineClient. Safe to call from any thread.

    Args:
        config: a config in which no option is "auto".
        environment: additional environment variables of a child.
        program: the module run by a child. It reads and writes the messages of wire.py.
        policy: the rules for replacing a dead child.
        start_child: makes a Child; tests replace it.
        clock: returns seconds, as time.monotonic does; tests replace it.

    Attributes:
        failover: called with the requests that never started when no child will run for a while; None: they fail.
        at_end: the supervisor's thread calls it just before the thread ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        environment: dict[str, str] | None = None,
        program: str = WORKER,
        policy: RestartPolicy = RESTARTS,
        start_child: StartChild = Child,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failover: weakref.WeakMethod[Failover] | None = None  # weak, so that the method's owner can be collected
        self.at_end: Callable[[], None] | None = None
        self._config = config
        self._environment = environment or {}
        self._program = program
        self._policy = policy
        self._start_child = start_child
        self._clock = clock
        self._restarts = Restarts(policy)
        self._identity: dict[str, Any] | None = None  # identity of the model's file
        self._loaded = LoadedResources(config.adapters)
        self._past_stats = EngineStats()  # sum of the counts of all ended children
        self._child_stats = EngineStats()  # the last counts from the present child
        self._fork_guard = ForkGuard()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._requests = CrashTriage(self._lock)
        self._child: Child | None = None
        self._is_up = False  # the child accepts requests
        self._closing = False
        self._end_reason: str | None = None  # the reason why no child runs; None: a child runs or starts soon
        self._has_ended = False  # the thread has ended its work
        self._events: queue.SimpleQueue[tuple[str, Child | None]] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="llamabatch-supervisor", daemon=True)

    def start(self) -> None:
        """Starts the first child and returns at once; see wait_until_ready."""
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Waits until the first child is ready. Raises the error of its start, or EngineClosedError if the load is
        cancelled."""
        result_of(self._started)

    @property
    def alive(self) -> bool:
        """True if the supervisor accepts requests. Requests may wait for the next child."""
        with self._lock:
            return not self._closing and self._end_reason is None

    @property
    def outage(self) -> Outage | None:
        """The reason why the supervisor accepts no requests; see EngineClient.outage."""
        with self._lock:
            if self._end_reason is None:
                return Outage(CLOSED) if self._closing else None
            return Outage(self._end_reason, self._retry_in())

    @property
    def up(self) -> bool:
        """True if a child runs and accepts requests."""
        return self._is_up

    @property
    def pid(self) -> int | None:
        """Process id of the present child; None without a child."""
        child = self._child
        return None if child is None else child.pid

    @property
    def heartbeat(self) -> Heartbeat:
        """The state of the present child."""
        with self._lock:
            child, total = self._child, self._restarts.total
            return Heartbeat(None, False, None, None, total) if child is None else child.heartbeat(self._is_up, total)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        """Queues requests, as EngineClient.submit does."""
        self._fork_guard.check()
        own: list[TrackedRequest] = []
        child = None
        try:
            with self._lock:
                self._check_alive()
                refused = self._requests.add(requests, sink, stream, own)
                child, sendable = self._pop_sendable(own)
            emit(sink, refused)
            self._requests.send(child, sendable)
        except BaseException:
            self._requests.forget(own)
            if child is not None:
                child.abort([tracked.request_id for tracked in own])
            raise

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests, as EngineClient.abort does. Requests that are waiting for a child end at once."""
        if not self._fork_guard.is_here:
            return
        inside, child = self._requests.abort(request_ids), self._child
        if inside and child is not None:  # a new child does not know these ids and ignores them
            child.abort(inside)

    def stats(self) -> EngineStats:
        """Returns the summed counts of all children, as EngineClient.stats does, also while no child runs."""
        self._fork_guard.check()
        with self._lock:
            if self._end_reason is None or self._retry_in() is None:
                self._check_alive()
            child = self._child if self._is_up else None
        if child is not None and not in_a_sink():  # a sink must not wait, so it gets the last counts
            try:
                child.ask("stats").result()  # on_stats gets the counts before the answer comes
            except EngineClosedError:
                if not self._is_replaced(child):
                    raise
        with self._lock:
            counted = self._past_stats + self._child_stats
            waiting = counted.waiting + self._requests.n_unsent
            return replace(counted, waiting=waiting, restarts=self._restarts.total)

    def states(self) -> list[EngineState]:
        """Returns slots and queue, as EngineClient.states does. The list is empty while no child accepts requests."""
        self._fork_guard.check()
        with self._lock:
            self._check_alive()
            child = self._child if self._is_up else None
        if child is None:
            return []
        try:
            packed = child.ask("states").result()
        except EngineClosedError:
            if not self._is_replaced(child):
                raise
            return []
        states = [unpack_state(each) for each in packed]
        with self._lock:
            n_unsent = self._requests.n_unsent
        return [replace(state, n_waiting=state.n_waiting + n_unsent) for state in states[:1]] + states[1:]

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        """Sends a call to the child and waits for the answer. If a child is starting, waits for it first.

        Raises:
            The error of the engine's method; EngineError if the child ended before the answer; EngineClosedError if no
            child runs or is starting.
        """
        self._fork_guard.check()
        with self._changed:
            self._check_alive()
            self._changed.wait_for(lambda: self._is_up or self._end_reason is not None)
            self._check_alive()
            child = self._child
        assert child is not None
        try:
            answer = child.ask(method, *arguments).result()
        except EngineClosedError as error:
            if not self._is_replaced(child):
                raise
            raise EngineError(f"{method}: {error}") from error
        with self._lock:
            self._loaded.record(method, *arguments)
        return answer

    def ask_to_end(self) -> None:
        """Asks the child to end and returns at once. No other child will start."""
        self._closing = True
        child = self._child
        if child is not None:
            if self._is_up:
                child.ask_to_end()
            else:  # the child is still loading
                child.kill()
        self._events.put(("close", None))

    def wait(self, deadline: float) -> None:
        """Waits until the supervisor's thread has ended, or time.monotonic() reaches the deadline."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kills the child if it still runs, and waits until the supervisor's thread has ended."""
        self.drop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def drop(self) -> None:
        """Kills the child and returns at once; the supervisor's thread cleans up."""
        self._closing = True
        child = self._child
        if child is not None:
            child.kill()
        self._events.put(("close", None))

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    # The Listener of the child: these methods run on the thread that reads from the child.

    def on_ready(self, child: Child) -> None:
        self._events.put(("ready", child))

    def on_exit(self, child: Child) -> None:
        self._events.put(("exit", child))

    def on_admitted(self, child: Child, request_ids: list[str]) -> None:
        self._requests.admitted(request_ids)

    def on_stats(self, child: Child, packed: dict[str, Any]) -> None:
        stats = EngineStats.from_wire(packed)
        with self._lock:
            self._child_stats = stats

    def on_outputs(self, child: Child, packed: Sequence[Any]) -> None:
        was_trying = self._requests.is_trying
        if self._requests.deliver(packed):
            with self._lock:
                self._restarts.worked()
        if was_trying or self._requests.has_unwanted:
            self._events.put(("send", child))  # the supervisor's thread sends; this thread must continue to read

    # The supervisor's thread.

    def _run(self) -> None:
        """Runs one child after another until no other child may start."""
        reason = CLOSED
        try:
            while not self._closing:
                if self._has_other_model():
                    self._restarts.refused()
                    reason = none_can_start("the model file was replaced since the start; load the model again")
                    if not self._pause(reason):
                        break
                    reason = CLOSED
                    continue
                exit_reason, never_ready = self._run_child()
                if self._closing:
                    break
                if not self._started.done():
                    self._started.set_exception(never_ready or EngineError(exit_reason))
                    reason = exit_reason
                    break
                wait_s = None
                if isinstance(never_ready, InputError):  # the file or an option is wrong: retries do not help
                    self._restarts.refused()
                    reason = none_can_start(exit_reason)
                elif (wait_s := self._restarts.after_death()) is None:
                    reason = self._restarts.too_often(exit_reason)
                if wait_s is None:
                    if not self._pause(reason):
                        break
                    reason = CLOSED
                    continue
                logger.warning("the engine process ended: %s; another one is started", exit_reason)
                self._on_child_death()
                self._wait_for_restart(self._clock() + wait_s)
        except BaseException as error:  # any error: all requests are answered before this thread ends
            reason = f"the supervisor failed: {describe(error)}"
            with contextlib.suppress(Exception):
                logger.exception("the supervisor failed")
        finally:
            self._stop(reason)
            if self.at_end is not None:
                self.at_end()

    def _has_other_model(self) -> bool:
        """Returns True if another file has replaced the model's file. Its weights do not fit the vocabulary and the
        chat template that the clients have read from the first file."""
        try:
            found = model_identity(resolve(self._config.model))
        except (OSError, LlamaBatchError):  # the child will report the error
            return False
        if self._identity is None:
            self._identity = found
        return found != self._identity

    def _run_child(self) -> tuple[str, BaseException | None]:
        """Runs one child until its end. Returns its exit reason, and the error of its start (None if it was ready)."""
        is_first = not self._started.done()
        config = self._config if is_first else replace(self._config, adapters=())
        try:
            child = self._start_child(config, self._environment, self._program, self)
        except Exception as error:  # no descriptors, processes, threads or memory are left
            why = describe(error)
            return f"it could not be started: {why}", EngineError(f"no engine process could be started: {why}")
        with self._lock:
            self._child = child
        if self._closing:
            child.kill()
        try:
            self._watch_child(child)
        finally:
            with self._lock:
                self._is_up = False
            child.end()
        failed = child.ready.exception()
        return child.exit_reason if failed is None else str(failed), failed

    def _watch_child(self, child: Child) -> None:
        """Sends requests to the child until it has ended, and kills it if it hangs."""
        silence = Silence()
        while True:
            try:
                kind, sender = self._events.get(timeout=self._tick_s())
            except queue.Empty:
                kind, sender = "tick", None
            if kind == "exit" and sender is child:
                return
            if kind == "ready" and sender is child and not self._closing:
                self._open(child)
            if kind == "tick":
                self._requests.end_late()
                limit_s = self._policy.hang_s if child.has_beaten else self._policy.start_s
                if silence.look(child.n_received, child.reader_is_busy, time.monotonic()) > limit_s:
                    child.kill(f"it gave no sign of life for {limit_s:g} s")
            unwanted = self._requests.pop_unwanted()
            if unwanted:
                child.abort(unwanted)
            self._requests.send(*self._pop_sendable())

    def _tick_s(self) -> float:
        return _SHORT_TICK_S if self._requests.n_unsent else _TICK_S

    def _open(self, child: Child) -> None:
        """Makes the child load the adapters and prefixes of earlier children, then marks the child as up. Requests
        reach the child after these calls, because messages keep their order.
        """
        if self._started.done():
            with self._lock:
                calls = self._loaded.calls()
            for method, *arguments in calls:
                try:
                    child.ask(method, *arguments).add_done_callback(_warn)
                except EngineClosedError:
                    return
        with self._changed:
            self._is_up = True
            self._changed.notify_all()
        if not self._started.done():
            self._started.set_result(None)

    def _on_child_death(self) -> None:
        """Keeps the requests and counts of the child that has ended."""
        with self._changed:
            child, self._child = self._child, None
            self._past_stats, self._child_stats = self._past_stats + self._child_stats.of_the_past(), EngineStats()
            self._changed.notify_all()
        exit_reason, from_outside = ("", False) if child is None else (child.exit_reason, child.from_outside)
        self._requests.child_died(exit_reason, from_outside)

    def _wait_for_restart(self, until: float) -> None:
        """Waits before the next child starts. During the wait, ends requests that are past their deadlines."""
        while not self._closing and self._clock() < until:
            try:
                self._events.get(timeout=min(_SHORT_TICK_S, max(0.0, until - self._clock())))
            except queue.Empty:
                self._requests.end_late()

    def _pause(self, reason: str) -> bool:
        """Ends all requests or passes them to `failover`, and waits for the next child. Returns False if none comes."""
        self._on_child_death()
        with self._changed:
            now = self._clock()
            self._restarts.given_up(now)
            wait_s = self._restarts.retry_in(now)
            if wait_s is None:
                logger.error("%s; no other one is started", reason)
                return False
            self._end_reason = reason
            self._changed.notify_all()
        logger.error("%s; another one is started in %d s", reason, math.ceil(wait_s))
        self._answer_all(reason)
        self._wait_for_restart(now + wait_s)
        with self._changed:
            if self._closing:
                return False
            self._end_reason = None
            self._restarts.retried()
        return True

    def _stop(self, reason: str) -> None:
        """Answers all waiting callers, because no other child will start."""
        with self._changed:
            self._end_reason = reason
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
                self._requests.hand_over(failover, reason)
        finally:
            self._requests.end_all(reason)

    def _check_alive(self) -> None:
        if self._end_reason is not None:
            retry_in = self._retry_in()
            when = "" if retry_in is None else f"; another one is started in {math.ceil(retry_in)} s"
            raise EngineClosedError(self._end_reason + when)
        if self._closing:
            raise EngineClosedError(CLOSED)

    def _retry_in(self) -> float | None:
        """Returns the seconds until another child starts; None: no child will start."""
        return None if self._closing or self._has_ended else self._restarts.retry_in(self._clock())

    def _is_replaced(self, child: Child) -> bool:
        """Waits until the supervisor has handled the end of this child. Returns False if no other child follows."""
        with self._changed:
            self._changed.wait_for(lambda: self._child is not child or self._end_reason is not None)
            return self._end_reason is None

    def _pop_sendable(self, only: list[TrackedRequest] | None = None) -> tuple[Child | None, list[TrackedRequest]]:
        """Returns the child and the requests to send to it now, chosen from `only` if it is given."""
        with self._lock:
            if self._child is None or not self._is_up:
                return None, []
            return self._child, self._requests.pop_sendable(only)


def _warn(answer: Future[Any]) -> None:
    error = answer.exception()
    if error is not None and not isinstance(error, EngineClosedError):
        logger.warning("an adapter or prefix could not be loaded into the new engine process: %s", error)
