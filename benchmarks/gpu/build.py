"""One build of llama.cpp for the check: the package that llamabatch loads, llama-server and llama-batched-bench.

All three use the same shared libraries, so that each device kernel is compiled once and all three run the same kernels.
The next call continues a build that was stopped, since the build's folder stays until the build is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.llama_programs import PROGRAMS, compile_targets, flags
from llamabatch.native_build import binding, recipe, sampler_library, source
from llamabatch.native_build.builds import marker
from llamabatch.native_build.machine import make_plan
from llamabatch.native_build.plan import MARKER, Plan
from llamabatch.native_build.tools import SetupFailure, cache_dir, make_folder
from llamabatch.utils.version import __version__

_LIBRARIES = (".so", ".dylib")
TARGETS = ("llama", "mtmd", *PROGRAMS)
_SHARED = (
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # programs find the libraries beside them, in any folder
    f"-DCMAKE_PROJECT_INCLUDE={recipe.OWN_NAMES}",
)


def folder_of(plan: Plan) -> Path:
    """Returns the folder of a build. It contains the package; the programs are beside the libraries in `programs()`."""
    return cache_dir() / "gpu-check" / plan.key


def package(plan: Plan) -> Path:
    return folder_of(plan) / binding.PACKAGE


def programs(plan: Plan) -> Path:
    return package(plan) / "lib"


def is_complete(plan: Plan) -> bool:
    return (package(plan) / MARKER).is_file() and all((programs(plan) / name).is_file() for name in PROGRAMS)


def build(backend: str, log: Path) -> Plan:
    """Makes the missing parts of the build for a backend; returns its plan. Raises SetupFailure."""
    plan = make_plan(backend)
    if is_complete(plan):
        return plan
    home = make_folder(folder_of(plan))
    tree = home / source.FOLDER
    unpacked = home / "unpacked"
    if not unpacked.is_file():
        shutil.rmtree(tree, ignore_errors=True)
        source.patched_tree(log, home)
        unpacked.touch()
    chosen = [flag for flag in flags(plan) if flag != "-DBUILD_SHARED_LIBS=OFF"]
    made = compile_targets(tree, home, log, (*chosen, *_SHARED), TARGETS)
    ready = home / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    libraries = binding.make_package(tree, ready / binding.PACKAGE, __version__, marker(plan, __version__))
    for path in made.iterdir():
        if path.suffix in _LIBRARIES or path.name in PROGRAMS:
            shutil.copy2(path, libraries / path.name)
    if not any(path.stem == f"lib{recipe.PREFIX}llama" for path in libraries.iterdir()):
        raise SetupFailure(f"The build made no library {recipe.PREFIX}llama: see {log}.")
    sampler_library.compile_library(libraries / sampler_library.LIBRARY)
    binding.prove(ready / binding.PACKAGE)
    shutil.rmtree(package(plan), ignore_errors=True)
    os.replace(ready / binding.PACKAGE, package(plan))
    for leftover in (tree, home / "build", ready):
        shutil.rmtree(leftover, ignore_errors=True)
    unpacked.unlink()
    return plan
