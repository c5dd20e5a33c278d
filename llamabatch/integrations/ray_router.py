"""The replica of Ray Serve that a request goes to: one that has the beginning of its prompt, while that has free slots,
else the least loaded; and the number of replicas that what runs and waits asks for.

PrefixRouter and SlotScaling stand behind interfaces of Ray Serve; what they decide is plain Python.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llamabatch.integrations import needs

with needs("ray", "ray"):
    from ray.serve.config import AutoscalingContext
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

K = TypeVar("K", bound=Hashable)

BLOCK = 256  # characters between two lengths at which beginnings are compared: some 64 tokens
_MOST_BLOCKS = 64
_MOST_ENDS = 64  # of messages, the last ones
_MOST_KNOWN = 65_536  # beginnings in a table
_SENDING_S = 5.0  # a request that was given a replica and has not been sent within so long, will not be
_PATHS = ("/completions", "/completion", "/messages", "/responses")  # ends of paths whose prompts are looked at


@dataclass(frozen=True)
class Prefix:
    """The beginnings of a prompt, the shortest first.

    Attributes:
        keys: digests of the beginnings.
        lengths: their characters, without those of the model's own turns.
        length: characters of the whole prompt, counted alike.
    """

    keys: tuple[bytes, ...] = ()
    lengths: tuple[int, ...] = ()
    length: int = 0

    @classmethod
    def of(cls, path: str, body: bytes) -> Prefix:
        """The beginnings of the prompt in a body of one of the generation endpoints; none in other bodies."""
        if not path.endswith(_PATHS):
            return cls()
        try:
            fields = json.loads(body)
        except ValueError:  # the replica answers with the error
            return cls()
        return cls.of_pieces(_pieces(fields)) if isinstance(fields, dict) else cls()

    @classmethod
    def of_pieces(cls, pieces: Iterable[tuple[str, bool]]) -> Prefix:
        """The beginnings of texts that follow each other, and whether they count in lengths.

        There is a beginning at each multiple of BLOCK characters of a text, and at its end.
        """
        state = hashlib.blake2b(digest_size=8)
        blocks: list[tuple[bytes, int]] = []
        ends: list[tuple[bytes, int]] = []
        length = 0
        for text, counts in pieces:
            for start in range(0, len(text), BLOCK):
                block = text[start : start + BLOCK]
                state.update(block.encode(errors="replace"))
                length += len(block) if counts else 0
                if len(block) == BLOCK and len(blocks) < _MOST_BLOCKS:
                    blocks.append((state.copy().digest(), length))
            state.update(b"\xff")  # no byte of UTF-8: where a text ends is a part of the beginning
            ends.append((state.copy().digest(), length))
        found = sorted({*blocks, *ends[-_MOST_ENDS:]}, key=lambda each: each[1])
        found = [each for each in found if each[1] >= BLOCK]
        return cls(tuple(key for key, _ in found), tuple(n for _, n in found), length)

    def worth_it(self) -> list[bytes]:
        """The beginnings that are worth the way, the longest first: half of the prompt, and BLOCK characters.

        A shorter one is computed again sooner than a request would wait beside others of its replica.
        """
        known = zip(reversed(self.keys), reversed(self.lengths), strict=True)
        return [key for key, length in known if 2 * length >= self.length]


def _pieces(body: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """The texts of a body in the order in which a prompt has them, and whether they count: the model's own do not, as
    the turn before had them as its answer."""
    yield str(body.get("model")), False
    for name in ("tools", "system", "instructions"):
        if body.get(name):
            yield _text(body[name]), True
    given = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        for each in given:
            yield _text(each), each.get("role") != "assistant"
    elif isinstance(given, list) and given and isinstance(given[0], (str, list)):  # several prompts go together
        yield _text(given[0]), True
    elif given is not None:
        yield _text(given), True


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


class PrefixTable(Generic[K]):
    """Which replicas were sent which beginnings; the ones that were not asked for longest are given up first."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most = most
        self._known: OrderedDict[bytes, set[K]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, prefix: Prefix, replica: K) -> None:
        """A replica has been sent a prompt with these beginnings."""
        for key in prefix.keys:
            self._known.setdefault(key, set()).add(replica)
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def holders(self, prefix: Prefix) -> Iterator[set[K]]:
        """The replicas with a beginning that is worth the way, those with the longest one first."""
        for key in prefix.worth_it():
            if found := self._known.get(key):
                yield found

    def keep(self, replicas: Iterable[K]) -> None:
        """All other replicas are gone."""
        kept = set(replicas)
        for key, found in list(self._known.items()):
            found &= kept
            if not found:
                del self._known[key]


@dataclass(frozen=True)
class Load:
    """A replica's continuations that run or wait, and its slots."""

    n: int
    slots: int

    @property
    def is_free(self) -> bool:
        return self.n < self.slots

    @property
    def share(self) -> float:
        return self.n / self.slots


def order(loads: Mapping[K, Load], holders: Iterable[set[K]] = ()) -> list[K]:
    """All replicas, the best first: those with the longest beginning and a free slot, then the least loaded."""
    shuffled = random.sample(list(loads), len(loads))  # of equal ones any, so that several routers do not agree on one
    by_load = sorted(shuffled, key=lambda each: loads[each].share)
    for found in holders:
        if free := [each for each in by_load if each in found and loads[each].is_free]:
            return free + [each for each in by_load if each not in free]
    return by_load


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """A request router of Ray Serve, for calls whose only argument has a `prefix` and `needs_batches`.

    The load of a replica is the number of calls that Serve knows of there, and what its record_routing_stats adds: its
    slots, and continuations beyond one a call. One that has not told of itself yet counts with the plan's slots.
    """

    def initialize_state(self, n_slots: int = 1) -> None:  # type: ignore[override]
        """Called by Serve with request_router_kwargs: the slots that a replica has by the plan."""
        self._n_slots = n_slots
        self._table: PrefixTable[ReplicaID] = PrefixTable()
        self._sending: dict[str, tuple[ReplicaID, float]] = {}  # calls that Serve does not count yet

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are to be tried, each alone."""
        replicas = {each.replica_id: each for each in candidate_replicas}
        call = _call_of(pending_request)
        loads = self._loads(replicas)
        holders: Iterable[set[ReplicaID]] = ()
        if call is not None and call.needs_batches:
            keepers = {key for key, each in replicas.items() if (each.routing_stats or {}).get("batches")}
            loads = {key: load for key, load in loads.items() if key in keepers} or loads
        elif call is not None:
            holders = self._table.holders(call.prefix)
        chosen = order(loads, holders)
        if chosen and pending_request is not None:
            self._sending[pending_request.metadata.internal_request_id] = chosen[0], time.monotonic()
        return [[replicas[each]] for each in chosen]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve: a replica has taken a call."""
        self._sending.pop(pending_request.metadata.internal_request_id, None)
        if (call := _call_of(pending_request)) is not None:
            self._table.remember(call.prefix, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve: these are all replicas."""
        super().update_replicas(replicas)
        self._table.keep(self.curr_replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve, before it updates the replicas."""
        super().on_replica_actor_died(replica_id)
        self._table.keep(self.curr_replicas)

    def _loads(self, replicas: Mapping[ReplicaID, RunningReplica]) -> dict[ReplicaID, Load]:
        until = time.monotonic() - _SENDING_S
        self._sending = {key: each for key, each in self._sending.items() if each[1] > until}
        sending = [replica for replica, _ in self._sending.values()]
        queues = self.replica_queue_len_cache
        return {
            key: load_of(each.routing_stats or {}, queues.get(key), self._n_slots, sending.count(key))
            for key, each in replicas.items()
        }


def load_of(stats: Mapping[str, Any], n_calls: int | None, n_slots: int, n_sending: int = 0) -> Load:
    """The load of a replica.

    Args:
        stats: as of record_routing_stats, of a second ago; empty before the first.
        n_calls: calls there, as the router knows them now; None: it does not.
        n_slots: where the replica has not told.
        n_sending: calls that were given to it a moment ago, and are not among n_calls.
    """
    reported, calls = stats.get("in_flight", 0), stats.get("calls", 0)
    n = reported if n_calls is None else n_calls + max(0, reported - calls)
    return Load(n + n_sending, max(1, stats.get("slots", n_slots)))


def _call_of(pending: PendingRequest | None) -> Any:
    """The call of a request; None: it is none of serve_app's."""
    given = pending.args[0] if pending is not None and pending.args else None
    # By its attributes: Serve sends this module to its routers by value, so that they have classes of their own.
    return given if hasattr(given, "prefix") and hasattr(given, "needs_batches") else None


class SlotScaling:
    """A policy of Ray Serve's autoscaling: so many replicas that what runs and waits takes a share of their slots.

    Args:
        occupancy: the share, above 0 and at most 1.
    """

    def __init__(self, occupancy: float = 0.8) -> None:
        self._occupancy = occupancy

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas, without the bounds and delays of the configuration, which Serve applies."""
        metrics = context.aggregated_metrics or {}
        slots = list((metrics.get("slots") or {}).values())
        in_flight = sum((metrics.get("in_flight") or {}).values())
        return replicas_for(in_flight, slots, context.current_num_replicas, self._occupancy), {}


def replicas_for(in_flight: float, slots: Sequence[float], current: int, occupancy: float) -> int:
    """Replicas that hold so many continuations in a share of their slots.

    Args:
        slots: of each replica that has told; those that are starting have not, and `current` holds then.
    """
    if not slots or min(slots) <= 0:
        return current
    each = sum(slots) / len(slots)
    return max(1, math.ceil(in_flight / (each * occupancy) - 1e-9))
