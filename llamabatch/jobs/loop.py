"""The loop of a job: rows to the engine, results to the output, until there are no more or somebody says stop."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Protocol

from llamabatch.client import EngineClient
from llamabatch.errors import EngineClosedError
from llamabatch.jobs.counts import Counts
from llamabatch.jobs.feed import Feed, Refused
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.jobs.stopping import Stop
from llamabatch.request import FinishReason, Request, RequestOutput, SequenceOutput

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
