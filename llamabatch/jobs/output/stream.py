"""The output of a job as a stream: "-" for stdout. A stream cannot be resumed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.output import Identity, Output, OutputOptions, RecordWriter
from llamabatch.jobs.output.records import to_line
from llamabatch.jobs.rows import ShardIndex

STDOUT = "-"


class StreamOutput(RecordWriter):
    """An output to a stream, with the methods of Output. Rows that wait for an earlier row are in memory.

    Args:
        fd: a file descriptor that is open for writing.
        options: as in Output. `retry_errors` is refused, and `force` has no effect.
    """

    n_before = n_errors_before = 0
    finished = resumed = False

    def __init__(self, fd: int = 1, options: OutputOptions | None = None, files: Files | None = None) -> None:
        self.options = options or OutputOptions()
        if self.options.retry_errors:
            raise ConfigError("retry_errors needs an output that is a file; '-' keeps nothing")
        self.path = Path(STDOUT)
        self.seed = secrets.randbits(63)
        self._fd = fd
        self._files = files or Files()
        self._shard = ShardIndex(self.options.shard)
        self._next = 0
        self._waiting: dict[int, bytes] = {}
        self._torn = False

    def is_done(self, number: int) -> bool:
        """Returns False: a stream has no rows of an earlier run."""
        return False

    def write(self, number: int, record: Mapping[str, Any]) -> None:
        """Writes the record of a row, or stores it until all earlier rows are written. Raises OutputError."""
        index, line = self._shard.index(number), to_line(record)
        if index is None or index < self._next or index in self._waiting:
            raise ValueError(f"row {number} is not due")
        if self.options.order == "finished":
            self._write(line)
            return
        self._waiting[index] = line
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1

    def _write(self, line: bytes) -> None:
        if self._torn:
            raise OutputError("the output broke off in the middle of a line")
        self._torn, left = True, memoryview(line)
        while left:
            left = left[self._files.write(self._fd, left, self.path) :]
        self._torn = False

    def sync_if_due(self) -> None:
        """Does nothing: a stream is not synced."""

    def finish(self) -> None:
        """Ends the output after the last row. Raises ValueError if a row is missing."""
        if self._waiting:
            raise ValueError(f"row {self._shard.number(self._next)} is missing, and later ones are there")

    def close(self) -> None:
        """Writes the rows that still wait for earlier rows, so that no finished row is lost."""
        waiting, self._waiting = self._waiting, {}
        for _, line in sorted(waiting.items()):
            if not self._torn:
                self._write(line)


def open_output(
    name: str,
    settings: Mapping[str, Any] | Identity,
    options: OutputOptions | None = None,
    files: Files | None = None,
    check_ids: Callable[[Mapping[int, str]], None] = lambda ids: None,
) -> Output | StreamOutput:
    """Opens the output of a name: "-" is stdout, other names are files. Raises the errors of Output and `settings`."""
    if name != STDOUT:
        return Output(Path(name), settings, options, files, check_ids)
    if callable(settings):
        settings(None)  # raises the errors that a file output would raise
    return StreamOutput(1, options, files)
