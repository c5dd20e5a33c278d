"""The requests of one supervisor, safe from any thread: taken in, handed to its child, and told of to their callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from llamabatch.child import Child
from llamabatch.client import Sink, failure, tell
from llamabatch.deadlines import lateness
from llamabatch.errors import InputError
from llamabatch.ledger import FROM_OUTSIDE, Ledger
from llamabatch.request import FinishReason, Request, SequenceOutput
from llamabatch.ticket import Ticket
from llamabatch.watch import Heir
from llamabatch.wire import check_crosses, unpack_output

_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR


class InFlight:
    """A Ledger under a lock, and whoever waits.

    Args:
        lock: its owner's, which may hold it in any call but those that end a request: these tell sinks.
    """

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock: Any = lock
        self._ledger = Ledger()

    def add(self, requests: list[Request], sink: Sink, stream: bool) -> list[SequenceOutput]:
        """Takes requests in; returns the ends of those that are refused."""
        refused = []
        with self._lock:
            for request in requests:
                try:
                    check_crosses(request)
                    if request.request_id in self._ledger:
                        raise InputError(f"request id {request.request_id!r} is already in flight")
                except InputError as error:
                    refused.append(failure(request, str(error)))
                else:
                    self._ledger.add(request, sink, stream)
        return refused

    def take(self) -> list[Ticket]:
        """Those that go into the child now."""
        with self._lock:
            self._ledger.clear(time.monotonic())
            return self._ledger.take()

    def admitted(self, request_ids: list[str]) -> None:
        with self._lock:
            self._ledger.admitted(request_ids, time.monotonic())

    def outputs(self, packed: list[list[Any]]) -> bool:
        """Tells of what the child has said; True if a request came to a good end."""
        told, worked = [], False
        with self._lock:
            for item in packed:
                ticket = self._ledger.get(item[0])
                output = None if ticket is None else ticket.take(unpack_output(item, ticket.request))
                if ticket is None or output is None:
                    continue  # its submit was interrupted, or its caller knows that already
                if output.finished is not None:
                    self._ledger.end(ticket)
                    worked = worked or output.finished.error is None
                told.append((ticket, output))
            if worked:
                self._ledger.worked()
        self._tell(told)
        return worked

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends those that are in no child; returns those that one has."""
        with self._lock:
            inside, ended = self._ledger.abort(request_ids)
        self._end(ended, _ABORT)
        return inside

    def forget(self, tickets: list[Ticket]) -> None:
        """Their submit was interrupted: nobody waits for them."""
        with self._lock:
            for ticket in tickets:
                if self._ledger.get(ticket.request.request_id) is ticket:
                    self._ledger.end(ticket)

    def end_late(self) -> None:
        """Those in no child whose deadline has passed."""
        now = time.perf_counter()
        with self._lock:
            late = self._ledger.late(now)
        for ticket in late:
            self._end([ticket], _ERROR, lateness(ticket.request, now, "while no engine process had it"))

    def child_died(self, how: str, from_outside: bool) -> None:
        """All that it had waits for the next one; a request that has killed too many ends."""
        with self._lock:
            culprits, aborted = self._ledger.died(time.monotonic(), FROM_OUTSIDE if from_outside else 1.0)
        self._end(aborted, _ABORT)
        for ticket in culprits:
            self._end(
                [ticket],
                _ERROR,
                f"the engine process ended {ticket.deaths} times while it computed this request alone, at last with "
                f"{how}; it is not tried again",
            )

    def bequeath(self, heir: Heir, reason: str) -> None:
        """There will be no child any more: gives away what none has begun."""
        with self._lock:
            tickets = self._ledger.release()
        for (_, stream), group in _grouped(tickets).items():
            heir([ticket.request for ticket in group], group[0].sink, stream, reason)

    def end_all(self, reason: str) -> None:
        with self._lock:
            tickets = self._ledger.clear_all()
        self._end([ticket for ticket in tickets if ticket.aborted], _ABORT)
        self._end([ticket for ticket in tickets if not ticket.aborted], _ERROR, reason)

    @property
    def is_trying(self) -> bool:
        """Is it finding out who killed a child?"""
        with self._lock:
            return self._ledger.is_trying

    @property
    def n_unsent(self) -> int:
        """Those in no child."""
        with self._lock:
            return self._ledger.n_unsent

    def _end(self, tickets: list[Ticket], reason: FinishReason, error: str | None = None) -> None:
        self._tell([(ticket, ticket.ended(reason, error)) for ticket in tickets])

    def _tell(self, told: list[tuple[Ticket, SequenceOutput]]) -> None:
        by_sink: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        for ticket, output in told:
            by_sink.setdefault(id(ticket.sink), (ticket.sink, []))[1].append(output)
        for sink, outputs in by_sink.values():
            tell(sink, outputs)


def _grouped(tickets: list[Ticket]) -> dict[tuple[int, bool], list[Ticket]]:
    """By sink, and whether it is told of every token."""
    groups: dict[tuple[int, bool], list[Ticket]] = {}
    for ticket in tickets:
        groups.setdefault((id(ticket.sink), ticket.stream), []).append(ticket)
    return groups


def send(child: Child | None, tickets: list[Ticket]) -> None:
    """Hands them to the child; nothing without one."""
    if child is None or not tickets:
        return
    for stream in (False, True):
        requests = [ticket.request for ticket in tickets if ticket.stream == stream]
        if requests:
            child.submit(requests, stream=stream)
    late = [ticket.request.request_id for ticket in tickets if ticket.aborted]
    if late:  # before the child had heard of them
        child.abort(late)
