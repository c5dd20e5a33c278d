"""The requests of one supervisor, safe from any thread: taken in, handed to its child, and told of to their callers.

A request is owned here from submit until its sink has its last output; the ledger, which knows where it stands
meanwhile, may let it go a little earlier. So what an exception has lost in between is still answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from llamabatch.client.base import failure, tell, tell_end
from llamabatch.client.crash_triage import FROM_OUTSIDE, CrashTriage, TrackedRequest
from llamabatch.client.spawn import Child
from llamabatch.client.wire import check_crosses, unpack_output
from llamabatch.engine.hooks import Failover, Sink
from llamabatch.errors import InputError, describe
from llamabatch.request.outputs import FinishReason, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.scheduler.deadlines import deadline_message

logger = logging.getLogger(__name__)

_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR
_LOST = "an exception in this process has lost the request"


class InFlight:
    """A Ledger under a lock, and whoever waits.

    Args:
        lock: its owner's, which may hold it in any call but those that end a request: these tell sinks.
    """

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock: Any = lock
        self._ledger = CrashTriage()
        self._owned: dict[str, TrackedRequest] = {}
        self._unwanted: list[str] = []  # the child has them, and need not go on

    def add(
        self, requests: list[Request], sink: Sink, stream: bool, added: list[TrackedRequest]
    ) -> list[SequenceOutput]:
        """Takes requests in; returns the ends of those that are refused.

        Args:
            added: gets the others, one by one.
        """
        refused = []
        with self._lock:
            for request in requests:
                try:
                    check_crosses(request)
                    if request.request_id in self._ledger:
                        raise InputError(f"request id {request.request_id!r} is already in flight")
                    added.append(self._ledger.add(request, sink, stream))
                    self._owned[request.request_id] = added[-1]
                except Exception as error:
                    refused.append(failure(request, describe(error)))
        return refused

    def take(self, only: list[TrackedRequest] | None = None) -> list[TrackedRequest]:
        """Those that go into the child now, of all or of some."""
        with self._lock:
            self._ledger.clear(time.monotonic())
            return self._ledger.take(only)

    def send(self, child: Child | None, tickets: list[TrackedRequest]) -> None:
        """Hands them to the child; nothing without one. What cannot be sent ends as an error."""
        if child is None or not tickets:
            return
        for stream in (False, True):
            requests = [ticket.request for ticket in tickets if ticket.stream == stream]
            refused = child.submit(requests, stream=stream) if requests else {}
            for ticket in tickets:
                error = refused.get(ticket.request.request_id)
                if error is not None:
                    self._end([ticket], _ERROR, error)
        late = [ticket.request.request_id for ticket in tickets if ticket.aborted]
        if late:  # before the child had heard of them
            child.abort(late)

    def admitted(self, request_ids: list[str]) -> None:
        with self._lock:
            self._ledger.admitted(request_ids, time.monotonic())

    def outputs(self, packed: list[list[Any]]) -> bool:
        """Tells of what the child has said; True if a request came to a good end."""
        told: list[tuple[TrackedRequest, SequenceOutput]] = []
        worked = False
        try:
            with self._lock:
                for item in packed:
                    ticket = self._ledger.get(item[0])
                    output = None if ticket is None else self._unpacked(item, ticket)
                    if ticket is None or output is None:
                        continue  # its submit was interrupted, or its caller knows that already
                    told.append((ticket, output))
                    if output.finished is not None:
                        self._ledger.end(ticket)
                        worked = worked or output.finished.error is None
                if worked:
                    self._ledger.worked()
        finally:
            self._tell(told)
        return worked

    def _unpacked(self, item: list[Any], ticket: TrackedRequest) -> SequenceOutput | None:
        try:
            return ticket.take(unpack_output(item, ticket.request))
        except Exception as error:
            logger.warning("an output could not be read", exc_info=True)
            self._unwanted.append(ticket.request.request_id)
            return _last_output(ticket, _ERROR, f"its output could not be read: {describe(error)}")

    @property
    def has_unwanted(self) -> bool:
        return bool(self._unwanted)

    def unwanted(self) -> list[str]:
        """Ids of those that the child should be told to end, each once."""
        with self._lock:
            ids, self._unwanted = self._unwanted, []
        return ids

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends those that are in no child; returns those that one has."""
        with self._lock:
            inside, ended = self._ledger.abort(request_ids)
        self._end(ended, _ABORT)
        return inside

    def forget(self, tickets: list[TrackedRequest]) -> None:
        """Their submit was interrupted: nobody waits for them."""
        with self._lock:
            for ticket in tickets:
                if self._ledger.get(ticket.request.request_id) is ticket:
                    self._ledger.end(ticket)
                if self._owned.get(ticket.request.request_id) is ticket:
                    del self._owned[ticket.request.request_id]

    def end_late(self) -> None:
        """Those in no child whose deadline has passed."""
        now = time.perf_counter()
        with self._lock:
            late = self._ledger.late(now)
        for ticket in late:
            self._end([ticket], _ERROR, deadline_message(ticket.request, now, "while no engine process had it"))

    def child_died(self, how: str, from_outside: bool) -> None:
        """All that it had waits for the next one; a request that has killed too many ends."""
        with self._lock:
            culprits, aborted = self._ledger.died(time.monotonic(), FROM_OUTSIDE if from_outside else 1.0)
            self._unwanted.clear()
            known = {id(ticket) for ticket in (*culprits, *aborted)}
            lost = [
                ticket
                for request_id, ticket in self._owned.items()
                if request_id not in self._ledger and id(ticket) not in known and not ticket.aborted
            ]
        self._end(lost, _ERROR, _LOST)
        self._end(aborted, _ABORT)
        for ticket in culprits:
            self._end(
                [ticket],
                _ERROR,
                f"the engine process ended {ticket.deaths} times while it computed this request alone, at last with "
                f"{how}; it is not tried again",
            )

    def hand_over(self, failover: Failover, reason: str) -> None:
        """There will be no child any more: gives away what none has begun."""
        with self._lock:
            tickets = self._ledger.release()
        for (_, stream), group in _grouped(tickets).items():
            failover([ticket.request for ticket in group], group[0].sink, stream, reason)
            self.forget(group)

    def end_all(self, reason: str) -> None:
        with self._lock:
            self._ledger.clear_all()
            tickets = list(self._owned.values())
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

    def _end(self, tickets: list[TrackedRequest], reason: FinishReason, error: str | None = None) -> None:
        self._tell([(ticket, _last_output(ticket, reason, error)) for ticket in tickets])

    def _tell(self, told: list[tuple[TrackedRequest, SequenceOutput]]) -> None:
        by_sink: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        for ticket, output in told:
            by_sink.setdefault(id(ticket.sink), (ticket.sink, []))[1].append(output)
        failed: dict[str, str] = {}
        for sink, outputs in by_sink.values():
            failed |= tell(sink, outputs)
        for ticket, output in told:
            error = failed.pop(ticket.request.request_id, None)
            if error is not None:
                tell_end(ticket.sink, failure(ticket.request, error))
                with self._lock:
                    self._unwanted.append(ticket.request.request_id)
            if error is not None or output.finished is not None:
                self.forget([ticket])


def _grouped(tickets: list[TrackedRequest]) -> dict[tuple[int, bool], list[TrackedRequest]]:
    """By sink, and whether it is told of every token."""
    groups: dict[tuple[int, bool], list[TrackedRequest]] = {}
    for ticket in tickets:
        groups.setdefault((id(ticket.sink), ticket.stream), []).append(ticket)
    return groups


def _last_output(ticket: TrackedRequest, reason: FinishReason, error: str | None) -> SequenceOutput:
    try:
        return ticket.ended(reason, error)
    except Exception:  # what was told of it cannot be put together
        return failure(ticket.request, error or _LOST)
