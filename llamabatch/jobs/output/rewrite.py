"""An output without some of its rows: what stands behind the first of them waits in the side file, and comes again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.files import AppendFile
from llamabatch.jobs.output.journal import OwnFiles, ahead_of, lines_that_wait, waiting_line
from llamabatch.jobs.output.lines import Line, has_error, lines_of
from llamabatch.jobs.output.survey import Bits, ShardIndex


def has_errors(path: Path, start: int) -> bool:
    """Has the output, or what waits beside it, rows that failed?"""
    return any(line.number is not None and has_error(line.content) for _, line in _lines(path, start))


def arrange(
    own: OwnFiles,
    kept: AppendFile,
    start: int,
    places: ShardIndex,
    *,
    in_order: bool,
    drop_errors: bool,
    is_damaged: bool,
) -> None:
    """Keeps each row once, without lines that are damaged and, where told so, rows that failed.

    The output keeps its lines up to the first that has to go, and stays the file that it is: whole lines behind that go
    to the side file, and the output is cut when they are on disk. A process that ends in between leaves both.

    Args:
        start: where the lines begin.
        is_damaged: something else has written there, so that every line is read as JSON: two halves of lines may look
            like one.

    Raises:
        ConfigError: a line is of another shard.
        OutputError: writing fails.
    """
    done, end, amid = Bits(), start, False
    n_rows = 0
    with contextlib.closing(own.begin("ahead")) as target:
        for behind, line in _lines(kept.path, start):
            place = None if is_damaged and not _is_json(line.content) else _kept(line, places, drop_errors)
            amid = amid or behind or place is None or place in done or (in_order and place != n_rows)
            if place is None or place in done:
                continue
            done.add(place)
            if amid:
                target.write(waiting_line(line.content))
            else:
                n_rows, end = n_rows + 1, line.offset + len(line.content)
        own.place(target, ahead_of(kept.path), over=True)
    if end < kept.size:
        kept.truncate(end)
    kept.sync()


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _kept(line: Line, places: ShardIndex, drop_errors: bool) -> int | None:
    if line.number is None or (drop_errors and has_error(line.content)):
        return None
    place = places.of(line.number)
    if place is None:
        raise ConfigError(f"the output has row {line.number}, which is not of shard {places.shard}; give another name")
    return place


def _lines(path: Path, start: int) -> Iterator[tuple[bool, Line]]:
    """Lines of the output, and then, behind them, of its side file."""
    for line in lines_of(path, start) if path.exists() else ():
        yield False, line
    if ahead_of(path).exists():
        for line in lines_that_wait(ahead_of(path)):
            yield True, line
