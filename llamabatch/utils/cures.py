"""Advice for error messages: how to get a patched llama.cpp in this installation and on this system."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

_ROOT = Path(__file__).absolute().parents[2]


def patched_build(backend: str | None = None) -> str:
    """Returns instructions for getting a patched build in this installation, as a clause of a sentence.

    Args:
        backend: the backend of the build, such as "cuda"; None: the CPU.
    """
    if in_checkout():
        return f"run `make setup{f' BACKEND={backend}' if backend else ''}` in the checkout of llamabatch"
    build = f"run `llamabatch build{f' --backend {backend}' if backend else ''}`, which needs a C++ compiler"
    return f"`pip install llamabatch-llama`, or {build}" if not backend and has_wheels() else build


def in_checkout() -> bool:
    """Returns True if llamabatch runs from its source tree, as after `make setup`."""
    return (_ROOT / "Makefile").is_file() and (_ROOT / "pyproject.toml").is_file()


def has_wheels() -> bool:
    """Returns True if there are wheels for this system: CPython, Linux, glibc 2.28 or newer, x86-64 or 64-bit ARM."""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        return False
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return name == "glibc" and numbers >= (2, 28) and platform.python_implementation() == "CPython"
