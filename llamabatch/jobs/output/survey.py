"""A survey of an output: its whole lines, read once when a job goes on, and the proof that the job has written them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from llamabatch.jobs.output.records import Line, checksum, has_error, lines_of
from llamabatch.jobs.rows import ShardIndex

_RANGE = 1024  # lines that share a checksum in the manifest of a job that has ended
_SUM = struct.Struct("<I")
TORN = "is torn"
UNRECORDED = "has no checksum"


class Bits:
    """A set of small whole numbers, one bit each."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __contains__(self, n: int) -> bool:
        i = n >> 3
        return i < len(self._bytes) and bool(self._bytes[i] >> (n & 7) & 1)

    def add(self, n: int) -> None:
        i = n >> 3
        if i >= len(self._bytes):
            self._bytes.extend(bytes(i + 1 - len(self._bytes)))
        self._bytes[i] |= 1 << (n & 7)


@dataclass
class Survey:
    """The state of an output.

    Attributes:
        n_rows: whole lines of this job.
        n_errors: those of failed rows.
        size: bytes up to the end of the last of them; the rest is torn.
        done: indices of these lines; empty for an output in the order of the input, whose indices are the first n_rows.
        n_unrecorded: lines behind these without a checksum, as a crash of the system leaves them; torn, too.
        damage: a fault that no interruption explains; None: there is none.
    """

    n_rows: int = 0
    n_errors: int = 0
    size: int = 0
    done: Bits = field(default_factory=Bits)
    n_unrecorded: int = 0
    damage: str | None = None


def survey(path: Path, shard: ShardIndex, *, in_order: bool, start: int = 0, proof: Proof | None = None) -> Survey:
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
        fault = _fault(line, found, shard, in_order, None if torn else proof)
        if fault == UNRECORDED:
            torn, found.n_unrecorded = True, 1
        elif fault is None and not torn:
            found.n_rows += 1
            found.n_errors += has_error(line.content)
            found.size = line.offset + len(line.content)
        elif fault == TORN:
            torn = True
        else:
            found.damage = f"line {i + 1} {fault or 'follows one that is torn'}"
            return found
    found.damage = None if proof is None else proof.rest()
    return found


def _fault(line: Line, found: Survey, shard: ShardIndex, in_order: bool, proof: Proof | None) -> str | None:
    """The fault of a line; TORN and UNRECORDED are those of an interruption. None: it is whole, and counts."""
    if line.number is None:
        torn = not line.content.endswith(b"\n") or b"\0" in line.content
        return TORN if torn else "is not one that this job has written"
    index = shard.index(line.number)
    if index is None:
        return f"is of row {line.number}, which is not of this shard"
    if in_order:
        due = shard.number(found.n_rows)
        if line.number != due:
            return f"is of row {line.number}, where row {due} is due"
    elif index in found.done:
        return f"is of row {line.number}, which another line is of already"
    if proof is not None and (fault := proof.fault(line.content)):
        return fault
    if not in_order:
        found.done.add(index)
    return None


class Proof(Protocol):
    """A proof that lines are as the job has written them; it sees each line once, in order."""

    def fault(self, line: bytes) -> str | None:
        """The fault of the next line; `UNRECORDED`: there is no record of it. None: there is none."""

    def rest(self) -> str | None:
        """The fault of the lines so far, once they were all; None: there is none."""


class RecordedLines:
    """The proof by a checksum of each line. A line without one came when the system crashed, and is done again."""

    def __init__(self, sums: Iterator[int]) -> None:
        self._sums = sums

    def fault(self, line: bytes) -> str | None:
        due = next(self._sums, 0)
        if not due:
            return UNRECORDED
        return None if checksum(line) == due else "is not as the job has written it"

    def rest(self) -> str | None:
        return None


class EndedLines:
    """The proof by the manifest of a job that has ended: a checksum of each range of lines. Of an output that was cut
    since then, the whole ranges are proven.

    Args:
        sums: as sums_of_lines makes them.
        n_rows: lines that the output had.
    """

    def __init__(self, sums: str, n_rows: int) -> None:
        self._sums, self._n_rows = sums, n_rows
        self._range: list[int] = []
        self._n = 0

    def fault(self, line: bytes) -> str | None:
        if self._n == self._n_rows:
            return "was not there when the job ended"
        self._n += 1
        self._range.append(checksum(line))
        return self._range_fault() if len(self._range) == _RANGE else None

    def rest(self) -> str | None:
        if self._range and self._n == self._n_rows and (fault := self._range_fault()):
            return f"line {self._n} {fault}"
        return None

    def _range_fault(self) -> str | None:
        first = (self._n - 1) // _RANGE * 8
        due, self._range, found = self._sums[first : first + 8], [], sums_of_lines(self._range)
        return None if found == due else "or one of those before it is not as the job has written it"


def sums_of_lines(sums: Iterable[int]) -> str:
    """The checksums of ranges of 1,024 lines, 8 hexadecimal digits each, made of those of the lines."""
    found, rest = [], iter(sums)
    while some := list(islice(rest, _RANGE)):
        found.append(f"{zlib.crc32(b''.join(map(_SUM.pack, some))):08x}")
    return "".join(found)
