"""The start of a job: where its first rows all end with the same error, it stops and writes none of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from llamabatch.errors import JobStoppedError
from llamabatch.jobs.loop import RowSink
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.utils.checks import counted

_MOST_HELD = 10_000
_NUMBERS = re.compile(r"\d+")


class StartErrors:
    """A sink in front of another one, which holds the errors of a job back until a row of it is ok, or until two of
    them differ. Then all go on, and it holds nothing any more.

    Errors are equal where they differ in numbers and in the place of their rows alone.

    Args:
        sink: gets the rows.
        most: the job stops where its first so many rows have the same error; 0: it never does.
    """

    def __init__(self, sink: RowSink, most: int) -> None:
        self._sink = sink
        self._most = most
        self._passes = most == 0
        self._first: list[int] = []
        self._failed: set[int] = set()
        self._held: list[Callable[[], None]] = []
        self._error: str | None = None

    def watched(self, rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The rows as they are read; the first of them are remembered."""
        for row in rows:
            if not self._passes and len(self._first) < self._most:
                self._first.append(row.number)
            yield row

    def done(self, row: Row, output: RequestOutput) -> None:
        """Takes a result. Raises as the sink, and JobStoppedError."""
        if output.error is None and output.finish_reason is not FinishReason.ERROR:
            self.flush()
        self._take(row, str(output.error), lambda: self._sink.done(row, output))

    def refused(self, row: Row | BadRow, error: str) -> None:
        """Takes the error of a row that could not be run. Raises as the sink, and JobStoppedError."""
        self._take(row, error, lambda: self._sink.refused(row, error))

    def flush(self) -> None:
        """Hands on all that is held; nothing is held from now on."""
        self._passes = True
        held, self._held = self._held, []
        for write in held:
            write()

    def _take(self, row: Row | BadRow, error: str, write: Callable[[], None]) -> None:
        if self._passes:
            write()
            return
        error = error.removeprefix(f"{row.place}: ")
        self._held.append(write)
        self._failed.add(row.number)
        if self._error is None:
            self._error = error
        if _form(error) != _form(self._error) or len(self._held) > _MOST_HELD:
            self.flush()
        elif len(self._first) == self._most and self._failed.issuperset(self._first):
            raise JobStoppedError(
                f"the job stopped: its first {counted(self._most, 'row')} all end with the same error, as {row.place}: "
                f"{self._error}. None of them is written: fix the cause and run the command again, which runs them "
                "again; --max-start-errors 0 writes such rows, and goes on"
            )


def _form(error: str) -> str:
    return _NUMBERS.sub("0", error)
