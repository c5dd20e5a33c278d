"""Makes the `llamabatch` command exit on a signal, with code 128 + signal and one line, from its first instruction on.

An exception that a signal raises at a random place may be lost or changed. For example, numpy turns it into an error
about its installation, and ctypes prints a traceback and continues. So at first a signal ends the process at once, even
in the middle of a native load.

From `careful` on, the command has something to keep or to clean up, and a signal raises KeyboardInterrupt. No
exception is raised inside an import or a callback, nor for a repetition of the signal: `timeout`, `npm` and systemd may
send a signal twice, and a second exception would stop the clean-up that the first exception began.

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

TYPE_CHECKING = False  # importing typing would take longer than all other imports here
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP
LINE = "Interrupted."
# An exception that is raised in these modules gets lost or changed.
_DELICATE = ("importlib._bootstrap", "weakref", "_weakrefset", "llamabatch.llama.log")
SAME_S = 1.0  # a second signal within this many seconds counts as a repetition of the first
_AGAIN_S = 0.02
_UNSEEN_S = 0.5  # seconds after which a signal is sent again, if it has not ended the wait for a line

_guarded: list[int] = []
_leaving = _thread.allocate_lock()
_leaver = 0
_came: int | None = None
_raised_s: float | None = None  # time.monotonic() of the last KeyboardInterrupt
_reading = 0  # number of the current wait for a line; 0 if there is none
_n_reads = 0
_acknowledged = False


def guard() -> None:
    """Makes signals end the process at once. Must run on the main thread.

    Changes only signals with the default action. Under nohup, for example, SIGHUP stays ignored.
    """
    if not _guarded:
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                try:
                    signal.signal(number, _leave)
                except ValueError:  # the command line runs in a thread of another program, where signals never arrive
                    return
                _guarded.append(number)
        atexit.register(_ignore)  # atexit runs the first registered function last
        _watch()
    else:
        _install(_leave)


def careful() -> None:
    """Makes signals raise KeyboardInterrupt from now on, so that a command can close, save or clean up."""
    _install(_interrupt)


def came() -> int | None:
    """Returns the signal that raised KeyboardInterrupt, or None."""
    return _came


def forget(number: int) -> bool:
    """Forgets a signal, because the command continues after it.

    Returns:
        False if a signal with another number came.
    """
    global _came, _raised_s
    if _came not in (number, None):
        return False
    _came = _raised_s = None
    return True


def acknowledge() -> bool:
    """Notes that the command prints its own line about the signal. Later signals then print nothing.

    Returns:
        False if this was noted before.
    """
    global _acknowledged
    before, _acknowledged = _acknowledged, True
    return not before


def read_line(read: Callable[[], str]) -> str:
    """Calls a function, such as `input`, that waits for a line from the terminal. Every signal ends the wait.

    Python itself ends the wait only if the signal comes during the wait. A signal just before the wait would take
    effect only when the user presses a key, so _watch sends the signal again.
    """
    global _reading, _n_reads
    _n_reads += 1
    _reading = _n_reads
    try:
        return read()
    finally:
        _reading = 0


def is_delicate(frame: FrameType | None, within: str) -> bool:
    """Returns True if an exception in `frame` would be lost or changed. This happens in an import, in `__del__`, in
    weakref, and in llama.cpp's log.

    Args:
        within: the search goes from `frame` to its callers, and ends at the first frame of the module with this name.
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
    """Returns True if a signal now counts as a repetition of the previous signal.

    Args:
        before_s: time.monotonic() of the previous signal; None: there was none.
    """
    return before_s is not None and time.monotonic() - before_s < SAME_S


def send_again(signum: int) -> None:
    """Sends the signal to this process again, after a short delay."""

    def send() -> None:
        time.sleep(_AGAIN_S)
        if sys.platform == "win32":  # os.kill would end the process, whatever the signal
            signal.raise_signal(signum)
        else:
            os.kill(os.getpid(), signum)

    _thread.start_new_thread(send, ())


def _install(handler: object) -> None:
    for number in _guarded:
        if signal.getsignal(number) in (_leave, _interrupt):
            signal.signal(number, handler)  # type: ignore[arg-type]


def _ignore() -> None:
    """Ignores signals at exit, while Python tears down its modules."""
    _install(signal.SIG_IGN)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Ends the process. Runs on the main thread, or on the watching thread while the main thread is in native code."""
    global _leaver
    if not _leaving.acquire(False):
        while _leaver != _thread.get_ident():  # the other thread is about to end the process
            time.sleep(1)
    else:
        _leaver = _thread.get_ident()
        with suppress(OSError, RuntimeError, ValueError, AttributeError):  # stdout is closed or being written
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
    """Starts a thread that handles signals while the main thread is in native code. Python calls a signal handler only
    after the main thread has returned from native code. For a load this can take minutes."""
    if sys.platform == "win32":  # set_wakeup_fd needs a socket on Windows
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
        if _reading == reading:  # this wait for a line still lasts
            signal.pthread_kill(main, number)  # `wait` sees this signal, too, and starts the next thread

    _thread.start_new_thread(wait, ())
