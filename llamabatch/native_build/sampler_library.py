"""Compiles native_patches/sampler with the C++ compiler of the machine. hatch_build.py calls it.

The library runs on every CPU of its kind, as its passes over the logits are compiled for several instruction sets.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llamabatch.native_build.source import PATCH_FOLDER

SOURCE = PATCH_FOLDER / "sampler" / "sampler.cpp"
LIBRARY = "libllamabatch.dylib" if sys.platform == "darwin" else "libllamabatch.so"
# no contraction: numpy must get the same bits; the other two change no result, but let comparisons be vectorised
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def sources() -> list[Path]:
    """All files that shape the library."""
    return [Path(__file__), *sorted(path for path in SOURCE.parent.iterdir() if path.is_file())]


def platform_tag() -> str:
    """Any Python 3 on this kind of machine."""
    if sys.platform == "darwin":  # the Python may be for two kinds of CPU, the library is for one
        return f"macosx_{platform.mac_ver()[0].split('.')[0]}_0_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(library: Path) -> str:
    """Make `library` again; returns the reason for which there is none, or ""."""
    library.unlink(missing_ok=True)  # one of an older source would be worse than none
    compiler = find_compiler()
    if not compiler:
        return "no C++ compiler was found (c++, g++ or clang++, or what CXX names)"
    problem = ""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        made = Path(folder) / library.name
        for flags in variants():
            problem = attempt([*compiler, *FLAGS, *flags, str(SOURCE), "-o", str(made)], made)
            if not problem:
                os.replace(made, library)  # never half written, nor under a process that has the old one open
                return ""
    return problem


def find_compiler() -> list[str]:
    """$CXX, which may hold arguments, or the first usual name on PATH; empty: none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else []
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), [])


def variants() -> Iterator[list[str]]:
    """Flags from the best to the plainest: threads and several instruction sets, where compiler and libc have them."""
    clones = [["-DLB_CLONES"], []] if sys.platform == "linux" and platform.machine() == "x86_64" else [[]]
    for threads in (["-fopenmp"], ["-fopenmp-simd"], []):
        for clone in clones:
            yield [*threads, *clone]


def attempt(command: list[str], made: Path) -> str:
    """Compile and load `made`; returns the complaint, or ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=300)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            return lines[0] if lines else f"{command[0]} ended with {done.returncode}"
        ctypes.CDLL(str(made)).lb_abi_version()
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""
