"""Bad lines of 200 kinds between good lines: each kind in a file of its own, and all in one file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from llamabatch.jobs.input.reader import read
from llamabatch.jobs.input.sources import find
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.utils.paths import shown
from tests.long.bad_kinds import EARLIER, Kind, all_kinds

HOLDS = (
    "a bad line of each of 200 kinds is one error row in its place, with its reason; all rows around it are complete"
)
TOTAL = 201
QUICK = 201

_MARK = b"\xef\xbb\xbf"


@cache
def kinds() -> list[Kind]:
    return all_kinds()


def case(number: int, folder: Path) -> None:
    """Checks the kind of this number. The last case checks all kinds in one file."""
    path = folder / "in.jsonl"
    check(path, kinds()[number : number + 1] if number < TOTAL - 1 else all_different(), number)


def all_different() -> list[Kind]:
    """Returns all kinds, with an id of its own for each."""
    return [
        kind._replace(line=kind.line.replace(b'"bad"', b'"bad %d"' % i), id=kind.id and f"{kind.id} {i}")
        for i, kind in enumerate(kinds())
    ]


def check(path: Path, bad: list[Kind], number: int) -> None:
    """Writes a file with these kinds, reads it, and compares the rows with the lines."""
    rows = lines_with(bad)
    write(path, rows, number)
    found = list(read(find([path])))
    assert [row.number for row in found] == list(range(len(rows)))
    assert [row.place for row in found] == [f"{shown(path)}, line {i + 1}" for i in range(len(rows))]
    assert [row.id for row in found[:2]] == ["0", EARLIER]
    assert all(isinstance(row, Row) for row in found[:2])
    for i, kind in enumerate(bad):
        wrong, right = found[2 * i + 2], found[2 * i + 3]
        assert isinstance(wrong, BadRow), kind.name
        assert kind.says in wrong.error, (kind.name, wrong.error)
        assert wrong.error.startswith(wrong.place), kind.name
        assert wrong.id == kind.id, kind.name
        assert isinstance(right, Row), kind.name
        assert (right.id, right.prompt, right.params.max_tokens) == (f"good after {i}", f"prompt {i} ü", i % 7 + 1)
    used = [row.id for row in found if row.id is not None]
    assert len(used) == len(set(used))


def lines_with(bad: list[Kind]) -> list[bytes]:
    """Returns two good lines, the first without an id, and then bad and good lines in turn."""
    rows = [b'{"prompt": "without an id"}', b'{"id": "%s", "prompt": "earlier"}' % EARLIER.encode()]
    for i, kind in enumerate(bad):
        rows += [kind.line, good_line(i)]
    return rows


def good_line(i: int) -> bytes:
    line = {"id": f"good after {i}", "prompt": f"prompt {i} ü", "max_tokens": i % 7 + 1, "ignore_eos": True}
    return json.dumps(line, ensure_ascii=i % 2 == 0).encode()


def write(path: Path, rows: list[bytes], number: int) -> None:
    """Writes the rows to a file.

    Every second case has Windows' line ends, every third has a byte order mark, every fifth lacks the last line end.
    """
    end = b"\r\n" if number % 2 else b"\n"
    text = (_MARK if number % 3 == 0 else b"") + end.join(rows) + (b"" if number % 5 == 0 else end)
    path.write_bytes(text)
