"""Estimates how long a new request would wait, for Retry-After and for deadlines that would pass in the queue.

The engine is not queried. The FrontClient reports requests that enter and end, and a simulation of the slots says which
of these requests run. An estimate is too short rather than too long, so that a request is admitted if it might
succeed. Pure Python.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.request.request import Request

# The longest Retry-After in seconds. OpenAI's clients ignore a longer Retry-After and use their own short waits.
MAX_RETRY_S = 60
WINDOW_S = 30.0  # seconds over which the rate is measured
# A deadline is refused only after this many measured requests. The first requests are slower: the engine warms up.
MIN_MEASURED = 4
_KEPT = 64  # number of newest requests that count; older requests do not show the present speed

_Tier = tuple[bool, int]


class EndRate:
    """Measures how many continuations end per second, over the last WINDOW_S seconds of busy time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, int]] = deque()  # (busy seconds since the previous entry, continuations)
        self._busy_s = 0.0
        self._ended = 0
        self._open_s = 0.0  # busy seconds since a continuation last ended

    def passed(self, seconds: float) -> None:
        """Adds seconds of busy time."""
        self._open_s += seconds

    def ended(self, n: int) -> None:
        """Counts `n` continuations that have ended."""
        self._spans.append((self._open_s, n))
        self._busy_s += self._open_s
        self._ended += n
        self._open_s = 0.0
        while len(self._spans) > 1 and (self._busy_s - self._spans[0][0] > WINDOW_S or len(self._spans) > 4096):
            seconds, count = self._spans.popleft()
            self._busy_s -= seconds
            self._ended -= count

    @property
    def per_s(self) -> float | None:
        """The number of continuations that end per second; None: nothing is measured. The rate falls while no
        continuation ends. Before the first end, the rate assumes that one continuation ends now."""
        if not self._ended:
            return 1.0 / self._open_s if self._open_s > 0.0 else None
        seconds = self._busy_s + self._open_s
        return self._ended / seconds if seconds > 0.0 else None


class _Measured(NamedTuple):
    """Totals of successful requests.

    Attributes:
        requests: number of requests.
        prompt_tokens: number of computed prompt tokens.
        prefill_s: seconds in a slot up to the first token.
        decode_s: seconds in a slot after the first token.
        steps: number of tokens after the first token.
        output_tokens: number of output tokens. Of each request, only the longest continuation counts.
    """

    requests: int
    prompt_tokens: int
    prefill_s: float
    steps: int
    decode_s: float
    output_tokens: int


_NOTHING = _Measured(0, 0, 0.0, 0, 0.0, 0)


class SlotSpeed:
    """The time of a token in a slot, and the usual length of an answer, both measured on the last successful requests.

    len() is the number of these requests.
    """

    def __init__(self) -> None:
        self._last: deque[_Measured] = deque(maxlen=_KEPT)
        self._known_sum: _Measured | None = None  # the sum of self._last; None: must be computed again

    def __len__(self) -> int:
        return len(self._last)

    def measure(self, output: RequestOutput) -> None:
        """Adds a request that has ended. Ignores failed requests, and requests without times or tokens."""
        timings, times = output.timings, output.timings.token_times_s
        ended_well = output.error is None and output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not ended_well or not times or timings.queued_s is None or timings.ttft_s is None:
            return
        computed = max(1, len(output.prompt_token_ids) - output.num_cached_tokens)
        prefill_s = max(0.0, timings.ttft_s - timings.queued_s)
        longest = max(len(each.token_ids) for each in output.outputs)
        self._last.append(_Measured(1, computed, prefill_s, len(times) - 1, times[-1] - times[0], longest))
        self._known_sum = None

    @property
    def _sum(self) -> _Measured:
        """The sum of the last requests. The sum is computed on demand, because most requests end without a query."""
        found = self._known_sum
        if found is None:
            found = self._known_sum = _Measured(*map(sum, zip(*self._last, strict=True))) if self._last else _NOTHING
        return found

    def service_s(self, request: Request) -> float:
        """Returns the estimated seconds of a request in a slot. If the request may end before max_tokens, its answer is
        assumed to have the usual length."""
        total = self._sum
        of_prompt = total.prefill_s / total.prompt_tokens if total.prompt_tokens else 0.0
        of_step = total.decode_s / total.steps if total.steps else 0.0
        return len(request.prompt_token_ids) * of_prompt + self._expected_tokens(request) * of_step

    def _expected_tokens(self, request: Request) -> float:
        params = request.params
        if request.score_from is not None:
            return 0.0
        usual = max(self._sum.output_tokens / max(1, self._sum.requests), params.min_tokens)
        if params.max_tokens is None:
            return usual
        return params.max_tokens if params.ignore_eos else min(usual, params.max_tokens)


@dataclass
class _Entered:
    """A request in flight.

    Attributes:
        number: number of the request in the order of arrival.
        started_s: time when the simulation gave slots to the request; None: the request waits.
    """

    request: Request
    number: int
    started_s: float | None = None

    @property
    def rank(self) -> tuple[_Tier, int]:
        return self.request.tier, self.number


class Admission:
    """A thread-safe simulation of the slots and of the requests in flight. It is a Watcher of the FrontClient.

    Args:
        n_slots: continuations that can run at once.
        n_in_flight: returns the number of continuations, and of texts to embed, that run or wait in the client.
        preempt: True: requests take the slots of running requests with a worse priority.
    """

    def __init__(self, n_slots: int, n_in_flight: Callable[[], int], *, preempt: bool = False) -> None:
        self.rate = EndRate()
        self.speed = SlotSpeed()
        self.n_slots = n_slots
        self._lock = threading.Lock()
        self._preempts = preempt
        self._counted = n_in_flight
        self._entered: dict[str, _Entered] = {}
        self._waiting: list[tuple[tuple[_Tier, int], str]] = []  # a heap; may contain requests that have ended
        self._n_running = 0  # continuations that have slots
        self._n_entered = 0
        self._last_s: float | None = None  # the latest `now` that a caller has passed
        self._promised_s = 0.0  # the latest time at which a refused caller was told to try again

    @property
    def n_in_flight(self) -> int:
        """The number of continuations, and of texts to embed, that run or wait."""
        return self._counted()

    def enter(self, requests: Iterable[Request], now: float) -> None:
        """Adds requests at the time `now`, in seconds of any monotonic clock."""
        with self._lock:
            self._advance(now)
            for request in requests:
                entered = self._entered[request.request_id] = _Entered(request, self._n_entered)
                self._n_entered += 1
                if request.embed:  # embedding needs no slot
                    entered.started_s = now
                else:
                    heapq.heappush(self._waiting, (entered.rank, request.request_id))
            self._start(now)

    def leave(self, request_id: str, output: RequestOutput | None, now: float) -> None:
        """Removes a request that has ended. Ignores ids that are not in flight.

        Args:
            output: the output of the request; None: the request was never queued.
        """
        with self._lock:
            entered = self._entered.get(request_id)
            if entered is None:
                return
            self._advance(now)
            del self._entered[request_id]
            copies = entered.request.params.n_copies
            if entered.started_s is not None and not entered.request.embed:
                self._n_running -= copies
            if output is not None:
                self.rate.ended(copies)
                self.speed.measure(output)
            self._start(now)

    def retry_after_s(self, n: int, now: float) -> int:
        """Returns the seconds (1 to MAX_RETRY_S) until a caller with `n` continuations should try a full queue again.

        Each place that becomes free is promised to only one caller. Callers who were refused together therefore do not
        come back together. No caller is told to come back after the time at which the present queue would be empty.
        """
        with self._lock:
            self._advance(now)
            per_s = self.rate.per_s
            if per_s is None:
                return 1
            empty_s = now + self.n_in_flight / per_s
            self._promised_s = min(max(now, self._promised_s) + n / per_s, empty_s)
            return max(1, min(MAX_RETRY_S, math.ceil(self._promised_s - now)))

    def wait_s(self, request: Request, now: float) -> float | None:
        """Returns the seconds until a request would get its first slot; None: too few requests were measured.

        The estimate includes the running requests that would keep their slots, and the waiting requests of an equal or
        better tier.
        """
        if request.embed or len(self.speed) < MIN_MEASURED:
            return None
        with self._lock:
            return self._wait_s(request, now)

    def _wait_s(self, request: Request, now: float) -> float:
        left_s: list[float] = []  # seconds left for each running continuation
        ahead: list[_Entered] = []
        for entered in self._entered.values():
            if entered.request.embed:
                continue
            if entered.started_s is None:
                if entered.request.tier <= request.tier:
                    ahead.append(entered)
            elif not self._gives_way(entered.request, request):
                service_s = self.speed.service_s(entered.request)
                left_s += [max(0.0, service_s - (now - entered.started_s))] * entered.request.params.n_copies
        left_s.sort()
        free_at = left_s[: self.n_slots]  # seconds until each slot is free
        free_at += [0.0] * (self.n_slots - len(free_at))
        heapq.heapify(free_at)
        for seconds in left_s[self.n_slots :]:  # running requests may have more continuations than there are slots
            heapq.heapreplace(free_at, free_at[0] + seconds)
        for entered in sorted(ahead, key=lambda each: each.rank):
            service_s = self.speed.service_s(entered.request)
            for _ in range(entered.request.params.n_copies):
                heapq.heapreplace(free_at, free_at[0] + service_s)
        return free_at[0]

    def _gives_way(self, running: Request, new: Request) -> bool:
        """True if a running request loses its slot to a new request."""
        if running.params.background and not new.params.background:
            return True
        return self._preempts and new.tier < running.tier

    def _start(self, now: float) -> None:
        """Gives free slots to the first waiting requests."""
        if len(self._waiting) > 2 * len(self._entered) + 64:  # many requests have ended while they waited
            self._waiting = [pair for pair in self._waiting if pair[1] in self._entered]
            heapq.heapify(self._waiting)
        while self._waiting and self._n_running < self.n_slots:
            _, request_id = heapq.heappop(self._waiting)
            entered = self._entered.get(request_id)
            if entered is None or entered.started_s is not None:
                continue
            entered.started_s = now
            self._n_running += entered.request.params.n_copies

    def _advance(self, now: float) -> None:
        last_s = now if self._last_s is None else self._last_s
        self._last_s = max(now, last_s)  # another thread may have passed a later `now`
        if self._entered:
            self.rate.passed(self._last_s - last_s)
