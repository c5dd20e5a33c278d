"""An output written anew, without some of its rows or in another order: whole lines are copied, and renamed over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from llamabatch.errors import ConfigError
from llamabatch.jobs.files import AppendFile, Files, temporary
from llamabatch.jobs.journal import ahead_of
from llamabatch.jobs.lines import Line, has_error, lines_of
from llamabatch.jobs.places import Places
from llamabatch.jobs.side_file import Offsets
from llamabatch.jobs.survey import Bits


def has_errors(path: Path) -> bool:
    """Has the output, or what waits beside it, rows that failed?"""
    return any(line.number is not None and has_error(line.content) for _, line in _lines(path))


def arrange(files: Files, path: Path, places: Places, *, in_order: bool, drop_errors: bool) -> None:
    """Keeps each row once, without lines that are damaged and, where told so, rows that failed.

    In the order of the input what stands behind a gap goes to the side file. That is renamed first: until the output
    is, too, it holds nothing that the output does not hold, or might.

    Raises:
        ConfigError: a line is of another shard.
        OutputError: writing fails.
    """
    if in_order:
        _in_order(files, path, places, drop_errors)
    else:
        _as_finished(files, path, places, drop_errors)


def _in_order(files: Files, path: Path, places: Places, drop_errors: bool) -> None:
    sources = [path, ahead_of(path)]
    found = Offsets(0)
    for source, line in _lines(path):
        place = _kept(line, places, drop_errors)
        if place is not None and found.get(place) is None:
            found.put(place, 2 * line.offset + source)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(source.open("rb")) if source.exists() else None for source in sources]
        targets = [
            stack.enter_context(contextlib.closing(AppendFile(files, temporary(source), empty=True)))
            for source in sources
        ]
        due = 0
        for place, code in found.live():
            reader = readers[code % 2]
            assert reader is not None
            reader.seek(code // 2)
            targets[place != due].write(reader.readline())
            due += place == due
        for target in targets:
            target.sync()
    for written in reversed(sources):
        files.rename(temporary(written), written)


def _as_finished(files: Files, path: Path, places: Places, drop_errors: bool) -> None:
    done = Bits()
    with contextlib.closing(AppendFile(files, temporary(path), empty=True)) as target:
        for _, line in _lines(path):
            place = _kept(line, places, drop_errors)
            if place is not None and place not in done:
                done.add(place)
                target.write(line.content)
        target.sync()
    files.rename(temporary(path), path)
    files.remove(ahead_of(path))


def _kept(line: Line, places: Places, drop_errors: bool) -> int | None:
    if line.number is None or (drop_errors and has_error(line.content)):
        return None
    place = places.of(line.number)
    if place is None:
        raise ConfigError(f"the output has row {line.number}, which is not of shard {places.shard}; give another name")
    return place


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    """Lines of the output (0) and of its side file (1)."""
    for source, each in enumerate((path, ahead_of(path))):
        if each.exists():
            for line in lines_of(each):
                yield source, line
