"""The inputs of a job: files, globs of files, stdin; compressed or not."""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from llamabatch.errors import InputError, LlamaBatchError
from llamabatch.jobs import formats
from llamabatch.jobs.output.manifest import output_of
from llamabatch.jobs.output.own_files import manifest_of
from llamabatch.utils.checks import show
from llamabatch.utils.paths import absolute, shown

Kind = Literal["jsonl", "txt", "csv", "tsv", "parquet", "xlsx"]

STDIN = "-"
HEAD_BYTES = 2**16  # a stream's fingerprint covers at most this many bytes at its start
WHOLE_BYTES = 2**30  # the digest of a larger file covers samples only
N_SAMPLES = 64
SAMPLE_BYTES = 2**20


class _DamagedZstd(EOFError):
    """The error of a damaged zstd file. This class stands for the zstd module's error, because the module may not be
    installed."""


# These errors mean a damaged compressed file. Any other OSError comes from the disk, not from the content.
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)

_STARTS = {formats.GZIP_START: formats.GZIP, formats.ZSTD_START: formats.ZSTD}
_JSON_BEGINS = re.compile(r"\{\s*(?:\"|$)|\[\s*\{")  # matches the start of JSON, but not "[INST]" or "{{ name }}"
_SIP_BYTES = 4096  # bytes of one read of a compressed file; small, so that `n_zipped` matches the text that was read
_FEW_BYTES = 256
_KINDS: dict[str, Kind] = {".txt": "txt", ".csv": "csv", ".tsv": "tsv", **dict.fromkeys(formats.PARQUET, "parquet")}
_KINDS[formats.EXCEL] = "xlsx"


class Source:
    """One input.

    Attributes:
        name: the name for messages, relative to the working directory; "stdin" for "-".
        path: the file; None: stdin.
        is_stream: true if the input can be read only once, such as stdin or a pipe.
    """

    def __init__(self, path: Path | None, stream: BinaryIO | None = None) -> None:
        """Args:
        path: the file; None: stdin.
        stream: the stream to read as stdin.
        """
        self.name = "stdin" if path is None else shown(path)
        self.path = path
        self.is_stream = path is None or not path.is_file()
        self._stream = stream
        self._head: bytes | None = None
        self._raw: BinaryIO | None = None
        self._text: BinaryIO | None = None
        self._unzipped: _Unzipped | None = None

    @functools.cached_property
    def kind(self) -> Kind:
        """The format. The suffix decides, apart from .gz or .zst. Files with an unknown suffix, and .txt files that
        begin like JSON, are lines of JSON."""
        found = "jsonl" if self.path is None else _KINDS.get(formats.suffixes(self.path)[0], "jsonl")
        return "jsonl" if found == "txt" and self._begins_as_json() else found

    def _begins_as_json(self) -> bool:
        if self.is_stream:
            return True  # a stream counts as lines of JSON, like stdin, because it cannot be read twice
        try:
            with Source(self.path).open() as file:
                begins = file.read(HEAD_BYTES).decode("utf-8-sig", "replace").lstrip()
        except (LlamaBatchError, OSError, *DAMAGED):  # the error is reported when the rows are read
            return False
        return _JSON_BEGINS.match(begins) is not None

    @property
    def has_columns(self) -> bool:
        """True for a Parquet or Excel file. Such a file is not read as text."""
        return self.kind in ("parquet", "xlsx")

    @property
    def says_lines(self) -> bool:
        """True for stdin, and for a name that promises lines of JSON. For other inputs, the first bytes decide."""
        return self.path is None or formats.suffixes(self.path)[0] in formats.LINES

    @property
    def size(self) -> int | None:
        """The number of bytes on the disk; None: not known."""
        return None if self.is_stream or self.path is None else self.path.stat().st_size

    def share(self, size: int) -> float:
        """Returns the share of the open content that was read, 0 to 1. Bytes in read-ahead buffers do not count.

        Args:
            size: the number of bytes on the disk. For a compressed file, these are compressed bytes.
        """
        if self._text is None or not size:
            return 1.0
        n_text = self._text.tell()
        if self._unzipped is None:
            return min(1.0, n_text / size)
        unzipped, zipped = self._unzipped.tell(), self._unzipped.n_zipped
        return min(1.0, n_text / unzipped * zipped / size) if unzipped else 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Opens the content, and decompresses gzip and zstd. The first bytes decide, whatever the name of the file.

        Raises:
            InputError: the input cannot be opened, or is neither text nor compressed by gzip or zstd.
            SetupError: as in formats.zstd.
        """
        with contextlib.ExitStack() as stack:
            raw = self._open_raw()
            if self.path is not None:
                stack.callback(raw.close)
            self._raw = raw
            begins = self._peek(raw)
            if (foreign := formats.kind_of(begins)) is not None:
                raise _refusal(self.name, f"its content is {foreign}", formats.cure(foreign))
            whole = cast(BinaryIO, io.BufferedReader(_Joined(begins, raw), 2**18)) if self.is_stream else raw
            compression = next((each for start, each in _STARTS.items() if begins.startswith(start)), None)
            self._unzipped = _Unzipped(whole, compression) if compression else None
            if self._unzipped is not None:
                whole = cast(BinaryIO, io.BufferedReader(self._unzipped, 2**18))
            self._text = whole
            stack.callback(setattr, self, "_text", None)
            yield whole

    def fingerprint(self, known: object = None) -> dict[str, object]:
        """Returns the fingerprint of the content. A later run recognises the input by this fingerprint.

        Args:
            known: an earlier fingerprint or None. For a stream, it gives the number of bytes to read.

        Returns:
            "name" without folders, "size" in bytes and "sha256". For a file above 1 GiB, "mtime_ns" is added, and the
            digest covers 64 samples of one MiB, evenly spaced from the first byte to the last. For a stream, "bytes" is
            the number of bytes that arrived with the first line, 64 KiB at most. The digest covers these bytes.
        """
        if self.is_stream or self.path is None:
            if self._raw is None:
                self._raw = self._open_raw()
            n_before = _stream_bytes(known)
            if self._head is None:
                self._head = _head(self._raw, n_before)
            found: dict[str, object] = {"name": self._short_name, "size": None, "bytes": len(self._head)}
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
            return self._raw  # the head of the stream was read already
        if self.path is None:
            return self._stream or sys.stdin.buffer
        try:
            return self.path.open("rb")
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror}") from error

    def _peek(self, raw: BinaryIO) -> bytes:
        """Returns the first bytes. The reader of the content gets these bytes again."""
        if not self.is_stream:
            begins = raw.read(formats.MOST_FIRST_BYTES)
            raw.seek(0)
            return begins
        if self._head is None:
            self._head = _head(raw)
        return self._head


class _Sips:
    """Reads the compressed bytes of a stream in small pieces, so that available text does not wait for more bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.n_read = 0

    def read(self, n: int = -1) -> bytes:
        """Reads the available bytes, at most n. A small n is read in full, because gzip needs whole headers."""
        piece = (
            self._stream.read(n)
            if 0 <= n <= _FEW_BYTES
            else _some(self._stream, min(n, _SIP_BYTES) if n >= 0 else _SIP_BYTES)
        )
        self.n_read += len(piece)
        return piece


class _Unzipped(io.RawIOBase):
    """The text of a compressed stream, a block at a time. All blocks before a damaged block can be read."""

    def __init__(self, stream: BinaryIO, compression: str) -> None:
        self._sips = _Sips(stream)
        self._file: Any = formats.open_compressed(self._sips, compression, "rb")
        self._damage = () if compression == formats.GZIP else (formats.zstd().ZstdError,)
        self._n_text = 0

    @property
    def n_zipped(self) -> int:
        """The number of compressed bytes that were read."""
        return self._sips.n_read

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._n_text

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self._file.read1(len(buffer))
        except self._damage as error:
            raise _DamagedZstd(str(error)) from error
        buffer[: len(piece)] = piece
        self._n_text += len(piece)
        return len(piece)


class _Joined(io.RawIOBase):
    """A stream whose first bytes were read already. A read returns the available bytes, however few."""

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
    """Returns the available bytes of a stream, at most n; empty at the end. Waits only for the first byte."""
    return getattr(stream, "read1", stream.read)(n) or b""


def _head(stream: BinaryIO, n: int | None = None) -> bytes:
    """Returns the first n bytes of a stream. If n is None, returns the bytes that arrived with the first line, up to
    HEAD_BYTES. Does not wait for more bytes, because a program may write one row and then wait for the answer."""
    head, most = b"", HEAD_BYTES if n is None else n
    while len(head) < most and (piece := _some(stream, most - len(head))):
        head += piece
        if n is None and (b"\n" in head or head.startswith(tuple(_STARTS))):
            break
    return head


def _stream_bytes(known: object) -> int | None:
    """Returns the number of bytes that a stream's fingerprint covers; None: `known` is not a stream's fingerprint."""
    if not isinstance(known, Mapping) or known.get("size", 0) is not None:
        return None
    n = known.get("bytes")
    return min(n, HEAD_BYTES) if isinstance(n, int) and n > 0 else None


def find(
    patterns: Sequence[str | os.PathLike[str]], stream: BinaryIO | None = None, without: Collection[str] = ()
) -> list[Source]:
    """Returns the inputs of a command line. The rows are numbered in the order of these inputs.

    Args:
        patterns: files, globs ("in/*.jsonl", "**" for any folders), "-" for stdin. Files of a glob are sorted by path.
        stream: the stream for "-"; None: stdin.
        without: files that the job writes itself, as paths without links. These files are left out of the inputs.

    Raises:
        InputError: there is no input, or all inputs are in `without`. A file does not exist, is a directory, or is
            named twice. A glob matches nothing. A file belongs to the output of another job, such as another shard.
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
            f"the only input, {shown(left_out or '')}, is a file of the output; give one of them another name"
        )
    return sources


def own_stdin(patterns: Sequence[str]) -> BinaryIO | None:
    """Returns a duplicate of stdin; None: no input is stdin, or stdin is not a real file.

    A thread reads the duplicate. This thread may still wait for input when Python ends, and must not hold the lock of
    sys.stdin then.
    """
    if STDIN in patterns:
        with contextlib.suppress(OSError, ValueError):  # stdin may not be a real file
            return open(os.dup(sys.stdin.fileno()), "rb")
    return None


def resolved(pattern: str) -> str:
    """Returns the absolute form of a pattern, so that os.chdir has no effect. "-" and invalid names stay unchanged."""
    if pattern == STDIN or "\0" in pattern or not pattern:
        return pattern
    path = absolute(pattern)
    if not glob.has_magic(pattern) or os.path.lexists(path):
        return path
    pattern = os.path.expanduser(pattern)  # the working directory is escaped below, because its name is not a pattern
    return pattern if os.path.isabs(pattern) else os.path.join(glob.escape(os.getcwd()), pattern)


def fingerprint(sources: Sequence[Source], known: object = None) -> list[dict[str, object]]:
    """Returns the fingerprint of each input, in order; see Source.fingerprint.

    Args:
        known: the earlier fingerprints from a manifest. They may be damaged.
    """
    before = known if isinstance(known, list) else []
    return [source.fingerprint(each) for source, each in zip_longest(sources, before[: len(sources)])]


def _matches(pattern: str) -> Iterator[Path | None]:
    """Yields the files that a pattern matches, or None for stdin."""
    if pattern == STDIN:
        yield None
        return
    if "\0" in pattern or not pattern:
        raise InputError(f"the input {show(pattern)} is no file name")
    path = Path(pattern)
    if path.exists() or not glob.has_magic(shown(pattern)):  # without the working directory, which is not a pattern
        yield path
        return
    names = sorted(name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name))
    if not names:
        raise InputError(f"no file matches {shown(pattern)!r}")
    yield from map(Path, names)


def _refuse_output(path: Path, *, named: bool) -> None:
    """Raises InputError if a file belongs to the output of another job. A glob may match such a file by accident.

    A table that the user named is accepted. Text and JSONL files are always refused, because their lines are results.
    """
    out = output_of(path)
    if out is None or (named and out.name == path.name and Source(path).kind not in ("jsonl", "txt")):
        return
    raise InputError(
        f"the input {shown(path)} belongs to the output of another job (see {manifest_of(out).name}); leave it out, "
        "for instance by writing outputs to another folder, or give a copy of it another name"
    )


def _refusal(name: str, why: str, cure: str) -> InputError:
    return InputError(f"the input {name} is not read: {why}; {cure}. What is read: {formats.READ}")


def _file(path: Path) -> Source:
    if path.is_dir():
        raise InputError(f"{shown(path)} is a directory; name its files, as in '{shown(path / '*.jsonl')}'")
    suffix, zipped = formats.suffixes(path)
    if suffix != formats.EXCEL and (foreign := formats.FOREIGN.get(suffix)) is not None:
        raise _refusal(shown(path), f"{suffix} is {foreign}", formats.cure(foreign))
    if zipped and suffix in (*formats.PARQUET, formats.EXCEL):
        what = "a spreadsheet" if suffix == formats.EXCEL else "a Parquet file"
        raise _refusal(shown(path), f"{suffix} with {zipped} behind is {what} compressed twice", "unpack it")
    if not path.exists():
        raise InputError(f"the input {shown(path)} does not exist")
    source = Source(path)
    if not source.is_stream:
        with source._open_raw():  # raises InputError before the first row if the file cannot be read
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
