"""The requests of one supervisor: who is in its child, and who is tried alone because a child died. Pure Python.

A child says whom it has admitted before it computes them. When it dies, those are the suspects. They are tried one at a
time in the next child, the last admitted first, and everybody else waits. Whoever is the only one to blame for two
deaths is the culprit; one death is forgiven, as it may have come from outside, and one that does seem to have come from
there counts half. Once the culprit is found, or all have
been tried, the others go on together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from llamabatch.request import Request
from llamabatch.ticket import Ticket
from llamabatch.watch import Sink

MOST_DEATHS = 2
FROM_OUTSIDE = 0.5  # how much a death counts that somebody else seems to have brought about
# A suspect is through when it has computed alone for so many times as long as it had when the child died, and this many
# seconds more: alone it is no slower, so that it has passed the token at which that happened.
_CLEAR_FACTOR = 2.0
_CLEAR_S = 1.0


class Ledger:
    """Not safe from several threads: its owner holds a lock."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._unsent: dict[str, Ticket] = {}
        self._inside: dict[str, Ticket] = {}
        self._suspects: deque[Ticket] = deque()  # of the unsent
        self._on_trial: Ticket | None = None
        self._n_unexplained = 0  # deaths in a row with nobody to suspect
        self._n_added = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def get(self, request_id: str) -> Ticket | None:
        return self._tickets.get(request_id)

    @property
    def is_trying(self) -> bool:
        """Is it finding out who killed a child?"""
        return self._on_trial is not None or bool(self._suspects)

    @property
    def n_unsent(self) -> int:
        return len(self._unsent)

    def add(self, request: Request, sink: Sink, stream: bool) -> Ticket:
        ticket = Ticket(request, sink, stream, self._n_added)
        self._n_added += 1
        self._tickets[request.request_id] = self._unsent[request.request_id] = ticket
        return ticket

    def take(self, only: Iterable[Ticket] | None = None) -> list[Ticket]:
        """Those that go into the child now, which they count as in from here on.

        Args:
            only: none but these; none of them while suspects are tried.
        """
        if self._on_trial is not None or (only is not None and self._suspects):
            return []
        if only is not None:
            taken = [ticket for ticket in only if self._unsent.pop(ticket.request.request_id, None) is not None]
            self._inside.update((ticket.request.request_id, ticket) for ticket in taken)
            return taken
        if self._suspects:
            self._on_trial = self._suspects.popleft()
            taken = [self._on_trial]
            del self._unsent[self._on_trial.request.request_id]
        else:
            taken, self._unsent = list(self._unsent.values()), {}
        self._inside.update((ticket.request.request_id, ticket) for ticket in taken)
        return taken

    def admitted(self, request_ids: Iterable[str], now: float) -> None:
        """The child is about to compute these."""
        for request_id in request_ids:
            ticket = self._inside.get(request_id)
            if ticket is not None and ticket.admitted_s is None:
                ticket.admit(now)

    def end(self, ticket: Ticket) -> None:
        """It has come to its end, wherever it is."""
        request_id = ticket.request.request_id
        del self._tickets[request_id]
        self._inside.pop(request_id, None)
        if self._unsent.pop(request_id, None) is not None and ticket in self._suspects:
            self._suspects.remove(ticket)
        if self._on_trial is ticket:
            self._on_trial = None

    def worked(self) -> None:
        """A request has come to a good end."""
        self._n_unexplained = 0

    def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[Ticket]]:
        """Ids of those that are in the child, which has to be told, and those that this has ended."""
        inside, ended = [], []
        for request_id in request_ids:
            ticket = self._tickets.get(request_id)
            if ticket is None:
                continue
            ticket.aborted = True
            if request_id in self._inside:
                inside.append(request_id)
            else:
                self.end(ticket)
                ended.append(ticket)
        return inside, ended

    def late(self, now: float) -> list[Ticket]:
        """Ends those whose deadline has passed and that are in no child, which would see to it."""
        late = [ticket for ticket in self._unsent.values() if ticket.request.is_late(now)]
        for ticket in late:
            self.end(ticket)
        return late

    def clear(self, now: float) -> None:
        """Lets the next one be tried if the one on trial is innocent by now.

        Whoever has had a death on trial runs to its end alone, so that every second death ends a request at the latest.
        """
        ticket = self._on_trial
        if ticket is None or ticket.admitted_s is None or ticket.doubtful:
            return
        if now - ticket.admitted_s >= _CLEAR_FACTOR * ticket.ran_s + _CLEAR_S:
            self._on_trial = None

    def died(self, now: float, weight: float = 1.0) -> tuple[list[Ticket], list[Ticket]]:
        """The child is gone. Returns the culprit, where one is found, and those that were aborted; both are ended.

        Args:
            weight: how much this blames whoever was alone in it.
        """
        inside, self._inside = sorted(self._inside.values(), key=lambda ticket: ticket.number), {}
        admitted = sorted((t for t in inside if t.admitted_s is not None), key=lambda t: t.admitted_s or 0.0)
        prime, self._on_trial = self._on_trial, None
        if prime is None and len(admitted) == 1:
            prime = admitted[0]
        for ticket in inside:
            ticket.leave(now)
        self._unsent = {t.request.request_id: t for t in sorted([*inside, *self._unsent.values()], key=_number)}
        culprits: list[Ticket] = []
        if prime is not None:
            prime.doubtful = True
            if len(admitted) <= 1:  # beside others that had been let off, it may have been one of them
                prime.deaths += 1
                prime.blame += weight
            if prime.blame < MOST_DEATHS:
                self._suspects.appendleft(prime)
            else:  # that explains what the others were suspected of
                culprits = [prime]
                self._suspects.clear()
        else:
            self._suspect(inside, admitted)
        aborted = [ticket for ticket in inside if ticket.aborted]
        culprits = [ticket for ticket in culprits if not ticket.aborted]
        for ticket in culprits + aborted:
            self.end(ticket)
        return culprits, aborted

    def _suspect(self, inside: list[Ticket], admitted: list[Ticket]) -> None:
        if admitted:
            self._suspects.extend(reversed(admitted))
        elif inside:  # the first time it may have come from outside
            self._n_unexplained += 1
            if self._n_unexplained >= MOST_DEATHS:
                self._suspects.extend(inside)

    def release(self) -> list[Ticket]:
        """Gives away those that are above suspicion: no child has begun them. They may go elsewhere."""
        suspects = {*self._suspects, self._on_trial}
        free = [t for t in self._tickets.values() if t.untouched and not t.aborted and t not in suspects]
        for ticket in free:
            self.end(ticket)
        return free

    def clear_all(self) -> None:
        """Ends all."""
        for tickets in (self._tickets, self._unsent, self._inside):
            tickets.clear()
        self._suspects.clear()
        self._on_trial = None
        self._n_unexplained = 0


def _number(ticket: Ticket) -> int:
    return ticket.number
