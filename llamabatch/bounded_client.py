"""max_queue: a client that takes in no more than its engines can run, and so many that wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from llamabatch.client import EngineClient, Sink, said_only
from llamabatch.config import EngineConfig
from llamabatch.errors import QueueFull
from llamabatch.passing_client import PassingClient
from llamabatch.policies import policy
from llamabatch.request import Request, SequenceOutput
from llamabatch.stats import EngineStats


class BoundedClient(PassingClient):
    """Refuses what goes beyond.

    Args:
        max_queue: continuations that may wait for a slot.
    """

    def __init__(self, client: EngineClient, max_queue: int) -> None:
        super().__init__(client)
        self._max_queue = max_queue
        self._n_slots = slots_of(client.plan.config)
        self._sizes: dict[str, int] = {}  # of what is in flight: continuations
        self._n_in_flight = 0
        self._n_rejected = 0
        self._lock = threading.Lock()

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        asked = sum(request.params.n_copies for request in requests)
        with self._lock:
            free = self._n_slots + self._max_queue - self._n_in_flight
            if asked > free:
                self._n_rejected += len(requests)
                raise QueueFull(
                    f"{asked} more would be {self._n_in_flight + asked} in flight; "
                    f"allowed are {self._n_slots} that run and max_queue={self._max_queue} that wait"
                )
            fresh = [request for request in requests if request.request_id not in self._sizes]
            for request in fresh:
                self._sizes[request.request_id] = request.params.n_copies
                self._n_in_flight += request.params.n_copies

        def tell(outputs: list[SequenceOutput]) -> None:
            with said_only("the length of the queue is wrong from here on"):
                self._forget(output.request_id for output in outputs if output.finished is not None)
            sink(outputs)

        try:
            self.behind.submit(requests, tell, stream=stream)
        except BaseException:
            self._forget(request.request_id for request in fresh)
            raise

    def _forget(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._n_in_flight -= self._sizes.pop(request_id, 0)

    def stats(self) -> EngineStats:
        return replace(self.behind.stats(), rejected=self._n_rejected)


def slots_of(config: EngineConfig) -> int:
    """How many can run at once, in all engines together."""
    is_multi = config.strategy == "multi-instance"
    if policy(config.instance_strategy if is_multi else config.strategy).one_slot:
        return config.number("instances")
    return config.number("n_slots") * (config.number("instances") if is_multi else 1)
