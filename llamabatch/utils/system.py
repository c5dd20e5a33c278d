"""Differences between Linux, macOS and Windows: signals, locks, limits, cores, sockets, files of the kernel, commands.

The other subpackages call these functions, and use only names that exist on all systems. If a system does not have a
feature, the function's return value says so, and nothing is raised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

INHERITS_SOCKETS = sys.platform != "win32"  # True if a child process can use its parent's open sockets by number
# With these creation flags of Popen, Ctrl-C reaches only the parent. Windows ignores start_new_session.
NEW_GROUP = 0
if sys.platform == "win32":
    NEW_GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
_LOCK_AGAIN_S = 0.1
_MOST_NAME_BYTES = 255
# On Windows a crash gives an exit code instead of a signal. This maps exit codes to the signals of other systems.
_FIRST_EXCEPTION = 0xC0000000
_EXCEPTIONS = {
    0xC0000005: "SIGSEGV",  # STATUS_ACCESS_VIOLATION
    0xC0000006: "SIGBUS",  # STATUS_IN_PAGE_ERROR: a mapped file that cannot be read
    0xC000001D: "SIGILL",  # STATUS_ILLEGAL_INSTRUCTION
    0xC0000094: "SIGFPE",  # STATUS_INTEGER_DIVIDE_BY_ZERO
    0xC00000FD: "SIGSEGV",  # STATUS_STACK_OVERFLOW
    0xC0000409: "SIGABRT",  # STATUS_STACK_BUFFER_OVERRUN, the exit code of abort()
}


def fatal_signal(code: int) -> str | None:
    """Returns the name of the signal that ended a child process, or None if it exited by itself.

    Args:
        code: the child's Popen.returncode.
    """
    if code >= _FIRST_EXCEPTION:
        return _EXCEPTIONS.get(code, f"exception 0x{code:X}")
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def lock(fd: int, byte: int = 0, *, patience: float = 0.0) -> bool:
    """Locks an open file for this process. On a file system without locks, does nothing and returns True.

    Args:
        byte: offset of the byte that is locked on Windows. Other processes cannot read this byte.
        patience: maximum seconds to wait for the lock.

    Returns:
        False if another process holds the lock.
    """
    end = time.monotonic() + patience
    while not _lock_now(fd, byte):
        if time.monotonic() >= end:
            return False
        time.sleep(_LOCK_AGAIN_S)
    return True


def _lock_now(fd: int, byte: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, byte, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def limits(name: str) -> tuple[int | None, int | None]:
    """Returns the soft and the hard limit of a resource such as "RLIMIT_AS". None: no limit, or no such resource."""
    if sys.platform == "win32":
        return None, None
    import resource

    if not hasattr(resource, name):
        return None, None
    soft, hard = resource.getrlimit(getattr(resource, name))
    none = resource.RLIM_INFINITY
    return None if soft == none else soft, None if hard == none else hard


def set_limits(name: str, soft: int, hard: int | None) -> None:
    """Sets the limits of a resource, if the system allows it."""
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (soft, resource.RLIM_INFINITY if hard is None else hard))


def usable_cores() -> set[int]:
    """Returns the numbers of the logical cores that this process may use; all cores if that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def affinity() -> int:
    """Returns the number of logical cores that this process may use."""
    return len(usable_cores())


def most_name_bytes(folder: Path) -> int:
    """Returns the maximum length of a file's name in a folder, in bytes."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError, ValueError):
            return os.pathconf(folder, "PC_NAME_MAX")
    return _MOST_NAME_BYTES


def unix_socket() -> socket.socket | None:
    """Returns a new UNIX socket, or None on systems without UNIX sockets."""
    if hasattr(socket, "AF_UNIX"):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return None


def kernel_lines(path: str) -> list[str]:
    """Returns the lines of a file of Linux's kernel, such as "/proc/self/maps"; no lines on other systems."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            return lines.read().splitlines()
    except OSError:
        return []


def command_output(*command: str) -> str:
    """Returns the standard output of a command, such as "sysctl"; empty if the command is missing or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def edit_lines(complete: Callable[[str, int], str | None], delimiters: str) -> None:
    """Adds a history, editing keys and completion by Tab to `input`. Does nothing on Windows, whose terminal has a
    history and editing keys itself."""
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            import readline

            readline.set_completer(complete)
            readline.set_completer_delims(delimiters)
            readline.parse_and_bind("tab: complete")
