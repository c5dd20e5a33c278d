"""The ways to a patched llama.cpp, for messages: they depend on the installation and the system."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

_ROOT = Path(__file__).absolute().parents[2]


def patched_build(backend: str | None = None) -> str:
    """The advice that gets a patched build here, as a clause: for a backend ("cuda", ...), or for the CPU."""
    if in_checkout():
        return f"run `make setup{f' BACKEND={backend}' if backend else ''}` in the checkout of llamabatch"
    build = f"run `llamabatch build{f' --backend {backend}' if backend else ''}`, which needs a C++ compiler"
    return f"`pip install llamabatch-llama`, or {build}" if not backend and has_wheels() else build


def in_checkout() -> bool:
    """True if llamabatch runs from its source tree, as after `make setup`."""
    return (_ROOT / "Makefile").is_file() and (_ROOT / "pyproject.toml").is_file()


def has_wheels() -> bool:
    """True if this system is one that llamabatch-llama has wheels for: Linux with glibc, on x86-64 or 64-bit ARM."""
    return (
        sys.platform == "linux"
        and platform.machine() in {"x86_64", "aarch64"}
        and platform.libc_ver()[0] == "glibc"
        and platform.python_implementation() == "CPython"
    )
