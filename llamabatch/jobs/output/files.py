"""All file operations of a job's output. They handle interruptions, short writes, full disks and other errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from llamabatch.errors import OutputError
from llamabatch.utils.atomic_file import NO_FOLDER_SYNC

FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EINVAL)
_NOT_ALLOWED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
# Flags to open a job's files: links are not followed, named pipes do not block, and Windows does not change line ends.
PLAIN: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LOOK_S = 0.2
_COPY_BYTES = 2**20

# Phrases for the changes that another program made to an open file.
REMOVED = "was removed"
REPLACED = "was replaced by another file"
MOVED = "was moved"


class Files:
    """The file operations of an output.

    A call that a signal interrupts is repeated. A call that fails because the disk is full or the quota is used up
    is repeated until there is room. Any other error ends the job.

    Args:
        emit: called with a message when a wait begins and when it ends.
        patience_s: maximum number of seconds to wait for room on a full disk; 0: no wait.
        retry_s: seconds between two tries during a wait.
        stopped: if it returns true, a wait ends as if its time were over.
    """

    def __init__(
        self,
        emit: Callable[[str], object] = lambda message: None,
        *,
        patience_s: float = 600.0,
        retry_s: float = 5.0,
        stopped: Callable[[], object] = lambda: False,
    ) -> None:
        self.emit = emit
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._stopped = stopped

    def open(self, path: Path, flags: int) -> int:
        return int(self._patiently("open", path, os.open, path, flags, 0o666))

    def write(self, fd: int, data: bytes | memoryview, path: Path) -> int:
        """Writes some of the data. Returns the number of written bytes, at least 1."""
        return int(self._patiently("write", path, os.write, fd, data))

    def sync(self, fd: int, path: Path) -> None:
        """Syncs a file to the disk. Raises OutputError at the first failure. There is no second try: after a
        failure the system may have dropped data, and the next fsync may succeed all the same."""
        self._once("fsync", path, os.fsync, fd)

    def truncate(self, fd: int, size: int, path: Path) -> None:
        self._patiently("truncate", path, os.ftruncate, fd, size)

    def rename(self, source: Path, target: Path) -> None:
        """Renames a file atomically inside one folder. The new name is on disk on return."""
        self._patiently("rename", target, os.replace, source, target)
        self.sync_folder(target.parent)

    def remove_lock(self, path: Path) -> None:
        """Removes a lock if the system allows it. Windows cannot remove an open file."""
        with contextlib.suppress(OSError):
            self._system("unlock", os.unlink, path)

    def name(self, source: Path, target: Path) -> None:
        """Renames a file to a free name. Raises FileExistsError if the name is taken."""
        try:
            self._patiently("link", target, os.link, source, target)
        except OutputError as error:
            cause = error.__cause__
            if isinstance(cause, FileExistsError) or os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
            if not isinstance(cause, OSError) or cause.errno not in _NO_LINKS:
                raise
            self.rename(source, target)  # the file system has no hard links
            return
        self.remove(source)
        self.sync_folder(target.parent)

    def sync_folder(self, folder: Path) -> None:
        if sys.platform == "win32":  # Windows cannot open folders
            return
        fd = self.open(folder, os.O_RDONLY)
        try:
            self._system("fsync", os.fsync, fd)
        except InterruptedError:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in NO_FOLDER_SYNC:
                self._fail("fsync", folder, error)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._once("remove", path, os.unlink, path)

    def _patiently(self, what: str, path: Path, function: Callable[..., Any], *args: Any) -> Any:
        started: float | None = None
        while True:
            try:
                result = self._system(what, function, *args)
                if started is not None:
                    self.emit(f"there is room again on the disk of {path}")
                return result
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in FULL or not self._patience_s:
                    self._fail(what, path, error)
                if started is None:
                    started = time.monotonic()
                    self.emit(
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
        """Waits for the next try. Returns False if `until` is reached or the job was stopped."""
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
        """Calls a function of the operating system. All calls come here, so a test can make the k-th call fail."""
        return function(*args)


class AppendFile:
    """A file that only grows at its end. After sync(), all written bytes are on disk. Links are not followed.

    Args:
        new: true: the file is created and must not exist yet; false: the file must exist; None: either.

    Attributes:
        path: the name of the file. A rename must also change `path`.
        size: the number of bytes that complete writes have added. The bytes of an interrupted write do not count, and
            are cut off when the output is opened again.
    """

    def __init__(self, files: Files, path: Path, *, new: bool | None = None) -> None:
        self._files = files
        self.path = path
        made = not os.path.lexists(path) if new is None else new
        flags = os.O_RDWR | os.O_APPEND | PLAIN | (os.O_CREAT | os.O_EXCL if made else 0)
        self.fd = files.open(path, flags)
        self.size = os.fstat(self.fd).st_size
        self._dirty = self.size > 0  # an earlier process may have been killed before it synced

    def write(self, data: bytes) -> None:
        """Writes all of the data. After an error, do not write again: the new data would follow half a line."""
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
        """Returns the change that another program made to the open file or its name, as a phrase; None: no change.

        Raises OSError."""
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
        """Copies the content to a new file, even if this file was deleted or renamed. Raises OutputError."""
        copy = AppendFile(self._files, path, new=True)
        try:
            os.lseek(self.fd, 0, os.SEEK_SET)
            while data := os.read(self.fd, _COPY_BYTES):
                copy.write(data)
            copy.sync()
        finally:
            copy.close()

    def reopen(self) -> None:
        """Opens the file again after close(), under its current name."""
        self.fd = self._files.open(self.path, os.O_RDWR | os.O_APPEND | PLAIN)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,} bytes free"
    except OSError:
        return "free space unknown"
