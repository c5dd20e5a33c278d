"""llama.cpp's log: forwarded to the logger `llamabatch.llama_cpp`. The last warnings are kept for exceptions."""

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

# The numbers are those of ggml_log_level in ggml.h. The comment in llama_cpp/_logger.py shows an older order.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5
# Lines with these endings are not errors: they come from a decode that was halted on purpose (halt.py).
_HALTED = ("compute_async failed with error 1", "compute status: 1", "failed to decode, ret = 2")


class LogForwarder:
    """Forwards llama.cpp's log texts to `logging`, line by line, and keeps the last warnings and errors."""

    def __init__(self, target: logging.Logger) -> None:
        self._target = target
        self.lock = threading.Lock()
        self._level = logging.DEBUG
        self._pending = ""
        self.complaints: collections.deque[str] = collections.deque(maxlen=20)
        self.heard: dict[int, list[str]] = {}  # for `listening`: the lines of each thread, by thread id

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
        except Exception:  # an exception must not reach C code; losing a log line does less harm
            logger.debug("a log line of llama.cpp was lost", exc_info=True)

    def _lines(self, level: int, text: str) -> list[tuple[int, str]]:
        """Returns the lines that are complete after `text`. A text with the level "continue" belongs to the line before
        it."""
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
# llama.cpp keeps only the address of a callback, so each binding's callback must live as long as the process.
_callbacks: list[tuple[ModuleType, Any]] = []


def recent_complaints() -> list[str]:
    """Returns the last warnings and errors of llama.cpp, oldest first, and drops them."""
    lines: list[str] = []
    while _forwarder.complaints:
        lines.append(_forwarder.complaints.popleft())
    return lines


@contextlib.contextmanager
def listening(module: ModuleType) -> Iterator[list[str] | None]:
    """Yields a list. Within the block, llama.cpp's log lines from this thread are added to the list. Yields None if
    another program's callback gets the lines."""
    if not any(known is module for known, _ in _callbacks):
        yield None
        return
    lines = _forwarder.heard[threading.get_ident()] = []
    try:
        yield lines
    finally:
        del _forwarder.heard[threading.get_ident()]


def reason() -> str:
    """Returns the recent complaints as one text. An exception's message shows this text as the reason of a failed
    call."""
    return "; ".join(dict.fromkeys(recent_complaints())) or "llama.cpp gives no reason"


def renew_lock() -> None:
    """Makes a new lock in a fork. A thread that does not exist in the fork may hold the old lock."""
    _forwarder.lock = threading.Lock()


def forward(module: ModuleType) -> None:
    """Forwards llama.cpp's log to `llamabatch.llama_cpp`, unless the program has set its own callback."""
    if any(known is module for known, _ in _callbacks) or _has_foreign_callback(module):
        return
    llama_logger.addHandler(logging.NullHandler())
    if llama_logger.level == logging.NOTSET:
        llama_logger.setLevel(logging.ERROR)  # quiet by default; setLevel(logging.INFO) on this logger shows everything
    callback = module.llama_log_callback(_forwarder)
    _callbacks.append((module, callback))
    module.llama_log_set(callback, ctypes.c_void_p(0))
    atexit.register(_silence_log, module)


def forward_media(module: ModuleType, mtmd: ModuleType) -> None:
    """Forwards libmtmd's log in the same way as llama.cpp's log, unless the program has set its own callback."""
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
    """Replaces the callback at exit, because native destructors must not run Python code. Without a callback, llama.cpp
    would print its log. So the new callback is a C function that has no effect."""
    nothing = ctypes.cast(module.llama_max_devices, module.llama_log_callback)
    module.llama_log_set(nothing, ctypes.c_void_p(0))
