"""The number of rows of a job: counted where counting is cheap, otherwise estimated from the rows read so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamabatch.jobs import formats
from llamabatch.jobs.input.column_files import open_columns
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.rows import ReadOptions

_BLOCK = 2**20
_MOST_BYTES = 2**34  # lines of a larger file are not counted; counting reads about 1 GB/s


class Seen(NamedTuple):
    """The progress of reading, in rows of all shards.

    Attributes:
        starts: for each input that reading has reached, the number of its first row. The last one is being read.
        n_rows: the number of rows read so far.
        share: how much of the last input has been read, as a share of its bytes, 0 to 1; None: not known.
        ended: true when all rows have been read.
    """

    starts: tuple[int, ...] = ()
    n_rows: int = 0
    share: float | None = None
    ended: bool = False


class Rows(NamedTuple):
    """A number of rows. If it is `estimated`, more or fewer rows may come."""

    n: int
    estimated: bool = False


class Total:
    """The number of rows that the options select from all inputs.

    The rows of streams, compressed files, .txt and CSV (a row may have several lines) are not counted in advance. For
    these inputs, the bytes and rows read so far give an estimate. The estimate is good if the rows of a file are alike.
    Rows read ahead of the engine do not distort the estimate, because their bytes count, too.
    """

    def __init__(self, sources: Sequence[Source], options: ReadOptions) -> None:
        self._options = options
        self._sizes = [source.size for source in sources]
        self._counts: list[int | None] = []
        left = options.limit
        for source in sources:
            count = 0 if left == 0 else _count(source, left)
            self._counts.append(count)
            if left is not None:
                left = max(0, left - (count or 0))

    def rows(self, seen: Seen) -> Rows | None:
        """Returns the number of rows, possibly estimated from the rows read so far; None: not known."""
        limit = self._options.limit
        if seen.ended:
            return Rows(wanted(seen.n_rows, self._options))
        if None not in self._counts:
            return Rows(wanted(sum(count or 0 for count in self._counts), self._options))
        n = self._estimate(seen)
        if n is None:
            return None if limit is None else Rows(wanted(limit, self._options), estimated=True)
        return Rows(wanted(max(n, seen.n_rows), self._options), estimated=True)

    def _estimate(self, seen: Seen) -> int | None:
        """Estimates the number of rows from the bytes read so far; None: an input has no size, or no row was read."""
        if not seen.starts:
            return None
        current = len(seen.starts) - 1
        n_here = seen.n_rows - seen.starts[-1]
        n, n_read, bytes_read, bytes_left = float(seen.starts[-1]), 0.0, 0.0, 0
        for i, (count, size) in enumerate(zip(self._counts, self._sizes, strict=True)):
            if count is not None:
                n += count if i >= current else 0
            elif size is None:
                if i >= current:
                    return None
            elif i < current:
                n_read, bytes_read = n_read + seen.starts[i + 1] - seen.starts[i], bytes_read + size
            elif i == current:
                if not seen.share or not n_here:
                    return None
                n += n_here / seen.share
                n_read, bytes_read = n_read + n_here, bytes_read + seen.share * size
            else:
                bytes_left += size
        if bytes_left and not n_read:
            return None
        return round(n + (bytes_left * n_read / bytes_read if bytes_left else 0.0))


def wanted(n_rows: int, options: ReadOptions) -> int:
    """Returns how many of the first `n_rows` rows are in the shard and below the limit."""
    (i, n), below = options.shard, n_rows if options.limit is None else min(n_rows, options.limit)
    return max(0, -(-(below - (i - 1)) // n))


def _count(source: Source, most: int | None) -> int | None:
    """Returns the number of rows of an input. Counts at most `most` lines. None: counting is as slow as reading."""
    if source.is_stream or source.path is None:
        return None
    if source.has_columns:
        with open_columns(source) as file:
            return file.n_rows
    is_plain = source.kind == "jsonl" and not formats.suffixes(source.path)[1]
    return _lines(source, most) if is_plain and (source.size or 0) <= _MOST_BYTES else None


def _lines(source: Source, most: int | None) -> int:
    """Counts the lines of a file, but not more than `most`. Empty lines at the end do not count."""
    ends = lines = 0
    with source.open() as file:
        while block := file.read(_BLOCK):
            content = block.rstrip()
            if content:
                lines = ends + content.count(b"\n") + 1
            ends += block.count(b"\n")
            if most is not None and lines >= most:
                return most
    return lines
