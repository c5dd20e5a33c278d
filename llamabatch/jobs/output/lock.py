"""The lock of an output: only one process at a time writes the output. If a process dies, the system releases its lock.

A file next to the output locks the output's name. The output itself is locked, too, because it may have a second name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from llamabatch.errors import ConfigError, OutputBusyError, OutputError
from llamabatch.jobs.output.files import PLAIN, AppendFile, Files
from llamabatch.jobs.output.own_files import foreign
from llamabatch.utils import system
from llamabatch.utils.checks import show

_TRIES = 10
_NOT_ALLOWED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR),
    *(errno.EINVAL, errno.EILSEQ, errno.ENOTDIR, errno.ENXIO),
)
_CONTENT = re.compile(rb"llamabatch job ([0-9a-f]{16}|-{16}) pid (\d{1,20})\n")
_NO_ID = "-" * 16
_FAR = 2**40  # offset of the locked byte: after the content, because on Windows locked bytes cannot be read


class Lock:
    """The lock of a name, held from the constructor to release().

    Attributes:
        left_by: the job id of a killed process that held the lock; None: the lock is new, or names no job.

    Raises:
        OutputBusyError: another process holds the lock. The message has the pid of the other process.
        ConfigError: another file has the name of the lock, or no file can be created in the folder.
        OutputError: the disk fails.
    """

    def __init__(self, files: Files, path: Path, owned: Path) -> None:
        self._files = files
        self._path = path
        for _ in range(_TRIES):
            fd = self._opened(files, owned)
            if fd is None:  # the file was removed between our two calls, or another process has just created it
                continue
            self._fd = fd
            try:
                content = self._content()
                if not system.lock(self._fd):
                    raise OutputBusyError(
                        f"another process{_holder(content)} is writing {owned} and has locked {path.name}; wait for "
                        "it, or give another name"
                    )
            except BaseException:
                os.close(self._fd)
                raise
            if self._is_the_file():
                break
            os.close(self._fd)
        else:
            raise ConfigError(f"{path} keeps changing; another program may use this name")
        match = _CONTENT.match(content)
        self.left_by = match[1].decode() if match and match[1].decode() != _NO_ID else None
        self._stays = self._found and not content  # an existing empty file may belong to another program
        self.write_id(self.left_by or _NO_ID)

    def write_id(self, job_id: str) -> None:
        """Writes the job's id into the file of the lock. If this process is killed, the next process reads the id.
        Ignores errors such as a full disk."""
        content = f"llamabatch job {job_id} pid {os.getpid()}\n".encode()
        with contextlib.suppress(OSError):
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.write(self._fd, content)
            os.ftruncate(self._fd, len(content))

    def _opened(self, files: Files, owned: Path) -> int | None:
        self._found = os.path.lexists(self._path)
        if os.path.islink(self._path):
            raise foreign(self._path, "is a link")
        try:
            return files.open(self._path, os.O_RDWR | PLAIN | (0 if self._found else os.O_CREAT | os.O_EXCL))
        except OutputError as error:
            cause = error.__cause__
            if isinstance(cause, FileExistsError) or (self._found and isinstance(cause, FileNotFoundError)):
                return None
            if isinstance(cause, OSError) and cause.errno in _NOT_ALLOWED:
                raise ConfigError(
                    f"the output is {show(str(owned))}; {self._path.name} cannot be made beside it: {cause.strerror}"
                ) from error
            raise

    def _content(self) -> bytes:
        """Returns the first bytes of the file. Raises ConfigError if the file is not a lock."""
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise foreign(self._path, "is no regular file")
        try:
            content = os.read(self._fd, 100)
        except OSError:  # on Windows a locked file cannot be read
            return b""
        if content and not _CONTENT.fullmatch(content):
            raise foreign(self._path, "is no lock of a job")
        return content

    def _is_the_file(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def release(self, *, remove: bool = True) -> None:
        """Removes the file, then unlocks it. A process that locks the file later sees that the file's name is gone.

        Args:
            remove: false: the file is only unlocked. A file that may belong to another program is never removed.
        """
        if self._fd < 0:
            return
        try:
            if self._stays:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            elif remove and self._is_the_file():
                self._files.remove_lock(self._path)
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)


def lock_file(file: AppendFile, out: Path) -> None:
    """Locks the open file of an output. The lock ends when the file is closed. Raises OutputBusyError if another
    process holds the lock."""
    if not system.lock(file.fd, _FAR):
        raise OutputBusyError(
            f"another process is writing {out} under another name of the same file; wait for it, or give another name"
        )


def is_held(path: Path, job_id: str) -> bool:
    """Returns True if another process holds the lock of the job `job_id` in the file `path`.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ConfigError: the file names another job.
    """
    fd = os.open(path, os.O_RDWR | PLAIN)
    try:
        match = _CONTENT.match(os.read(fd, 100))
        if match is None or match[1].decode() != job_id:
            raise ConfigError(f"{path} is not the lock of job {job_id}")
        return not system.lock(fd)
    finally:
        os.close(fd)


def _holder(content: bytes) -> str:
    match = _CONTENT.match(content)
    return f" (pid {match[2].decode()})" if match else ""
