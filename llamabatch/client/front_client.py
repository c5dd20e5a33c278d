"""FrontClient: the client as entry points have it, in front of all engines, so that no death of an engine loses a
request or a count.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from llamabatch.client.base import EngineClient, EngineMethod, Heartbeat, Outage, SharedSinks, emit_last, failure
from llamabatch.client.front_sink import FrontSink
from llamabatch.client.request_table import Call, RequestTable
from llamabatch.config import ResolvedConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.scheduler.policies import policy
from llamabatch.utils.lifetime import ForkGuard


def slots_of(config: ResolvedConfig) -> int:
    """Continuations that can run at once, in all engines together."""
    is_multi = config.strategy == "multi-instance"
    if policy(config.instance_strategy if is_multi else config.strategy).one_slot:
        return config.instances
    return config.n_slots * (config.instances if is_multi else 1)


class FrontClient:
    """Owns each request from its submit to its last output. It refuses what max_queue has no room for and ids that are
    in flight, takes texts apart, and counts requests when they come and when they end. Other calls go on to the client
    behind.

    Args:
        client: has the engines.
        max_queue: continuations that may wait for a slot, beyond those that run; None: as many as come.

    Attributes:
        inner: the client behind.
        in_flight: the requests that have not ended, and the counts of those that have.
    """

    def __init__(self, client: EngineClient, max_queue: int | None = None) -> None:
        self.plan = client.plan
        self.model = client.model
        self.inner = client
        config = client.plan.config
        self.in_flight = RequestTable() if max_queue is None else RequestTable(slots_of(config), max_queue)
        self._sinks = SharedSinks[FrontSink]()
        self._seeds = None if config.seed is None else random.Random(config.seed)
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._fork_guard = ForkGuard()

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._fork_guard.check()
        table, call = self.in_flight, Call(stream)
        try:
            new, repeated = table.enter(requests, call)
            self.inner.submit(new, self._sinks.of(sink, partial(FrontSink, table)), stream=stream)
        except BaseException:  # nothing was queued; interrupted, some may have ended already
            table.roll_back(requests, call)
            raise
        for request in repeated:
            refused = failure(request, f"request id {request.request_id!r} is already in flight")
            table.count_refused([refused])
            emit_last(sink, refused)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.inner.abort(request_ids)

    def stats(self) -> EngineStats:
        """As EngineClient.stats; may be called from a sink."""
        self._fork_guard.check()
        counts = self.in_flight.figures()  # before the engine's, in which a request that has ended must not still run
        return replace(self.inner.stats(), **counts)

    def states(self) -> list[EngineState]:
        return self.inner.states()

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        return self.inner.call(method, *arguments)

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
        """A seed for a request without one, the next that follows from the engine's; -1: the engine has none."""
        return -1 if self._seeds is None else self._seeds.getrandbits(64)

    def count_refused(self, outputs: list[SequenceOutput]) -> None:
        """Counts prompts that were refused before they were requests: as submitted, and ended by an error."""
        self.in_flight.count_refused(outputs)

    def at_close(self, action: Callable[[], None]) -> None:
        """Registers a method to call once before the engines are closed. Its object is not kept alive."""
        self._at_close = [other for other in self._at_close if other() is not None]
        self._at_close.append(weakref.WeakMethod(action))

    def close(self) -> None:
        while self._at_close:
            action = self._at_close.pop()()
            if action is not None:
                action()
        self.inner.close()
