"""Stops a job whose first rows all end with the same error. None of these rows is written."""

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
    """A sink that holds back the first errors of a job until a row succeeds or two errors differ.

    Then this sink passes all held rows to the next sink, and holds no later row. Two errors count as equal if they
    differ only in numbers and in the places of their rows.

    Args:
        sink: the next sink, which gets the rows.
        most: the number of first rows that stop the job if they all have the same error; 0: errors never stop the job.
    """

    def __init__(self, sink: RowSink, most: int) -> None:
        self._sink = sink
        self._most = most
        self._passes = most == 0
        self._first: list[int] = []
        self._failed: set[int] = set()
        self._held: list[Callable[[], None]] = []
        self._error: str | None = None
        self._place = ""  # the place of the first error

    def watched(self, rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        """Yields the rows unchanged, and stores the numbers of the first rows."""
        for row in rows:
            if not self._passes and len(self._first) < self._most:
                self._first.append(row.number)
            yield row

    def done(self, row: Row, output: RequestOutput) -> None:
        """Passes a result to the next sink, or holds an error. Raises JobStoppedError, and the errors of the sink."""
        if output.error is None and output.finish_reason is not FinishReason.ERROR:
            self.flush()
        self._take(row, str(output.error), lambda: self._sink.done(row, output))

    def refused(self, row: Row | BadRow, error: str) -> None:
        """Passes on or holds the error of a row that cannot run. Raises JobStoppedError, and the errors of the sink."""
        self._take(row, error, lambda: self._sink.refused(row, error))

    def flush(self) -> None:
        """Writes all held rows. No later row is held."""
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
            self._error, self._place = error, row.place
        if _form(error) != _form(self._error) or len(self._held) > _MOST_HELD:
            self.flush()
        elif len(self._first) == self._most and self._failed.issuperset(self._first):
            raise JobStoppedError(
                f"the job stopped: its first {counted(self._most, 'row')} all end with the same error. {self._place}: "
                f"{self._error}. None of them is written: fix the cause and repeat the command; with "
                "--max-start-errors 0 such rows are written, and the job continues"
            )


def _form(error: str) -> str:
    return _NUMBERS.sub("0", error)
