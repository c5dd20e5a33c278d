"""Appends each line of an output once, with a checksum, in the order of the input or as rows finish."""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

from llamabatch.errors import OutputError
from llamabatch.jobs.output.files import AppendFile
from llamabatch.jobs.output.own_files import OwnFiles, ahead_of, sums_of
from llamabatch.jobs.output.records import Line, checksum, has_error, lines_of, number_of
from llamabatch.jobs.output.survey import Survey
from llamabatch.jobs.rows import ShardIndex

_LEAST_GARBAGE = 4 * 2**20  # a side file is compacted only if its dropped lines have at least this many bytes
_TRIM = 65536
_SUM = struct.Struct("<I")
_PREFIX_BYTES = 9  # a waiting line begins with its checksum (8 hexadecimal digits) and a blank
_MOST_AT_ONCE = 2**20  # bytes of lines in one write


class InOrder:
    """A journal in the order of the input. A row waits in the side file until all earlier rows are written.

    Args:
        file: the file of lines, without a torn line at the end. The journal does not close this file.

    Attributes:
        n_errors: the number of failed rows that were in the files when the journal was opened.
    """

    def __init__(self, own: OwnFiles, file: AppendFile, shard: ShardIndex, found: Survey) -> None:
        self._file = file
        self._next = found.n_rows
        with contextlib.ExitStack() as stack:
            self._sums = Checksums(own, sums_of(file.path), found.n_rows)
            stack.callback(self._sums.close)
            self._ahead = SideFile(own, ahead_of(file.path), shard, self._next)
            stack.callback(self._ahead.close)
            self.n_errors = found.n_errors + self._ahead.n_errors
            self._catch_up([])
            stack.pop_all()

    @property
    def n_done(self) -> int:
        return self._next + len(self._ahead)

    @property
    def n_waiting(self) -> int:
        """The number of rows that are only in the side file."""
        return len(self._ahead)

    @property
    def side_files(self) -> list[AppendFile]:
        """The open files of the checksums and of the waiting lines."""
        return [self._sums.file, self._ahead.file]

    def is_done(self, index: int) -> bool:
        return index < self._next or index in self._ahead

    def write(self, index: int, line: bytes) -> None:
        if index == self._next:
            self._catch_up([line])
        else:
            self._ahead.add(index, line)

    def _catch_up(self, lines: list[bytes]) -> None:
        """Appends the next lines, and the waiting lines that follow them."""
        n_bytes = sum(map(len, lines))
        while True:
            end = self._next + len(lines)
            waiting = self._ahead.get(end)
            if waiting is not None:
                lines.append(waiting)
                n_bytes += len(waiting)
                self._ahead.drop(end, waiting)
            if lines and (waiting is None or n_bytes > _MOST_AT_ONCE):
                self._sums.add(lines)  # checksums come first, because a line without a checksum does not count
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
    """A journal in the order in which rows finish.

    Args:
        file: the file of lines, without a torn line at the end. The journal does not close this file.

    Attributes:
        n_errors: the number of failed rows that were in the files when the journal was opened.
    """

    n_waiting = 0

    def __init__(self, own: OwnFiles, file: AppendFile, shard: ShardIndex, found: Survey) -> None:
        self._file = file
        self._done = found.done
        self.n_done = found.n_rows
        self.n_errors = found.n_errors
        self._sums = Checksums(own, sums_of(file.path), found.n_rows)
        try:
            self._append_waiting(own, ahead_of(file.path), shard)
        except BaseException:
            self.close()
            raise

    def _append_waiting(self, own: OwnFiles, ahead: Path, shard: ShardIndex) -> None:
        """Appends the lines of a side file. Such a file exists if the order was "input" or the output was rewritten."""
        if not own.exists(ahead, "ahead"):
            return
        for line in waiting_lines(ahead):
            index = None if line.number is None else shard.index(line.number)
            if index is not None and index not in self._done:
                self.write(index, line.content)
                self.n_errors += has_error(line.content)
        self.sync()
        own.remove(ahead, "ahead")

    @property
    def side_files(self) -> list[AppendFile]:
        """The open file of the checksums."""
        return [self._sums.file]

    def is_done(self, index: int) -> bool:
        return index in self._done

    def write(self, index: int, line: bytes) -> None:
        self._sums.add([line])
        self._file.write(line)
        self._done.add(index)
        self.n_done += 1

    def sync(self) -> None:
        self._sums.sync()
        self._file.sync()

    finish = sync

    def close(self) -> None:
        self._sums.close()


class Checksums:
    """The file OUT.sums: a checksum of each line of the output, 4 bytes a line, written before the line itself.

    Args:
        n_lines: the number of lines of the output. Further checksums are cut off.
    """

    def __init__(self, own: OwnFiles, path: Path, n_lines: int) -> None:
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
        """Returns an iterator of the lines' checksums in order, 0 for a missing checksum; None: no file."""
        return _sums(path, len(own.header("sums"))) if own.exists(path, "sums") else None

    @staticmethod
    def write(own: OwnFiles, path: Path, lines: Iterator[bytes]) -> None:
        """Replaces the whole file with the checksums of the lines."""
        with contextlib.closing(own.create("sums")) as file:
            waiting = bytearray()
            for line in lines:
                waiting += _SUM.pack(checksum(line))
                if len(waiting) >= _TRIM:
                    file.write(bytes(waiting))
                    waiting.clear()
            if waiting:
                file.write(bytes(waiting))
            own.commit(file, path, over=True)

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


class SideFile:
    """The file OUT.ahead: lines that wait for an earlier row. Only the offset of each line is in memory.

    Args:
        first: the first index that is missing in the output. Lines of earlier rows are ignored, and so are torn and
            damaged lines.

    Attributes:
        n_errors: the number of failed rows among the waiting lines when the file was opened.
    """

    def __init__(self, own: OwnFiles, path: Path, shard: ShardIndex, first: int) -> None:
        self._own = own
        self._path = path
        self._file = own.open(path, "ahead")
        self._reader = path.open("rb")
        self._offsets = Offsets(first)
        self._live_bytes = 0
        self.n_errors = 0
        header = len(own.header("ahead"))
        try:
            if self._file.size > header:
                self._load(shard, first, header)
        except BaseException:
            self.close()
            raise

    def _load(self, shard: ShardIndex, first: int, end: int) -> None:
        for line in waiting_lines(self._path):
            if line.number is not None:
                end = line.offset + _PREFIX_BYTES + len(line.content)
            elif line.content.endswith(b"\n"):
                end = line.offset + len(line.content)
            index = None if line.number is None else shard.index(line.number)
            if index is not None and index >= first and self._offsets.get(index) is None:
                self._offsets.put(index, line.offset)
                self._live_bytes += _PREFIX_BYTES + len(line.content)
                self.n_errors += has_error(line.content)
        if end < self._file.size:
            self._file.truncate(end)

    def __contains__(self, index: int) -> bool:
        return self._offsets.get(index) is not None

    def __len__(self) -> int:
        return self._offsets.n

    @property
    def file(self) -> AppendFile:
        return self._file

    def add(self, index: int, line: bytes) -> None:
        offset = self._file.size
        content = waiting_line(line)
        self._file.write(content)
        self._offsets.put(index, offset)
        self._live_bytes += len(content)

    def get(self, index: int) -> bytes | None:
        """Returns the waiting line of an index; None: no such line. Raises OutputError if the file has changed."""
        offset = self._offsets.get(index)
        return None if offset is None else self._read(offset)

    def _read(self, offset: int) -> bytes:
        self._reader.seek(offset)
        line = line_of_waiting(self._reader.readline())
        if line is None:
            raise OutputError(
                f"{self._path}: something else has written to it while the job ran. What is in {self._own.out.name} "
                "stays; run the same command again, which does the rest"
            )
        return line

    def drop(self, index: int, line: bytes) -> None:
        """Drops a waiting line just before it is appended to the output. The indices must come in order."""
        self._offsets.drop(index)
        self._live_bytes -= _PREFIX_BYTES + len(line)

    @property
    def is_mostly_garbage(self) -> bool:
        garbage = self._file.size - self._live_bytes
        return garbage > _LEAST_GARBAGE and garbage > self._live_bytes

    def compact(self, first: int) -> None:
        """Rewrites the file with only the lines that still wait. The output must be synced up to the index `first`."""
        file = self._own.create("ahead")
        offsets = Offsets(first)
        try:
            for index, offset in self._offsets.live():
                offsets.put(index, file.size)
                file.write(waiting_line(self._read(offset)))
            self.close()  # Windows cannot replace an open file
            self._own.commit(file, self._path, over=True)
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


class Offsets:
    """The offsets of waiting lines. The memory is 8 bytes for each index from the first to the last waiting line."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._offsets: array[int] = array("q")
        self.n = 0

    def get(self, index: int) -> int | None:
        i = index - self._base
        return self._offsets[i] if 0 <= i < len(self._offsets) and self._offsets[i] >= 0 else None

    def put(self, index: int, offset: int) -> None:
        """Stores the offset of an index. The index must be `base` or more."""
        i = index - self._base
        if i >= len(self._offsets):
            self._offsets.extend([-1] * (i + 1 - len(self._offsets)))
        self.n += self._offsets[i] < 0
        self._offsets[i] = offset

    def drop(self, index: int) -> None:
        """Drops `index`, which must be the lowest index that is left."""
        self._offsets[index - self._base] = -1
        self.n -= 1
        if index - self._base >= _TRIM:
            del self._offsets[: index + 1 - self._base]
            self._base = index + 1

    def live(self) -> Iterator[tuple[int, int]]:
        """Yields (index, offset) of all waiting lines, in order."""
        return ((self._base + i, offset) for i, offset in enumerate(self._offsets) if offset >= 0)


def waiting_line(line: bytes) -> bytes:
    """Returns a line of the output in the form of OUT.ahead, which begins with the checksum."""
    return b"%08x " % checksum(line) + line


def line_of_waiting(content: bytes) -> bytes | None:
    """Returns the line of the output that a line of OUT.ahead contains; None: the content is torn or damaged."""
    line = content[_PREFIX_BYTES:]
    return line if content[:_PREFIX_BYTES] == b"%08x " % checksum(line) and line else None


def waiting_lines(path: Path) -> Iterator[Line]:
    """Yields all lines of OUT.ahead after the header. A torn or damaged line has no number. Raises OSError."""
    for line in lines_of(path):
        content = line_of_waiting(line.content)
        if content is not None:
            yield Line(line.offset, content, number_of(content))
        elif line.offset:
            yield Line(line.offset, line.content, None)
