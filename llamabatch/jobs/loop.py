"""The loop of a job: rows to the engine, results to the output, until there are no more or somebody says stop."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import FrameType
from typing import Any, Protocol

from llamabatch.client.base import EngineClient
from llamabatch.errors import EngineClosedError
from llamabatch.jobs.feed import Feed, Refused
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.jobs.stats import Counts
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.utils import interrupts

# ----------------------------------------------------------------------------------------------------
# What ends a job before its time: Ctrl-C, SIGTERM, a closed terminal.


class Stop:
    """Whether a job shall end, and for which signal.

    While a job runs, a signal only leaves its number here and wakes the loop, which ends in good order: an exception in
    the middle of a write would not. While the engine loads or closes, there is nothing to lose, and nobody who would
    look here: then a signal raises KeyboardInterrupt, at once or when no import is under way. So does the third one,
    wherever it comes.

    Attributes:
        signum: of the first signal; None: go on.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._n_signals = 0
        self._wake: Callable[[], object] | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    def request(self, signum: int = signal.SIGINT) -> None:
        """As if the signal had come. Safe from signal handlers and from any thread."""
        if self.signum is None:
            self.signum = signum
        if self._wake is not None:
            self._wake()

    @contextlib.contextmanager
    def noted(self, wake: Callable[[], object]) -> Iterator[None]:
        """Inside, signals are noted and `wake` is called; outside, they raise KeyboardInterrupt."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals over; outside the main thread, where Python gives none, it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # one that is ignored stays so: nohup means it
        taken: dict[int, Any] = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
        taken = {number: before for number, before in taken.items() if before not in (signal.SIG_IGN, None)}
        for number in taken:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, before in taken.items():
                signal.signal(number, before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.request(signum)
        self._n_signals += 1
        if self._wake is None or self._n_signals > 2:
            if interrupts.is_delicate(frame, "llamabatch.jobs.job"):
                self._n_signals -= 1
                interrupts.send_again(signum)
            else:
                raise KeyboardInterrupt


_SLOW_INPUT_S = 0.02
_TICK_S = 0.2  # how often progress is shown while nothing else happens


class Sheet(Protocol):
    """Where rows end."""

    def done(self, row: Row, output: RequestOutput) -> None:
        """A row came back from the engine, be it with an error of its own."""

    def refused(self, row: Row | BadRow, error: str) -> None:
        """A row that the engine never saw."""


class Loop:
    """One thread reads, tokenizes and writes; the engine computes elsewhere, and has a queue of rows to go on with
    meanwhile.

    Args:
        tick: called after each turn, several times a second.
    """

    def __init__(
        self, client: EngineClient, feed: Feed, sheet: Sheet, counts: Counts, stop: Stop, tick: Callable[[], object]
    ) -> None:
        self._client = client
        self._feed = feed
        self._sheet = sheet
        self._counts = counts
        self._stop = stop
        self._tick = tick
        self._events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()

    def run(self) -> None:
        """Returns when all rows are written, or when it was told to stop and what had finished is written.

        Raises:
            EngineClosedError: the engine is gone for good. What had finished is written; what was in flight is not,
                and is done by the next run.
            OutputError: the output cannot be written.
            InputError: an input cannot be read any further; the rows before are done.
        """
        try:
            while not self._stop and self._turn():
                self._tick()
        except CancelledError:  # stopped while a row was made: it is one of those still to run
            pass
        except EngineClosedError:
            self._write_finished()
            raise
        self._write_finished()
        if self._feed.broken is not None and not self._stop:
            raise self._feed.broken

    def wake(self) -> None:
        """Has the loop look at once whether it shall stop. Safe from signal handlers."""
        self._events.put([])

    def _turn(self) -> bool:
        """A piece of rows in, what has finished out; False when nothing is left."""
        if self._feed.wants_more:
            self._submit(*self._feed.piece())
        if self._feed.exhausted and not self._feed.n_in_flight:
            return False
        self._take(_TICK_S if not self._feed.wants_more else _SLOW_INPUT_S if self._feed.waits else 0.0)
        return True

    def _submit(self, requests: list[Request], refused: list[Refused]) -> None:
        if requests:
            self._client.submit(requests, self._events.put)
        for each in refused:
            self._counts.fail(each.message)
            self._sheet.refused(each.row, each.error)

    def _take(self, wait_s: float) -> None:
        """What has finished, and waits for something to finish if nothing has."""
        events = self._ready(wait_s)
        failed = [event for event in events if self._failed(event)]
        for event in events:
            if not self._failed(event):
                self._write(event)
        if failed and (why := self._gone(failed[0])) is not None:
            raise EngineClosedError(why)
        for event in failed:
            self._write(event)

    def _ready(self, wait_s: float) -> list[SequenceOutput]:
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

    def _gone(self, event: SequenceOutput) -> str | None:
        """Why the engine is gone; None if it is there, and the error that row's own."""
        try:
            self._client.stats()
        except EngineClosedError as error:
            assert event.finished is not None
            return event.finished.error or str(error)
        return None

    def _write(self, event: SequenceOutput) -> None:
        assert event.finished is not None
        row = self._feed.take(event.request_id)
        self._counts.take(row.task, row.place, event.finished)
        self._sheet.done(row, event.finished)

    def _write_finished(self) -> None:
        """What came in the meantime, when the loop has been left early; errors may be those of an engine that is
        gone."""
        for event in self._ready(0.0):
            if not self._failed(event):
                self._write(event)
