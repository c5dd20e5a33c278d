"""Builds llama-server and llama-batched-bench from the same patched source and with the same flags as the wheel.

    python -m benchmarks.llama_programs [--backend auto|cpu|cuda|metal] [--force]

The benchmarks compare with these programs. They are stored in the user's cache under the key of the plan, and linked
statically, so that they run from there. stock.py builds the programs without our patches, with a plan of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from llamabatch.native_build import recipe, source
from llamabatch.native_build.machine import BACKENDS, make_plan
from llamabatch.native_build.plan import MARKER, Plan
from llamabatch.native_build.tools import (
    cache_dir,
    lock,
    main_guard,
    make_folder,
    require_space,
    say,
)

PROGRAMS = ("llama-server", "llama-batched-bench")
GIGABYTES = 3.0

# These replace the wheel's choice of targets. Without TLS and the server's web page, the build downloads nothing.
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
_TARGETS_OF_THE_WHEEL = ("-DLLAMA_BUILD_", "-DLLAVA_BUILD=")

Unpack = Callable[[Path, Path], Path]
"""(log, folder) -> the top folder of the source, unpacked into `folder`, with the patches of a plan."""


def folder(key: str) -> Path:
    """Returns the folder for the programs of the plan with this key."""
    return cache_dir() / "programs" / key / "bin"


def flags(plan: Plan) -> tuple[str, ...]:
    """Returns the flags of the wheel, with other targets."""
    return (*(flag for flag in plan.flags if not flag.startswith(_TARGETS_OF_THE_WHEEL)), *_FLAGS)


def marker(plan: Plan) -> str:
    """Returns a text of what the programs are built from. Programs with another marker are built again."""
    return plan.marker() + "\n".join(flags(plan)) + "\n"


def is_current(plan: Plan) -> bool:
    stamp = folder(plan.key) / MARKER
    return (
        stamp.is_file()
        and stamp.read_text(encoding="utf-8") == marker(plan)
        and all((folder(plan.key) / name).is_file() for name in PROGRAMS)
    )


def programs(plan: Plan, force: bool = False, unpack: Unpack = source.patched_tree) -> Path:
    """Returns the folder with the programs, from the cache or built now. Raises SetupFailure.

    Args:
        unpack: unpacks the source and applies the patches that `plan` names.
    """
    if not force and is_current(plan):
        return folder(plan.key)
    make_folder(cache_dir() / "programs")
    with lock(cache_dir() / "programs" / "lock"):
        if force or not is_current(plan):  # another build may have made them while we waited
            _build(plan, unpack)
    return folder(plan.key)


def _build(plan: Plan, unpack: Unpack) -> None:
    home = cache_dir() / "programs"
    require_space(home, GIGABYTES)
    log = make_folder(cache_dir() / "logs") / f"programs-{plan.key}.log"
    log.write_text(marker(plan), encoding="utf-8")
    start = time.monotonic()
    kind = f"{plan.backend}, {len(plan.patches)} patches"
    say(f"Building {' and '.join(PROGRAMS)} ({kind}), once; this takes some minutes. Log: {log}")
    with tempfile.TemporaryDirectory(dir=home, prefix="build-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        made = compile_targets(unpack(log, place), place, log, flags(plan), PROGRAMS)
        ready = make_folder(place / "ready")
        for name in PROGRAMS:
            shutil.copy2(made / name, ready / name)
        (ready / MARKER).write_text(marker(plan), encoding="utf-8")
        target = folder(plan.key)
        if target.exists():
            shutil.rmtree(target)
        make_folder(target.parent)
        os.replace(ready, target)
    minutes, seconds = divmod(int(time.monotonic() - start), 60)
    say(f"Built in {minutes}:{seconds:02d}, kept in {folder(plan.key)}")


def compile_targets(tree: Path, place: Path, log: Path, flags: Sequence[str], targets: Sequence[str]) -> Path:
    """Builds targets of the llama.cpp in `tree`, in a folder within `place`. Raises SetupFailure.

    Returns:
        The folder with programs and libraries, within `place`.
    """
    build = place / "build"
    environment = recipe.with_cmake(place, log)
    recipe.compile_tree(tree / "vendor" / "llama.cpp", build, log, flags, targets, environment)
    return build / "bin"


def main(build: Callable[[Plan, bool], Path] = programs, module: str = "llama_programs") -> None:
    """Prints the folder that `build` returns for the plan of this machine."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="default: what this machine has")
    parser.add_argument("--force", action="store_true", help="build even where the cache has the programs")
    options = parser.parse_args()
    print(build(make_plan(options.backend), options.force))


if __name__ == "__main__":
    sys.exit(main_guard(main))
