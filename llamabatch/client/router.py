"""A router over several engines. A request goes to the engine that has computed the start of its prompt, if this engine
is not too busy, and otherwise to the least loaded engine.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from llamabatch.client.base import EngineMethod, Outage, SharedSinks, emit_last, errors_logged, failure
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError, LlamaBatchError
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.scheduler.common_prefix import MIN_SHARED
from llamabatch.utils.lifetime import ForkGuard

MAX_KNOWN = 8192  # number of prefixes to remember; the oldest is dropped first
_LENGTHS = tuple(itertools.takewhile(lambda n: n < 2**24, (round(MIN_SHARED * 1.25**i) for i in range(100))))


class Member(Protocol):
    """One engine of a router; methods without a docstring are as in EngineClient."""

    @property
    def alive(self) -> bool:
        """True if the engine accepts requests."""

    @property
    def up(self) -> bool:
        """True if the engine computes requests; False while a dead engine is being replaced."""

    @property
    def outage(self) -> Outage | None: ...

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def stats(self) -> EngineStats: ...

    def states(self) -> list[EngineState]: ...

    def call(self, method: EngineMethod, *arguments: Any) -> Any: ...


class Router:
    """Several engines with the methods of one EngineClient. Safe to call from any thread.

    Args:
        keeps_prefixes: The engines keep the KV cells of finished requests. A request then goes to the engine that last
            computed the start of its prompt. So the next turn of a chat goes to the engine of the turn before. But the
            least loaded engine gets the request if its load is lower by more than a limit. The limit is the number of
            tokens saved by the cells, plus the expected tokens of the request.
    """

    def __init__(self, members: Sequence[Member], keeps_prefixes: bool = False) -> None:
        self._members = list(members)
        self._loads = [0] * len(self._members)  # expected tokens of the requests in flight
        self._last_stats = [EngineStats()] * len(self._members)  # members that are gone keep their stats here
        self._owners: dict[str, tuple[int, int]] = {}  # by request_id: (index of the member, tokens added to its load)
        self._moving: set[str] = set()  # ids of requests that move from a dead member to another one
        self._aborted_on_move: set[str] = set()
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard()
        self._sinks = SharedSinks[Sink]()
        self._affinity = Affinity() if keeps_prefixes and len(self._members) > 1 else None

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._fork_guard.check()
        shares: dict[int, list[Request]] = {}
        scored: dict[tuple[int, ...], int] = {}  # by prompt: index of the member that scores the continuations
        with self._lock:
            alive = self._alive()
            best = [number for number in alive if self._members[number].up] or alive
            for request in requests:
                if request.score_from is None:
                    number = self._choose(request, best)
                else:
                    prompt = request.prompt_token_ids[: request.score_from]
                    number = scored[prompt] = scored[prompt] if prompt in scored else self._choose(request, best)
                self._loads[number] += request.expected_tokens
                self._owners[request.request_id] = (number, request.expected_tokens)
                shares.setdefault(number, []).append(request)

        counted = self._sinks.of(sink, self._accounting)
        sent: set[str] = set()
        try:
            for number, share in shares.items():
                try:
                    self._members[number].submit(share, counted, stream=stream)
                except EngineClosedError as error:  # the member died a moment ago
                    self.take_over(share, sink, stream, str(error))
                except Exception as error:  # only this share of the requests fails
                    for request in share:
                        emit_last(counted, failure(request, error))
                sent.update(request.request_id for request in share)
        except BaseException:  # interrupted: the caller waits for none of these requests
            self.abort(sent)
            self._account([failure(r, "interrupted") for r in requests if r.request_id not in sent])
            raise

    def _accounting(self, sink: Sink) -> Sink:
        """Returns a wrapper of a sink. The wrapper subtracts a request's load before the sink gets the last output."""

        def counted(outputs: list[SequenceOutput]) -> None:
            with errors_logged("the load of an engine is wrong from here on"):
                self._account(outputs)
            sink(outputs)

        return counted

    def take_over(self, requests: list[Request], sink: Sink, stream: bool, reason: str) -> None:
        """Moves requests from a dead engine to the other engines. The requests have never started.

        Args:
            reason: the error of the requests if no other engine is left.
        """
        ids = {request.request_id for request in requests}
        with self._lock:
            self._moving |= ids
            for request_id in ids & self._owners.keys():
                number, load = self._owners.pop(request_id)
                self._loads[number] -= load
        try:
            self.submit(requests, sink, stream=stream)
        except LlamaBatchError:  # there is no other engine
            for request in requests:
                emit_last(sink, failure(request, reason))
        with self._lock:
            self._moving -= ids
            aborted = self._aborted_on_move & ids
            self._aborted_on_move -= ids
        self.abort(aborted)

    def abort(self, request_ids: Iterable[str]) -> None:
        if not self._fork_guard.is_here:
            return
        by_member: dict[int, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                if request_id in self._moving:  # the next member may not have the request yet
                    self._aborted_on_move.add(request_id)
                elif request_id in self._owners:
                    by_member.setdefault(self._owners[request_id][0], []).append(request_id)
        for number, ids in by_member.items():
            self._members[number].abort(ids)

    def stats(self) -> EngineStats:
        for number in self._alive():
            with contextlib.suppress(EngineClosedError):  # the member died a moment ago
                self._last_stats[number] = self._members[number].stats()
        figures = zip(self._members, self._last_stats, strict=True)
        return sum((stats if member.alive else stats.of_the_past() for member, stats in figures), EngineStats())

    def states(self) -> list[EngineState]:
        states: list[EngineState] = []
        for number in self._alive():
            with contextlib.suppress(EngineClosedError):
                states += self._members[number].states()
        return states

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        answers = (self._members[number].call(method, *arguments) for number in self._alive())
        if method == "save_prefix":
            return any(answers)  # stops at the first engine that saves the prefix
        answer = list(answers)[-1]  # all engines give the same answer
        if method == "reset_prefix_cache" and self._affinity is not None:
            with self._lock:
                self._affinity = Affinity()
        return answer

    @property
    def outage(self) -> Outage | None:
        """The outage of the engine that may return first; None while an engine works. See EngineClient.outage."""
        outages = []
        for member in self._members:
            outage = member.outage
            if outage is None:
                return None
            outages.append(outage)
        return min(outages, key=lambda each: math.inf if each.retry_in_s is None else each.retry_in_s)

    def _alive(self) -> list[int]:
        alive = [number for number, member in enumerate(self._members) if member.alive]
        if not alive:
            raise EngineClosedError("all engines are gone")
        return alive

    def _choose(self, request: Request, alive: list[int]) -> int:
        number = min(alive, key=self._loads.__getitem__)
        found = self._affinity.find(request.prompt_token_ids) if self._affinity is not None else None
        if found is None or found[0] not in alive:
            return number
        last, saved = found
        more = self._loads[last] - self._loads[number]
        return last if more <= saved + request.expected_tokens else number

    def _account(self, outputs: list[SequenceOutput]) -> None:
        if all(output.finished is None for output in outputs):
            return
        with self._lock:
            for output in outputs:
                if output.finished is not None and output.request_id in self._owners:
                    number, load = self._owners.pop(output.request_id)
                    self._loads[number] -= load
                    if self._affinity is not None and output.finished.error is None:
                        text = (*output.finished.prompt_token_ids, *output.finished.token_ids)
                        self._affinity.add(text, number)


class Affinity:
    """A table of prefixes, each with the member that last computed it and may still have its KV cells. Pure Python."""

    def __init__(self) -> None:
        self._members: dict[int, int] = {}

    def add(self, token_ids: Sequence[int], member: int) -> None:
        """Remembers that this member has computed these tokens."""
        for key, _ in _keys(token_ids):
            self._members.pop(key, None)  # makes the key the youngest in the dict
            self._members[key] = member
        while len(self._members) > MAX_KNOWN:
            del self._members[next(iter(self._members))]

    def find(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Returns the member that computed the longest known prefix, and a lower bound of its length in tokens."""
        found = None
        for key, length in _keys(token_ids):
            member = self._members.get(key)
            if member is None:
                break
            found = member, length
        return found


def _keys(token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (hash, length in tokens) of the prefixes to remember, shortest first."""
    lengths = itertools.takewhile(lambda n: n <= len(token_ids), _LENGTHS)
    return [(hash(tuple(token_ids[:n])), n) for n in lengths]
