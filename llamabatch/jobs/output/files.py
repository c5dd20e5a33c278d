"""All file operations of a job's output, in one place: what interrupts them, what a full disk means, what fails."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from llamabatch.errors import OutputError

# ----------------------------------------------------------------------------------------------------
# Endings of names: of the formats that a job reads and writes, and of what it keeps beside its output.


MANIFEST = ".job.json"
AHEAD = ".ahead"
PART = ".part"
SUMS = ".sums"
LOCK = ".lock"
RESCUED = ".rescued"
ALL = (MANIFEST, AHEAD, PART, SUMS, LOCK, RESCUED)
TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
LONGEST = 13  # characters of an ending: of a manifest in being, of lines that wait beside a Parquet file's

READ = "lines of JSON (.jsonl, .ndjson, .json), .csv, .tsv and .parquet, all but the last also with .gz behind"
WRITTEN = "lines of JSON (.jsonl, .ndjson) and .parquet"
LINES = (".jsonl", ".ndjson")  # the name promises lines of JSON
PARQUET = (".parquet", ".pq")
GZIP = ".gz"

_SHEET = "a spreadsheet"
_ARCHIVE = "an archive"
_COMPRESSED = "compressed by another program than gzip"
_COLUMNS = "a file of columns other than Parquet"
_DATABASE = "a database"
_DATA = "data of a program"
_DOCUMENT = "one document"

# What no job reads or writes. A name with any other ending says nothing of a format.
FOREIGN = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"), _SHEET),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz"), _ARCHIVE),
    **dict.fromkeys((".zst", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".snappy", ".sz", ".z"), _COMPRESSED),
    **dict.fromkeys((".arrow", ".arrows", ".ipc", ".feather", ".orc", ".avro"), _COLUMNS),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb"), _DATABASE),
    **dict.fromkeys((".pkl", ".pickle", ".npy", ".npz", ".pt", ".h5", ".hdf5", ".msgpack", ".tfrecord"), _DATA),
    **dict.fromkeys((".gguf", ".safetensors"), "a model"),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".pdf", ".doc", ".docx", ".rtf"), _DOCUMENT),
}

# How such files begin, whatever their names are: with bytes that no line of text has.
_BEGINNINGS = {
    b"PK\x03\x04": "a spreadsheet or an archive",
    b"\xd0\xcf\x11\xe0": _SHEET,
    b"7z\xbc\xaf": _ARCHIVE,
    b"Rar!\x1a": _ARCHIVE,
    b"\x28\xb5\x2f\xfd": _COMPRESSED,
    b"\xfd7zXZ\x00": _COMPRESSED,
    b"\x04\x22\x4d\x18": _COMPRESSED,
    **{b"BZh%d1AY&SY" % level: _COMPRESSED for level in range(1, 10)},
    b"PAR1\x15": "Parquet, which can be read from a file only whose name ends with .parquet",
    b"ARROW1\x00": _COLUMNS,
    b"Obj\x01": _COLUMNS,
    b"SQLite format 3\x00": _DATABASE,
    b"\x93NUMPY": _DATA,
    b"\x89HDF": _DATA,
    b"GGUF\x03\x00": "a model",
}
BEGINNING_BYTES = max(map(len, _BEGINNINGS))

_CURES = {
    _SHEET: "save it as CSV",
    _ARCHIVE: "unpack it",
    _COMPRESSED: "unpack it, or have its program write to a pipe that is read as '-'",
    _COLUMNS: "convert it to Parquet",
}


def suffixes(path: Path) -> tuple[str, bool]:
    """The ending that tells the format, in small letters, and whether .gz follows it."""
    found = [each.lower() for each in path.suffixes]
    zipped = found[-1:] == [GZIP]
    if zipped:
        found.pop()
    return (found[-1] if found else ""), zipped


def begins(content: bytes) -> str | None:
    """What a file is of which these are the first bytes; None: it may be text."""
    return next((words for start, words in _BEGINNINGS.items() if content.startswith(start)), None)


def cure(words: str) -> str:
    """What to do with an input that is such a file."""
    return _CURES.get(words, "give its rows in another form")


def temporary(out: Path, job_id: str) -> Path:
    """Where a file of a job is written before it is renamed: in the same folder, so that a rename is enough, and under
    a name that holds a part of the job's id, so that nothing else has it."""
    return out.with_name(f"{out.name}.{job_id[:8]}.tmp")


def shortened(name: str) -> str | None:
    """The name of the output that a file of this name may be kept beside; None: it has no such ending."""
    if match := TEMPORARY.search(name):
        return name[: match.start()] or None
    return next((name.removesuffix(each) for each in ALL if name.endswith(each)), "") or None


FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)  # some file systems sync no folders
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EINVAL)
_NOT_ALLOWED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # and no wait for the end of a pipe
_LOOK_S = 0.2


class Files:
    """What the output asks of the operating system.

    A call that a signal interrupts is made again, a short write goes on with the rest, and a full disk (or quota) is
    waited for: in all other cases the error ends the job.

    Args:
        tell: called with a message when a wait begins and when it ends.
        patience_s: how long a full disk is waited for; 0: not at all.
        retry_s: how often it is tried meanwhile.
        stopped: true ends a wait early, as if it were over.
    """

    def __init__(
        self,
        tell: Callable[[str], object] = lambda message: None,
        *,
        patience_s: float = 600.0,
        retry_s: float = 5.0,
        stopped: Callable[[], object] = lambda: False,
    ) -> None:
        self.tell = tell
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._stopped = stopped

    def open(self, path: Path, flags: int) -> int:
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        return int(self._patiently("open", path, os.open, path, flags, 0o666))

    def write(self, fd: int, data: bytes | memoryview, path: Path) -> int:
        """Some of it; returns how many bytes, at least one."""
        return int(self._patiently("write", path, os.write, fd, data))

    def sync(self, fd: int, path: Path) -> None:
        """Raises OutputError at once: after a failed fsync the system may have dropped what it could not write, and
        another that succeeds says nothing about it."""
        self._once("fsync", path, os.fsync, fd)

    def truncate(self, fd: int, size: int, path: Path) -> None:
        self._patiently("truncate", path, os.ftruncate, fd, size)

    def rename(self, source: Path, target: Path) -> None:
        """Atomically, in one folder, and on disk when it returns."""
        self._patiently("rename", target, os.replace, source, target)
        self.sync_folder(target.parent)

    def remove_lock(self, path: Path) -> None:
        """If the system lets us: Windows removes no open file."""
        with contextlib.suppress(OSError):
            self._system("unlock", os.unlink, path)

    def name(self, source: Path, target: Path) -> None:
        """Renames a file to a name that nothing has yet. Raises FileExistsError: something has it."""
        try:
            self._patiently("link", target, os.link, source, target)
        except OutputError as error:
            cause = error.__cause__
            if isinstance(cause, FileExistsError) or os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
            if not isinstance(cause, OSError) or cause.errno not in _NO_LINKS:
                raise
            self.rename(source, target)  # the file system has no links
            return
        self.remove(source)
        self.sync_folder(target.parent)

    def sync_folder(self, folder: Path) -> None:
        if sys.platform == "win32":  # it opens no folders
            return
        fd = self.open(folder, os.O_RDONLY)
        try:
            self._system("fsync", os.fsync, fd)
        except InterruptedError:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                self._fail("fsync", folder, error)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """If it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._once("remove", path, os.unlink, path)

    def _patiently(self, what: str, path: Path, function: Callable[..., Any], *args: Any) -> Any:
        started: float | None = None
        while True:
            try:
                result = self._system(what, function, *args)
                if started is not None:
                    self.tell(f"there is room again on the disk of {path}")
                return result
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in FULL or not self._patience_s:
                    self._fail(what, path, error)
                if started is None:
                    started = time.monotonic()
                    self.tell(
                        f"no room for {path} ({error.strerror}; {_free(path)}): the job waits up to "
                        f"{self._patience_s:g} s for some, and tries every {self._retry_s:g} s"
                    )
                if not self._pause(started + self._patience_s):
                    self._fail(what, path, error)

    def _once(self, what: str, path: Path, function: Callable[..., Any], *args: Any) -> None:
        while True:
            try:
                self._system(what, function, *args)
                return
            except InterruptedError:
                continue
            except FileNotFoundError:
                raise
            except OSError as error:
                self._fail(what, path, error)

    def _pause(self, until: float) -> bool:
        """Waits for the next try; False when there is none."""
        again = min(time.monotonic() + self._retry_s, until)
        while (left := again - time.monotonic()) > 0:
            if self._stopped():
                return False
            time.sleep(min(left, _LOOK_S))
        return time.monotonic() < until and not self._stopped()

    def _fail(self, what: str, path: Path, error: OSError) -> NoReturn:
        full = error.errno in FULL
        message = f"{path}: {what} failed: {error.strerror or error}" + (f" ({_free(path)})" if full else "")
        if error.errno not in _NOT_ALLOWED:
            message += ". What is written stays; " + ("make room, and " if full else "")
            message += "run the same command again, which goes on from there"
        raise OutputError(message) from error

    def _system(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Each call of the operating system comes by here, by its name, so that a test can make the k-th one fail."""
        return function(*args)


class AppendFile:
    """A file that grows at its end, and is on disk after sync().

    Args:
        new: it must not be there yet; else it must be. None: either. Links are not followed.

    Attributes:
        path: its name, which follows a rename.
        size: bytes that are whole: what was interrupted in between is not counted, and is mended when it is opened
            again.
    """

    def __init__(self, files: Files, path: Path, *, new: bool | None = None) -> None:
        self._files = files
        self.path = path
        made = not os.path.lexists(path) if new is None else new
        flags = os.O_RDWR | os.O_APPEND | NO_FOLLOW | (os.O_CREAT | os.O_EXCL if made else 0)
        self.fd = files.open(path, flags)
        self.size = os.fstat(self.fd).st_size
        self._dirty = self.size > 0  # an earlier process may have been killed before it reached the disk

    def write(self, data: bytes) -> None:
        """All of it. After an error nothing else may be written: it would follow half a line."""
        self._dirty = True
        left = memoryview(data)
        while left:
            left = left[self._files.write(self.fd, left, self.path) :]
        self.size += len(data)

    def truncate(self, size: int) -> None:
        self._files.truncate(self.fd, size, self.path)
        self.size, self._dirty = size, True

    def sync(self) -> None:
        if self._dirty:
            self._files.sync(self.fd, self.path)
            self._dirty = False

    def change(self) -> str | None:
        """What something else has done to the file or its name since it was opened; None: nothing. Raises OSError."""
        status = os.fstat(self.fd)
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            named = None
        if named is None or not os.path.samestat(status, named):
            if status.st_nlink:
                return MOVED
            return REMOVED if named is None else REPLACED
        if status.st_size < self.size:
            return f"was cut from {self.size:,} to {status.st_size:,} bytes"
        if status.st_size > self.size:
            return f"has {status.st_size - self.size:,} bytes that something else has written"
        return None

    def copy_to(self, path: Path) -> None:
        """What it holds, though its name be gone, as a new file. Raises OutputError."""
        copy = AppendFile(self._files, path, new=True)
        try:
            os.lseek(self.fd, 0, os.SEEK_SET)
            while data := os.read(self.fd, _COPIED):
                copy.write(data)
            copy.sync()
        finally:
            copy.close()

    def reopen(self) -> None:
        """After close(), under the name that it has now."""
        self.fd = self._files.open(self.path, os.O_RDWR | os.O_APPEND | NO_FOLLOW)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


REMOVED = "was removed"
REPLACED = "was replaced by another file"
MOVED = "was moved"
_COPIED = 2**20


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,} bytes free"
    except OSError:
        return "free space unknown"
