"""Builds llama-server and llama-batched-bench from the same patched source and with the same flags as the wheel.

    python -m llamabatch.native_patches.build --programs [--stock] [--backend auto|cpu|cuda|metal] [--force]

The benchmarks compare with these programs. They go to the user's cache, under the key of the plan; they are linked
statically, so that they run from there. Those without our patches (`--stock`) have a plan of their own, see stock.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from llamabatch.native_patches import source
from llamabatch.native_patches.plan import MARKER, Plan, jobs
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

PROGRAMS = ("llama-server", "llama-batched-bench")
GIGABYTES = 3.0
_LEAST_CMAKE = (3, 21)  # of llama-cpp-python's CMakeLists.txt

# In place of the wheel's own choice of targets. Nothing is downloaded: no TLS, no web page for the server.
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
    """Folder of the programs of a plan with this key."""
    return cache_dir() / "programs" / key / "bin"


def flags(plan: Plan) -> tuple[str, ...]:
    """The flags of the wheel, with other targets."""
    return (*(flag for flag in plan.flags if not flag.startswith(_TARGETS_OF_THE_WHEEL)), *_FLAGS)


def marker(plan: Plan) -> str:
    """Facts that the programs were made from. Programs with another marker are built anew."""
    return plan.marker() + "\n".join(flags(plan)) + "\n"


def is_current(plan: Plan) -> bool:
    stamp = folder(plan.key) / MARKER
    return (
        stamp.is_file()
        and stamp.read_text(encoding="utf-8") == marker(plan)
        and all((folder(plan.key) / name).is_file() for name in PROGRAMS)
    )


def programs(plan: Plan, force: bool = False, unpack: Unpack = source.patched_tree) -> Path:
    """The folder with the programs: from the cache, or built now. Raises SetupFailure.

    Args:
        unpack: gives the source with those patches that `plan` names.
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
    """Build targets of the llama.cpp in `tree`, in `place`. Raises SetupFailure.

    Returns:
        The folder with programs and libraries, within `place`.
    """
    environment = with_cmake(place, log)
    build = place / "build"
    generator = ("-G", "Ninja") if shutil.which("ninja", path=environment["PATH"]) else ()
    n_jobs = environment.get("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs()))
    commands: tuple[list[str | Path], ...] = (
        ["cmake", "-S", tree / "vendor" / "llama.cpp", "-B", build, *generator, *flags],
        ["cmake", "--build", build, "--config", "Release", "--parallel", n_jobs, "--target", *targets],
    )
    for command in commands:
        if run_logged(command, log, f"building {targets[0]}", environment) != 0:
            reason = explain(log, "the compiler or cmake stopped, see the end of the log")
            raise SetupFailure(f"The build of {' and '.join(targets)} failed: {reason} (log: {log}).")
    return build / "bin"


def with_cmake(place: Path, log: Path, python: str = sys.executable) -> dict[str, str]:
    """The environment, with a cmake on its PATH: the system's, or else PyPI's in a folder that goes with the build.

    Args:
        python: an interpreter with pip.

    Raises:
        SetupFailure: there is none, or an old one, and pip cannot install it.
    """
    if _cmake_version() >= _LEAST_CMAKE:
        return dict(os.environ)
    folder = place / "cmake"
    command: list[str | Path] = [
        python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input",
        "--target", folder, "cmake", "ninja",
    ]  # fmt: skip
    if run_logged(command, log, "installing cmake") != 0:
        least = ".".join(map(str, _LEAST_CMAKE))
        reason = explain(log, "pip failed")
        raise SetupFailure(f"cmake {least} or newer is missing and could not be installed: {reason} (log: {log}).")
    before = {name: os.environ.get(name, default) for name, default in (("PATH", os.defpath), ("PYTHONPATH", ""))}
    ours = {"PATH": folder / "bin", "PYTHONPATH": folder}  # the commands there are scripts that import their modules
    return {**os.environ, **{name: os.pathsep.join(filter(None, (str(ours[name]), before[name]))) for name in ours}}


def _cmake_version() -> tuple[int, ...]:
    """The version of the cmake on PATH; empty: there is none that works."""
    try:
        done = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found and done.returncode == 0 else ()
