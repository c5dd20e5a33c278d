"""The requests of one supervisor, and the search for a request that kills its child processes.

Before a child computes requests, it reports them as admitted. If the child dies, these requests are the suspects:
the next child gets them one at a time, the last admitted first, and all other requests wait. If two children die while
they compute the same request alone, this request is the culprit and ends with an error. A first death is forgiven,
because its cause may be outside the process. A death that seems to come from outside counts half. Once the culprit is
found, or all suspects have been tried, the other requests run together again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llamabatch.client.base import emit, emit_last, failure
from llamabatch.client.spawn import Child
from llamabatch.client.wire import check_crosses, unpack_output
from llamabatch.engine.hooks import Failover, Sink
from llamabatch.errors import InputError, describe
from llamabatch.request.logprobs import FlatLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request, ResumedOutput
from llamabatch.scheduler.deadlines import deadline_message

logger = logging.getLogger(__name__)

MOST_DEATHS = 2
FROM_OUTSIDE = 0.5  # a death counts this much if it seems to come from outside the process
# A suspect is cleared once it has run alone for long enough: _CLEAR_FACTOR times its run in the child that died, plus
# _CLEAR_S seconds. A request that runs alone runs at least as fast as with other requests. So by then the suspect is
# past the token at which the child died.
_CLEAR_FACTOR = 2.0
_CLEAR_S = 1.0
# These words are part of the error of a request that kills the engine.
KILLS_ALONE = "while it computed this request alone"
_LOST = "an exception in this process has lost the request"


@dataclass
class _Emitted:
    """The part of one continuation's output that its caller has received.

    Attributes:
        n_repeated_tokens, n_repeated_chars: size of the part that the present child will send again.
    """

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    n_chars: int = 0
    times: list[float] = field(default_factory=list)
    logprobs: FlatLogprobs = field(default_factory=FlatLogprobs)
    n_repeated_tokens: int = 0
    n_repeated_chars: int = 0


class TrackedRequest:
    """A request that survives the death of a child, and the output that its caller has received so far.

    Args:
        number: position of the request in the order of arrival.

    Attributes:
        admitted_s: time at which the present child admitted the request, by the supervisor's clock; None before.
        ran_s: longest time from the admission of the request to the death of its child, in seconds.
        deaths: number of children that died while this request ran alone: it was admitted, or on trial, and no other
            request was admitted.
        blame: sum of the weights of these deaths.
        died_on_trial: a child died while this request was on trial or was the only one admitted.
        aborted: the caller has aborted the request.
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
        self.died_on_trial = False
        self.aborted = False
        self._first_admitted_s: float | None = None  # a value of time.perf_counter()
        self._emitted: dict[int, _Emitted] = {}  # by the index of the continuation
        self._repeats = False  # the child sends the emitted part again

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def never_started(self) -> bool:
        """True if no child has admitted the request, and no child died while the request was on trial."""
        return self._first_admitted_s is None and not self.died_on_trial

    def admit(self, now: float) -> None:
        """Records that the child has admitted the request."""
        self.admitted_s = now
        if self._first_admitted_s is None:
            self._first_admitted_s = time.perf_counter()

    def child_died(self, now: float) -> None:
        """Prepares the request for the next child, which continues after the emitted tokens or computes them again."""
        if self.admitted_s is not None:
            self.ran_s = max(self.ran_s, now - self.admitted_s)
            self.admitted_s = None
        first = self._emitted.get(0)
        if first is not None and first.token_ids and _can_resume(self.request):
            logprobs = FlatLogprobs(first.logprobs) if self.request.params.wants_logprobs else None
            known = ResumedOutput(tuple(first.token_ids), tuple(first.times), logprobs, self._first_admitted_s)
            self.request = replace(self.request, resumed=known)
            return
        self._repeats = bool(self._emitted)
        for emitted in self._emitted.values():
            emitted.n_repeated_tokens, emitted.n_repeated_chars = len(emitted.token_ids), emitted.n_chars

    def new_part(self, output: SequenceOutput) -> SequenceOutput | None:
        """Returns the part of a child's output that the caller has not received yet; None if there is none."""
        if not self.stream:
            return output if output.finished is not None else None
        emitted = self._emitted.get(output.index)
        if emitted is None:
            emitted = self._emitted[output.index] = _Emitted()
        if self._repeats:
            output = _without_repeated(output, emitted)
        if output.token_ids:
            emitted.token_ids += output.token_ids
            emitted.times += [time.perf_counter()] * len(output.token_ids)
            emitted.logprobs.extend(output.logprobs or ())
        if output.text:
            emitted.pieces.append(output.text)
            emitted.n_chars += len(output.text)
        return output if output.token_ids or output.text or output.finished is not None else None

    def last_output(self, reason: FinishReason, error: str | None) -> SequenceOutput:
        """Returns the last output of a request that ends without a child. It has all text and tokens emitted before."""
        request, start = self.request, self.request.arrival_s
        completions = tuple(
            CompletionOutput(index, "".join(emitted.pieces), tuple(emitted.token_ids), reason)
            for index, emitted in sorted(self._emitted.items())
        )
        times = tuple(t - start for t in (self._emitted[0].times if 0 in self._emitted else ()))
        timings = Timings(None, times[0] if times else None, time.perf_counter() - start, times)
        nothing = CompletionOutput(0, "", (), reason)
        output = RequestOutput(
            *(request.request_id, request.prompt, request.prompt_token_ids, completions or (nothing,), error, timings),
            num_truncated=request.num_truncated,
        )
        return SequenceOutput(request.request_id, (), "", output)


def _can_resume(request: Request) -> bool:
    """Returns True if the next child can continue after the emitted tokens. With several continuations it cannot,
    because some may have ended. With mirostat it cannot, because mirostat needs the probabilities of earlier tokens.
    """
    return request.params.n_copies == 1 and not request.params.mirostat


def _without_repeated(output: SequenceOutput, emitted: _Emitted) -> SequenceOutput:
    """Drops the part that was emitted before. The child repeats this part exactly, because the seed and the position
    of a token determine its draw."""
    tokens = min(len(output.token_ids), emitted.n_repeated_tokens)
    chars = min(len(output.text), emitted.n_repeated_chars)
    emitted.n_repeated_tokens -= tokens
    emitted.n_repeated_chars -= chars
    logprobs = output.logprobs if output.logprobs is None else output.logprobs[tokens:]
    return replace(output, token_ids=output.token_ids[tokens:], text=output.text[chars:], logprobs=logprobs)


class CrashTriage:
    """The requests of one supervisor. Safe to call from any thread. len() is the number of requests not yet ended.

    A request stays here until its sink has received the last output. So it is answered even if an exception loses it on
    the way.

    Args:
        lock: The supervisor's lock. Methods that end requests also call sinks, so the supervisor must not hold the lock
            when it calls these methods.
        clock: returns seconds; tests replace it.
    """

    def __init__(
        self,
        lock: threading.RLock | None = None,  # type: ignore[valid-type]
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock: Any = lock or threading.RLock()
        self._clock = clock
        self._unanswered: dict[str, TrackedRequest] = {}  # requests whose sinks have not received the last output
        # Each request that has not ended is either in _unsent or in _inside.
        self._unsent: dict[str, TrackedRequest] = {}
        self._inside: dict[str, TrackedRequest] = {}  # requests in the child
        self._suspects: deque[TrackedRequest] = deque()  # requests to run alone; all are in _unsent
        self._on_trial: TrackedRequest | None = None  # the suspect that runs alone; it is in _inside
        self._unwanted: list[str] = []  # ids of requests that the child must abort
        self._n_unexplained = 0  # number of deaths with no request admitted, since the last request that ended well
        self._n_added = 0

    def __len__(self) -> int:
        return len(self._unsent) + len(self._inside)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unsent or request_id in self._inside

    @property
    def is_trying(self) -> bool:
        """True while suspects are being tried."""
        with self._lock:
            return self._on_trial is not None or bool(self._suspects)

    @property
    def n_unsent(self) -> int:
        """The number of requests that are waiting for a child."""
        return len(self._unsent)

    def add(
        self, requests: list[Request], sink: Sink, stream: bool, added: list[TrackedRequest]
    ) -> list[SequenceOutput]:
        """Adds requests; returns the last outputs of the refused ones.

        Args:
            added: gets the accepted requests, one by one.
        """
        refused = []
        with self._lock:
            for request in requests:
                try:
                    check_crosses(request)
                    if request.request_id in self:
                        raise InputError(f"request id {request.request_id!r} is already in flight")
                    tracked = TrackedRequest(request, sink, stream, self._n_added)
                    added.append(tracked)
                    self._n_added += 1
                    for table in (self._unsent, self._unanswered):
                        table[request.request_id] = tracked
                except Exception as error:
                    refused.append(failure(request, error))
        return refused

    def pop_sendable(self, only: Iterable[TrackedRequest] | None = None) -> list[TrackedRequest]:
        """Returns the requests to send to the child now. They now count as inside the child.

        Args:
            only: the only requests to send; none of them is sent while suspects are being tried.
        """
        with self._lock:
            self._end_trial_in_time()
            if self._on_trial is not None or (only is not None and self._suspects):
                return []
            if only is not None:
                sendable = [tracked for tracked in only if self._unsent.pop(tracked.request_id, None) is not None]
            elif self._suspects:
                self._on_trial = self._suspects.popleft()
                sendable = [self._on_trial]
                del self._unsent[self._on_trial.request_id]
            else:
                sendable, self._unsent = list(self._unsent.values()), {}
            self._inside.update((tracked.request_id, tracked) for tracked in sendable)
            return sendable

    def _end_trial_in_time(self) -> None:
        """Clears the suspect on trial once it has run for long enough. The next suspect can then be tried.

        A suspect is not cleared if a child has died during its trial: it then runs alone to its end. Otherwise it could
        kill one child after another and be cleared each time.
        """
        tracked = self._on_trial
        if tracked is None or tracked.admitted_s is None or tracked.died_on_trial:
            return
        if self._clock() - tracked.admitted_s >= _CLEAR_FACTOR * tracked.ran_s + _CLEAR_S:
            self._on_trial = None

    def send(self, child: Child | None, sendable: list[TrackedRequest]) -> None:
        """Sends requests to the child, if there is one. A request that cannot be sent ends with an error."""
        if child is None or not sendable:
            return
        for stream in (False, True):
            requests = [tracked.request for tracked in sendable if tracked.stream == stream]
            refused = child.submit(requests, stream=stream) if requests else {}
            for tracked in sendable:
                error = refused.get(tracked.request_id)
                if error is not None:
                    self._emit_last([tracked], FinishReason.ERROR, error)
        aborted = [tracked.request_id for tracked in sendable if tracked.aborted]
        if aborted:  # the requests were aborted before the child had them
            child.abort(aborted)

    def admitted(self, request_ids: Iterable[str]) -> None:
        """Records that the child is about to compute these requests."""
        with self._lock:
            now = self._clock()
            for request_id in request_ids:
                tracked = self._inside.get(request_id)
                if tracked is not None and tracked.admitted_s is None:
                    tracked.admit(now)

    def deliver(self, packed: Sequence[Any]) -> bool:
        """Emits outputs of the child; returns True if an output ended a request without an error."""
        outputs: list[tuple[TrackedRequest, SequenceOutput]] = []
        ended_well = False
        try:
            with self._lock:
                for item in packed:
                    tracked = self._get(item[0])
                    output = None if tracked is None else self._unpacked(item, tracked)
                    if tracked is None or output is None:
                        continue  # submit was interrupted, or the caller has this output already
                    outputs.append((tracked, output))
                    if output.finished is not None:
                        self._remove(tracked)
                        ended_well = ended_well or output.finished.error is None
                if ended_well:
                    self._n_unexplained = 0
        finally:
            self._emit(outputs)
        return ended_well

    def _unpacked(self, item: Any, tracked: TrackedRequest) -> SequenceOutput | None:
        try:
            return tracked.new_part(unpack_output(item, tracked.request))
        except Exception as error:
            logger.warning("an output could not be read", exc_info=True)
            self._unwanted.append(tracked.request_id)
            return _last_output(tracked, FinishReason.ERROR, f"its output could not be read: {describe(error)}")

    @property
    def has_unwanted(self) -> bool:
        return bool(self._unwanted)

    def pop_unwanted(self) -> list[str]:
        """Returns the ids of requests that the child must abort, and clears the list."""
        with self._lock:
            ids, self._unwanted = self._unwanted, []
        return ids

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests that are waiting for a child. Returns the other ids, which the child must abort."""
        inside, ended = [], []
        with self._lock:
            for request_id in request_ids:
                tracked = self._get(request_id)
                if tracked is None:
                    continue
                tracked.aborted = True
                if request_id in self._inside:
                    inside.append(request_id)
                else:
                    self._remove(tracked)
                    ended.append(tracked)
        self._emit_last(ended, FinishReason.ABORT)
        return inside

    def forget(self, group: Iterable[TrackedRequest]) -> None:
        """Drops requests and emits nothing: their last output is delivered, or their submit was interrupted."""
        with self._lock:
            for tracked in group:
                if self._get(tracked.request_id) is tracked:
                    self._remove(tracked)
                if self._unanswered.get(tracked.request_id) is tracked:
                    del self._unanswered[tracked.request_id]

    def end_late(self) -> None:
        """Ends requests that wait for a child and are past their deadlines. A child does this for its own requests."""
        now = time.perf_counter()
        with self._lock:
            late = [tracked for tracked in self._unsent.values() if tracked.request.is_late(now)]
            for tracked in late:
                self._remove(tracked)
        for tracked in late:
            error = deadline_message(tracked.request, now, "while no engine process had it")
            self._emit_last([tracked], FinishReason.ERROR, error)

    def child_died(self, how: str, from_outside: bool) -> None:
        """Keeps the requests of the dead child for the next child. Ends the culprit (if one is found), aborted requests
        and requests lost by an exception.

        Args:
            how: the way in which the child ended, for messages.
            from_outside: the child seems to have been killed from outside. Such a death counts less against requests.
        """
        with self._lock:
            self._unwanted.clear()
            lost = [t for t in self._unanswered.values() if t.request_id not in self and not t.aborted]
            culprit, aborted = self._judge(FROM_OUTSIDE if from_outside else 1.0)
            for tracked in (*culprit, *aborted):
                self._remove(tracked)
        self._emit_last(lost, FinishReason.ERROR, _LOST)
        self._emit_last(aborted, FinishReason.ABORT)
        for tracked in culprit:
            error = (
                f"the engine process ended {tracked.deaths} times {KILLS_ALONE}, at last with {how}; it is not tried "
                "again"
            )
            self._emit_last([tracked], FinishReason.ERROR, error)

    def _judge(self, weight: float) -> tuple[list[TrackedRequest], list[TrackedRequest]]:
        """Removes all requests from the dead child. Returns the culprit, if one is found, and the aborted requests.

        Args:
            weight: a request that ran alone gets this much blame for the death.
        """
        now = self._clock()
        inside, self._inside = sorted(self._inside.values(), key=_number), {}
        admitted = sorted((t for t in inside if t.admitted_s is not None), key=lambda t: t.admitted_s or 0.0)
        prime, self._on_trial = self._on_trial, None
        if prime is None and len(admitted) == 1:
            prime = admitted[0]
        for tracked in inside:
            tracked.child_died(now)
        self._unsent = {t.request_id: t for t in sorted([*inside, *self._unsent.values()], key=_number)}
        culprit: list[TrackedRequest] = []
        if prime is not None:
            prime.died_on_trial = True
            if all(tracked is prime for tracked in admitted):  # else an earlier suspect may be the cause
                prime.deaths += 1
                prime.blame += weight
            if prime.blame < MOST_DEATHS:
                self._suspects.appendleft(prime)
            else:  # the other suspects are innocent
                culprit = [] if prime.aborted else [prime]
                self._suspects.clear()
        elif admitted:
            self._suspects.extend(reversed(admitted))
        elif inside:  # no request was admitted, so a first death may come from outside
            self._n_unexplained += 1
            if self._n_unexplained >= MOST_DEATHS:
                self._suspects.extend(inside)
        return culprit, [tracked for tracked in inside if tracked.aborted]

    def hand_over(self, failover: Failover, reason: str) -> None:
        """Passes requests to `failover`, because no child will run now. Suspects stay, and so do requests that have
        started or were aborted.
        """
        with self._lock:
            suspects = {*self._suspects, self._on_trial}
            every = sorted([*self._inside.values(), *self._unsent.values()], key=_number)
            free = [t for t in every if t.never_started and not t.aborted and t not in suspects]
            for tracked in free:
                self._remove(tracked)
        groups: dict[tuple[int, bool], list[TrackedRequest]] = {}
        for tracked in free:
            groups.setdefault((id(tracked.sink), tracked.stream), []).append(tracked)
        for (_, stream), group in groups.items():
            failover([tracked.request for tracked in group], group[0].sink, stream, reason)
            self.forget(group)

    def end_all(self, reason: str) -> None:
        """Ends all unanswered requests. Requests that were not aborted end with the error `reason`."""
        with self._lock:
            self._unsent.clear()
            self._inside.clear()
            self._suspects.clear()
            self._on_trial = None
            self._n_unexplained = 0
            unanswered = list(self._unanswered.values())
        self._emit_last([tracked for tracked in unanswered if tracked.aborted], FinishReason.ABORT)
        self._emit_last([tracked for tracked in unanswered if not tracked.aborted], FinishReason.ERROR, reason)

    def _get(self, request_id: str) -> TrackedRequest | None:
        return self._inside.get(request_id) or self._unsent.get(request_id)

    def _remove(self, tracked: TrackedRequest) -> None:
        """Removes a request that ends, whether or not the child has it. The sink still waits for the last output."""
        self._inside.pop(tracked.request_id, None)
        if self._unsent.pop(tracked.request_id, None) is not None and tracked in self._suspects:
            self._suspects.remove(tracked)
        if self._on_trial is tracked:
            self._on_trial = None

    def _emit_last(self, group: list[TrackedRequest], reason: FinishReason, error: str | None = None) -> None:
        self._emit([(tracked, _last_output(tracked, reason, error)) for tracked in group])

    def _emit(self, outputs: list[tuple[TrackedRequest, SequenceOutput]]) -> None:
        by_sink: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        for tracked, output in outputs:
            by_sink.setdefault(id(tracked.sink), (tracked.sink, []))[1].append(output)
        failed: dict[str, str] = {}
        for sink, of_sink in by_sink.values():
            failed |= emit(sink, of_sink)
        for tracked, output in outputs:
            error = failed.pop(tracked.request_id, None)
            if error is not None:
                emit_last(tracked.sink, failure(tracked.request, error))
                with self._lock:
                    self._unwanted.append(tracked.request_id)
            if error is not None or output.finished is not None:
                self.forget([tracked])


def _last_output(tracked: TrackedRequest, reason: FinishReason, error: str | None) -> SequenceOutput:
    try:
        return tracked.last_output(reason, error)
    except Exception:  # the parts emitted before cannot be joined
        return failure(tracked.request, error or _LOST)


def _number(tracked: TrackedRequest) -> int:
    return tracked.number
