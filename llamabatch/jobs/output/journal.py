"""Where results are written as they come: in the order of the input, or as they finish."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs.output import files
from llamabatch.jobs.output import files as endings
from llamabatch.jobs.output.files import NO_FOLLOW, AppendFile, Files
from llamabatch.jobs.output.lines import Line, checksum, has_error, lines_of, number_of
from llamabatch.jobs.output.survey import ShardIndex, Survey

# ----------------------------------------------------------------------------------------------------
# Files that a job keeps beside its output: each begins with the job's id, and no other file is written or
# removed.


Kind = Literal["ahead", "part", "sums"]

_LEAST_GARBAGE = 4 * 2**20  # bytes of lines that are in the output already, before the file is made anew
_TRIM = 65536
_HEADER = re.compile(rb'\{"llamabatch": "(ahead|part|sums)", "job": "([0-9a-f]{16})"\}\n')
_HEAD_BYTES = 64
_LEAST_TORN = 16  # of a first line: as much of it as nothing else begins with
_SUM = struct.Struct("<I")
_PREFIX_BYTES = 9  # of a line that waits: its checksum in hexadecimal digits, and a blank


def head(path: Path) -> bytes | None:
    """The first bytes of a file; None: there is none.

    Raises:
        ConfigError: it is a link, a folder, a pipe, or cannot be read.
    """
    flags = os.O_RDONLY | NO_FOLLOW | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise foreign(path, "is a link")
        fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise foreign(path, f"cannot be read ({error.strerror})") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise foreign(path, "is no regular file")
        return os.read(fd, _HEAD_BYTES)
    finally:
        os.close(fd)


def foreign(path: Path, why: str) -> ConfigError:
    """The error for a file under a name that a job needs."""
    return ConfigError(
        f"{path} {why}, and a job of this output would keep a file of its own there; move it away, or give the output "
        "another name"
    )


def job_of(path: Path, kind: Kind) -> str | None:
    """The id of the job that keeps this file; None: it says of none, or is not there. Raises ConfigError as head."""
    match = _HEADER.match(head(path) or b"")
    return match[2].decode() if match and match[1] == kind.encode() else None


@dataclass(frozen=True)
class OwnFiles:
    """The files of one job: made under names that nothing has, and removed only where they begin with the job's id.

    Attributes:
        files: the operating system.
        out: the output.
        job_id: 16 hexadecimal digits.
    """

    files: Files
    out: Path
    job_id: str

    def header(self, kind: Kind) -> bytes:
        """The first line of a file."""
        return b'{"llamabatch": "%s", "job": "%s"}\n' % (kind.encode(), self.job_id.encode())

    @property
    def temporary(self) -> Path:
        return endings.temporary(self.out, self.job_id)

    def check(self, path: Path, kind: Kind) -> bool:
        """Is the file there? Raises ConfigError: it is, and is not this job's."""
        begin = head(path)
        if begin is None:
            return False
        if not begin.startswith(self.header(kind)):
            known = _HEADER.match(begin)
            raise foreign(path, "is of another job" if known else "is not of this job")
        return True

    def remove_torn(self, path: Path, kind: Kind) -> None:
        """The file, where it was cut within its first line. Raises ConfigError as check, OutputError."""
        begin, due = head(path), self.header(kind)
        if begin is not None and begin.startswith(due[:_LEAST_TORN]) and begin != due and due.startswith(begin):
            self.files.remove(path)

    def begin(self, kind: Kind | None = None) -> AppendFile:
        """A new file under a name of its own, to be given its place by `place`. Raises OutputError."""
        file = AppendFile(self.files, self.temporary, new=True)
        try:
            if kind is not None:
                file.write(self.header(kind))
        except BaseException:
            file.close()
            raise
        return file

    def place(self, file: AppendFile, path: Path, *, over: bool) -> None:
        """The name that a new file is to have, once it is whole and on disk.

        Args:
            over: it takes the place of this job's own file, if there is one; else nothing may be there.

        Raises:
            ConfigError: something else has the name.
            OutputError: writing fails.
        """
        file.sync()
        if sys.platform == "win32":  # it renames no open file
            file.close()
        if over and os.path.lexists(path):
            self.files.rename(file.path, path)
        else:
            try:
                self.files.name(file.path, path)
            except FileExistsError as error:
                raise foreign(path, "has come to be just now") from error
        file.path = path
        if sys.platform == "win32":
            file.reopen()

    def open(self, path: Path, kind: Kind) -> AppendFile:
        """The job's file of that name, made if it is not there. Raises ConfigError as check, OutputError."""
        if self.check(path, kind):
            return AppendFile(self.files, path, new=False)
        file = self.begin(kind)
        try:
            self.place(file, path, over=False)
        except BaseException:
            file.close()
            raise
        return file

    def remove(self, path: Path, kind: Kind) -> None:
        """If it is there. Raises ConfigError as check, OutputError."""
        if self.check(path, kind):
            self.files.remove(path)

    def remove_temporary(self, manifest: bytes) -> None:
        """What a job that was killed has left.

        Args:
            manifest: what the manifest of this job begins with.

        Raises:
            ConfigError: it is not of this job. OutputError.
        """
        begin = head(self.temporary)
        if begin is None:
            return
        kinds: tuple[Kind, ...] = ("ahead", "part", "sums")
        if not any(_same(begin, due) for due in (*map(self.header, kinds), manifest, _PARQUET)):
            raise foreign(self.temporary, "is not of this job")
        self.files.remove(self.temporary)


_PARQUET = b"PAR1"


def _same(begin: bytes, due: bytes) -> bool:
    """As far as they go: a job may have been killed amid its first write."""
    return begin[: len(due)] == due[: len(begin)]


class Checksums:
    """OUT.sums: a checksum of each line of the output, 4 bytes a line, written before the line itself.

    Args:
        n_lines: those that the output has; what the file holds of others is cut off.
    """

    def __init__(self, own: OwnFiles, path: Path, n_lines: int) -> None:
        self._own = own
        self._file = own.open(path, "sums")
        self._start = len(own.header("sums"))
        size = self._start + n_lines * _SUM.size
        if self._file.size > size:
            try:
                self._file.truncate(size)
            except BaseException:
                self._file.close()
                raise

    @staticmethod
    def read(own: OwnFiles, path: Path) -> Iterator[int] | None:
        """Those of the lines, in order; 0 where one is missing. None: there is no such file."""
        return _sums(path, len(own.header("sums"))) if own.check(path, "sums") else None

    @staticmethod
    def make(own: OwnFiles, path: Path, lines: Iterator[bytes]) -> None:
        """Anew, of all lines that are there."""
        with contextlib.closing(own.begin("sums")) as file:
            waiting = bytearray()
            for line in lines:
                waiting += _SUM.pack(checksum(line))
                if len(waiting) >= _TRIM:
                    file.write(bytes(waiting))
                    waiting.clear()
            if waiting:
                file.write(bytes(waiting))
            own.place(file, path, over=True)

    def add(self, lines: list[bytes]) -> None:
        self._file.write(b"".join(_SUM.pack(checksum(line)) for line in lines))

    def sync(self) -> None:
        self._file.sync()

    @property
    def file(self) -> AppendFile:
        return self._file

    def close(self) -> None:
        self._file.close()


def _sums(path: Path, start: int) -> Iterator[int]:
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(_TRIM):
            yield from (each[0] for each in _SUM.iter_unpack(data[: len(data) // _SUM.size * _SUM.size]))


def waiting_line(line: bytes) -> bytes:
    """A line of the output as OUT.ahead holds it."""
    return b"%08x " % checksum(line) + line


def line_that_waits(content: bytes) -> bytes | None:
    """The line of the output; None: it is torn, or not as it was written."""
    line = content[_PREFIX_BYTES:]
    return line if content[:_PREFIX_BYTES] == b"%08x " % checksum(line) and line else None


def lines_that_wait(path: Path) -> Iterator[Line]:
    """All lines of OUT.ahead after the first; a torn or damaged one has no number. Raises OSError."""
    for line in lines_of(path):
        content = line_that_waits(line.content)
        if content is not None:
            yield Line(line.offset, content, number_of(content))
        elif line.offset:
            yield Line(line.offset, line.content, None)


class Offsets:
    """Where the line of a place stands; 8 bytes a place between the first and the last that wait."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._offsets: array[int] = array("q")
        self.n = 0

    def get(self, place: int) -> int | None:
        i = place - self._base
        return self._offsets[i] if 0 <= i < len(self._offsets) and self._offsets[i] >= 0 else None

    def put(self, place: int, offset: int) -> None:
        """Of a place at or after the base."""
        i = place - self._base
        if i >= len(self._offsets):
            self._offsets.extend([-1] * (i + 1 - len(self._offsets)))
        self.n += self._offsets[i] < 0
        self._offsets[i] = offset

    def drop(self, place: int) -> None:
        """That place, whose turn has come: all before it are gone already."""
        self._offsets[place - self._base] = -1
        self.n -= 1
        if place - self._base >= _TRIM:
            del self._offsets[: place + 1 - self._base]
            self._base = place + 1

    def live(self) -> Iterator[tuple[int, int]]:
        """(place, offset) of all that wait, in order."""
        return ((self._base + i, offset) for i, offset in enumerate(self._offsets) if offset >= 0)


class SideFile:
    """Lines by place, on disk; of each only the offset is in memory.

    Args:
        first: the first place that the output does not have; what the file holds of earlier ones is passed over, as is
            a line that is torn or damaged.

    Attributes:
        n_errors: lines of rows that failed, among those that it held when it was opened and that wait.
    """

    def __init__(self, own: OwnFiles, path: Path, places: ShardIndex, first: int) -> None:
        self._own = own
        self._path = path
        self._file = own.open(path, "ahead")
        self._reader = path.open("rb")
        self._offsets = Offsets(first)
        self._live_bytes = 0
        self.n_errors = 0
        try:
            self._load(places, first)
        except BaseException:
            self.close()
            raise

    def _load(self, places: ShardIndex, first: int) -> None:
        end = len(self._own.header("ahead"))
        for line in lines_that_wait(self._path):
            if line.number is not None:
                end = line.offset + _PREFIX_BYTES + len(line.content)
            elif line.content.endswith(b"\n"):
                end = line.offset + len(line.content)
            place = None if line.number is None else places.of(line.number)
            if place is not None and place >= first and self._offsets.get(place) is None:
                self._offsets.put(place, line.offset)
                self._live_bytes += _PREFIX_BYTES + len(line.content)
                self.n_errors += has_error(line.content)
        if end < self._file.size:
            self._file.truncate(end)

    def __contains__(self, place: int) -> bool:
        return self._offsets.get(place) is not None

    def __len__(self) -> int:
        return self._offsets.n

    @property
    def file(self) -> AppendFile:
        return self._file

    def add(self, place: int, line: bytes) -> None:
        offset = self._file.size
        content = waiting_line(line)
        self._file.write(content)
        self._offsets.put(place, offset)
        self._live_bytes += len(content)

    def look(self, place: int) -> bytes | None:
        """The line of a place that waits. Raises OutputError: it is not there any more."""
        offset = self._offsets.get(place)
        return None if offset is None else self._read(offset)

    def _read(self, offset: int) -> bytes:
        self._reader.seek(offset)
        line = line_that_waits(self._reader.readline())
        if line is None:
            raise OutputError(
                f"{self._path}: something else has written to it while the job ran. What is in {self._own.out.name} "
                "stays; run the same command again, which does the rest"
            )
        return line

    def drop(self, place: int, line: bytes) -> None:
        """The output has it. What is before it must be there too."""
        self._offsets.drop(place)
        self._live_bytes -= _PREFIX_BYTES + len(line)

    @property
    def is_mostly_garbage(self) -> bool:
        garbage = self._file.size - self._live_bytes
        return garbage > _LEAST_GARBAGE and garbage > self._live_bytes

    def compact(self, first: int) -> None:
        """Makes the file anew with what still waits. The output must be on disk before, up to the place `first`."""
        file = self._own.begin("ahead")
        offsets = Offsets(first)
        try:
            for place, offset in self._offsets.live():
                offsets.put(place, file.size)
                file.write(waiting_line(self._read(offset)))
            self.close()  # Windows replaces no open file
            self._own.place(file, self._path, over=True)
        except BaseException:
            file.close()
            raise
        self._file, self._offsets = file, offsets
        self._reader = self._path.open("rb")

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
        self._reader.close()


_MOST_AT_ONCE = 2**20  # bytes of lines that one write takes


class InOrder:
    """Appends a row when all before it are there; until then it waits in the side file.

    Args:
        file: the output, without a torn line at its end. It stays open.

    Attributes:
        n_errors: rows that had failed when it was opened.
    """

    def __init__(self, own: OwnFiles, file: AppendFile, places: ShardIndex, found: Survey) -> None:
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

    def __init__(self, own: OwnFiles, file: AppendFile, places: ShardIndex, found: Survey) -> None:
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

    def _take_waiting(self, own: OwnFiles, ahead: Path, places: ShardIndex) -> None:
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
    return path.with_name(path.name + files.AHEAD)


def sums_of(path: Path) -> Path:
    """The checksums of the lines of an output."""
    return path.with_name(path.name + files.SUMS)
