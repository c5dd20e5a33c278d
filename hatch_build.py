"""Compiles the helper in native_patches/native when llamabatch is installed, wherever a C++ compiler is at hand.

Without one, or when it fails, the install goes on: llamabatch then samples with numpy, and `llamabatch doctor` says so.
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
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "native_patches/native/sampler.cpp"
LIBRARY = "llamabatch/libllamabatch.dylib" if sys.platform == "darwin" else "llamabatch/libllamabatch.so"
# no contraction: numpy must get the same bits; the other two change no result, but let comparisons be vectorised
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # generic in newer releases of hatchling only
    """Adds the library to the wheel, and leaves it in the tree for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        problem = compile_library(root / SOURCE, root / LIBRARY)
        if problem:
            self.app.display_warning(f"The sampler was not compiled, numpy takes its place: {problem}")
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """Any Python 3 on this kind of machine."""
    if sys.platform == "darwin":  # the Python may be for two kinds of CPU, the library is for one
        return f"macosx_{platform.mac_ver()[0].split('.')[0]}_0_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(source: Path, library: Path) -> str:
    """Makes `library` anew; returns why there is none, or nothing."""
    library.unlink(missing_ok=True)  # one of an older source would be worse than none
    compiler = find_compiler()
    if not compiler:
        return "no C++ compiler was found (c++, g++ or clang++, or what CXX names)"
    problem = ""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        made = Path(folder) / library.name
        for flags in variants():
            problem = attempt([*compiler, *FLAGS, *flags, str(source), "-o", str(made)], made)
            if not problem:
                os.replace(made, library)  # never half written, nor under a process that has the old one open
                return ""
    return problem


def find_compiler() -> list[str]:
    """$CXX, which may hold arguments, or the first usual name that is there."""
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
    """Compiles and loads; returns what is wrong with it, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=300)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            return lines[0] if lines else f"{command[0]} ended with {done.returncode}"
        ctypes.CDLL(str(made)).lb_abi_version()
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""
