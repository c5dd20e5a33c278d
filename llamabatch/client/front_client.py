"""FrontClient: the client used by entry points. It tracks requests outside the engines, so that the death of an engine
loses no request and no count.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from llamabatch.client.asleep import AsleepClient
from llamabatch.client.base import (
    CLOSED,
    EngineClient,
    EngineMethod,
    Heartbeat,
    Outage,
    SharedSinks,
    emit_last,
    failure,
    in_a_sink,
)
from llamabatch.client.front_sink import FrontSink
from llamabatch.client.loaded_resources import LoadedResources
from llamabatch.client.request_table import Call, RequestTable
from llamabatch.config import EngineConfig, ResolvedConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError, EngineError, LlamaBatchError, describe
from llamabatch.gguf.header import part_paths
from llamabatch.gguf.resolve import resolve
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.scheduler.policies import policy
from llamabatch.utils.cancellation import cancelled_by
from llamabatch.utils.checks import counted
from llamabatch.utils.lifetime import ForkGuard

logger = logging.getLogger(__name__)

Connect = Callable[[EngineConfig], EngineClient]


def slots_of(config: ResolvedConfig) -> int:
    """Returns the number of continuations that can run at the same time in all engines together."""
    is_multi = config.strategy == "multi-instance"
    if policy(config.instance_strategy if is_multi else config.strategy).one_slot:
        return config.instances
    return config.n_slots * (config.instances if is_multi else 1)


class FrontClient:
    """The owner of each request from its submit to its last output.

    It refuses requests if the queue is full or their ids are in use, parses texts, and counts requests when they come
    and when they end. It passes other calls to the inner client.

    Unused engines may sleep: they are closed, and the next use makes them again with the same options.

    Args:
        client: the inner client, which has the engines.
        max_queue: number of continuations that may wait for a slot, in addition to the running ones; None: no limit.
        connect: makes the engines again after a sleep; None: the engines cannot sleep.

    Attributes:
        inner: the client that has the engines; an AsleepClient while they sleep.
        model: the model of the inner client; closed while the engines sleep.
        in_flight: the requests that have not ended, and the counts of the ended ones.
    """

    def __init__(self, client: EngineClient, max_queue: int | None = None, connect: Connect | None = None) -> None:
        self.plan = client.plan
        self.model = client.model
        self.inner = client
        config = client.plan.config
        self.in_flight = RequestTable() if max_queue is None else RequestTable(slots_of(config), max_queue)
        self._sinks = SharedSinks[FrontSink]()
        self._seeds = None if config.seed is None else random.Random(config.seed)
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._fork_guard = ForkGuard()
        self._connect = connect
        self._loaded = LoadedResources(config.adapters)
        self._past_stats: EngineStats | None = None  # counts of the engines that went to sleep
        self._stamp = None if connect is None else _stamp(config)
        self._n_users = 0
        self._is_moving = False  # a thread is putting the engines to sleep or waking them
        self._is_closed = False
        self._cancelled = threading.Event()  # once set, waking the engines is cancelled
        self._changed = threading.Condition()

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        table, call = self.in_flight, Call(stream)
        with self.awake():
            try:
                new, repeated = table.enter(requests, call)
                self.inner.submit(new, self._sinks.of(sink, partial(FrontSink, table)), stream=stream)
            except BaseException:  # no request stays queued; after an interrupt, some may have ended already
                table.roll_back(requests, call)
                raise
        for request in repeated:
            refused = failure(request, f"request id {request.request_id!r} is already in flight")
            table.count_refused([refused])
            emit_last(sink, refused)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.inner.abort(request_ids)

    def stats(self) -> EngineStats:
        """Returns the counts, as EngineClient.stats does; may be called from a sink."""
        self._fork_guard.check()
        counts = self.in_flight.figures()  # read first, because the engine's counts must not be older than these
        now, past = self.inner.stats(), self._past_stats
        return replace(now if past is None else past + now, **counts)

    def states(self) -> list[EngineState]:
        return self.inner.states()

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        with self.awake():
            answer = self.inner.call(method, *arguments)
            self._loaded.record(method, *arguments)
        return answer

    @property
    def pids(self) -> list[int]:
        return self.inner.pids

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return self.inner.heartbeats

    @property
    def outage(self) -> Outage | None:
        return self.inner.outage

    @property
    def adapters(self) -> list[str]:
        return self.inner.adapters

    def next_seed(self) -> int:
        """Returns a seed for a request that has none. The engine's seed determines all such seeds. Returns -1 if the
        engine has no seed.
        """
        return -1 if self._seeds is None else self._seeds.getrandbits(64)

    def count_refused(self, outputs: list[SequenceOutput]) -> None:
        """Counts refused prompts, which never became requests, as submitted and as ended by an error."""
        self.in_flight.count_refused(outputs)

    def at_close(self, action: Callable[[], None]) -> None:
        """Registers a method that is called once before the engines close. The method's object is not kept alive."""
        self._at_close = [other for other in self._at_close if other() is not None]
        self._at_close.append(weakref.WeakMethod(action))

    @property
    def is_asleep(self) -> bool:
        """True while the engines sleep. Their next use wakes them."""
        return isinstance(self.inner, AsleepClient) and not self._is_closed

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Wakes the engines and keeps them awake until the end of the block.

        Raises:
            EngineError: the file of the model has changed.
            EngineClosedError: the client was closed; this process is a fork; or a sink uses the engines while they
                sleep.
            The errors of `connect`: the engines could not be loaded. The next use tries to load them again.
        """
        self._fork_guard.check()
        with self._changed:
            if in_a_sink() and (self._is_moving or self.is_asleep):
                raise EngineClosedError("the engine sleeps; a sink cannot wake it")
            while self._is_moving:
                self._changed.wait()
            if self._is_closed:
                raise EngineClosedError(CLOSED)
            if self.is_asleep:
                self._move(self._wake)
            self._n_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_users -= 1

    def sleep(self) -> None:
        """Closes the engines until they are used again. Writes cells of finished requests to the folder of cache_disk.

        Raises:
            EngineError: the engines are in use, or cannot sleep; or a sink calls this method.
            EngineClosedError: the client was closed.
        """
        self._fork_guard.check()
        if in_a_sink():
            raise EngineError("a sink cannot put the engine to sleep, because the engine waits for the sink")
        with self._changed:
            while self._is_moving:
                self._changed.wait()
            if self._is_closed:
                raise EngineClosedError(CLOSED)
            if self.is_asleep:
                return
            if self._connect is None:
                raise EngineError("this engine cannot sleep")
            n_requests, n_calls = len(self.in_flight), self._n_users
            if n_requests or n_calls:
                what = counted(n_requests, "request") if n_requests else counted(n_calls, "call")
                raise EngineError(f"the engine cannot sleep while it is in use by {what}")
            self._move(self._fall_asleep)

    def _move(self, move: Callable[[], None]) -> None:
        """Closes or makes engines. `move` runs without the lock, because sinks that still run may wait for the lock."""
        self._is_moving = True
        self._changed.release()
        try:
            move()
        finally:
            self._changed.acquire()
            self._is_moving = False
            self._changed.notify_all()

    def _fall_asleep(self) -> None:
        engines, self.inner = self.inner, AsleepClient(self.plan, self.model, self._loaded)
        with contextlib.suppress(EngineClosedError):  # the engines have died; the next use makes new ones
            self._past_stats = (self._past_stats or EngineStats()) + engines.stats().of_the_past()
        engines.close()

    def _wake(self) -> None:
        config = self.plan.config
        if _stamp(config) not in (self._stamp, None):
            raise EngineError(f"{config.model} has been changed or replaced since it was loaded; make a new LLM of it")
        assert self._connect is not None
        with cancelled_by(self._cancelled):
            engines = self._connect(replace(config.requested(), adapters=tuple(self._loaded.adapters.items())))
        for path in self._loaded.prefixes:
            try:
                engines.call("load_prefix", path)
            except LlamaBatchError as error:  # requests will compute the prefix themselves
                logger.warning("a prefix is not loaded again: %s", describe(error))
        self.model = engines.model
        self.inner = engines

    def close(self) -> None:
        while self._at_close:
            action = self._at_close.pop()()
            if action is not None:
                action()
        self._cancelled.set()
        with self._changed:
            while self._is_moving:
                self._changed.wait()
            self._is_closed = True
        self.inner.close()


def _stamp(config: EngineConfig) -> object:
    """Returns size and time of each part of the model's file; None: a file is missing, and a load will report this."""
    try:
        found = [part.stat() for part in part_paths(resolve(config.model))]
    except (OSError, LlamaBatchError):
        return None
    return [(each.st_size, each.st_mtime_ns) for each in found]
