"""One process at a time works on an output: a lock that the system releases when the process dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

from llamabatch.checks import show
from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs.files import Files

_TRIES = 10
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


class Lock:
    """Held from its making to release().

    Raises:
        ConfigError: another process holds it; the message has its pid. Or the folder takes no file.
        OutputError: the disk fails.
    """

    def __init__(self, files: Files, path: Path, owned: Path) -> None:
        self._path = path
        for _ in range(_TRIES):
            self._fd = self._opened(files, owned)
            if not _locked(self._fd):
                holder = _holder(self._fd)
                os.close(self._fd)
                raise ConfigError(
                    f"another process{holder} is writing {owned} and has locked {path.name}; wait for it, or give "
                    "another name"
                )
            if self._is_the_file():
                break
            os.close(self._fd)  # its holder removed it between our two calls
        else:
            raise ConfigError(f"{path} changes all the time; is something else using this name?")
        # for messages alone, so that a full disk may keep it from being written
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, str(os.getpid()).encode())

    def _opened(self, files: Files, owned: Path) -> int:
        try:
            return files.open(self._path, os.O_RDWR | os.O_CREAT)
        except OutputError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _NOT_ALLOWED:
                raise ConfigError(
                    f"the output is {show(str(owned))}; {self._path.name} cannot be made beside it: {cause.strerror}"
                ) from error
            raise

    def _is_the_file(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Removes the file first: whoever locks it afterwards sees that it is another one."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # Windows removes no open file
            os.unlink(self._path)
        os.close(fd)


def _locked(fd: int) -> bool:
    """Takes the lock if nobody has it. Where the file system has no locks, it is as if nobody had."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def _holder(fd: int) -> str:
    try:
        pid = os.read(fd, 20).decode()
    except (OSError, UnicodeDecodeError):
        return ""
    return f" (pid {pid})" if pid.isdigit() else ""
