"""Where rows come from: files, globs of them, stdin; compressed or not."""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import os
import stat
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from llamabatch.errors import InputError
from llamabatch.jobs.output import files
from llamabatch.jobs.output.manifest import output_of, path_of
from llamabatch.jobs.rows import ReadOptions, Seen
from llamabatch.utils.checks import show
from llamabatch.utils.paths import absolute, shown

Kind = Literal["jsonl", "csv", "tsv", "parquet"]

STDIN = "-"
HEAD_BYTES = 2**16  # of a stream: as much of it as can be known before it is read
WHOLE_BYTES = 2**30  # a larger file's digest is of samples
N_SAMPLES = 64
SAMPLE_BYTES = 2**20

# What a damaged compressed file raises. Another OSError is the disk's, and says nothing of the content.
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)

_GZIP = b"\x1f\x8b"
_SIP_BYTES = 4096  # of a compressed file at once: what is decompressed tells how far it is
_FEW_BYTES = 256
_KINDS: dict[str, Kind] = {".csv": "csv", ".tsv": "tsv", **dict.fromkeys(files.PARQUET, "parquet")}


class Source:
    """One input.

    Attributes:
        name: for messages, as it is written in the working directory; "stdin" for "-".
        path: None: stdin.
        is_stream: it can be read once only, and no part of it before: stdin, a pipe.
    """

    def __init__(self, path: Path | None, stream: BinaryIO | None = None) -> None:
        """Args:
        path: None: stdin.
        stream: what to read as stdin.
        """
        self.name = "stdin" if path is None else shown(path)
        self.path = path
        self.is_stream = path is None or not path.is_file()
        self._stream = stream
        self._head: bytes | None = None
        self._raw: BinaryIO | None = None
        self._text: BinaryIO | None = None
        self._unzipped: _Unzipped | None = None

    @property
    def kind(self) -> Kind:
        """By the name's ending, with .gz after it or not; lines of JSON where it says nothing."""
        return "jsonl" if self.path is None else _KINDS.get(files.suffixes(self.path)[0], "jsonl")

    @property
    def says_lines(self) -> bool:
        """Does the name promise lines of JSON? Else it has to be seen whether they are."""
        return self.path is None or files.suffixes(self.path)[0] in files.LINES

    @property
    def size(self) -> int | None:
        """Bytes as they lie on the disk; None: not known."""
        return None if self.is_stream or self.path is None else self.path.stat().st_size

    def share(self, size: int) -> float:
        """How much of the content has been handed out, 0 to 1, while it is open: buffers that run ahead do not count.

        Args:
            size: bytes on the disk. Of a compressed file the share is that of the compressed bytes.
        """
        if self._text is None or not size:
            return 1.0
        told = self._text.tell()
        if self._unzipped is None:
            return min(1.0, told / size)
        unzipped, zipped = self._unzipped.tell(), self._unzipped.n_zipped
        return min(1.0, told / unzipped * zipped / size) if unzipped else 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Its content, decompressed if it begins as gzip files do, whatever its name is.

        Raises:
            InputError: it cannot be opened, or is neither text nor compressed by gzip.
        """
        with contextlib.ExitStack() as stack:
            raw = self._open_raw()
            if self.path is not None:
                stack.callback(raw.close)
            self._raw = raw
            begins = self._peek(raw)
            if (foreign := files.begins(begins)) is not None:
                raise _refusal(self.name, f"its content is {foreign}", files.cure(foreign))
            whole = cast(BinaryIO, io.BufferedReader(_Joined(begins, raw), 2**18)) if self.is_stream else raw
            self._unzipped = _Unzipped(whole) if begins.startswith(_GZIP) else None
            if self._unzipped is not None:
                whole = cast(BinaryIO, io.BufferedReader(self._unzipped, 2**18))
            self._text = whole
            stack.callback(setattr, self, "_text", None)
            yield whole

    def fingerprint(self, known: object = None) -> dict[str, object]:
        """What tells whether it is the same as before.

        Args:
            known: the fingerprint that it had then, if there is one. Of a stream as many bytes are read as that is of.

        Returns:
            "name" without folders, "size" in bytes and "sha256". Of a file above 1 GiB the digest is of 64 samples,
            one MiB each, at even distances, the first and the last bytes among them, and "mtime_ns" is there too. Of
            a stream it is of its first "bytes", 64 KiB at most: those that are there when its first line is. The rest
            is not known before it is read, and is not compared.
        """
        if self.is_stream or self.path is None:
            if self._raw is None:
                self._raw = self._open_raw()
            n_before = _stream_bytes(known)
            if self._head is None:
                self._head = _head(self._raw, n_before)
            found: dict[str, object] = {"name": self._short_name, "size": None}
            if not isinstance(known, Mapping) or "bytes" in known:  # earlier versions always waited for 64 KiB
                found["bytes"] = len(self._head)
            return found | {"sha256": hashlib.sha256(self._head).hexdigest()}
        size = self.path.stat().st_size
        found = {"name": self._short_name, "size": size}
        with self._open_raw() as raw:
            if size <= WHOLE_BYTES:
                return found | {"sha256": _digest(raw, [(0, size)])}
            step = (size - SAMPLE_BYTES) / (N_SAMPLES - 1)
            samples = [(round(i * step), SAMPLE_BYTES) for i in range(N_SAMPLES)]
            return found | {"sha256": _digest(raw, samples), "mtime_ns": self.path.stat().st_mtime_ns}

    @property
    def _short_name(self) -> str:
        return STDIN if self.path is None else self.path.name

    def _open_raw(self) -> BinaryIO:
        if self.is_stream and self._raw is not None:
            return self._raw  # its head has been read already
        if self.path is None:
            return self._stream or sys.stdin.buffer
        try:
            return self.path.open("rb")
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror}") from error

    def _peek(self, raw: BinaryIO) -> bytes:
        """The first bytes, which stay to be read."""
        if not self.is_stream:
            begins = raw.read(files.BEGINNING_BYTES)
            raw.seek(0)
            return begins
        if self._head is None:
            self._head = _head(raw)
        return self._head


class _Sips:
    """The compressed bytes of a stream, few at a time, so that no text waits for more of them than it needs."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.n_read = 0

    def read(self, n: int = -1) -> bytes:
        """All of a few bytes, which gzip asks of headers; else what is there, up to n."""
        piece = (
            self._stream.read(n)
            if 0 <= n <= _FEW_BYTES
            else _some(self._stream, min(n, _SIP_BYTES) if n >= 0 else _SIP_BYTES)
        )
        self.n_read += len(piece)
        return piece


class _Unzipped(io.RawIOBase):
    """What a gzip stream holds, a block at a time: where it is damaged, all blocks before come first."""

    def __init__(self, stream: BinaryIO) -> None:
        self._sips = _Sips(stream)
        self._file = gzip.GzipFile(fileobj=cast(BinaryIO, self._sips), mode="rb")
        self._n_text = 0

    @property
    def n_zipped(self) -> int:
        """Compressed bytes that have been read."""
        return self._sips.n_read

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._n_text

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read1(len(buffer))
        buffer[: len(piece)] = piece
        self._n_text += len(piece)
        return len(piece)


class _Joined(io.RawIOBase):
    """A stream whose first bytes have been read already. What has come is handed out, however little it is."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = memoryview(head)
        self._rest = rest
        self._n = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._head[: len(buffer)] if self._head else _some(self._rest, len(buffer))
        self._head = self._head[len(piece) :]
        buffer[: len(piece)] = piece
        self._n += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._n


def _some(stream: BinaryIO, n: int) -> bytes:
    """What a stream has at the moment, n bytes at most; nothing at its end. It waits for the first of them only."""
    return getattr(stream, "read1", stream.read)(n) or b""


def _head(stream: BinaryIO, n: int | None = None) -> bytes:
    """The first n bytes, or all; None: those that are there when the first line is, up to HEAD_BYTES. A program that
    writes a row and waits for its answer sends nothing else before."""
    head, most = b"", HEAD_BYTES if n is None else n
    while len(head) < most and (piece := _some(stream, most - len(head))):
        head += piece
        if n is None and (b"\n" in head or head.startswith(_GZIP)):
            break
    return head


def _stream_bytes(known: object) -> int | None:
    """Of how many bytes a fingerprint of a stream is; None: there is none."""
    if not isinstance(known, Mapping) or known.get("size", 0) is not None:
        return None
    n = known.get("bytes", HEAD_BYTES)
    return min(n, HEAD_BYTES) if isinstance(n, int) and n > 0 else None


def find(
    patterns: Sequence[str | os.PathLike[str]], stream: BinaryIO | None = None, without: Collection[str] = ()
) -> list[Source]:
    """The inputs that a command line names, in the order in which their rows are counted.

    Args:
        patterns: files, globs ("in/*.jsonl", "**" for any folders), "-" for stdin. The files of a glob are sorted by
            their paths.
        stream: what "-" reads; None: stdin.
        without: files that are no inputs where a pattern, or the shell, names them among others: what the job writes
            itself. Their paths have no links.

    Raises:
        InputError: nothing is named, or nothing but files of `without`, a file does not exist or is a directory, a glob
            matches nothing, a file comes twice, or one is of the output of another job, such as another shard of this.
    """
    if not patterns:
        raise InputError("there is no input; name a file, a glob of files, or - for stdin")
    sources: list[Source] = []
    seen: dict[object, str] = {}
    left_out = None
    for pattern in (os.fspath(pattern) for pattern in patterns):
        for path in _matches(pattern):
            if path is not None and os.path.realpath(path) in without:
                left_out = path
                continue
            if path is not None:
                _refuse_output(path, named=path == Path(pattern))
            source = Source(None, stream) if path is None else _file(path)
            known = _identity(source)
            if known in seen:
                raise InputError(
                    f"the input {source.name} is named twice, by {seen[known]!r} and by {shown(pattern)!r}"
                )
            seen[known] = shown(pattern)
            sources.append(source)
    if not sources:
        raise InputError(
            f"the only input, {shown(left_out or '')}, is of the output itself; give one of them another name"
        )
    return sources


def resolved(pattern: str) -> str:
    """An input that means the same files after any os.chdir; "-" stays as it is, and so does what is no file name."""
    if pattern == STDIN or "\0" in pattern or not pattern:
        return pattern
    path = absolute(pattern)
    if not glob.has_magic(pattern) or os.path.lexists(path):
        return path
    pattern = os.path.expanduser(pattern)  # the names of the folders above are no part of the pattern
    return pattern if os.path.isabs(pattern) else os.path.join(glob.escape(os.getcwd()), pattern)


def fingerprint(sources: Sequence[Source], known: object = None) -> list[dict[str, object]]:
    """That of each input, in order; see Source.fingerprint.

    Args:
        known: those of the same job before, whatever a file says of them.
    """
    before = known if isinstance(known, list) else []
    return [source.fingerprint(each) for source, each in zip_longest(sources, before[: len(sources)])]


def _matches(pattern: str) -> Iterator[Path | None]:
    """None: stdin."""
    if pattern == STDIN:
        yield None
        return
    if "\0" in pattern or not pattern:
        raise InputError(f"the input {show(pattern)} is no file name")
    path = Path(pattern)
    if path.exists() or not glob.has_magic(shown(pattern)):  # the folder's own name is no pattern
        yield path
        return
    names = sorted(name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name))
    if not names:
        raise InputError(f"no file matches {shown(pattern)!r}")
    yield from map(Path, names)


def _refuse_output(path: Path, *, named: bool) -> None:
    """Of another job: nobody means to read that because a glob matches it. A table that is named may be meant; lines of
    results are no lines of requests, wherever they come from."""
    out = output_of(path)
    if out is None or (named and out.name == path.name and Source(path).kind != "jsonl"):
        return
    raise InputError(
        f"the input {shown(path)} is of the output of another job, as {path_of(out).name} says; leave it out, for "
        "instance by writing outputs to another folder, or give a copy of it another name"
    )


def _refusal(name: str, why: str, cure: str) -> InputError:
    return InputError(f"the input {name} is not read: {why}; {cure}. What is read: {files.READ}")


def _file(path: Path) -> Source:
    if path.is_dir():
        raise InputError(f"{shown(path)} is a directory; name its files, as in '{shown(path / '*.jsonl')}'")
    ending, zipped = files.suffixes(path)
    if (foreign := files.FOREIGN.get(ending)) is not None:
        raise _refusal(str(path), f"{ending} is {foreign}", files.cure(foreign))
    if zipped and ending in files.PARQUET:
        raise _refusal(str(path), f"{ending} with .gz behind is a Parquet file compressed twice", "unpack it")
    if not path.exists():
        raise InputError(f"the input {shown(path)} does not exist")
    source = Source(path)
    if not source.is_stream:
        with source._open_raw():  # whether it may be read is known before the first row
            pass
    return source


def _identity(source: Source) -> object:
    if source.path is None:
        return STDIN
    status = source.path.stat()
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else source.name


def _digest(file: BinaryIO, ranges: Sequence[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for start, length in ranges:
        file.seek(start)
        while length > 0 and (piece := file.read(min(length, SAMPLE_BYTES))):
            digest.update(piece)
            length -= len(piece)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------
# How many rows a job has: counted where that costs little, else estimated from what has been read.


_BLOCK = 2**20
_MOST_BYTES = 2**34  # lines are counted at about 1 GB/s


class Rows(NamedTuple):
    """A number of rows; `estimated`: more or fewer may come."""

    n: int
    estimated: bool = False


class Total:
    """The rows of all inputs that the options want.

    Rows of streams, compressed files and CSV, whose rows may have several lines, are not counted before they are read.
    What has been read of a file tells how many it has, as far as its rows are alike. Rows that are read ahead of the
    engine count as read here, and their bytes, too: no error comes of them.
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
        """What is known when a reader has seen so much; None: nothing."""
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
        """Rows by what the bytes that have been read hold; None where an input has no size, or none was read."""
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
    """How many of the numbers below n_rows the options want."""
    (i, n), below = options.shard, n_rows if options.limit is None else min(n_rows, options.limit)
    return max(0, -(-(below - (i - 1)) // n))


def _count(source: Source, most: int | None) -> int | None:
    """Rows of an input, or `most` of them; None where counting them costs as much as reading them."""
    if source.is_stream or source.path is None:
        return None
    if source.kind == "parquet":
        import pyarrow.parquet as parquet  # the reader has made sure that it is there

        metadata: Any = parquet.ParquetFile(source.path).metadata
        return int(metadata.num_rows)
    is_plain = source.kind == "jsonl" and source.path.suffix.lower() != ".gz"
    return _lines(source, most) if is_plain and (source.size or 0) <= _MOST_BYTES else None


def _lines(source: Source, most: int | None) -> int:
    """Up to the last one that is not empty."""
    ends = lines = 0
    with source.open() as file:
        while block := file.read(_BLOCK):
            told = block.rstrip()
            if told:
                lines = ends + told.count(b"\n") + 1
            ends += block.count(b"\n")
            if most is not None and lines >= most:
                return most
    return lines
