"""What stands in an output: read once, when a job goes on."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from llamabatch.jobs.output.lines import Line, checksum, has_error, lines_of

# ----------------------------------------------------------------------------------------------------
# Numbers of rows and places in an output: those of a shard stand without gaps.


@dataclass(frozen=True)
class ShardIndex:
    """Row `number` of shard (i, n) has place number // n, as the shard has every n-th row from row i - 1 on."""

    shard: tuple[int, int] = (1, 1)

    def of(self, number: int) -> int | None:
        """None: the row is of another shard."""
        i, n = self.shard
        return number // n if number % n == i - 1 else None

    def number(self, place: int) -> int:
        i, n = self.shard
        return place * n + i - 1


class Bits:
    """A set of small whole numbers, one bit each."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __contains__(self, place: int) -> bool:
        i = place >> 3
        return i < len(self._bytes) and bool(self._bytes[i] >> (place & 7) & 1)

    def add(self, place: int) -> None:
        i = place >> 3
        if i >= len(self._bytes):
            self._bytes.extend(bytes(i + 1 - len(self._bytes)))
        self._bytes[i] |= 1 << (place & 7)


@dataclass
class Survey:
    """
    Attributes:
        n_rows: whole lines of this job.
        n_errors: those whose row failed.
        size: bytes up to the end of the last of them; what follows is torn.
        done: their places; of an output in the order of the input these are the first n_rows, and it stays empty.
        n_unrecorded: lines behind these that have no checksum, as a crash of the system leaves them; torn, too.
        damage: what is wrong with a line that no interruption explains; None: nothing.
    """

    n_rows: int = 0
    n_errors: int = 0
    size: int = 0
    done: Bits = field(default_factory=Bits)
    n_unrecorded: int = 0
    damage: str | None = None


_RANGE = 1024  # lines that share a checksum in the manifest of a job that has ended
_SUM = struct.Struct("<I")


def sums_of_lines(sums: Iterable[int]) -> str:
    """Checksums of ranges of lines, 8 hexadecimal digits each, made of those of the lines."""
    found, rest = [], iter(sums)
    while some := list(islice(rest, _RANGE)):
        found.append(f"{zlib.crc32(b''.join(map(_SUM.pack, some))):08x}")
    return "".join(found)


class Proof(Protocol):
    """Whether lines are as the job has written them."""

    def unproven(self, line: bytes) -> str | None:
        """What is wrong with the next line; `UNRECORDED`: nothing says whether it is the job's. None: nothing."""

    def left(self) -> str | None:
        """What is wrong with the lines before, now that these were all."""


class RecordedLines:
    """By a checksum of each line. A line without one came when the system crashed, and is done again."""

    def __init__(self, sums: Iterator[int]) -> None:
        self._sums = sums

    def unproven(self, line: bytes) -> str | None:
        due = next(self._sums, 0)
        if not due:
            return UNRECORDED
        return None if checksum(line) == due else "is not as the job has written it"

    def left(self) -> str | None:
        return None


class EndedLines:
    """By the checksums of ranges that a manifest has of a job that has ended; of an output that was cut since then, the
    whole ranges that are left are known.

    Args:
        sums: as sums_of_lines makes them.
        n_rows: lines that the output had.
    """

    def __init__(self, sums: str, n_rows: int) -> None:
        self._sums, self._n_rows = sums, n_rows
        self._range: list[int] = []
        self._n = 0

    def unproven(self, line: bytes) -> str | None:
        if self._n == self._n_rows:
            return "was not there when the job ended"
        self._n += 1
        self._range.append(checksum(line))
        return self._wrong() if len(self._range) == _RANGE else None

    def left(self) -> str | None:
        if self._range and self._n == self._n_rows and (wrong := self._wrong()):
            return f"line {self._n} {wrong}"
        return None

    def _wrong(self) -> str | None:
        first = (self._n - 1) // _RANGE * 8
        due, self._range, found = self._sums[first : first + 8], [], sums_of_lines(self._range)
        return None if found == due else "or one of those before it is not as the job has written it"


def survey(path: Path, places: ShardIndex, *, in_order: bool, start: int = 0, proof: Proof | None = None) -> Survey:
    """Reads the whole file from the byte `start` on; a missing one is empty. A crash of the system may leave zeros at
    the end of a file, which count as torn. Raises OSError."""
    found = Survey(size=start)
    if not path.exists():
        return found
    torn = False
    for i, line in enumerate(lines_of(path, start)):
        if found.n_unrecorded and line.number is not None:  # those behind it have no checksums either
            found.n_unrecorded += 1
            continue
        wrong = _wrong(line, found, places, in_order, None if torn else proof)
        if wrong == UNRECORDED:
            torn, found.n_unrecorded = True, 1
        elif wrong is None and not torn:
            found.n_rows += 1
            found.n_errors += has_error(line.content)
            found.size = line.offset + len(line.content)
        elif wrong == TORN:
            torn = True
        else:
            found.damage = f"line {i + 1} {wrong or 'follows one that is torn'}"
            return found
    found.damage = None if proof is None else proof.left()
    return found


TORN = "is torn"
UNRECORDED = "has no checksum"


def _wrong(line: Line, found: Survey, places: ShardIndex, in_order: bool, proof: Proof | None) -> str | None:
    if line.number is None:
        torn = not line.content.endswith(b"\n") or b"\0" in line.content
        return TORN if torn else "is not one that this job has written"
    place = places.of(line.number)
    if place is None:
        return f"is of row {line.number}, which is not of this shard"
    if in_order:
        due = places.number(found.n_rows)
        if line.number != due:
            return f"is of row {line.number}, where row {due} is due"
    elif place in found.done:
        return f"is of row {line.number}, which another line is of already"
    if proof is not None and (unproven := proof.unproven(line.content)):
        return unproven
    if not in_order:
        found.done.add(place)
    return None
