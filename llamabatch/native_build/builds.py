"""The builds of `llamabatch build`: packages `llamabatch_llama` for this machine, in the user's cache.

    builds/KEY/llamabatch_llama/__init__.py, _binding/, lib/, licenses/, llamabatch_build.json

A build is there whole or not at all: it is made in a folder beside and gets its name last. Starts of llamabatch take
the newest that fits the release and the CPU. The folder of a stopped build for GPUs, which may have compiled for an
hour, stays, and the same build goes on there; another one removes it.
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

GIGABYTES = {"cpu": 1.0, "rpc": 1.0}  # of the build; source and cmake take 0.5
_GPU_GIGABYTES = 3.0
_DRIVER = "libcuda.so.1"
_UNFINISHED = "build-"


@dataclass(frozen=True)
class Kept:
    """A build in the cache.

    Attributes:
        key: the name of its folder.
        package: the folder of the package llamabatch_llama.
        release: the release of llamabatch that made it; "": its marker cannot be read.
        size: bytes of its files.
        made: the time when it was made, or asked for again, in seconds since 1970.
    """

    key: str
    package: Path
    release: str
    backend: str
    portable: bool
    size: int
    made: float


def builds_folder() -> Path:
    """The folder of all builds; it need not exist."""
    return cache_dir() / "builds"


def package_of(key: str) -> Path:
    """The folder of the package of a build."""
    return builds_folder() / key / binding.PACKAGE


def is_complete(key: str) -> bool:
    return (package_of(key) / MARKER).is_file()


def make(plan: Plan, release: str, display: Callable[[str], Display] | None = None) -> tuple[Path, bool]:
    """The package of a plan: from the cache, or built now. Either way it counts as the newest.

    Args:
        plan: of machine.make_plan(..., multimodal=True).
        release: the version of llamabatch.
        display: called with a title; shows the progress of the compilers. Default: a line now and then on stderr.

    Returns:
        The folder of the package, and True if it was built now.

    Raises:
        SetupFailure: with what is missing, or what went wrong and the log. OSError: the disk is full, or fails.
    """
    home = make_folder(builds_folder())
    built = False
    with lock(home / "lock"):  # another build may have made it while this one waited
        if is_complete(plan.key):
            (package_of(plan.key) / MARKER).touch()
        else:
            _remove_unfinished(home, plan)
            _build(plan, release, home, display)
            built = True
    return package_of(plan.key), built


def kept() -> list[Kept]:
    """All builds in the cache, the newest first."""
    found = [_kept(folder) for folder in _folders()]
    return sorted(found, key=lambda each: each.made, reverse=True)


def remove(key: str) -> Path:
    """Remove a build by its key, or by a beginning that only one key has; returns its folder.

    Raises:
        SetupFailure: there is none, or more than one.
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
    os.replace(folder, gone / "removed")  # at once: a start of llamabatch sees all of it, or nothing
    shutil.rmtree(gone, ignore_errors=True)
    return folder


def _folders() -> list[Path]:
    try:
        return [each for each in builds_folder().iterdir() if each.is_dir() and not each.name.startswith(_UNFINISHED)]
    except OSError:
        return []


def _remove_unfinished(home: Path, plan: Plan) -> None:
    """Removes the remains of stopped builds of other plans; the lock is held, so none of it is in use."""
    for folder in home.glob(f"{_UNFINISHED}*"):
        if folder != _place(home, plan):
            shutil.rmtree(folder, ignore_errors=True)


def _place(home: Path, plan: Plan) -> Path:
    return home / f"{_UNFINISHED}{plan.key}"


@contextlib.contextmanager
def _workplace(home: Path, plan: Plan) -> Iterator[Path]:
    """The folder that a build is made in. That of a build for GPUs stays when it is stopped or fails."""
    if plan.backend in GIGABYTES:
        with tempfile.TemporaryDirectory(dir=home, prefix=_UNFINISHED, ignore_cleanup_errors=True) as temporary:
            try:
                yield Path(temporary)
            except KeyboardInterrupt:
                say("  stopping: what is not whole is removed")  # some thousand files
                raise
        return
    place = _place(home, plan)
    if place.is_dir():
        say(f"  going on with what an earlier run compiled in {place}")
    try:
        yield make_folder(place)
    except BaseException:
        say(f"  what is compiled stays in {place}: the same command goes on from there")
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
        if target.exists():  # without its marker: it is not whole
            shutil.rmtree(target)
        os.replace(package.parent, target)
    minutes, seconds = divmod(int(time.monotonic() - start), 60)
    say(f"Built in {minutes}:{seconds:02d}")


def _made_package(plan: Plan, release: str, place: Path, log: Path, display: Callable[[str], Display] | None) -> Path:
    """The package, made in a folder of its own in `place`."""
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
    """Raises SetupFailure if the package does not load here, unless only a GPU's driver is missing, as it is wherever a
    container is built: the machine that runs it has one."""
    try:
        binding.prove(package)
    except SetupFailure as failure:
        if f"{_DRIVER}: cannot open" not in str(failure):
            raise
        say(f"  not loaded here: {_DRIVER} of NVIDIA's driver is missing; a machine that runs this build needs it")


def _tree(place: Path, log: Path, python: str) -> Path:
    """The patched source in `place`: that of an earlier run if it is whole, since files of a new one compile again."""
    stamp = place / "patched"
    if stamp.is_file():
        return Path(stamp.read_text(encoding="utf-8"))
    shutil.rmtree(place / source.FOLDER, ignore_errors=True)
    tree = source.patched_tree(log, place, python)
    stamp.write_text(str(tree), encoding="utf-8")
    return tree


def marker(plan: Plan, release: str) -> str:
    """The marker of the package: that of the plan, the release, and the instruction sets that a CPU must have."""
    facts = json.loads(plan.marker())
    facts |= {
        "release": release,
        "cpu_flags": list(plan.cpu_flags),
        "portable": "-DGGML_NATIVE=OFF" in plan.flags,
    }
    return json.dumps(facts, indent=2, sort_keys=True) + "\n"


def _with_pip(place: Path, log: Path) -> str:
    """An interpreter with pip: this one, or, as in environments of uv, one in a folder that goes with the build."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    venv = place / "python"
    if run_logged([sys.executable, "-m", "venv", venv], log, "getting pip") != 0:
        raise SetupFailure(
            "This Python has no pip and cannot make an environment that has: install pip into it (uv pip install pip), "
            f"or what makes environments (Debian and Ubuntu: apt install python3-venv) (log: {log})."
        )
    return str(venv / ("Scripts" if sys.platform == "win32" else "bin") / "python")
