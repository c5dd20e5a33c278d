"""Builds llama.cpp's libraries without the patches that make it faster, with the flags of the wheel, for comparisons.

The patches without which it does not build or crashes stay (`NEEDED`). The libraries go to the user's cache.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

from llamabatch.native_patches import source
from llamabatch.native_patches.plan import MARKER, Plan, jobs
from llamabatch.native_patches.programs import with_cmake
from llamabatch.native_patches.tools import (
    SetupFailure,
    cache_dir,
    explain,
    lock,
    make_folder,
    require_space,
    run_logged,
    say,
)

NEEDED = ("0001-amx-tile-config.patch", "0002-common-is-optional.patch")
GIGABYTES = 3.0

_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF")


def libraries(plan: Plan) -> Path:
    """The folder with libllama and ggml's libraries: from the cache, or built now. Raises SetupFailure."""
    plan = dataclasses.replace(plan, patches={name: plan.patches[name] for name in NEEDED}, kernels={})
    folder = cache_dir() / "stock" / plan.key
    if (folder / MARKER).is_file():
        return folder
    home = make_folder(folder.parent)
    with lock(home / "lock"):
        if not (folder / MARKER).is_file():  # another build may have made them while we waited
            _build(plan, folder)
    return folder


def _build(plan: Plan, folder: Path) -> None:
    require_space(folder.parent, GIGABYTES)
    log = make_folder(cache_dir() / "logs") / f"stock-{plan.key}.log"
    log.write_text(plan.marker(), encoding="utf-8")
    say(f"Building llama.cpp without our patches ({plan.backend}), once; this takes some minutes. Log: {log}")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        tree = source.unpack(source.fetch(log), place)
        for patch in source.patches():
            if patch.name in NEEDED:
                source.apply(patch, tree)
        environment, target = with_cmake(place, log), place / "build"
        generator = ("-G", "Ninja") if shutil.which("ninja", path=environment["PATH"]) else ()
        commands: tuple[list[str | Path], ...] = (
            ["cmake", "-S", tree / "vendor" / "llama.cpp", "-B", target, *generator, *plan.flags, *_FLAGS],
            ["cmake", "--build", target, "--config", "Release", "--parallel", str(jobs()), "--target", "llama"],
        )
        for command in commands:
            if run_logged(command, log, "building llama.cpp", environment) != 0:
                reason = explain(log, "the compiler or cmake stopped, see the end of the log")
                raise SetupFailure(f"The build of llama.cpp without our patches failed: {reason} (log: {log}).")
        ready = make_folder(place / "ready")
        for library in (target / "bin").glob("lib*"):
            shutil.copy2(library, ready / library.name, follow_symlinks=False)
        (ready / MARKER).write_text(plan.marker(), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(ready, folder)
