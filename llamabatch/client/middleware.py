"""Clients in front of another client: PassingClient hands calls on, CountingClient counts requests by how they end,
BoundedClient holds max_queue. Counts are taken here, in front of all engines, so that no death of an engine loses any.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from llamabatch.client.base import EngineClient, EngineMethod, Heartbeat, Outage, SharedSinks, errors_logged
from llamabatch.config import ResolvedConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.stats import EngineStats, RequestCounts
from llamabatch.errors import QueueFull
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.scheduler.policies import policy
from llamabatch.utils.lifetime import ForkGuard


class PassingClient:
    """An EngineClient that passes every call to its inner one; subclasses change a part."""

    def __init__(self, client: EngineClient) -> None:
        self.plan = client.plan
        self.model = client.model
        self.inner = client

    @property
    def pids(self) -> list[int]:
        return self.inner.pids

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return self.inner.heartbeats

    @property
    def outage(self) -> Outage | None:
        return self.inner.outage

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self.inner.submit(requests, sink, stream=stream)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.inner.abort(request_ids)

    def stats(self) -> EngineStats:
        return self.inner.stats()

    def states(self) -> list[EngineState]:
        return self.inner.states()

    @property
    def adapters(self) -> list[str]:
        return self.inner.adapters

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        return self.inner.call(method, *arguments)

    def close(self) -> None:
        self.inner.close()


class BoundedClient(PassingClient):
    """Refuses requests that would make the queue longer than max_queue.

    Background requests have a queue of their own, of the same length: they hold no other request up, so that none is
    refused for their sake.

    Args:
        max_queue: continuations that may wait for a slot, beyond those that run.
    """

    def __init__(self, client: EngineClient, max_queue: int) -> None:
        super().__init__(client)
        self._max_queue = max_queue
        self._n_slots = slots_of(client.plan.config)
        self._sizes: dict[str, tuple[bool, int]] = {}  # background, continuations of each request in flight
        self._n_in_flight = {False: 0, True: 0}
        self._n_rejected = 0
        self._lock = threading.Lock()
        self._sinks = SharedSinks(self._forgetting)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        with self._lock:
            for background in (False, True):
                self._check(requests, background)
            fresh = [request for request in requests if request.request_id not in self._sizes]
            for request in fresh:
                params = request.params
                self._sizes[request.request_id] = params.background, params.n_copies
                self._n_in_flight[params.background] += params.n_copies
        try:
            self.inner.submit(requests, self._sinks.of(sink), stream=stream)
        except BaseException:
            self._forget(request.request_id for request in fresh)
            raise

    def _forgetting(self, sink: Sink) -> Sink:
        """The sink; before it gets the last output of a request, the request is no longer in flight."""

        def forgot(outputs: list[SequenceOutput]) -> None:
            with errors_logged("the length of the queue is wrong from here on"):
                ended = [output.request_id for output in outputs if output.finished is not None]
                if ended:
                    self._forget(ended)
            sink(outputs)

        return forgot

    def _check(self, requests: list[Request], background: bool) -> None:
        """Raises QueueFull: the queue of one tier is too short for its requests among these."""
        asked = sum(request.params.n_copies for request in requests if request.params.background == background)
        n_in_flight = self._n_in_flight[background]
        if asked and asked > self._n_slots + self._max_queue - n_in_flight:
            self._n_rejected += len(requests)
            tier = " in the background" if background else ""
            raise QueueFull(
                f"{asked} more would be {n_in_flight + asked} in flight{tier}; "
                f"allowed are {self._n_slots} that run and max_queue={self._max_queue} that wait"
            )

    def _forget(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                background, n_copies = self._sizes.pop(request_id, (False, 0))
                self._n_in_flight[background] -= n_copies

    def stats(self) -> EngineStats:
        return replace(self.inner.stats(), rejected=self._n_rejected)


def slots_of(config: ResolvedConfig) -> int:
    """Continuations that can run at once, in all engines together."""
    is_multi = config.strategy == "multi-instance"
    if policy(config.instance_strategy if is_multi else config.strategy).one_slot:
        return config.instances
    return config.n_slots * (config.instances if is_multi else 1)


class _Call:
    """The requests of one submit.

    Attributes:
        left: the number of those that have not ended.
    """

    def __init__(self, left: int) -> None:
        self.left = left


class CountingClient(PassingClient):
    """Counts requests when they are submitted, and once when they end, before their caller has the output. The counts
    outlive engines and child processes.
    """

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self._counts = RequestCounts()
        # by id; an id that is in flight already may come again, and the engine refuses it then at once
        self._in_flight: dict[str, list[_Call]] = {}
        self._sinks = SharedSinks(self._counting)
        seed = client.plan.config.seed
        self._seeds = None if seed is None else random.Random(seed)
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard()

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._fork_guard.check()
        call = _Call(len(requests))
        with self._lock:
            self._counts.submitted += call.left
            for request in requests:
                self._in_flight.setdefault(request.request_id, []).append(call)
        try:
            self.inner.submit(requests, self._sinks.of(sink), stream=stream)
        except BaseException:  # nothing was queued; interrupted, some may have ended already
            with self._lock:
                self._counts.submitted -= call.left
                for request in requests:
                    self._leave(request.request_id, call)
            raise

    def _counting(self, sink: Sink) -> Sink:
        """The sink; before it gets the last output of a request, the request is counted, once."""

        def counted(outputs: list[SequenceOutput]) -> None:
            ended = [output for output in outputs if output.finished is not None]
            if ended:
                with errors_logged("the counts of requests are off from here on"), self._lock:
                    self._counts.note([output for output in ended if self._leave(output.request_id)])
            sink(outputs)

        return counted

    def _leave(self, request_id: str, call: _Call | None = None) -> bool:
        """A request has ended, of this call, or of the last with its id; False: it had before."""
        calls = self._in_flight.get(request_id, [])
        if not calls or (call is not None and call not in calls):
            return False
        ended = calls.pop() if call is None else calls.pop(calls.index(call))
        ended.left -= 1
        if not calls:
            del self._in_flight[request_id]
        return True

    def next_seed(self) -> int:
        """A seed for a request without one, the next that follows from the engine's; -1: the engine has none."""
        return -1 if self._seeds is None else self._seeds.getrandbits(64)

    def note_refused(self, outputs: list[SequenceOutput]) -> None:
        """Counts prompts that were refused before they were requests: as submitted, and ended by an error."""
        with self._lock:
            self._counts.submitted += len(outputs)
            self._counts.note(outputs)

    def stats(self) -> EngineStats:
        """As EngineClient.stats; may be called from a sink."""
        self._fork_guard.check()
        with self._lock:
            counts = self._counts.figures()  # before the engine's, in which a request that has ended must not still run
        return replace(self.inner.stats(), **counts)

    def at_close(self, action: Callable[[], None]) -> None:
        """Registers a method to call once before the engines are closed. Its object is not kept alive."""
        self._at_close = [other for other in self._at_close if other() is not None]
        self._at_close.append(weakref.WeakMethod(action))

    def close(self) -> None:
        while self._at_close:
            action = self._at_close.pop()()
            if action is not None:
                action()
        super().close()
