"""The end of an engine: closed, collected, or at the end of the program. And the use of an engine in a fork: refused.

A forgotten engine is collected at once, by its reference count, or by a garbage collection where the program has it in
a cycle. Either may come at any moment, on any thread and under any lock, so it only tells an engine to end.
close() and the end of the program wait until it has ended.
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
    """Registers an action to run in each fork of this process, before anything else runs there; returns it."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=action)
    return action


def end_with_parent() -> None:
    """Lets Linux kill this process when the thread that started it ends; that thread must outlive it otherwise.

    On other systems nothing happens. A parent that ended before this call goes unnoticed.
    """
    if sys.platform == "linux":
        import ctypes  # only child processes of ours need it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def leave_signals_to_parent() -> None:
    """Lets this child process ignore the signals that ask to end: a terminal and systemd send them to the parent too,
    which decides.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def give_memory_back() -> None:
    """Gives freed memory back to the system. glibc alone has a call for this, and without the call glibc keeps most."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # musl has none
            ctypes.CDLL(None).malloc_trim(0)


class Endable(Protocol):
    """Threads or processes of an engine. They must not refer to the client that owns them."""

    def drop(self) -> None:
        """Tells them to end, and waits for nothing: neither for them nor for a lock."""

    def end(self) -> None:
        """Tells them to end, and returns when they have. May be called twice."""

    @property
    def ended(self) -> bool:
        """True once they have ended."""


class ForkGuard:
    """The process that made an engine. A fork of it has the objects, but no threads, and locks in any state."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the engine."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises EngineClosedError in a fork. For use before any lock or wait, which would last for ever there."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork of it, and threads do "
                "not come along in a fork: make the LLM in the process that uses it"
            )


class Lifetime:
    """Ends an engine when its owner is collected or closed, or when the program ends. In a fork it does nothing."""

    def __init__(self, owner: object, parts: Endable) -> None:
        self._parts = parts
        self._process = ForkGuard()
        _open.difference_update([other for other in list(_open) if other._parts.ended])
        _open.add(self)
        weakref.finalize(owner, self._drop).atexit = False

    def end(self) -> None:
        """Ends the engine, and returns when it has ended."""
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
    """Collects forgotten engines and waits until they have ended: another engine may need their memory."""
    if _open:  # a cycle of the program's own, with an exception's traceback in it, say, may hold a forgotten one
        gc.collect()
    while _dropped:
        _dropped.pop().end()


@atexit.register
def _end_all() -> None:
    for lifetime in list(_open):
        lifetime.end()
