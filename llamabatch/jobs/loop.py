"""The loop of a job: rows become requests in flight, results go to the output, and a signal ends the loop cleanly."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple, Protocol

from llamabatch.client.base import EngineClient
from llamabatch.client.restart_policy import gave_up
from llamabatch.entrypoints.input_processor import Host, InputProcessor
from llamabatch.errors import EngineClosedError, InputError, QueueFull
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.jobs.shared import SharedEngine
from llamabatch.jobs.stats import Counts
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request, new_group
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils import interrupts
from llamabatch.utils.checks import counted

_SLOW_INPUT_S = 0.02
_TICK_S = 0.2  # the longest wait between two displays of progress


class RowSink(Protocol):
    """The receiver of finished rows: an output, or a test's list."""

    def done(self, row: Row, output: RequestOutput) -> None:
        """Receives the result of a row from the engine. The result may be an error."""

    def refused(self, row: Row | BadRow, error: str) -> None:
        """Receives the error of a row that was refused before it reached the engine."""


class Loop:
    """The loop of a job: one thread reads, tokenizes and writes rows. The engine computes elsewhere, from a queue.

    Args:
        tick: called after each iteration, several times a second.
        shared: an engine that outlives the job; `run` leaves no request in this engine. None: the engine belongs to the
            job.
    """

    def __init__(
        self,
        client: EngineClient,
        feed: Feed,
        sink: RowSink,
        counts: Counts,
        stop: Stop,
        tick: Callable[[], object],
        shared: SharedEngine | None = None,
    ) -> None:
        self._client = client
        self._feed = feed
        self._sink = sink
        self._counts = counts
        self._stop = stop
        self._tick = tick
        self._shared = shared
        self._unsent: list[Request] = []  # requests that wait while the queue of a shared engine is full
        self._events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
        # Clients compare sinks by identity, but each access to `put` makes a new bound method.
        self._sink_of_events = self._events.put

    def run(self) -> None:
        """Runs until all rows are written. After a request to stop, runs until all finished rows are written.

        Raises:
            EngineClosedError: the engine is gone for good. Finished rows are written. The next run computes the rows
                that were in flight.
            OutputError: the output cannot be written.
            InputError: an input cannot be read any further. All earlier rows are written.
        """
        try:
            while not self._stop and self._iterate():
                self._tick()
        except CancelledError:  # a stop came while a row was tokenized; the next run computes that row
            pass
        except EngineClosedError:
            self._write_finished()
            raise
        finally:
            if self._shared is not None:
                with contextlib.suppress(EngineClosedError):
                    self._client.abort(self._feed.in_flight)
        self._write_finished()
        if self._feed.input_error is not None and not self._stop:
            raise self._feed.input_error

    def wake(self) -> None:
        """Ends the wait for results, so that the loop sees a stop at once. Safe to call in signal handlers."""
        self._events.put([])

    def _iterate(self) -> bool:
        """Submits a few rows and writes the finished ones. Returns False when no row is left."""
        if self._shared is not None and not self._shared.background and self._feed.background:
            self._promote()
        if self._unsent:
            self._send(self._unsent)
        elif self._feed.wants_more:
            self._submit(*self._feed.next_requests())
        if self._feed.exhausted and not self._feed.n_in_flight:
            return False
        if self._unsent or not self._feed.wants_more:
            self._collect(_TICK_S)
        elif self._feed.is_waiting:
            self._collect(_SLOW_INPUT_S)
        else:
            self._collect(0.0)
        return True

    def _submit(self, requests: list[Request], refused: list[Refused]) -> None:
        if requests:
            self._send(requests)
        for each in refused:
            self._counts.add_error(each.message)
            self._sink.refused(each.row, each.error)

    def _send(self, requests: list[Request]) -> None:
        """Submits requests. If the queue of a shared engine is full, the remaining requests wait in `_unsent`."""
        self._unsent = []
        try:
            self._client.submit(requests, self._sink_of_events)
        except QueueFull:
            if len(requests) == 1:
                self._unsent = requests
                return
            for i, request in enumerate(requests):  # one request at a time uses every free place in the queue
                self._send([request])
                if self._unsent:
                    self._unsent = requests[i:]
                    return

    def _promote(self) -> None:
        """Ends the background tier of the rows: requests in flight are aborted, and their rows are submitted again."""
        self._feed.background = False
        for request in self._unsent:
            self._feed.again(request.request_id)
        self._unsent = []
        self._client.abort(self._feed.in_flight)

    def _collect(self, wait_s: float) -> None:
        """Writes all finished rows. Waits up to `wait_s` for the first one."""
        events = self._finished(wait_s)
        failed = [event for event in events if self._failed(event)]
        for event in events:
            if not self._failed(event):
                self._write(event)
        if failed and (reason := self._engine_error(failed[0])) is not None:
            raise EngineClosedError(reason)
        for event in failed:
            self._write(event)

    def _finished(self, wait_s: float) -> list[SequenceOutput]:
        events: list[SequenceOutput] = []
        try:
            events += self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            while True:
                events += self._events.get_nowait()
        except queue.Empty:
            return [event for event in events if event.finished is not None]

    @staticmethod
    def _failed(event: SequenceOutput) -> bool:
        return event.finished is not None and event.finished.finish_reason is FinishReason.ERROR

    def _engine_error(self, event: SequenceOutput) -> str | None:
        """Returns the reason why the engine is gone; None: the engine is alive, and only this row failed."""
        assert event.finished is not None
        if gave_up(event.finished.error):  # stats() would not raise if a new engine has started since
            return event.finished.error
        try:
            self._client.stats()
        except EngineClosedError as error:
            return event.finished.error or str(error)
        return None

    def _write(self, event: SequenceOutput) -> None:
        assert event.finished is not None
        if self._shared is not None and event.finished.finish_reason is FinishReason.ABORT:
            # Either the job was promoted or the engine is closing. The row is submitted again in both cases. A closing
            # engine then raises, so that the row is not written as an error.
            self._feed.again(event.request_id)
            return
        row = self._feed.pop(event.request_id)
        self._counts.add(row.task, row.place, event.finished)
        self._sink.done(row, event.finished)

    def _write_finished(self) -> None:
        """Writes rows that finished while the loop ended. Failed rows are not written: the engine may be the cause."""
        for event in self._finished(0.0):
            if not self._failed(event):
                self._write(event)


_LEAST_GROUP = 64  # minimum rows of a group without a shared engine: a strategy needs rows to sort
_MOST_REQUESTS = 32  # maximum number of rows that are tokenized before the engine gets them
_MOST_S = 0.05  # seconds of tokenizing before the engine gets the rows that are ready
_LEAST_TOKENS = 2**19
_MOST_BYTES = 256 * 2**20  # maximum size of all media in flight
_MOST_TIERS = 256


@dataclass(frozen=True)
class Refused:
    """A row that never reaches the engine, with the reason."""

    row: Row | BadRow
    error: str

    @property
    def message(self) -> str:
        """The place of the row, and the error."""
        place = self.row.place
        return self.error if self.error.startswith(place) else f"{place}: {self.error}"


class _InFlight(NamedTuple):
    """A row in flight, with the number of its prompt tokens and the bytes of its media."""

    row: Row
    n_tokens: int
    n_bytes: int


class Feed:
    """Turns the rows of a job into requests. Just enough requests are in flight to keep the engine busy.

    The rows form groups. A group has four rows for each slot, at least 64. With a shared engine, a group has
    `shared.most_rows` / 2 rows. A strategy may sort the rows inside a group. The next group is submitted before the
    current group is done, so that no slot stays empty. No row overtakes a row of an earlier group. So only few results
    wait for an earlier row.

    Args:
        host: the engine that will get the requests.
        rows: the rows that are not done yet; an item None means that no row has arrived yet.
        slots: number of rows that the engine computes at once.
        n_ctx: maximum number of tokens of one row, prompt and output together.
        seed: the seed of the job. A row without a seed gets the seed `seed_of(seed, number)`.
        adapters: as in LLM.generate.
        cancelled: returns true as soon as the job must end; see InputProcessor.
        shared: the engine, if the job shares it with other requests; None: the engine belongs to the job.

    Attributes:
        background: true while new requests get the background tier.
        exhausted: true when no further row comes.
        is_waiting: true while a slow input has no row ready, although more rows may come.
        input_error: the error that ended the input; None: there was none.
    """

    def __init__(
        self,
        host: Host,
        rows: Iterator[Row | BadRow | None],
        slots: int,
        n_ctx: int,
        seed: int,
        adapters: Mapping[str, float] | None = None,
        cancelled: Callable[[], bool] | None = None,
        shared: SharedEngine | None = None,
    ) -> None:
        self._input_processor = InputProcessor(host, cancelled)
        self._rows = rows
        self._seed = seed
        self._adapters = adapters
        self._group_rows = max(_LEAST_GROUP, 4 * slots)
        self._most_rows = 2 * self._group_rows
        self._shared = shared
        self._most_copies: int | None = None
        self.background = False
        if shared is not None:
            self.background = shared.background
            self._group_rows, self._most_rows = max(1, shared.most_rows // 2), shared.most_rows
            max_queue = shared.client.plan.config.max_queue
            self._most_copies = None if max_queue is None else slots + max_queue
        self._tiers: dict[tuple[int, bool], tuple[SamplingParams, SamplingParams]] = {}
        self._again: deque[Row] = deque()
        self._most_tokens = max(_LEAST_TOKENS, 2 * slots * n_ctx)
        self._in_flight: dict[str, _InFlight] = {}
        self._n_tokens = self._n_bytes = 0
        self._group, self._n_group = new_group(), 0
        self._is_read = False
        self.is_waiting = False
        self.input_error: InputError | None = None

    @property
    def exhausted(self) -> bool:
        return self._is_read and not self._again

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def in_flight(self) -> list[str]:
        """The ids of the requests in flight."""
        return list(self._in_flight)

    @property
    def wants_more(self) -> bool:
        """True while more rows may come and there is room for them."""
        room = self._most_rows - len(self._in_flight)
        return room >= min(_MOST_REQUESTS, self._group_rows) and self._has_room and not self.exhausted

    @property
    def _has_room(self) -> bool:
        return self._n_tokens < self._most_tokens and self._n_bytes < _MOST_BYTES

    def next_requests(self) -> tuple[list[Request], list[Refused]]:
        """Reads the next few rows. Returns their requests, now in flight, and the rows that cannot become requests."""
        requests: list[Request] = []
        refused: list[Refused] = []
        until = time.perf_counter() + _MOST_S
        most = min(_MOST_REQUESTS, self._most_rows - len(self._in_flight))
        while len(requests) + len(refused) < most and self._has_room:
            row = self._next_row()
            if row is None:
                break
            made = Refused(row, row.error) if isinstance(row, BadRow) else self._request(row)
            if isinstance(made, Refused):
                refused.append(made)
            else:
                requests.append(made)
            if time.perf_counter() > until:
                break
        return requests, refused

    def _next_row(self) -> Row | BadRow | None:
        if self._again:
            return self._again.popleft()
        if self._is_read:
            return None
        try:
            row = next(self._rows)
        except StopIteration:
            self._is_read = True
            return None
        except InputError as error:
            self._is_read, self.input_error = True, error
            return None
        self.is_waiting = row is None
        return row

    def pop(self, request_id: str) -> Row:
        """Removes a request from the requests in flight, and returns its row."""
        found = self._in_flight.pop(request_id)
        self._n_tokens -= found.n_tokens
        self._n_bytes -= found.n_bytes
        return found.row

    def again(self, request_id: str) -> None:
        """Removes a request from the requests in flight. Its row becomes a request again before new rows are read."""
        self._again.append(self.pop(request_id))

    def _request(self, row: Row) -> Request | Refused:
        try:
            [item] = self._processed(row)
        except (ValueError, RecursionError) as error:  # InputError, a text not in UTF-8, or a template nested too deep
            return Refused(row, str(error))
        if self._n_group == self._group_rows:
            self._group, self._n_group = new_group(), 0
        self._n_group += 1
        seed = item.seed if item.params.seed is not None else seed_of(self._seed, row.number)
        if self._most_copies is not None and item.params.n_copies > self._most_copies:
            most = counted(self._most_copies, "continuation")
            return Refused(row, f"n or best_of is {item.params.n_copies}; the engine and its queue take {most}")
        request = replace(item, group=self._group, seed=seed, params=self._in_tier(item.params))
        known = _InFlight(row, len(request.prompt_token_ids), sum(media.n_bytes for media in request.media))
        self._in_flight[request.request_id] = known
        self._n_tokens += known.n_tokens
        self._n_bytes += known.n_bytes
        return request

    def _in_tier(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with the job's tier. Results are cached by id(params): most rows share an object."""
        if self._shared is None:
            return params
        key = id(params), self.background
        known = self._tiers.get(key)
        if known is None:
            if len(self._tiers) > _MOST_TIERS:
                self._tiers.clear()
            # the entry refers to `params`, so that no other object can get the same id
            known = self._tiers[key] = params, replace(params, background=self.background, priority=0)
        return known[1]

    def _processed(self, row: Row) -> list[Request]:
        """Returns the request of a row as a list of one. Raises the errors of InputProcessor."""
        if row.form is not None:
            return [row.form.prepare(self._input_processor)]
        if row.task == "embedding":
            return self._input_processor.texts(row.prompt, self._adapters).requests
        if row.task == "chat":
            return self._input_processor.conversations(row.prompt, row.params, row.options, self._adapters).requests
        return self._input_processor.prompts(row.prompt, row.params, self._adapters).requests


_MASK = 2**64 - 1


def seed_of(job_seed: int, number: int) -> int:
    """Returns the seed of a row. The seed depends only on the job's seed and the row's number, so a resumed run draws
    the same tokens.

    The generator is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), started with
    the job's seed. The row gets output `number` of the generator, in 0 .. 2**64 - 1. The seeds of neighbouring rows
    have no pattern.
    """
    z = (job_seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Stop:
    """A request to end the job early: Ctrl-C, SIGTERM, a closed terminal. A Stop is true after the first request.

    While a job runs, a signal only stores its number here and wakes the loop. The loop then ends cleanly, whereas an
    exception could interrupt a write. While the engine loads or closes, no loop would see the number, and nothing can
    be lost. During this time a signal raises KeyboardInterrupt, at once or after the current import. The third signal
    raises KeyboardInterrupt in any case. Signals within a second count once, because `timeout` sends its signal twice.

    Attributes:
        signum: the number of the first signal; None: no stop was requested.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._n_signals = 0
        self._counted_s: float | None = None  # time.monotonic() of the last counted signal
        self._wake: Callable[[], object] | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    def request(self, signum: int = signal.SIGINT) -> None:
        """Requests a stop, as the signal `signum` does. Safe to call in signal handlers and in any thread."""
        if self.signum is None:
            self.signum = signum
        if self._wake is not None:
            self._wake()

    @contextlib.contextmanager
    def noted(self, wake: Callable[[], object]) -> Iterator[None]:
        """Inside this context, a signal is stored, and `wake` is called. Outside, a signal raises KeyboardInterrupt."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles signals inside the context. Does nothing outside the main thread, as other threads get no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # An ignored signal stays ignored: nohup ignores SIGHUP for the program that it starts.
        replaced: dict[int, Any] = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
        replaced = {number: before for number, before in replaced.items() if before not in (signal.SIG_IGN, None)}
        for number in replaced:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, before in replaced.items():
                signal.signal(number, before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if interrupts.is_same(self._counted_s):
            return
        self.request(signum)
        ends_now = self._wake is None or self._n_signals >= 2
        if ends_now and interrupts.is_delicate(frame, "llamabatch.jobs.job"):
            interrupts.send_again(signum)
            return
        self._n_signals += 1
        self._counted_s = time.monotonic()
        if ends_now:
            raise KeyboardInterrupt
