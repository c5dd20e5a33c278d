"""An output without some of its rows: lines behind the first of these wait in the side file, and come again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.files import AppendFile
from llamabatch.jobs.output.journal import waiting_line, waiting_lines
from llamabatch.jobs.output.own_files import OwnFiles, ahead_of
from llamabatch.jobs.output.records import Line, has_error, lines_of
from llamabatch.jobs.output.survey import Bits
from llamabatch.jobs.rows import ShardIndex


def rewrite(
    own: OwnFiles,
    file: AppendFile,
    start: int,
    shard: ShardIndex,
    *,
    in_order: bool,
    drop_errors: bool,
    is_damaged: bool,
) -> None:
    """Keeps each row once, without damaged lines and, on request, without failed rows.

    The output keeps its lines up to the first that has to go, and stays the file that it is: whole lines behind that go
    to the side file, and the output is cut when they are on disk. A process that ends in between leaves both.

    Args:
        file: the lines.
        start: the offset of the first of them.
        drop_errors: failed rows go, too.
        is_damaged: something else has written there, so that every line is read as JSON: two halves of lines may look
            like one.

    Raises:
        ConfigError: a line is of another shard.
        OutputError: writing fails.
    """
    done, end, amid = Bits(), start, False
    n_rows = 0
    with contextlib.closing(own.create("ahead")) as target:
        for is_waiting, line in _lines(file.path, start):
            index = None if is_damaged and not _is_json(line.content) else _index(line, shard, drop_errors)
            amid = amid or is_waiting or index is None or index in done or (in_order and index != n_rows)
            if index is None or index in done:
                continue
            done.add(index)
            if amid:
                target.write(waiting_line(line.content))
            else:
                n_rows, end = n_rows + 1, line.offset + len(line.content)
        own.commit(target, ahead_of(file.path), over=True)
    if end < file.size:
        file.truncate(end)
    file.sync()


def has_errors(path: Path, start: int) -> bool:
    """True where the output, or its side file, has failed rows."""
    return any(line.number is not None and has_error(line.content) for _, line in _lines(path, start))


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _index(line: Line, shard: ShardIndex, drop_errors: bool) -> int | None:
    """The index of a line that stays; None: it goes."""
    if line.number is None or (drop_errors and has_error(line.content)):
        return None
    index = shard.index(line.number)
    if index is None:
        raise ConfigError(f"the output has row {line.number}, which is not of shard {shard.shard}; give another name")
    return index


def _lines(path: Path, start: int) -> Iterator[tuple[bool, Line]]:
    """(False, line) for lines of the output, then (True, line) for lines of its side file."""
    for line in lines_of(path, start) if path.exists() else ():
        yield False, line
    if ahead_of(path).exists():
        for line in waiting_lines(ahead_of(path)):
            yield True, line
