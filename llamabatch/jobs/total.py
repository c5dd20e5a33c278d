"""How many rows a job has, where that costs little to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamabatch.jobs.rows import ReadOptions
from llamabatch.jobs.sources import Source

_BLOCK = 2**20
_MOST_BYTES = 2**34  # lines are counted at about 1 GB/s


def total(sources: Sequence[Source], options: ReadOptions) -> int | None:
    """Rows of all inputs that the options want; None where that is not known before they are read: streams, compressed
    files, CSV, whose rows may have several lines."""
    counts = [_count(source) for source in sources]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return wanted(sum(known), options)


def wanted(n_rows: int, options: ReadOptions) -> int:
    """How many of the numbers below n_rows the options want."""
    (i, n), below = options.shard, n_rows if options.limit is None else min(n_rows, options.limit)
    return max(0, -(-(below - (i - 1)) // n))


def _count(source: Source) -> int | None:
    if source.is_stream or source.path is None:
        return None
    if source.kind == "parquet":
        import pyarrow.parquet as parquet  # the reader has made sure that it is there

        metadata: Any = parquet.ParquetFile(source.path).metadata
        return int(metadata.num_rows)
    is_plain = source.kind == "jsonl" and source.path.suffix.lower() != ".gz"
    return _lines(source) if is_plain and (source.size or 0) <= _MOST_BYTES else None


def _lines(source: Source) -> int:
    """Up to the last one that is not empty."""
    ends = lines = 0
    with source.open() as file:
        while block := file.read(_BLOCK):
            told = block.rstrip()
            if told:
                lines = ends + told.count(b"\n") + 1
            ends += block.count(b"\n")
    return lines
