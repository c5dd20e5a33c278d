"""When engines end: closed, collected, at the end of the program; and what a fork of the program may not do with them.

A garbage collection may come in the middle of anything, on any thread and under any lock, so it only tells an engine
to end. Whoever closes, and the end of the program, wait until it has.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

from llamabatch.errors import EngineClosedError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def in_forks(action: Callable[[], None]) -> Callable[[], None]:
    """Has it called in each process that is forked off this one, before anything else happens there."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=action)
    return action


def end_with_parent() -> None:
    """Has Linux kill this process when the thread that started it ends, which must outlive it if it is to live.

    Nothing happens elsewhere. A parent that ended before this call is not noticed.
    """
    if sys.platform == "linux":
        import ctypes  # programs that start none of ours need not load it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Endable(Protocol):
    """Threads or processes of an engine. Must not refer to the client that owns them."""

    def drop(self) -> None:
        """Tells them to end, and waits for nobody: neither for them nor for a lock."""

    def end(self) -> None:
        """Tells them to end, and returns when they have. May be called twice."""

    @property
    def ended(self) -> bool: ...


class ForkGuard:
    """The process that made an engine. A fork of it gets the objects, but neither threads nor what locks guard."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Before anything that takes a lock or waits: in a fork that would be for ever. Raises EngineClosedError."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork of it, and threads do "
                "not come along in a fork: make the LLM in the process that uses it"
            )


class Lifetime:
    """Ends an engine when its owner is collected or closed, or when the program ends; in a fork, does nothing."""

    def __init__(self, owner: object, parts: Endable) -> None:
        self._parts = parts
        self._home = ForkGuard()
        _open.difference_update([other for other in list(_open) if other._parts.ended])
        _open.add(self)
        weakref.finalize(owner, self._drop).atexit = False

    def end(self) -> None:
        if self._home.is_here:
            self._parts.end()
            _open.discard(self)

    def _drop(self) -> None:
        if self._home.is_here and self in _open:
            _dropped.append(self)
            self._parts.drop()


_open: set[Lifetime] = set()
_dropped: list[Lifetime] = []


def reap_collected() -> None:
    """Waits for those that were collected, so that their memory is free before another engine asks for some."""
    while _dropped:
        _dropped.pop().end()


@atexit.register
def _end_all() -> None:
    for lifetime in list(_open):
        lifetime.end()
