"""Halting a llama_decode: the CPU backend asks a function before each operation of its graph whether to go on."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


class Halt:
    """Ends the llama_decode under way, and each later one, in all contexts that it was given to.

    The backend asks hundreds of times in a pass, on a thread that must not wait for Python's lock. So it calls a
    function of C that has the right shape, strlen, with a text that is empty until `now`.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def now(self) -> None:
        """Returns at once; safe at any moment and on any thread. Backends of GPUs do not ask."""
        self._text[0] = b"!"

    @property
    def is_halted(self) -> bool:
        """True after `now`."""
        return bool(self._text.value)

    def give_to(self, lib: Any, params: Any) -> None:
        """Sets the parameters of a context, which must not outlive this."""
        params.abort_callback = ctypes.cast(_strlen(), lib.ggml_abort_callback)
        params.abort_callback_data = ctypes.addressof(self._text)


def _strlen() -> Any:
    return (ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)).strlen
