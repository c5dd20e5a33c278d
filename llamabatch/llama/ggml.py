"""ggml's registry of backends and devices, through ctypes because llama_cpp does not bind the registry.

libllama links to ggml, so ggml's functions are found in libllama. A build in a single library does not export them.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

POINTER = ctypes.c_void_p
MISSING = (AttributeError, ValueError)
"""The exceptions of ctypes for a function that the library does not export."""

_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


def bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """Returns a function of ggml. Raises one of the exceptions in MISSING if the library does not export the
    function."""
    return ctypes.CFUNCTYPE(result, *arguments)((name, library))


def cpu_device(library: ctypes.CDLL) -> int | None:
    """Returns the address of the CPU's device, or None if no CPU backend is loaded. Raises the errors of `bind`."""
    address: int | None = bind(library, "ggml_backend_dev_by_type", POINTER, ctypes.c_int)(_CPU)
    return address


def backend_function(library: ctypes.CDLL, device: int | None, name: bytes) -> int | None:
    """Returns the address of a function of a device's backend, or None if the backend has no such function.

    Raises the errors of `bind`.
    """
    backend = bind(library, "ggml_backend_dev_backend_reg", POINTER, POINTER)(device)
    return registered_function(library, backend, name)


def registered_function(library: ctypes.CDLL, backend: int | None, name: bytes) -> int | None:
    """Returns the address of a function of a backend (a ggml_backend_reg), or None. Raises the errors of `bind`."""
    find = bind(library, "ggml_backend_reg_get_proc_address", POINTER, POINTER, ctypes.c_char_p)
    address: int | None = find(backend, name) if backend else None
    return address


def load_backend(library: ctypes.CDLL, path: str | os.PathLike[str]) -> bool:
    """Loads a backend from a file.

    Returns False if the file cannot be loaded or refuses this CPU. Raises the errors of `bind`.
    """
    return bool(bind(library, "ggml_backend_load", POINTER, ctypes.c_char_p)(os.fsencode(path)))


def text(raw: bytes | None) -> str:
    """Returns a text of ggml or llama.cpp; "" for a null pointer."""
    return (raw or b"").decode("utf-8", "replace")
