"""Where results are written as they come: in the order of the input, or as they finish."""

from __future__ import annotations

import contextlib
from pathlib import Path

from llamabatch.jobs import endings
from llamabatch.jobs.files import AppendFile
from llamabatch.jobs.lines import has_error
from llamabatch.jobs.places import Places
from llamabatch.jobs.side_file import Checksums, OwnFiles, SideFile, lines_that_wait
from llamabatch.jobs.survey import Survey

_MOST_AT_ONCE = 2**20  # bytes of lines that one write takes


class InOrder:
    """Appends a row when all before it are there; until then it waits in the side file.

    Args:
        file: the output, without a torn line at its end. It stays open.

    Attributes:
        n_errors: rows that had failed when it was opened.
    """

    def __init__(self, own: OwnFiles, file: AppendFile, places: Places, found: Survey) -> None:
        self._file = file
        self._next = found.n_rows
        with contextlib.ExitStack() as stack:
            self._sums = Checksums(own, sums_of(file.path), found.n_rows)
            stack.callback(self._sums.close)
            self._ahead = SideFile(own, ahead_of(file.path), places, self._next)
            stack.callback(self._ahead.close)
            self.n_errors = found.n_errors + self._ahead.n_errors
            self._catch_up([])
            stack.pop_all()

    @property
    def n_done(self) -> int:
        return self._next + len(self._ahead)

    @property
    def n_waiting(self) -> int:
        """Rows that are in the side file alone."""
        return len(self._ahead)

    @property
    def beside(self) -> list[AppendFile]:
        """The files that are open beside the output."""
        return [self._sums.file, self._ahead.file]

    def is_done(self, place: int) -> bool:
        return place < self._next or place in self._ahead

    def write(self, place: int, line: bytes) -> None:
        if place == self._next:
            self._catch_up([line])
        else:
            self._ahead.add(place, line)

    def _catch_up(self, lines: list[bytes]) -> None:
        """Writes lines whose turn it is, and those that waited for them."""
        n_bytes = sum(map(len, lines))
        while True:
            end = self._next + len(lines)
            waiting = self._ahead.look(end)
            if waiting is not None:
                lines.append(waiting)
                n_bytes += len(waiting)
                self._ahead.drop(end, waiting)
            if lines and (waiting is None or n_bytes > _MOST_AT_ONCE):
                self._sums.add(lines)  # before the lines: one without is not taken for the job's
                self._file.write(b"".join(lines))
                self._next += len(lines)
                lines, n_bytes = [], 0
            if waiting is None:
                break
        if self._ahead.is_mostly_garbage:
            self._sums.sync()
            self._file.sync()
            self._ahead.compact(self._next)

    def sync(self) -> None:
        self._sums.sync()
        self._file.sync()
        self._ahead.sync()

    def finish(self) -> None:
        if len(self._ahead):
            raise ValueError(f"row {self._next} of this shard is missing, and later ones are there")
        self.sync()

    def close(self) -> None:
        self._sums.close()
        self._ahead.close()


class AsFinished:
    """Appends each row when it comes.

    Args:
        file: the output, without a torn line at its end. It stays open.

    Attributes:
        n_errors: rows that had failed when it was opened.
    """

    n_waiting = 0

    def __init__(self, own: OwnFiles, file: AppendFile, places: Places, found: Survey) -> None:
        self._file = file
        self._done = found.done
        self.n_done = found.n_rows
        self.n_errors = found.n_errors
        self._sums = Checksums(own, sums_of(file.path), found.n_rows)
        try:
            self._take_waiting(own, ahead_of(file.path), places)
        except BaseException:
            self.close()
            raise

    def _take_waiting(self, own: OwnFiles, ahead: Path, places: Places) -> None:
        """Of an output that was begun in the order of the input, or has been arranged."""
        if not own.check(ahead, "ahead"):
            return
        for line in lines_that_wait(ahead):
            place = None if line.number is None else places.of(line.number)
            if place is not None and place not in self._done:
                self.write(place, line.content)
                self.n_errors += has_error(line.content)
        self.sync()
        own.remove(ahead, "ahead")

    @property
    def beside(self) -> list[AppendFile]:
        """The files that are open beside the output."""
        return [self._sums.file]

    def is_done(self, place: int) -> bool:
        return place in self._done

    def write(self, place: int, line: bytes) -> None:
        self._sums.add([line])
        self._file.write(line)
        self._done.add(place)
        self.n_done += 1

    def sync(self) -> None:
        self._sums.sync()
        self._file.sync()

    finish = sync

    def close(self) -> None:
        self._sums.close()


def ahead_of(path: Path) -> Path:
    """The side file of an output."""
    return path.with_name(path.name + endings.AHEAD)


def sums_of(path: Path) -> Path:
    """The checksums of the lines of an output."""
    return path.with_name(path.name + endings.SUMS)
