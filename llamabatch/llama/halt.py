"""Halts a llama_decode. The CPU backend calls an abort callback before each operation of a graph."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


class Halt:
    """Stops the running llama_decode and each later one, in all contexts that were given this object.

    The abort callback of a context is called hundreds of times in a pass, on a thread that must not wait for Python's
    lock. So it cannot be a Python function. It is C's strlen, which has the right signature. For an empty text it
    returns 0, and the decode goes on. `now` fills the text.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def now(self) -> None:
        """Halts all contexts and returns at once. Safe at any time and on any thread. Has no effect on GPU backends."""
        self._text[0] = b"!"

    @property
    def is_halted(self) -> bool:
        """True after a call of `now`."""
        return bool(self._text.value)

    def give_to(self, lib: Any, params: Any) -> None:
        """Sets the abort callback in the parameters of a context. The context must not outlive this object."""
        params.abort_callback = ctypes.cast(_strlen(), lib.ggml_abort_callback)
        params.abort_callback_data = ctypes.addressof(self._text)


def _strlen() -> Any:
    return (ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)).strlen
