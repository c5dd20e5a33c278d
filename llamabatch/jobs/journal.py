"""Where results are written as they come: in the order of the input, or as they finish."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from llamabatch.jobs import endings
from llamabatch.jobs.files import AppendFile, Files
from llamabatch.jobs.lines import has_error, lines_of
from llamabatch.jobs.places import Places
from llamabatch.jobs.side_file import SideFile
from llamabatch.jobs.survey import Survey

_MOST_AT_ONCE = 2**20  # bytes of lines that one write takes


class InOrder:
    """Appends a row when all before it are there; until then it waits in the side file.

    Attributes:
        n_errors: rows that had failed when it was opened.
    """

    def __init__(self, files: Files, path: Path, places: Places, found: Survey) -> None:
        self._file = _opened(files, path, found)
        self._next = found.n_rows
        with _closing_on_errors(self._file):
            self._ahead = SideFile(files, ahead_of(path), places, self._next)
        self.n_errors = found.n_errors + self._ahead.n_errors
        with _closing_on_errors(self):
            self._catch_up([])

    @property
    def n_done(self) -> int:
        return self._next + len(self._ahead)

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
                self._file.write(b"".join(lines))
                self._next += len(lines)
                lines, n_bytes = [], 0
            if waiting is None:
                break
        if self._ahead.is_mostly_garbage:
            self._file.sync()
            self._ahead.compact(self._next)

    def sync(self) -> None:
        self._file.sync()
        self._ahead.sync()

    def finish(self) -> int:
        if len(self._ahead):
            raise ValueError(f"row {self._next} of this shard is missing, and later ones are there")
        self.sync()
        self._ahead.remove()
        return self._file.size

    def close(self) -> None:
        self._file.close()
        self._ahead.close()


class AsFinished:
    """Appends each row when it comes.

    Attributes:
        n_errors: rows that had failed when it was opened.
    """

    def __init__(self, files: Files, path: Path, places: Places, found: Survey) -> None:
        self._file = _opened(files, path, found)
        self._done = found.done
        self.n_done = found.n_rows
        self.n_errors = found.n_errors
        with _closing_on_errors(self):
            self._take_waiting(files, ahead_of(path), places)

    def _take_waiting(self, files: Files, ahead: Path, places: Places) -> None:
        """Of an output that was begun in the order of the input."""
        if not ahead.exists():
            return
        for line in lines_of(ahead):
            place = None if line.number is None else places.of(line.number)
            if place is not None and place not in self._done:
                self.write(place, line.content)
                self.n_errors += has_error(line.content)
        self._file.sync()
        files.remove(ahead)

    def is_done(self, place: int) -> bool:
        return place in self._done

    def write(self, place: int, line: bytes) -> None:
        self._file.write(line)
        self._done.add(place)
        self.n_done += 1

    def sync(self) -> None:
        self._file.sync()

    def finish(self) -> int:
        self.sync()
        return self._file.size

    def close(self) -> None:
        self._file.close()


def ahead_of(path: Path) -> Path:
    """The side file of an output."""
    return path.with_name(path.name + endings.AHEAD)


def _opened(files: Files, path: Path, found: Survey) -> AppendFile:
    """The output without a torn line at its end."""
    file = AppendFile(files, path)
    with _closing_on_errors(file):
        if found.size < file.size:
            file.truncate(found.size)
    return file


@contextlib.contextmanager
def _closing_on_errors(thing: AppendFile | InOrder | AsFinished) -> Iterator[None]:
    """What was opened in a constructor that does not come to its end."""
    try:
        yield
    except BaseException:
        thing.close()
        raise
