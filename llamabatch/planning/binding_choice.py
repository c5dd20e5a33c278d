"""Chooses the build of llama.cpp for this process: the first in a fixed order that works.

A build is a package with a binding and its libraries. The package is llama-cpp-python's `llama_cpp`, or
`llamabatch_llama`; both can be installed side by side. This module imports neither.

The order:
    1. the named build, given by LLAMABATCH_LLAMA (the folder of such a package) or LLAMA_CPP_LIB_PATH (a folder of
       libraries for the installed llama-cpp-python). It is used or refused, never passed over.
    2. a llama_cpp already imported by this process.
    3. builds made by `llamabatch build`, the newest first. They must suit this CPU and have this release's patches.
    4. an installed llama_cpp that offloads to a GPU.
    5. the installed llamabatch_llama.
    6. an installed llama_cpp for CPUs.

A process cannot unload the libraries of a build that does not work. So a child process tries each build first, and the
verdict is kept on disk. A named build, an imported build, and the last remaining build are not tried.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from llamabatch.errors import SetupError
from llamabatch.native_build import source as patch_source
from llamabatch.native_build.plan import MARKER
from llamabatch.planning.cpu import cpu_flags
from llamabatch.utils import disk_cache, paths
from llamabatch.utils.cures import has_wheels, in_checkout, patched_build
from llamabatch.utils.lifetime import in_forks
from llamabatch.utils.subprogram import run_program
from llamabatch.utils.system import fatal_signal

logger = logging.getLogger(__name__)

VARIABLE = "LLAMABATCH_LLAMA"
LIBRARIES_VARIABLE = "LLAMA_CPP_LIB_PATH"  # a variable of llama-cpp-python
_VARIANT_VARIABLE = "LLAMABATCH_CPU_VARIANT"  # llamabatch/llama/backends.py reads it
FOREIGN, OURS = "llama_cpp", "llamabatch_llama"
TRIAL = "llamabatch.llama.try_binding"
NO_GPU = "it finds no GPU here"
_TRIAL_TIMEOUT_S = 60.0
_VERDICTS = "binding"
_VERSION = 1  # version of the trial; after a change, verdicts on disk no longer count
_GPU_LIBRARY = re.compile(r"ggml-(cuda|hip|musa|vulkan|metal|sycl|opencl|cann|webgpu)\b")
_GPU_BACKENDS = {"cuda", "hip", "musa", "vulkan", "metal", "sycl", "opencl", "cann", "webgpu"}
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
_DEVICE_NODES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "dxg")
_OF_THE_BUILD = ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE")


class Origin(Enum):
    """The origin of a build. The value describes it in messages."""

    NAMED = "named by the environment"
    IMPORTED = "already imported in this process"
    BUILT = "made by `llamabatch build`"
    GPU = "an installed llama-cpp-python that offloads to a GPU"
    WHEEL = "the installed llamabatch-llama"
    INSTALLED = "the installed llama-cpp-python"


@dataclass(frozen=True)
class Build:
    """A binding and its libraries.

    Attributes:
        folder: the folder of the package, `llama_cpp` or `llamabatch_llama`.
        libraries: the folder of libllama.
    """

    origin: Origin
    folder: Path
    libraries: Path

    @property
    def is_ours(self) -> bool:
        """True for the layout of llamabatch_llama, False for that of llama_cpp."""
        return (self.folder / "_binding").is_dir()

    @property
    def package(self) -> str:
        """The import name of the package."""
        return OURS if self.is_ours else FOREIGN

    @property
    def module(self) -> str:
        """The import name of the binding's module."""
        return f"{OURS}._binding" if self.is_ours else FOREIGN

    @property
    def marker(self) -> Mapping[str, Any] | None:
        """The patches, flags and compiler of a build made by llamabatch; None for any other build."""
        return read_marker(self.libraries)

    def describe(self) -> str:
        """Returns the origin and the path, such as "made by `llamabatch build` (/path)"."""
        return f"{self.origin.value} ({self.folder if self.libraries == self.folder / 'lib' else self.libraries})"


@dataclass(frozen=True)
class PassedOver:
    """A build that is earlier in the order than the chosen one but cannot be used, and the reason."""

    build: Build
    reason: str


@dataclass(frozen=True)
class Choice:
    """The build in use, the earlier builds that do not work, and the later builds, which were not tried."""

    build: Build
    passed_over: tuple[PassedOver, ...]
    others: tuple[Build, ...]


_lock = threading.RLock()
_choice: Choice | None = None
_rejected: dict[Path, str] = {}  # reasons why this process failed to load builds, by folder


@in_forks
def _renew_lock() -> None:
    """Replaces the lock in a fork, because a thread that held the lock does not exist there."""
    global _lock
    _lock = threading.RLock()


def choose() -> Choice:
    """Returns the choice of this process. The first call makes the choice.

    On a new machine this first call may take seconds if there are several builds.

    Raises:
        SetupError: no build works, or the build given by environment variables does not exist.
    """
    global _choice
    with _lock:
        if _choice is None:
            _choice = _first_that_works()
        return _choice


def chosen() -> Choice | None:
    """Returns the choice, or None if it has not been made."""
    return _choice


def forget() -> None:
    """Forgets the choice, so that choose() searches again after the environment or installed packages have changed."""
    global _choice
    with _lock:
        _choice = None
        _rejected.clear()
        _at_first.clear()


def reject(build: Build, reason: str) -> None:
    """Rejects a build that could not be loaded, so that choose() returns the next one.

    Raises:
        SetupError: environment variables gave this build; or no other build works (the message gives all reasons).
    """
    global _choice
    with _lock:
        _rejected[build.folder] = reason
        _choice = None
        if build.origin is Origin.NAMED:
            raise SetupError(f"the llama.cpp {_naming()} cannot be used: {reason}")
        choose()


def for_children() -> dict[str, str]:
    """Returns environment variables that make a child program choose the same build. If no build works, there are no
    variables, and the child reports the error."""
    try:
        build = choose().build
    except SetupError:
        return {}
    if build.libraries != build.folder / "lib":
        return {LIBRARIES_VARIABLE: str(build.libraries)}
    return {VARIABLE: str(build.folder)}


def read_marker(libraries: Path) -> Mapping[str, Any] | None:
    """Returns the contents of the marker file next to the libraries or next to their `lib` folder; None without one."""
    for place in (libraries, libraries.parent) if libraries.name == "lib" else (libraries,):
        try:
            marker = json.loads((place / MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(marker, dict):
            return marker
    return None


def _first_that_works() -> Choice:
    named = _named()
    if named is not None:
        return Choice(named, (), tuple(build for build, _ in _in_order() if build.folder != named.folder))
    known = list(_in_order())
    passed: list[PassedOver] = []
    for place, (build, unfit) in enumerate(known):
        rest = tuple(other for other, reason in known[place + 1 :] if not reason)
        reason = unfit or _rejected.get(build.folder, "") or _problem(build, is_last=not rest)
        if not reason:
            return Choice(build, tuple(passed), rest)
        logger.debug("passed over: %s: %s", build.describe(), reason)
        passed.append(PassedOver(build, reason))
    if not passed:
        raise SetupError(f"no llama.cpp is installed: {_install()}.")
    found = "; ".join(f"{each.build.describe()}: {each.reason}" for each in passed)
    raise SetupError(f"no llama.cpp can be used: {found}. To get one, {_install()}.")


def _install() -> str:
    """Returns the advice for an environment without llama.cpp."""
    if in_checkout() or has_wheels():
        return patched_build()
    return f"{patched_build()}, or `pip install llama-cpp-python`"


def _named() -> Build | None:
    """Returns the build given by environment variables; None if none is set. Raises SetupError for a missing build."""
    ours, libraries = os.environ.get(VARIABLE), os.environ.get(LIBRARIES_VARIABLE)
    if ours and libraries:
        raise SetupError(
            f"{VARIABLE} and {LIBRARIES_VARIABLE} are both set, to {ours!r} and {libraries!r}: unset one of them, "
            "since a binding and its libraries come from the same place"
        )
    if ours:
        folder = _package_in(_resolved(VARIABLE, ours))
        if folder is None:
            raise SetupError(
                f"{VARIABLE} is {ours!r}, which is not the folder of a llamabatch_llama or llama_cpp package, nor one "
                f"that holds such a package: correct it, or unset it"
            )
        return Build(Origin.NAMED, folder, folder / "lib")
    if libraries:
        folder = _imported_folder() or installed(FOREIGN)
        if folder is None:
            raise SetupError(
                f"{LIBRARIES_VARIABLE} is {libraries!r}, but llama-cpp-python is not installed, whose binding these "
                "libraries need: pip install llama-cpp-python, or unset it"
            )
        return Build(Origin.NAMED, folder, _resolved(LIBRARIES_VARIABLE, libraries))
    return None


def _naming() -> str:
    name = VARIABLE if os.environ.get(VARIABLE) else LIBRARIES_VARIABLE
    return f"that {name} names ({os.environ.get(name)})"


_at_first: dict[tuple[str, str], Path] = {}


def _resolved(variable: str, value: str) -> Path:
    """Returns the value of a variable as an absolute path. The first call decides, so that a later os.chdir changes
    nothing.
    """
    return _at_first.setdefault((variable, value), Path(paths.absolute(value)))


def _package_in(folder: Path) -> Path | None:
    for place in (folder, folder / OURS, folder / FOREIGN):
        if (place / "__init__.py").is_file() and ((place / "_binding").is_dir() or (place / "llama_cpp.py").is_file()):
            return place
    return None


def _in_order() -> Iterator[tuple[Build, str]]:
    """Yields all builds in order, except one given by an environment variable. Each comes with the reason why it cannot
    be used, or ""."""
    imported = _imported()
    if imported is not None:
        yield imported, ""
    yield from _built()
    foreign = installed(FOREIGN)
    stock = Build(Origin.INSTALLED, foreign, foreign / "lib") if foreign is not None else None
    if stock is not None and imported is not None and stock.folder == imported.folder:
        stock = None
    if stock is not None and _offloads(stock):
        yield dataclasses.replace(stock, origin=Origin.GPU), ""
        stock = None
    wheel = installed(OURS)
    if wheel is not None:
        yield Build(Origin.WHEEL, wheel, wheel / "lib"), ""
    if stock is not None:
        yield stock, ""


def _imported() -> Build | None:
    """Returns the llama_cpp imported by this process; None if there is none, or its import is not complete."""
    folder = _imported_folder()
    library = getattr(getattr(sys.modules.get(FOREIGN), FOREIGN, None), "_lib", None)
    name = getattr(library, "_name", None)
    if folder is None or not isinstance(name, str):
        return None
    libraries = Path(name).absolute().parent
    own = folder / "lib"
    return Build(Origin.IMPORTED, folder, own if libraries.resolve() == own.resolve() else libraries)


def _imported_folder() -> Path | None:
    file = getattr(sys.modules.get(FOREIGN), "__file__", None)
    return Path(file).parent if isinstance(file, str) else None


def installed(package: str) -> Path | None:
    """Returns the folder of an installed package; None if it is not installed. Does not import the package, and finds
    it even if another package of this name is imported."""
    for finder in sys.meta_path:
        spec: importlib.machinery.ModuleSpec | None
        try:
            spec = finder.find_spec(package, None) if hasattr(finder, "find_spec") else None
        except (ImportError, ValueError, OSError):
            continue
        if spec is not None and spec.origin is not None and Path(spec.origin).name == "__init__.py":
            return Path(spec.origin).parent
    return None


def builds_folder() -> Path:
    """Returns the folder for builds made by `llamabatch build`. Each build lies in KEY/llamabatch_llama."""
    return paths.cache_dir() / "builds"


def _built() -> Iterator[tuple[Build, str]]:
    """Yields the builds in the cache, newest first, each with the reason why it cannot be used, or ""."""
    try:
        markers = sorted(
            builds_folder().glob(f"*/{OURS}/{MARKER}"), key=lambda path: path.stat().st_mtime, reverse=True
        )
    except OSError:
        return
    for marker in markers:
        build = Build(Origin.BUILT, marker.parent, marker.parent / "lib")
        yield build, _unfit(build.marker)


def _unfit(marker: Mapping[str, Any] | None) -> str:
    """Returns the reason why a cached build does not suit this release or this CPU; "" if it does."""
    if marker is None:
        return f"its {MARKER} cannot be read"
    if other := of_another_release(marker):
        return f"another release of llamabatch made it, with other {other}: run `llamabatch build` again"
    missing = set(marker.get("cpu_flags", ())) - cpu_flags()
    if missing and sys.platform == "linux":  # Only Linux lists all features of a CPU.
        return f"it was made for a CPU with {', '.join(sorted(missing)[:4])}, which this one lacks"
    return ""


def of_another_release(marker: Mapping[str, Any]) -> str:
    """Returns "patches" or "kernels" if a build has other patches or kernels than this release, else ""."""
    if marker.get("patches") != _hashes(patch_source.patches()):
        return "patches"
    return "kernels" if marker.get("kernels") != _hashes(patch_source.kernels()) else ""


def _hashes(files: list[Path]) -> dict[str, str]:
    return {path.name: patch_source.sha256_of(path) for path in files}


def gpu_backend(build: Build) -> str | None:
    """Returns the backend of a build for devices other than the CPU; None for a CPU build. Reads the marker file. If it
    names no such backend, looks at the file names of the libraries."""
    marker = build.marker
    if marker is not None and marker.get("backend") in {*_GPU_BACKENDS, "rpc"}:
        return str(marker["backend"])
    try:
        found = (_GPU_LIBRARY.search(path.name) for path in build.libraries.iterdir())
        return next((match[1] for match in found if match), None)
    except OSError:
        return None


def _offloads(build: Build) -> bool:
    return gpu_backend(build) in _GPU_BACKENDS


def _problem(build: Build, is_last: bool) -> str:
    """Returns the reason why a build does not work in a child process; "" if it works, or needs no trial."""
    if is_last or build.origin is Origin.IMPORTED:  # no other build is left, or this process has loaded this one
        return ""
    key = _key(build)
    kept = disk_cache.read(_VERDICTS, key)
    if kept is not None and isinstance(kept.get("problem"), str):
        return str(kept["problem"])
    problem, certain = _tried(build)
    if certain:
        disk_cache.keep(_VERDICTS, key, {"problem": problem, "build": str(build.folder)})
    return problem


def _tried(build: Build) -> tuple[str, bool]:
    """Returns the reason why a child process cannot load a build (or ""), and True if this verdict may be kept."""
    if not sys.executable:
        return "", False
    try:
        # A wrong LLAMABATCH_CPU_VARIANT of the user must not count against the build.
        environment = {VARIABLE: str(build.folder), _VARIANT_VARIABLE: ""}
        child = run_program(TRIAL, timeout_s=_TRIAL_TIMEOUT_S, environment=environment)
    except subprocess.TimeoutExpired:
        return f"a child process could not load it within {_TRIAL_TIMEOUT_S:.0f} s", False
    except OSError as error:
        logger.debug("%s is not tried: no child process can be started: %s", build.describe(), error)
        return "", False
    name = fatal_signal(child.returncode)
    if name is not None:
        return f"it crashes the process that loads it ({name})", name in _OF_THE_BUILD
    answer = _answer(child.stdout)
    if answer is None:
        words = child.stdout.decode("utf-8", "replace").split("\n")
        return f"the trial in a child process failed with exit code {child.returncode}: {words[-1]}"[:300], False
    if "problem" in answer:
        return str(answer["problem"]), True
    if build.origin is Origin.GPU and not answer.get("gpus"):
        return NO_GPU, True
    return "", True


def _answer(output: bytes) -> dict[str, Any] | None:
    """Returns the last line that is a JSON answer of the trial, or None. The libraries may print other lines."""
    for line in reversed(output.decode("utf-8", "replace").splitlines()):
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and ("problem" in answer or "gpus" in answer):
            return answer
    return None


def _key(build: Build) -> str:
    """Returns a hash of the build's files and of everything else that decides the result of the trial."""
    facts = [
        _VERSION, sys.version, str(build.folder), build.origin.name, sorted(cpu_flags()), _sizes(build),
        [os.environ.get(name) for name in _DEVICE_VARIABLES],
        [str(node) for pattern in _DEVICE_NODES for node in sorted(Path("/dev").glob(pattern))],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _sizes(build: Build) -> list[tuple[str, int, int]]:
    files = [*build.libraries.glob("*"), *build.folder.glob("*.json"), *build.folder.glob("**/*.py")]
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((str(file), status.st_size, status.st_mtime_ns))
    return sorted(found)
