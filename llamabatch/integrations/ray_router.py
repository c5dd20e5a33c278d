"""Chooses the replica of Ray Serve for a request, and the number of replicas.

A request goes to a replica that has the beginning of its prompt and a free slot, else to the least loaded replica. The
number of replicas follows from running and waiting requests. PrefixRouter and SlotScaling connect Ray Serve to plain
functions.
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

BLOCK = 256  # characters (about 64 tokens); beginnings of a text end at multiples of this number
_MOST_BLOCKS = 64  # a Prefix keeps the shortest beginnings that end at a multiple of BLOCK, at most this many
_MOST_ENDS = 64  # a Prefix keeps the longest beginnings that end with a text, at most this many
_MOST_KNOWN = 65_536  # maximum number of beginnings in a table
_SENDING_S = 5.0  # a request counts as lost if it has not reached its replica after this time
_PATHS = ("/completions", "/completion", "/messages", "/responses")  # endings of the paths of generation endpoints


@dataclass(frozen=True)
class Prefix:
    """Beginnings of a prompt, of different lengths, the shortest first.

    Attributes:
        keys: the digests of the beginnings.
        lengths: number of characters of each beginning, without the model's own turns.
        length: number of characters of the whole prompt, without the model's own turns.
    """

    keys: tuple[bytes, ...] = ()
    lengths: tuple[int, ...] = ()
    length: int = 0

    @classmethod
    def of(cls, path: str, body: bytes) -> Prefix:
        """Returns the beginnings of the prompt in a request to a generation endpoint; none for any other request."""
        if not path.endswith(_PATHS):
            return cls()
        try:
            fields = json.loads(body)
        except ValueError:  # the replica will answer with an error
            return cls()
        return cls.of_pieces(_pieces(fields)) if isinstance(fields, dict) else cls()

    @classmethod
    def of_pieces(cls, pieces: Iterable[tuple[str, bool]]) -> Prefix:
        """Returns the beginnings of a prompt. A beginning ends at each multiple of BLOCK characters of a text, and at
        the end of each text. Beginnings shorter than BLOCK are left out.

        Args:
            pieces: pairs (text, counts). If `counts` is true, the characters of the text count in `lengths`.
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
            state.update(b"\xff")  # marks the end of the text in the digest; UTF-8 never has this byte
            ends.append((state.copy().digest(), length))
        found = sorted({*blocks, *ends[-_MOST_ENDS:]}, key=lambda each: each[1])
        found = [each for each in found if each[1] >= BLOCK]
        return cls(tuple(key for key, _ in found), tuple(n for _, n in found), length)

    def worth_it(self) -> list[bytes]:
        """Returns the beginnings that contain at least half of the prompt, the longest first.

        A replica that has such a beginning and a free slot is better than the least loaded replica. A shorter beginning
        does not count: to compute it again takes less time than to share a replica with more requests.
        """
        known = zip(reversed(self.keys), reversed(self.lengths), strict=True)
        return [key for key, length in known if 2 * length >= self.length]


def _pieces(body: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields (text, counts) for each text of a body, in the order of the prompt. `counts` is true if the text counts in
    Prefix.lengths. The model's own turns do not count, because the replica that has the prompt generated them."""
    yield str(body.get("model")), False
    for name in ("tools", "system", "instructions"):
        if body.get(name):
            yield _text(body[name]), True
    given = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        for each in given:
            yield _text(each), each.get("role") != "assistant"
    elif isinstance(given, list) and given and isinstance(given[0], (str, list)):  # several prompts: the first counts
        yield _text(given[0]), True
    elif given is not None:
        yield _text(given), True


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


class PrefixTable(Generic[K]):
    """A table of beginnings of prompts, each with the replicas that have received it. A full table drops the least
    recently sent beginnings first."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most = most
        self._known: OrderedDict[bytes, set[K]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, prefix: Prefix, replica: K) -> None:
        """Records that a replica has received a prompt with these beginnings."""
        for key in prefix.keys:
            self._known.setdefault(key, set()).add(replica)
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def holders(self, prefix: Prefix) -> Iterator[set[K]]:
        """Yields the replicas that have received a beginning, as a set for each beginning of prefix.worth_it(), the
        longest first. Beginnings that are not in the table are skipped."""
        for key in prefix.worth_it():
            if found := self._known.get(key):
                yield found

    def keep(self, replicas: Iterable[K]) -> None:
        """Forgets all replicas except `replicas`."""
        kept = set(replicas)
        for key, found in list(self._known.items()):
            found &= kept
            if not found:
                del self._known[key]


@dataclass(frozen=True)
class Load:
    """The load of a replica. `n`: number of running and waiting continuations. `slots`: number of slots."""

    n: int
    slots: int

    @property
    def is_free(self) -> bool:
        return self.n < self.slots

    @property
    def share(self) -> float:
        return self.n / self.slots


def order(loads: Mapping[K, Load], holders: Iterable[set[K]] = ()) -> list[K]:
    """Returns all replicas, the best first: the replicas with a free slot and the longest known beginning, then all
    other replicas. Both groups are sorted by load.

    Args:
        holders: one set for each beginning: the replicas that have this beginning. The longest beginning is first.
    """
    shuffled = random.sample(list(loads), len(loads))  # so that several routers do not all pick the same replica
    by_load = sorted(shuffled, key=lambda each: loads[each].share)
    for found in holders:
        if free := [each for each in by_load if each in found and loads[each].is_free]:
            return free + [each for each in by_load if each not in free]
    return by_load


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """A request router of Ray Serve, for calls whose only argument has the attributes `prefix` and `needs_batches`.

    The load of a replica comes from Serve's count of the replica's calls, and from record_routing_stats of the replica
    (see load_of).
    """

    def initialize_state(self, n_slots: int = 1) -> None:  # type: ignore[override]
        """Stores the number of slots that the plan gives a replica. Serve calls this with request_router_kwargs."""
        self._n_slots = n_slots
        self._table: PrefixTable[ReplicaID] = PrefixTable()
        # calls not yet counted by Serve: request id -> (replica, time of sending)
        self._sending: dict[str, tuple[ReplicaID, float]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns lists of one replica each, in the order in which Serve tries the replicas."""
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
        """Records the prefix of a call. Serve calls this when a replica has accepted the call."""
        self._sending.pop(pending_request.metadata.internal_request_id, None)
        if (call := _call_of(pending_request)) is not None:
            self._table.remember(call.prefix, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forgets replicas that are gone. Serve calls this with all current replicas."""
        super().update_replicas(replicas)
        self._table.keep(self.curr_replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets a dead replica. Serve calls this before update_replicas."""
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
    """Returns the load of a replica, in continuations. A call may have several continuations. So the load is the
    current number of calls, plus the difference between continuations and calls in `stats`.

    Args:
        stats: the replica's last record_routing_stats, about a second old; empty before the first.
        n_calls: number of calls on the replica now; None: unknown, so only the continuations in `stats` count.
        n_slots: number of slots to assume if `stats` has none.
        n_sending: number of calls that the router has just sent to the replica, and that n_calls does not include.
    """
    reported, calls = stats.get("in_flight", 0), stats.get("calls", 0)
    n = reported if n_calls is None else n_calls + max(0, reported - calls)
    return Load(n + n_sending, max(1, stats.get("slots", n_slots)))


def _call_of(pending: PendingRequest | None) -> Any:
    """Returns the call of a request; None: the request is not one of serve_app's."""
    given = pending.args[0] if pending is not None and pending.args else None
    # isinstance would fail: Serve copies this module to its routers by value, so the classes there are other objects.
    return given if hasattr(given, "prefix") and hasattr(given, "needs_batches") else None


class SlotScaling:
    """An autoscaling policy of Ray Serve. It chooses the smallest number of replicas with which the share of busy slots
    stays within a limit. Waiting continuations count as busy slots.

    Args:
        occupancy: the limit of the share, above 0 and at most 1.
    """

    def __init__(self, occupancy: float = 0.8) -> None:
        self._occupancy = occupancy

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Returns the number of replicas. Serve applies the bounds and delays of the configuration afterwards."""
        metrics = context.aggregated_metrics or {}
        slots = list((metrics.get("slots") or {}).values())
        in_flight = sum((metrics.get("in_flight") or {}).values())
        return replicas_for(in_flight, slots, context.current_num_replicas, self._occupancy), {}


def replicas_for(in_flight: float, slots: Sequence[float], current: int, occupancy: float) -> int:
    """Returns the smallest number of replicas whose slots are enough for `in_flight` continuations. At most the share
    `occupancy` of all slots may be in use.

    Args:
        slots: number of slots of each replica that has reported. If no replica has reported, the result is `current`.
        current: the present number of replicas.
    """
    if not slots or min(slots) <= 0:
        return current
    each = sum(slots) / len(slots)
    return max(1, math.ceil(in_flight / (each * occupancy) - 1e-9))
