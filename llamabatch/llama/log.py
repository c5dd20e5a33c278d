"""llama.cpp's log: forwarded to the logger `llamabatch.llama_cpp`, its last complaints kept for exceptions."""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)
llama_logger = logging.getLogger("llamabatch.llama_cpp")

# ggml_log_level as ggml.h has it; the comment in llama_cpp/_logger.py shows an older order
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5
# ends of the lines about a decode that was halted (halt.py): as wanted, and no error of anything
_HALTED = ("compute_async failed with error 1", "compute status: 1", "failed to decode, ret = 2")


class LogForwarder:
    """Forwards llama.cpp's pieces of text to `logging`, line by line, and keeps the last warnings and errors."""

    def __init__(self, target: logging.Logger) -> None:
        self._target = target
        self.lock = threading.Lock()
        self._level = logging.DEBUG
        self._pending = ""
        self.complaints: collections.deque[str] = collections.deque(maxlen=20)
        self.heard: dict[int, list[str]] = {}  # lines of the threads that listen, by their ids

    def __call__(self, level: int, text: bytes | None, _user_data: object) -> None:
        if sys.is_finalizing():
            return
        try:
            for line_level, line in self._lines(level, (text or b"").decode("utf-8", "replace")):
                if self.heard and (heard := self.heard.get(threading.get_ident())) is not None:
                    heard.append(line)
                if line.endswith(_HALTED):
                    line_level = logging.DEBUG
                if line_level >= logging.WARNING:
                    self.complaints.append(line)
                self._target.log(line_level, "%s", line)
        except Exception:  # an exception must not travel into C; a lost log line is the smaller harm
            logger.debug("a log line of llama.cpp was lost", exc_info=True)

    def _lines(self, level: int, text: str) -> list[tuple[int, str]]:
        """The lines that `text` completes; a piece marked "continue" belongs to the line before it."""
        with self.lock:
            done: list[tuple[int, str]] = []
            if level != _CONTINUE:
                if self._pending:
                    done.append((self._level, self._pending))
                self._pending = ""
                self._level = _LEVELS.get(level, logging.DEBUG)
            *whole, self._pending = (self._pending + text).split("\n")
            return [*done, *((self._level, line) for line in whole if line.strip())]


_forwarder = LogForwarder(llama_logger)
# llama.cpp keeps only the address, so a callback must live as long as the process: one for each binding
_callbacks: list[tuple[ModuleType, Any]] = []


def recent_complaints() -> list[str]:
    """The last warnings and errors of llama.cpp, oldest first; the call forgets them."""
    lines: list[str] = []
    while _forwarder.complaints:
        lines.append(_forwarder.complaints.popleft())
    return lines


@contextlib.contextmanager
def listening(module: ModuleType) -> Iterator[list[str] | None]:
    """Gives a list that fills with all lines that llama.cpp logs from this thread in the block; None if they go to
    another program's callback."""
    if not any(known is module for known, _ in _callbacks):
        yield None
        return
    lines = _forwarder.heard[threading.get_ident()] = []
    try:
        yield lines
    finally:
        del _forwarder.heard[threading.get_ident()]


def reason() -> str:
    """The recent complaints as the reason of a failed call, for the message of an exception."""
    return "; ".join(dict.fromkeys(recent_complaints())) or "llama.cpp gives no reason"


def renew_lock() -> None:
    """Replace the lock, in a fork: its holder is a thread of the parent process."""
    _forwarder.lock = threading.Lock()


def forward(module: ModuleType) -> None:
    """Send llama.cpp's log to `llamabatch.llama_cpp`, unless the program has put a callback of its own in place."""
    if any(known is module for known, _ in _callbacks) or _has_foreign_callback(module):
        return
    llama_logger.addHandler(logging.NullHandler())
    if llama_logger.level == logging.NOTSET:
        llama_logger.setLevel(logging.ERROR)  # quiet; setLevel(logging.INFO) on this logger shows everything
    callback = module.llama_log_callback(_forwarder)
    _callbacks.append((module, callback))
    module.llama_log_set(callback, ctypes.c_void_p(0))
    atexit.register(_silence_log, module)


def forward_media(module: ModuleType, mtmd: ModuleType) -> None:
    """Sends libmtmd's log to where that of llama.cpp goes, unless a program has put a callback of its own in place."""
    callback = next((callback for known, callback in _callbacks if known is module), None)
    if callback is None or any(known is mtmd for known, _ in _callbacks):
        return
    _callbacks.append((mtmd, callback))
    mtmd.mtmd_log_set(callback, ctypes.c_void_p(0))
    atexit.register(mtmd.mtmd_log_set, ctypes.cast(module.llama_max_devices, module.llama_log_callback), None)


def _has_foreign_callback(module: ModuleType) -> bool:
    current, user_data = module.llama_log_callback(), ctypes.c_void_p()
    module.llama_log_get(ctypes.byref(current), ctypes.byref(user_data))
    own = importlib.import_module(f"{module.__name__}._logger").llama_log_callback
    return _address(current) not in (None, _address(own))


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _silence_log(module: ModuleType) -> None:
    """Replace the callback at exit, when no Python may run from a native destructor. A null callback would print, so a
    C function without arguments and effects takes its place."""
    nothing = ctypes.cast(module.llama_max_devices, module.llama_log_callback)
    module.llama_log_set(nothing, ctypes.c_void_p(0))
