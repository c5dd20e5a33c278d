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
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from llamabatch.checks import show
from llamabatch.errors import InputError
from llamabatch.jobs.manifest import output_of, path_of
from llamabatch.paths import absolute, shown

Kind = Literal["jsonl", "csv", "tsv", "parquet"]

STDIN = "-"
HEAD_BYTES = 2**16  # of a stream: as much of it as can be known before it is read
WHOLE_BYTES = 2**30  # a larger file's digest is of samples
N_SAMPLES = 64
SAMPLE_BYTES = 2**20

# What a damaged compressed file raises. Another OSError is the disk's, and says nothing of the content.
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)

_GZIP = b"\x1f\x8b"
_KINDS: dict[str, Kind] = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet"}


class Source:
    """One input.

    Attributes:
        name: for messages, as it is written in the working directory; "stdin" for "-".
        path: None: stdin.
        is_stream: it can be read once only, and no part of it before: stdin, a pipe.
        noted: the position, where somebody else reads the file.
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
        self.noted: int | None = None

    @property
    def kind(self) -> Kind:
        """By the name's ending, with .gz after it or not; lines of JSON where it says nothing."""
        suffixes = [] if self.path is None else [s.lower() for s in self.path.suffixes]
        if suffixes[-1:] == [".gz"]:
            suffixes.pop()
        return _KINDS.get(suffixes[-1], "jsonl") if suffixes else "jsonl"

    @property
    def size(self) -> int | None:
        """Bytes as they lie on the disk; None: not known."""
        return None if self.is_stream or self.path is None else self.path.stat().st_size

    @property
    def position(self) -> int:
        """Bytes of `size` that have been read."""
        if self.noted is not None:
            return self.noted
        return 0 if self._raw is None or self._raw.closed or self.is_stream else self._raw.tell()

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Its content, decompressed if it begins as gzip files do, whatever its name is.

        Raises:
            InputError: it cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            raw = self._open_raw()
            if self.path is not None:
                stack.callback(raw.close)
            self._raw = raw
            begins = self._peek(raw)
            whole = cast(BinaryIO, io.BufferedReader(_Joined(begins, raw), 2**18)) if self.is_stream else raw
            if begins.startswith(_GZIP):
                whole = cast(BinaryIO, io.BufferedReader(_Unzipped(whole), 2**18))
            yield whole

    def fingerprint(self) -> dict[str, object]:
        """What tells whether it is the same as before.

        Returns:
            "name" without folders, "size" in bytes and "sha256". Of a file above 1 GiB the digest is of 64 samples,
            one MiB each, at even distances, the first and the last bytes among them, and "mtime_ns" is there too. Of
            a stream it is of the first 64 KiB: the rest is not known before it is read, and is not compared.
        """
        if self.is_stream or self.path is None:
            if self._raw is None:
                self._raw = self._open_raw()
            return {"name": self._short_name, "size": None, "sha256": hashlib.sha256(self._peek(self._raw)).hexdigest()}
        size = self.path.stat().st_size
        found: dict[str, object] = {"name": self._short_name, "size": size}
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
            begins = raw.read(len(_GZIP))
            raw.seek(0)
            return begins
        if self._head is None:
            self._head = raw.read(HEAD_BYTES)
        return self._head


class _Unzipped(io.RawIOBase):
    """What a gzip stream holds, a block at a time: where it is damaged, all blocks before come first."""

    def __init__(self, stream: BinaryIO) -> None:
        self._file = gzip.GzipFile(fileobj=stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read1(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Joined(io.RawIOBase):
    """A stream whose first bytes have been read already."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = memoryview(head)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._head[: len(buffer)] if self._head else self._rest.read(len(buffer))
        self._head = self._head[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)


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


def fingerprint(sources: Sequence[Source]) -> list[dict[str, object]]:
    """That of each input, in order; see Source.fingerprint."""
    return [source.fingerprint() for source in sources]


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


def _file(path: Path) -> Source:
    if path.is_dir():
        raise InputError(f"{shown(path)} is a directory; name its files, as in '{shown(path / '*.jsonl')}'")
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
