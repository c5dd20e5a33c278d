"""OUT.ahead: results that wait for an earlier row, so that the output can stay in the order of the input."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from llamabatch.jobs.files import AppendFile, Files, temporary
from llamabatch.jobs.lines import has_error, lines_of
from llamabatch.jobs.places import Places

_LEAST_GARBAGE = 4 * 2**20  # bytes of lines that are in the output already, before the file is made anew
_TRIM = 65536


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

    def __init__(self, files: Files, path: Path, places: Places, first: int) -> None:
        self._files = files
        self._path = path
        self._file = AppendFile(files, path)
        self._reader = path.open("rb")
        self._offsets = Offsets(first)
        self._live_bytes = 0
        self.n_errors = 0
        try:
            self._load(places, first)
        except BaseException:
            self.close()
            raise

    def _load(self, places: Places, first: int) -> None:
        end = 0
        for line in lines_of(self._path):
            if line.content.endswith(b"\n"):
                end = line.offset + len(line.content)
            place = None if line.number is None else places.of(line.number)
            if place is not None and place >= first and self._offsets.get(place) is None:
                self._offsets.put(place, line.offset)
                self._live_bytes += len(line.content)
                self.n_errors += has_error(line.content)
        if end < self._file.size:
            self._file.truncate(end)

    def __contains__(self, place: int) -> bool:
        return self._offsets.get(place) is not None

    def __len__(self) -> int:
        return self._offsets.n

    def add(self, place: int, line: bytes) -> None:
        offset = self._file.size
        self._file.write(line)
        self._offsets.put(place, offset)
        self._live_bytes += len(line)

    def look(self, place: int) -> bytes | None:
        """The line of a place that waits."""
        offset = self._offsets.get(place)
        if offset is None:
            return None
        self._reader.seek(offset)
        return self._reader.readline()

    def drop(self, place: int, line: bytes) -> None:
        """The output has it. What is before it must be there too."""
        self._offsets.drop(place)
        self._live_bytes -= len(line)

    @property
    def is_mostly_garbage(self) -> bool:
        garbage = self._file.size - self._live_bytes
        return garbage > _LEAST_GARBAGE and garbage > self._live_bytes

    def compact(self, first: int) -> None:
        """Makes the file anew with what still waits. The output must be on disk before, up to the place `first`."""
        beside = temporary(self._path)
        file = AppendFile(self._files, beside, empty=True)
        offsets = Offsets(first)
        try:
            for place, offset in self._offsets.live():
                self._reader.seek(offset)
                line = self._reader.readline()
                offsets.put(place, file.size)
                file.write(line)
            file.sync()
            self._files.rename(beside, self._path)
        except BaseException:
            file.close()
            raise
        self.close()
        self._file, self._offsets = file, offsets
        self._reader = self._path.open("rb")

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
        self._reader.close()

    def remove(self) -> None:
        self.close()
        self._files.remove(self._path)
