"""Surveys an output on resume: reads the complete lines once, and checks that the job wrote them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from llamabatch.jobs.output.records import Line, checksum, has_error, lines_of
from llamabatch.jobs.rows import Bits, ShardIndex

_RANGE = 1024  # lines that share one checksum in the manifest of a finished job
_SUM = struct.Struct("<I")
TORN = "is torn"
UNRECORDED = "has no checksum"


@dataclass
class Survey:
    """The state of an output.

    Attributes:
        n_rows: the number of complete lines of this job.
        n_errors: the number of failed rows among them.
        size: the bytes up to the end of the last complete line. The rest is torn.
        done: the indices of the complete lines. Empty if the lines are in the order of the input: their indices are
            then 0 .. n_rows - 1.
        n_unrecorded: the number of lines at the end that have no checksum. A system crash leaves such lines, and they
            count as torn.
        damage: a fault that an interruption cannot explain; None: there is no such fault.
    """

    n_rows: int = 0
    n_errors: int = 0
    size: int = 0
    done: Bits = field(default_factory=Bits)
    n_unrecorded: int = 0
    damage: str | None = None


def survey(path: Path, shard: ShardIndex, *, in_order: bool, start: int = 0, proof: Proof | None = None) -> Survey:
    """Returns the state of a file, read from the byte `start` on. A missing file counts as empty. Zeros at the end,
    which a system crash may leave, count as torn. Raises OSError."""
    found = Survey(size=start)
    if not path.exists():
        return found
    torn = False
    for i, line in enumerate(lines_of(path, start)):
        if found.n_unrecorded and line.number is not None:  # later lines have no checksums either
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
    """Returns the fault of a line; None: the line counts. An interruption can cause only TORN and UNRECORDED."""
    if line.number is None:
        torn = not line.content.endswith(b"\n") or b"\0" in line.content
        return TORN if torn else "is not one that this job has written"
    index = shard.index(line.number)
    if index is None:
        return f"is of row {line.number}, which is not of this shard"
    if in_order:
        due = shard.number(found.n_rows)
        if line.number != due:
            return f"is of row {line.number}, but row {due} must come next"
    elif index in found.done:
        return f"is of row {line.number}, which an earlier line has already"
    if proof is not None and (fault := proof.fault(line.content)):
        return fault
    if not in_order:
        found.done.add(index)
    return None


class Proof(Protocol):
    """A check that lines have not changed since the job wrote them. `fault` gets each line once, in order."""

    def fault(self, line: bytes) -> str | None:
        """Returns the fault of the next line; `UNRECORDED`: the line has no checksum; None: no fault."""

    def rest(self) -> str | None:
        """Returns a fault that can be found only after the last line; None: no fault."""


class RecordedLines:
    """A check by the checksum of each line. If checksums were lost in a system crash, their rows are run again."""

    def __init__(self, sums: Iterator[int]) -> None:
        self._sums = sums

    def fault(self, line: bytes) -> str | None:
        due = next(self._sums, 0)
        if not due:
            return UNRECORDED
        return None if checksum(line) == due else "has changed since the job wrote it"

    def rest(self) -> str | None:
        return None


class EndedLines:
    """A check by the manifest of a finished job, which has a checksum for each range of 1,024 lines. If the output was
    cut later, only the complete ranges are checked.

    Args:
        sums: the checksums from sums_of_lines.
        n_rows: the number of lines that the output had when the job ended.
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
        return None if found == due else "or a line before it has changed since the job wrote it"


def sums_of_lines(sums: Iterable[int]) -> str:
    """Combines the checksums of lines to one checksum of 8 hexadecimal digits for each range of 1,024 lines."""
    found, rest = [], iter(sums)
    while some := list(islice(rest, _RANGE)):
        found.append(f"{zlib.crc32(b''.join(map(_SUM.pack, some))):08x}")
    return "".join(found)
