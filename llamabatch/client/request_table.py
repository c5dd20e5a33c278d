"""RequestTable: the only owner of the requests in flight, from their submit to their last outputs.

Other parts learn about the end of a request from this table, or from outputs of the engine that pass through here.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from llamabatch.engine.stats import RequestCounts
from llamabatch.errors import QueueFull
from llamabatch.request.delta import AnswerParser
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request


class Watcher(Protocol):
    """An observer of all requests. The table calls it under its lock, so the methods must not block."""

    def enter(self, requests: list[Request], now: float) -> None:
        """Records requests as in flight from the time `now`, in seconds of time.perf_counter(). If this method raises,
        all these requests are refused.
        """

    def leave(self, request_id: str, output: RequestOutput | None, now: float) -> None:
        """Records that a request has ended with this output. The output is None if the request was never queued. The
        method may be called twice for a request.
        """


class Call:
    """One call of submit.

    Attributes:
        stream: the caller gets each piece; False: whole outputs only.
    """

    __slots__ = ("stream",)

    def __init__(self, stream: bool) -> None:
        self.stream = stream


class InFlight:
    """A request that has not ended.

    Attributes:
        n_copies: number of its continuations.
        background: True for a background request.
    """

    __slots__ = ("_parsers", "background", "call", "n_copies", "request")

    def __init__(self, request: Request, call: Call) -> None:
        self.request = request
        self.call = call
        self.n_copies = request.params.n_copies
        self.background = request.params.background
        self._parsers: dict[int, AnswerParser] | None = None  # by the index of the continuation

    def parser(self, index: int) -> AnswerParser:
        """Returns the parser of a continuation. The first call makes the parser."""
        if self._parsers is None:
            self._parsers = {}
        parser = self._parsers.get(index)
        if parser is None:
            assert self.request.make_parser is not None
            parser = self._parsers[index] = self.request.make_parser(self.request, index)
        return parser


class RequestTable:
    """The requests in flight by id, and the counts of ended requests. Safe to call from any thread.

    Args:
        n_slots: number of continuations that can run at the same time.
        max_queue: Number of continuations that may wait for a slot; None: no limit. Background requests have a separate
            queue of the same length, because they delay no other request.

    Attributes:
        n_parsed: number of requests in flight whose texts are parsed.
    """

    def __init__(self, n_slots: int = 0, max_queue: int | None = None) -> None:
        self.n_parsed = 0
        self._n_slots = n_slots
        self._max_queue = max_queue
        self._in_flight: dict[str, InFlight] = {}
        self._n_copies = {False: 0, True: 0}  # number of continuations in flight, by InFlight.background
        self._counts = RequestCounts()
        self._n_rejected = 0
        self._lock = threading.Lock()
        self._watcher: Callable[[], Watcher | None] = _nobody

    def __len__(self) -> int:
        return len(self._in_flight)

    def get(self, request_id: str) -> InFlight | None:
        """Returns the request in flight with this id; None: there is none."""
        return self._in_flight.get(request_id)

    @property
    def n_continuations(self) -> int:
        """The number of continuations, and of texts to embed, that run or wait."""
        return self._n_copies[False] + self._n_copies[True]

    def watch(self, watcher: Watcher) -> None:
        """Sets the only watcher of all later requests. The table does not keep the watcher alive."""
        self._watcher = weakref.ref(watcher)

    def enter(self, requests: list[Request], call: Call) -> tuple[list[Request], list[Request]]:
        """Adds requests. Returns the added requests, and the refused requests, whose ids are in flight already.

        Raises:
            QueueFull: the queue has no room for all requests; no request was added.
        """
        with self._lock:
            fresh: dict[str, Request] = {}
            repeated = []
            for request in requests:
                if request.request_id in self._in_flight or request.request_id in fresh:
                    repeated.append(request)
                else:
                    fresh[request.request_id] = request
            new = list(fresh.values())
            if self._max_queue is not None:
                for background in (False, True):
                    self._check_room(new, background, self._n_slots + self._max_queue)
            for request_id, request in fresh.items():
                one = InFlight(request, call)
                self._in_flight[request_id] = one
                self._n_copies[one.background] += one.n_copies
                self.n_parsed += request.make_parser is not None
                self._counts.submitted += 1
            watcher = self._watcher()
            if watcher is not None:
                watcher.enter(new, time.perf_counter())
        return new, repeated

    def _check_room(self, requests: list[Request], background: bool, most: int) -> None:
        """Raises QueueFull if the queue has no room for these requests. `background` says which queue."""
        n_new = sum(request.params.n_copies for request in requests if request.params.background == background)
        n_in_flight = self._n_copies[background]
        if n_new and n_new > most - n_in_flight:
            self._n_rejected += len(requests)
            tier = " in the background" if background else ""
            raise QueueFull(
                f"{n_new} more would be {n_in_flight + n_new} in flight{tier}; "
                f"allowed are {self._n_slots} that run and max_queue={self._max_queue} that wait"
            )

    def leave(self, ended: list[SequenceOutput]) -> None:
        """Drops each request that ends with one of these outputs, and counts it once."""
        with self._lock:
            known = [output for output in ended if self._pop(output.request_id) is not None]
            try:
                self._counts.count(known)
            finally:
                self._tell([(output.request_id, output.finished) for output in known])

    def roll_back(self, requests: list[Request], call: Call) -> None:
        """Drops the requests of a failed call, as if they had never come. Some requests may have ended already."""
        with self._lock:
            dropped: list[tuple[str, RequestOutput | None]] = []
            for request in requests:
                one = self._in_flight.get(request.request_id)
                if one is not None and one.call is call:
                    self._pop(request.request_id)
                    self._counts.submitted -= 1
                    dropped.append((request.request_id, None))
            self._tell(dropped)

    def _pop(self, request_id: str) -> InFlight | None:
        one = self._in_flight.pop(request_id, None)
        if one is not None:
            self._n_copies[one.background] -= one.n_copies
            self.n_parsed -= one.request.make_parser is not None
        return one

    def _tell(self, ended: list[tuple[str, RequestOutput | None]]) -> None:
        watcher = self._watcher()
        if watcher is None or not ended:
            return
        now = time.perf_counter()
        for request_id, output in ended:
            try:
                watcher.leave(request_id, output, now)
            except Exception:  # tries again, because without this call the watcher counts the request forever
                watcher.leave(request_id, output, now)

    def count_refused(self, outputs: list[SequenceOutput]) -> None:
        """Counts refused prompts, which never became requests, as submitted and as ended by an error."""
        with self._lock:
            self._counts.submitted += len(outputs)
            self._counts.count(outputs)

    def figures(self) -> dict[str, Any]:
        """Returns the fields of EngineStats that are counted here."""
        with self._lock:
            return {**self._counts.figures(), "rejected": self._n_rejected}


def _nobody() -> None:
    """Returns None. A table without a watcher has this function in place of a weak reference to the watcher."""
