"""Signals that end the `llamabatch` command: exit code 128 + the signal and one line, from its first instruction on.

An exception that a signal raises at a random place gets lost or changed there: numpy turns it into a complaint about
its installation, ctypes prints a traceback and goes on. So until a command has something to keep or to clean up, a
signal ends the process where it stands, even in the middle of a native load. From `careful` on it raises
KeyboardInterrupt, but never inside an import or a callback, and once: `timeout`, `npm` and systemd may send theirs
twice, and a second exception would end the cleaning up that the first one began.

This module imports nothing slow, because it runs before anything else.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # typing itself takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP
LINE = "Interrupted."
# modules whose callers lose or change an exception
_DELICATE = ("importlib._bootstrap", "weakref", "_weakrefset", "llamabatch.llama.log")
SAME_S = 1.0  # from a signal: others within them are the same wish, sent twice
_AGAIN_S = 0.02
_UNSEEN_S = 0.5  # after which a signal that has not ended the wait for a line is sent again

_guarded: list[int] = []
_leaving = _thread.allocate_lock()
_leaver = 0
_came: int | None = None
_raised_s: float | None = None  # time.monotonic() of the last KeyboardInterrupt
_reading = 0  # number of the wait for a line that is under way; 0: there is none
_n_reads = 0
_acknowledged = False


def guard() -> None:
    """Takes over signals that still have their default action (nohup ignores SIGHUP on purpose). In the main thread."""
    if not _guarded:
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                try:
                    signal.signal(number, _leave)
                except ValueError:  # another program runs the command line in a thread, where signals never come
                    return
                _guarded.append(number)
        atexit.register(_ignore)  # as the first one: it runs last
        _watch()
    else:
        _install(_leave)


def careful() -> None:
    """From here on signals raise KeyboardInterrupt, so that a command can close, keep or clean up what it holds."""
    _install(_interrupt)


def came() -> int | None:
    """The signal that raised KeyboardInterrupt; None if none did."""
    return _came


def forget(number: int) -> bool:
    """Takes back that a signal came, where it ends a part of a command and not the command.

    Returns:
        False if another one came.
    """
    global _came, _raised_s
    if _came not in (number, None):
        return False
    _came = _raised_s = None
    return True


def acknowledge() -> bool:
    """Notes that the command tells of the signal: a second one, or the same sent again, prints no second line.

    Returns:
        False if it was noted before.
    """
    global _acknowledged
    before, _acknowledged = _acknowledged, True
    return not before


def read_line(read: Callable[[], str]) -> str:
    """Calls a function that waits for a line of the terminal, as `input`, so that every signal ends it.

    Python's own wait ends at a signal that comes within it. One that comes just before, when the prompt is already
    there, would be seen at the next key alone.
    """
    global _reading, _n_reads
    _n_reads += 1
    _reading = _n_reads
    try:
        return read()
    finally:
        _reading = 0


def is_delicate(frame: FrameType | None, within: str) -> bool:
    """True where an exception would be lost or changed: inside an import, the end of an object or llama.cpp's log.

    Args:
        within: the module with the call to interrupt; frames outside that call do not count.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == within:
            return False
        if module in _DELICATE or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def is_same(before_s: float | None) -> bool:
    """True where a signal that comes now is that of time.monotonic() `before_s`, sent twice; None: there was none."""
    return before_s is not None and time.monotonic() - before_s < SAME_S


def send_again(signum: int) -> None:
    """Sends the signal to this process once more, in a moment."""

    def send() -> None:
        time.sleep(_AGAIN_S)
        if sys.platform == "win32":  # os.kill ends a process there, whatever the signal
            signal.raise_signal(signum)
        else:
            os.kill(os.getpid(), signum)

    _thread.start_new_thread(send, ())


def _install(handler: object) -> None:
    for number in _guarded:
        if signal.getsignal(number) in (_leave, _interrupt):
            signal.signal(number, handler)  # type: ignore[arg-type]


def _ignore() -> None:
    """At exit, while Python takes its modules apart: signals change nothing any more."""
    _install(signal.SIG_IGN)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Ends the process: on the main thread, or on the watching thread while the main thread is in native code."""
    global _leaver
    if not _leaving.acquire(False):
        while _leaver != _thread.get_ident():  # the other thread is about to end the process
            time.sleep(1)
    else:
        _leaver = _thread.get_ident()
        with suppress(OSError, RuntimeError, ValueError, AttributeError):  # closed, or in the middle of a write
            sys.stdout.flush()
        with suppress(OSError):
            if not _acknowledged:
                os.write(2, f"{LINE}\n".encode())
    os._exit(128 + signum)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _came, _raised_s
    if is_same(_raised_s):
        return
    _came = signum
    if is_delicate(frame, "llamabatch.cli"):
        send_again(signum)
    else:
        _raised_s = time.monotonic()
        raise KeyboardInterrupt


def _watch() -> None:
    """Starts the thread that ends the process while the main thread is in native code.

    Python calls a signal handler only when the main thread is back from native code, which for a load can take minutes.
    """
    if sys.platform == "win32":  # set_wakeup_fd needs a socket there
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while number := os.read(reading, 1):
            if signal.getsignal(number[0]) is _leave:
                _leave(number[0], None)
            if _reading and number[0] in _guarded:
                _thread.start_new_thread(send_until_seen, (number[0], _reading))

    main = _thread.get_ident()

    def send_until_seen(number: int, reading: int) -> None:
        time.sleep(_UNSEEN_S)
        if _reading == reading:  # the handler would have ended it
            signal.pthread_kill(main, number)  # whose byte starts the next of these threads

    _thread.start_new_thread(wait, ())
