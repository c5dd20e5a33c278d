"""Compiles native_patches/sampler with the machine's C++ compiler. hatch_build.py calls this module.

The library runs on every CPU of its kind, because its passes over the logits are compiled for several instruction sets.
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
# -ffp-contract=off: without fused multiply-add the sampler gives the same bits as numpy. The last two flags change no
# result, but allow the compiler to vectorise comparisons.
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def sources() -> list[Path]:
    """Returns all files that determine the library."""
    return [Path(__file__), *sorted(path for path in SOURCE.parent.iterdir() if path.is_file())]


def platform_tag() -> str:
    """Returns the wheel's platform tag for this kind of machine."""
    if sys.platform == "darwin":  # Python may support two kinds of CPU, but the library supports one
        return f"macosx_{platform.mac_ver()[0].split('.')[0]}_0_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(library: Path) -> str:
    """Removes the file `library` and compiles it again. Returns the reason for a failure, or ""."""
    library.unlink(missing_ok=True)  # a library of an older source would be worse than none
    compiler = find_compiler()
    if not compiler:
        return "no C++ compiler was found (c++, g++ or clang++, or what CXX names)"
    problem = ""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        made = Path(folder) / library.name
        for flags in variants():
            problem = attempt([*compiler, *FLAGS, *flags, str(SOURCE), "-o", str(made)], made)
            if not problem:
                os.replace(made, library)  # atomic, and safe for a process that has the old library open
                return ""
    return problem


def find_compiler() -> list[str]:
    """Returns the compiler's command: $CXX (with arguments), or the first usual name on PATH; [] if there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else []
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), [])


def variants() -> Iterator[list[str]]:
    """Yields sets of compiler flags to try in turn: first with threads and several instruction sets, last with
    neither."""
    clones = [["-DLB_CLONES"], []] if sys.platform == "linux" and platform.machine() == "x86_64" else [[]]
    for threads in (["-fopenmp"], ["-fopenmp-simd"], []):
        for clone in clones:
            yield [*threads, *clone]


def attempt(command: list[str], made: Path) -> str:
    """Compiles a library to the file `made`, and loads it to try it. Returns the error message, or ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=300)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            return lines[0] if lines else f"{command[0]} ended with {done.returncode}"
        ctypes.CDLL(str(made)).lb_abi_version()
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""
