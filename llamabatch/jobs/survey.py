"""What stands in an output: read once, when a job goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llamabatch.jobs.lines import Line, has_error, lines_of
from llamabatch.jobs.places import Places


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
        damage: what is wrong with a line that no interruption explains; None: nothing.
    """

    n_rows: int = 0
    n_errors: int = 0
    size: int = 0
    done: Bits = field(default_factory=Bits)
    damage: str | None = None


def survey(path: Path, places: Places, *, in_order: bool) -> Survey:
    """Reads the whole file; a missing one is empty. A crash of the system may leave zeros at the end of a file, which
    count as torn. Raises OSError."""
    found = Survey()
    if not path.exists():
        return found
    torn = False
    for i, line in enumerate(lines_of(path)):
        wrong = _wrong(line, found, places, in_order)
        if wrong is None and not torn:
            found.n_rows += 1
            found.n_errors += has_error(line.content)
            found.size = line.offset + len(line.content)
        elif wrong == _TORN:
            torn = True
        else:
            found.damage = f"line {i + 1} {wrong or 'follows one that is torn'}"
            return found
    return found


_TORN = "is torn"


def _wrong(line: Line, found: Survey, places: Places, in_order: bool) -> str | None:
    if line.number is None:
        torn = not line.content.endswith(b"\n") or b"\0" in line.content
        return _TORN if torn else "is not one that this job has written"
    place = places.of(line.number)
    if place is None:
        return f"is of row {line.number}, which is not of this shard"
    if in_order:
        due = places.number(found.n_rows)
        return None if line.number == due else f"is of row {line.number}, where row {due} is due"
    if place in found.done:
        return f"is of row {line.number}, which another line is of already"
    found.done.add(place)
    return None
