"""Builds llama.cpp without the patches that make it faster, with the flags of the wheel, for comparisons.

    python -m benchmarks.stock [--backend auto|cpu|cuda|metal] [--force]

The build keeps the patches (`NEEDED`) without which llama.cpp does not build, or crashes. Libraries and programs are
stored in the user's cache.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import llama_programs
from llamabatch.native_build import source
from llamabatch.native_build.plan import MARKER, Plan
from llamabatch.native_build.tools import cache_dir, lock, main_guard, make_folder, require_space, say

NEEDED = ("0001-amx-tile-config.patch", "0002-common-is-optional.patch")
GIGABYTES = 3.0

_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF")


def plan_of(plan: Plan) -> Plan:
    """Returns the same plan without our kernels and with only the needed patches."""
    return dataclasses.replace(plan, patches={name: plan.patches[name] for name in NEEDED}, kernels={})


def tree(log: Path, folder: Path) -> Path:
    """Unpacks the source into `folder`, applies the needed patches, returns the top folder. Raises SetupFailure."""
    unpacked = source.unpack(source.fetch(log), folder)
    for patch in source.patches():
        if patch.name in NEEDED:
            source.apply(patch, unpacked)
    return unpacked


def stock_programs(plan: Plan, force: bool = False) -> Path:
    """Returns the folder of llama-server and llama-batched-bench without our patches, from the cache or built now.

    Args:
        plan: plan of the patched build.

    Raises:
        SetupFailure: the build failed.
    """
    return llama_programs.programs(plan_of(plan), force, tree)


def libraries(plan: Plan) -> Path:
    """Returns the folder of stock libllama and ggml's libraries, from the cache or built now. Raises SetupFailure.

    Args:
        plan: plan of the patched build.
    """
    return _cached(plan_of(plan), tree)


def patched_libraries(plan: Plan) -> Path:
    """Returns the folder of libllama and ggml's libraries with all patches, for a plan that is not installed.

    Raises:
        SetupFailure: the build failed.
    """
    return _cached(plan, source.patched_tree)


def _cached(plan: Plan, unpack: llama_programs.Unpack) -> Path:
    folder = cache_dir() / "stock" / plan.key
    if (folder / MARKER).is_file():
        return folder
    home = make_folder(folder.parent)
    with lock(home / "lock"):
        if not (folder / MARKER).is_file():  # another build may have made them while we waited
            _build(plan, folder, unpack)
    return folder


def _build(plan: Plan, folder: Path, unpack: llama_programs.Unpack) -> None:
    require_space(folder.parent, GIGABYTES)
    log = make_folder(cache_dir() / "logs") / f"stock-{plan.key}.log"
    log.write_text(plan.marker(), encoding="utf-8")
    patched = "with" if plan.kernels else "without"
    say(f"Building llama.cpp {patched} our patches ({plan.backend}), once; this takes some minutes. Log: {log}")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        made = llama_programs.compile_targets(unpack(log, place), place, log, (*plan.flags, *_FLAGS), ("llama",))
        ready = make_folder(place / "ready")
        for library in made.glob("lib*"):
            shutil.copy2(library, ready / library.name, follow_symlinks=False)
        (ready / MARKER).write_text(plan.marker(), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(ready, folder)


if __name__ == "__main__":
    sys.exit(main_guard(lambda: llama_programs.main(stock_programs, "stock")))
