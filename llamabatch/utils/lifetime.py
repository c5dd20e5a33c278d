"""Ends an engine by close(), by garbage collection, or with the program. Refuses the use of an engine in a fork.

A garbage collection may happen at any time, on any thread and under any lock. So a collected engine is only told to
end. close() and the end of the program also wait until the engine has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

from llamabatch.errors import EngineClosedError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def in_forks(action: Callable[[], None]) -> Callable[[], None]:
    """Registers an action to run at the start of each fork of this process. Returns the action, as a decorator does."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=action)
    return action


def end_with_parent() -> None:
    """Ties this process to the thread that started it: Linux kills this process when that thread ends.

    So the parent must start this process on a thread that lives long enough. Does nothing on other systems, or if the
    parent ended before this call.
    """
    if sys.platform == "linux":
        import ctypes  # imported late, because only child processes need it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def leave_signals_to_parent() -> None:
    """Ignores signals that ask this child process to end, because the parent gets the same signals and decides."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def give_memory_back() -> None:
    """Returns freed memory to the system. Only glibc needs this call, because it does not return most freed memory."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


class Endable(Protocol):
    """Threads or processes of an engine. They must not refer to the client that owns them."""

    def drop(self) -> None:
        """Tells the threads or processes to end. Waits neither for their end nor for a lock."""

    def end(self) -> None:
        """Tells the threads or processes to end, and waits for their end. May be called twice."""

    @property
    def ended(self) -> bool:
        """True once all threads or processes have ended."""


class ForkGuard:
    """Refuses the use of an engine in a fork of the process that made the engine. A fork has copies of the objects, but
    no threads, and its copies of locks may be locked for ever.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the engine."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises EngineClosedError in a fork. Call this before any lock or wait, which could last for ever."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork of it, and threads do "
                "not come along in a fork: make the LLM in the process that uses it"
            )


class Lifetime:
    """Ends an engine when its owner is collected or closed, or when the program ends. Does nothing in a fork."""

    def __init__(self, owner: object, parts: Endable) -> None:
        self._parts = parts
        self._process = ForkGuard()
        _open.difference_update([other for other in list(_open) if other._parts.ended])
        _open.add(self)
        weakref.finalize(owner, self._drop).atexit = False

    def end(self) -> None:
        """Ends the engine and waits until it has ended."""
        if self._process.is_here:
            self._parts.end()
            _open.discard(self)

    def _drop(self) -> None:
        if self._process.is_here and self in _open:
            _dropped.append(self)
            self._parts.drop()


_open: set[Lifetime] = set()
_dropped: list[Lifetime] = []


def reap_collected() -> None:
    """Collects unreferenced engines and waits for their end, because another engine may need their memory."""
    if _open:  # an unreferenced engine may be part of a cycle, for example with an exception's traceback
        gc.collect()
    while _dropped:
        _dropped.pop().end()


@atexit.register
def _end_all() -> None:
    for lifetime in list(_open):
        lifetime.end()
