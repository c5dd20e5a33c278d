"""The requests of one supervisor: who is in its child, and who is tried alone because a child died. Pure Python.

A child says whom it has admitted before it computes them. When it dies, those are the suspects. They are tried one at a
time in the next child, the last admitted first, and everybody else waits. Whoever is the only one to blame for two
deaths is the culprit; one death is forgiven, as it may have come from outside, and one that does seem to have come from
there counts half. Once the culprit is found, or all have
been tried, the others go on together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from llamabatch.engine.hooks import Sink
from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request, ResumedOutput

# ----------------------------------------------------------------------------------------------------
# A request that outlives the process which computes it, and what its caller has been told so far.


@dataclass
class _Told:
    """Of one continuation: what its caller has, and how much of that the present child is still to bring once more."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    n_chars: int = 0
    times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens_again: int = 0
    chars_again: int = 0


class TrackedRequest:
    """One request under a supervisor.

    Args:
        number: its place in the order of arrival.

    Attributes:
        admitted_s: when the present child said that it computes it; None before.
        ran_s: how long it had been computed when a child died with it, at most.
        deaths: children that died while it was the only one there; blame: the same, weighed.
        doubtful: a child died while it was on trial.
        aborted: its caller has taken it back.
    """

    def __init__(self, request: Request, sink: Sink, stream: bool, number: int) -> None:
        self.request = request
        self.sink = sink
        self.stream = stream
        self.number = number
        self.admitted_s: float | None = None
        self.ran_s = 0.0
        self.deaths = 0
        self.blame = 0.0
        self.doubtful = False
        self.aborted = False
        self._first_s: float | None = None  # time.perf_counter() when it was first admitted
        self._told: dict[int, _Told] = {}
        self._again = False  # some of what comes has been told before

    def admit(self, now: float) -> None:
        """The child says that it computes it."""
        self.admitted_s = now
        if self._first_s is None:
            self._first_s = time.perf_counter()

    @property
    def untouched(self) -> bool:
        """Has no child begun it, nor died with it alone?"""
        return self._first_s is None and not self.doubtful

    def leave(self, now: float) -> None:
        """The child that had it is gone."""
        if self.admitted_s is not None:
            self.ran_s = max(self.ran_s, now - self.admitted_s)
            self.admitted_s = None
        told = self._told.get(0)
        if told is not None and told.token_ids and _can_resume(self.request):
            logprobs = None if self.request.params.logprobs is None else tuple(told.logprobs)
            known = ResumedOutput(tuple(told.token_ids), tuple(told.times), logprobs, self._first_s)
            self.request = replace(self.request, known=known)
            return
        self._again = bool(self._told)
        for told in self._told.values():
            told.tokens_again, told.chars_again = len(told.token_ids), told.n_chars

    def take(self, output: SequenceOutput) -> SequenceOutput | None:
        """What is left to tell of something that the child has said; None if that is nothing."""
        if not self.stream:
            return output if output.finished is not None else None
        told = self._told.get(output.index)
        if told is None:
            told = self._told[output.index] = _Told()
        if self._again:
            output = _unknown_part(output, told)
        if output.token_ids:
            told.token_ids += output.token_ids
            told.times += [time.perf_counter()] * len(output.token_ids)
            told.logprobs += output.logprobs or ()
        if output.text:
            told.pieces.append(output.text)
            told.n_chars += len(output.text)
        return output if output.token_ids or output.text or output.finished is not None else None

    def ended(self, reason: FinishReason, error: str | None) -> SequenceOutput:
        """The event that ends it without a child, with what was told of it."""
        request, start = self.request, self.request.arrival_s
        completions = tuple(
            CompletionOutput(index, "".join(told.pieces), tuple(told.token_ids), reason)
            for index, told in sorted(self._told.items())
        )
        times = tuple(t - start for t in (self._told[0].times if 0 in self._told else ()))
        timings = Timings(None, times[0] if times else None, time.perf_counter() - start, times)
        nothing = CompletionOutput(0, "", (), reason)
        output = RequestOutput(
            *(request.request_id, request.prompt, request.prompt_token_ids, completions or (nothing,), error, timings),
            num_truncated=request.num_truncated,
        )
        return SequenceOutput(request.request_id, (), "", output)


def _can_resume(request: Request) -> bool:
    """Do the tokens told so far say all about how it goes on? Of several continuations, some may have ended; and
    mirostat remembers how likely its tokens were."""
    return request.params.n_copies == 1 and not request.params.mirostat


def _unknown_part(output: SequenceOutput, told: _Told) -> SequenceOutput:
    """Without what has been told before: the same tokens come again, as draws depend on seed and place alone."""
    tokens, chars = min(len(output.token_ids), told.tokens_again), min(len(output.text), told.chars_again)
    told.tokens_again -= tokens
    told.chars_again -= chars
    logprobs = output.logprobs if output.logprobs is None else output.logprobs[tokens:]
    return replace(output, token_ids=output.token_ids[tokens:], text=output.text[chars:], logprobs=logprobs)


MOST_DEATHS = 2
FROM_OUTSIDE = 0.5  # how much a death counts that somebody else seems to have brought about
# A suspect is through when it has computed alone for so many times as long as it had when the child died, and this many
# seconds more: alone it is no slower, so that it has passed the token at which that happened.
_CLEAR_FACTOR = 2.0
_CLEAR_S = 1.0


class CrashTriage:
    """Not safe from several threads: its owner holds a lock."""

    def __init__(self) -> None:
        self._tickets: dict[str, TrackedRequest] = {}
        self._unsent: dict[str, TrackedRequest] = {}
        self._inside: dict[str, TrackedRequest] = {}
        self._suspects: deque[TrackedRequest] = deque()  # of the unsent
        self._on_trial: TrackedRequest | None = None
        self._n_unexplained = 0  # deaths in a row with nobody to suspect
        self._n_added = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._tickets.get(request_id)

    @property
    def is_trying(self) -> bool:
        """Is it finding out who killed a child?"""
        return self._on_trial is not None or bool(self._suspects)

    @property
    def n_unsent(self) -> int:
        return len(self._unsent)

    def add(self, request: Request, sink: Sink, stream: bool) -> TrackedRequest:
        ticket = TrackedRequest(request, sink, stream, self._n_added)
        self._n_added += 1
        self._tickets[request.request_id] = self._unsent[request.request_id] = ticket
        return ticket

    def take(self, only: Iterable[TrackedRequest] | None = None) -> list[TrackedRequest]:
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

    def end(self, ticket: TrackedRequest) -> None:
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

    def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[TrackedRequest]]:
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

    def late(self, now: float) -> list[TrackedRequest]:
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

    def died(self, now: float, weight: float = 1.0) -> tuple[list[TrackedRequest], list[TrackedRequest]]:
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
        culprits: list[TrackedRequest] = []
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

    def _suspect(self, inside: list[TrackedRequest], admitted: list[TrackedRequest]) -> None:
        if admitted:
            self._suspects.extend(reversed(admitted))
        elif inside:  # the first time it may have come from outside
            self._n_unexplained += 1
            if self._n_unexplained >= MOST_DEATHS:
                self._suspects.extend(inside)

    def release(self) -> list[TrackedRequest]:
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


def _number(ticket: TrackedRequest) -> int:
    return ticket.number
