"""The builds that `llamabatch build` makes for this machine. Each is a package `llamabatch_llama` in the user's cache.

    builds/KEY/llamabatch_llama/__init__.py, _binding/, lib/, licenses/, llamabatch_build.json

A build is either complete or missing, because it is made in a temporary folder and gets its name at the end. When
llamabatch starts, it uses the newest build that fits the release and the CPU. A build for GPUs may take an hour, so its
temporary folder stays if `llamabatch build` is stopped or fails. The next run resumes there if its plan is the same,
and otherwise removes the folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamabatch.native_build import binding, recipe, sampler_library, source
from llamabatch.native_build.plan import MARKER, Plan
from llamabatch.native_build.tools import (
    Display,
    SetupFailure,
    cache_dir,
    lock,
    make_folder,
    require_space,
    run_logged,
    say,
)

GIGABYTES = {"cpu": 1.0, "rpc": 1.0}  # disk space of a build in GB; source and cmake need 0.5 GB of it
_GPU_GIGABYTES = 3.0
_DRIVER = "libcuda.so.1"
_UNFINISHED = "build-"


@dataclass(frozen=True)
class Kept:
    """A build in the cache.

    Attributes:
        key: the name of its folder.
        package: the folder of the package llamabatch_llama.
        release: the release of llamabatch that made the build; "" if the build's marker cannot be read.
        size: bytes of its files.
        made: the time when the build was made or last requested again, in seconds since 1970.
    """

    key: str
    package: Path
    release: str
    backend: str
    portable: bool
    size: int
    made: float


def builds_folder() -> Path:
    """Returns the folder of all builds, which need not exist."""
    return cache_dir() / "builds"


def package_of(key: str) -> Path:
    """Returns the folder of a build's package."""
    return builds_folder() / key / binding.PACKAGE


def is_complete(key: str) -> bool:
    return (package_of(key) / MARKER).is_file()


def make(plan: Plan, release: str, display: Callable[[str], Display] | None = None) -> tuple[Path, bool]:
    """Returns the package of a plan, from the cache or built now. The package then counts as the newest build.

    Args:
        plan: from machine.make_plan.
        release: the version of llamabatch.
        display: makes a Display for a title. Default: a line on stderr now and then.

    Returns:
        The folder of the package, and True if it was built now.

    Raises:
        SetupFailure: something is missing, or the build failed; the message names the reason and the log.
        OSError: the disk is full or fails.
    """
    home = make_folder(builds_folder())
    built = False
    with lock(home / "lock"):  # during the wait, another process may have made the same build
        if is_complete(plan.key):
            (package_of(plan.key) / MARKER).touch()
        else:
            _remove_unfinished(home, plan)
            _build(plan, release, home, display)
            built = True
    return package_of(plan.key), built


def kept() -> list[Kept]:
    """Returns all builds in the cache, newest first."""
    found = [_kept(folder) for folder in _folders()]
    return sorted(found, key=lambda each: each.made, reverse=True)


def remove(key: str) -> Path:
    """Removes the build with this key. A unique beginning of the key is enough. Returns the build's folder.

    Raises:
        SetupFailure: no build has this key, or several keys begin with it.
    """
    keys = [folder.name for folder in _folders()]
    named = [each for each in keys if each == key] or [each for each in keys if key and each.startswith(key)]
    if len(named) != 1:
        known = ", ".join(sorted(named or keys)) or "none"
        if named:
            raise SetupFailure(f"{len(named)} builds begin with {key!r}: give one of these keys: {known}.")
        raise SetupFailure(f"No build has the key {key!r}; there are: {known}.")
    folder = builds_folder() / named[0]
    gone = Path(tempfile.mkdtemp(dir=builds_folder(), prefix=_UNFINISHED))
    os.replace(folder, gone / "removed")  # atomic: a starting llamabatch sees the whole build, or nothing
    shutil.rmtree(gone, ignore_errors=True)
    return folder


def _folders() -> list[Path]:
    try:
        return [each for each in builds_folder().iterdir() if each.is_dir() and not each.name.startswith(_UNFINISHED)]
    except OSError:
        return []


def _remove_unfinished(home: Path, plan: Plan) -> None:
    """Removes the unfinished builds of other plans. The caller holds the lock, so no process uses these builds."""
    for folder in home.glob(f"{_UNFINISHED}*"):
        if folder != _place(home, plan):
            shutil.rmtree(folder, ignore_errors=True)


def _place(home: Path, plan: Plan) -> Path:
    return home / f"{_UNFINISHED}{plan.key}"


@contextlib.contextmanager
def _workplace(home: Path, plan: Plan) -> Iterator[Path]:
    """Yields the folder for making a build. A GPU build's folder stays if the build is stopped or fails."""
    if plan.backend in GIGABYTES:
        with tempfile.TemporaryDirectory(dir=home, prefix=_UNFINISHED, ignore_cleanup_errors=True) as temporary:
            try:
                yield Path(temporary)
            except KeyboardInterrupt:
                say("  stopping: the unfinished build is removed")  # the removal of some thousand files takes time
                raise
        return
    place = _place(home, plan)
    if place.is_dir():
        say(f"  going on with what an earlier run compiled in {place}")
    try:
        yield make_folder(place)
    except BaseException:
        say(f"  compiled files stay in {place}: the same command continues there")
        raise
    shutil.rmtree(place, ignore_errors=True)


def _kept(folder: Path) -> Kept:
    package = folder / binding.PACKAGE
    try:
        marker = json.loads((package / MARKER).read_text(encoding="utf-8"))
        made = (package / MARKER).stat().st_mtime
    except (OSError, ValueError):
        marker, made = {}, 0.0
    marker = marker if isinstance(marker, dict) else {}
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    return Kept(
        key=folder.name,
        package=package,
        release=str(marker.get("release", "")),
        backend=str(marker.get("backend", "")),
        portable=marker.get("portable") is True,
        size=size,
        made=made,
    )


def _build(plan: Plan, release: str, home: Path, display: Callable[[str], Display] | None) -> None:
    source.require_patch_tool()
    binding.require_packages()
    require_space(home, GIGABYTES.get(plan.backend, _GPU_GIGABYTES))
    log = make_folder(cache_dir() / "logs") / f"user-build-{plan.key}.log"
    log.write_text(plan.marker(), encoding="utf-8")
    start = time.monotonic()
    say(f"Building llama.cpp for this machine ({plan.backend}), once; this takes some minutes. Log: {log}")
    with _workplace(home, plan) as place:
        package = _made_package(plan, release, place, log, display)
        target = home / plan.key
        if target.exists():  # this folder has no marker, so it is incomplete
            shutil.rmtree(target)
        os.replace(package.parent, target)
    minutes, seconds = divmod(int(time.monotonic() - start), 60)
    say(f"Built in {minutes}:{seconds:02d}")


def _made_package(plan: Plan, release: str, place: Path, log: Path, display: Callable[[str], Display] | None) -> Path:
    """Builds the package in a new folder in `place`. Returns the folder of the package."""
    python = _with_pip(place, log)
    tree = _tree(place, log, python)
    flags = (*plan.flags, *recipe.names_flags())
    environment = recipe.with_cmake(place, log, python)
    is_cuda = plan.backend == "cuda"
    recipe.compile_tree(
        tree, place / "build", log, flags, recipe.LIBRARIES, environment, is_cuda=is_cuda, display=display
    )
    package = place / "ready" / binding.PACKAGE
    shutil.rmtree(package.parent, ignore_errors=True)
    libraries = binding.make_package(tree, package, release, marker(plan, release))
    for library in recipe.libraries(place / "build"):
        shutil.copy2(library, libraries / library.name)
    problem = sampler_library.compile_library(libraries / sampler_library.LIBRARY)
    if problem:
        say(f"  the sampler was not compiled, numpy takes its place: {problem}")
    _prove(package)
    return package


def _prove(package: Path) -> None:
    """Raises SetupFailure if the package does not load here, unless only a GPU driver is missing. The driver is missing
    during the build of a container, but not on the machine that runs the container."""
    try:
        binding.prove(package)
    except SetupFailure as failure:
        if f"{_DRIVER}: cannot open" not in str(failure):
            raise
        say(f"  not loaded here: {_DRIVER} of NVIDIA's driver is missing; a machine that runs this build needs it")


def _tree(place: Path, log: Path, python: str) -> Path:
    """Returns the patched source in `place`. Reuses an earlier source, because cmake would compile new files again."""
    stamp = place / "patched"
    if stamp.is_file():
        return Path(stamp.read_text(encoding="utf-8"))
    shutil.rmtree(place / source.FOLDER, ignore_errors=True)
    tree = source.patched_tree(log, place, python)
    stamp.write_text(str(tree), encoding="utf-8")
    return tree


def marker(plan: Plan, release: str) -> str:
    """Returns JSON about the build of a package: the plan, the release, and the required instruction sets."""
    facts = json.loads(plan.marker())
    facts |= {
        "release": release,
        "cpu_flags": list(plan.cpu_flags),
        "portable": "-DGGML_NATIVE=OFF" in plan.flags,
    }
    return json.dumps(facts, indent=2, sort_keys=True) + "\n"


def _with_pip(place: Path, log: Path) -> str:
    """Returns an interpreter with pip: this one, or a new one in the build's folder. uv's environments have no pip."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    venv = place / "python"
    if run_logged([sys.executable, "-m", "venv", venv], log, "getting pip") != 0:
        raise SetupFailure(
            "This Python has no pip and cannot make an environment that has: install pip into it (uv pip install pip), "
            f"or what makes environments (Debian and Ubuntu: apt install python3-venv) (log: {log})."
        )
    return str(venv / ("Scripts" if sys.platform == "win32" else "bin") / "python")
