"""The parts of a job on Ray: the names and rows of its shards' outputs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from llamabatch.errors import OutputError
from llamabatch.jobs.output.own_files import ahead_of, part_of
from llamabatch.jobs.output.records import lines_of

PLACE = "{shard}"
"""Placeholder in the name of an output whose parts are not joined. A part has "1-of-4", for example."""

_FOLDER = ".shards"  # the name of the parts' folder is the output's name with this ending


def part_of_shard(output: str | os.PathLike[str], shard: int, n_shards: int) -> Path:
    """Returns the path of the output of one shard. Shards are numbered from 1 to n_shards."""
    out = Path(output)
    number = f"{shard:0{len(str(n_shards))}}-of-{n_shards}"
    if PLACE in out.name:
        return out.with_name(out.name.replace(PLACE, number))
    return out.with_name(out.name + _FOLDER) / f"{number}.jsonl"


def part_bytes(part: Path) -> tuple[int, int]:
    """Returns the bytes of a part's written lines, and the bytes of its lines that wait for an earlier row."""
    kept = [lines for lines in (part, part_of(part)) if lines.exists()]
    return sum(map(_size_of, kept)), sum(_size_of(ahead_of(lines)) for lines in kept)


def in_turn(parts: Sequence[Path]) -> Iterator[tuple[int, bytes]]:
    """Yields all rows in the order of the input. Row n is in parts[n % len(parts)]. Raises OutputError if a row is
    missing."""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(contextlib.closing(_lines(part))) for part in parts]
        number = 0
        while (line := next(lines[number % len(parts)], None)) is not None:
            if line[0] != number:
                break
            yield line
            number += 1
        for part, rest in zip(parts, lines, strict=True):
            if line is not None or next(rest, None) is not None:
                raise OutputError(f"row {number} is missing in {parts[number % len(parts)]}, but {part} has later rows")


def in_a_row(parts: Sequence[Path]) -> Iterator[tuple[int, bytes]]:
    """Yields all rows, part by part. Raises OutputError."""
    for part in parts:
        yield from _lines(part)


def _lines(part: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yields the rows of a part with their numbers. Raises OutputError if the part cannot be read."""
    try:
        for line in lines_of(part):
            if line.number is None:
                raise OutputError(f"{part} has a line that no job has written, at byte {line.offset:,}")
            yield line.number, line.content
    except OSError as error:
        raise OutputError(f"{part}: {error.strerror or error}") from error


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
