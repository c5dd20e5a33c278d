"""Outputs that are made from a job's lines after the last row: Parquet, CSV, and compressed outputs of any format.

While the job runs, its lines are in OUT.part. These lines survive a crash, as in any output. A resumed job turns a
complete OUT into lines again.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from llamabatch.errors import ConfigError
from llamabatch.jobs import formats
from llamabatch.jobs.output import csv_table, parquet
from llamabatch.jobs.output.columns import columns_of
from llamabatch.jobs.output.files import AppendFile
from llamabatch.jobs.output.lock import lock_file
from llamabatch.jobs.output.own_files import OwnFiles
from llamabatch.jobs.output.records import RecordOptions, number_of, to_line

_PIECE_BYTES = 2**20
_RANGE_BYTES = 16 * 2**20


def is_made_at_end(path: Path) -> bool:
    """Returns True if an output of this name is made after the last row; False: it is written line by line."""
    suffix, compression = formats.suffixes(path)
    return bool(compression) or suffix in formats.PARQUET or suffix in formats.CSV


def has_columns(path: Path) -> bool:
    """Returns True for the name of a table."""
    return formats.suffixes(path)[0] in (*formats.PARQUET, *formats.CSV)


def check_installed(path: Path) -> None:
    """Raises SetupError if a library for the format is not installed."""
    suffix, compression = formats.suffixes(path)
    if suffix in formats.PARQUET:
        parquet.check_installed()
    if compression == formats.ZSTD:
        formats.zstd()


def convert(
    own: OwnFiles, source: Path, options: RecordOptions, *, over: bool, compression: str = parquet.COMPRESSIONS[0]
) -> tuple[int, str]:
    """Makes the output from a file of lines. The output gets its name only when it is complete.

    Args:
        over: true: an earlier output is replaced.
        compression: the compression of the columns of a Parquet file.

    Returns:
        The size of the output in bytes, and its checksums; see sums_of_ranges.

    Raises:
        OutputError, OSError: reading or writing fails.
    """
    suffix, packing = formats.suffixes(own.out)
    start = len(own.header("part"))
    file = own.create()
    try:
        lock_file(file, own.out)  # the file is locked before it gets the output's name
        sink = Sink(file)
        if suffix in formats.PARQUET:
            parquet.write(source, start, columns_of(source, start, options), sink, compression)
        else:
            with _packed(sink, packing) as target:
                if suffix in formats.CSV:
                    csv_table.write(source, start, columns_of(source, start, options), formats.CSV[suffix], target)
                else:
                    with source.open("rb") as lines:
                        lines.seek(start)
                        shutil.copyfileobj(lines, target, _PIECE_BYTES)
        sink.flush_all()
        file.sync()
        sums = sums_of_ranges(file.path)
        own.commit(file, own.out, over=over)
    finally:
        file.close()
    return file.size, sums


@contextlib.contextmanager
def _packed(sink: Sink, compression: str) -> Iterator[BinaryIO]:
    if not compression:
        yield cast(BinaryIO, sink)
        return
    with formats.open_compressed(sink, compression, "wb") as target:
        yield target


def sums_of_ranges(path: Path) -> str:
    """Returns the checksum of each 16 MiB of a file, 8 hexadecimal digits each, as one text. Raises OSError."""
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(data):08x}" for data in iter(lambda: file.read(_RANGE_BYTES), b""))


def restore(own: OwnFiles, source: Path, target: Path, options: RecordOptions) -> None:
    """Turns a complete output into lines again, so that its job can be resumed.

    Raises:
        ConfigError: no job wrote the output, or the output is damaged.
        OutputError, OSError: reading or writing fails.
    """
    file = own.create("part")
    try:
        for line in _lines(source, options):
            if number_of(line) is None:
                raise ConfigError(f"{source} is not the output of a job; give another name")
            file.write(line)
        own.commit(file, target, over=True)
    finally:
        file.close()


def _lines(source: Path, options: RecordOptions) -> Iterator[bytes]:
    suffix, compression = formats.suffixes(source)
    if suffix in formats.PARQUET:
        yield from map(to_line, parquet.records(source))
        return
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(source.open("rb"))
        damages: tuple[type[Exception], ...] = (EOFError, zlib.error)
        if compression:
            damages += (formats.zstd().ZstdError,) if compression == formats.ZSTD else (gzip.BadGzipFile,)
            file = stack.enter_context(formats.open_compressed(file, compression, "rb"))
        try:
            if suffix in formats.CSV:
                yield from map(to_line, csv_table.records(source, file, formats.CSV[suffix], options.answer))
            else:
                yield from file
        except damages as error:
            raise ConfigError(f"{source} is damaged ({error}); give another name") from error


class Sink:
    """A file object for other libraries. A library may write pieces of any size."""

    closed = False

    def __init__(self, file: AppendFile) -> None:
        self.file = file
        self._waiting = bytearray()

    def write(self, data: Any) -> int:
        before = len(self._waiting)
        self._waiting += data
        written = len(self._waiting) - before
        if len(self._waiting) >= _PIECE_BYTES:
            self.flush_all()
        return written

    def flush_all(self) -> None:
        """Writes all collected bytes. flush() does nothing, because pyarrow calls it after each piece."""
        self.file.write(bytes(self._waiting))
        self._waiting.clear()

    def tell(self) -> int:
        return self.file.size + len(self._waiting)

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
