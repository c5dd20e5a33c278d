"""Removes rows from an output. Lines after the first removed line move to the side file, and are appended later."""

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
from llamabatch.jobs.rows import Bits, ShardIndex


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
    """Removes damaged lines, repeated rows and, on request, failed rows.

    The output is changed in place. The lines before the first removed line stay in the output. The complete lines
    after that line are copied to the side file. When the side file is on disk, the output is cut. If the process dies
    in between, both files have these lines.

    Args:
        file: the file of lines.
        start: the offset of the first line.
        drop_errors: true: failed rows are removed, too.
        is_damaged: true: another program wrote to the file. Lines that are not JSON are then removed, too:
            the halves of two lines may look like one line of the job.

    Raises:
        ConfigError: a line belongs to another shard.
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
    """Returns True if the output or its side file has failed rows."""
    return any(line.number is not None and has_error(line.content) for _, line in _lines(path, start))


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _index(line: Line, shard: ShardIndex, drop_errors: bool) -> int | None:
    """Returns the index of a line to keep; None: the line is removed."""
    if line.number is None or (drop_errors and has_error(line.content)):
        return None
    index = shard.index(line.number)
    if index is None:
        raise ConfigError(f"the output has row {line.number}, which is not of shard {shard.shard}; give another name")
    return index


def _lines(path: Path, start: int) -> Iterator[tuple[bool, Line]]:
    """Yields (False, line) for lines of the output, then (True, line) for lines of its side file."""
    for line in lines_of(path, start) if path.exists() else ():
        yield False, line
    if ahead_of(path).exists():
        for line in waiting_lines(ahead_of(path)):
            yield True, line
