"""The recipe for all builds of llama.cpp: CMake on the patched source, and the resulting libraries.

`llamabatch build`, `make setup`, `make wheels` and the benchmark programs all build with `compile_tree`. Their builds
differ in flags, in targets and in the compiler, which the environment names.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llamabatch.native_build import source
from llamabatch.native_build.plan import jobs
from llamabatch.native_build.tools import Display, SetupFailure, explain, run_logged

PREFIX = "llamabatch-"
"""own_names.cmake gives this prefix to the libraries of the package llamabatch_llama."""
OWN_NAMES = source.PATCH_FOLDER / "own_names.cmake"

LIBRARIES = ("llama", "mtmd")
"""The targets of a build for Python: libllama with ggml's libraries, and libmtmd for images and sound."""
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAVA_BUILD=ON",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
"""The flags of all builds of `LIBRARIES`."""

_LEAST_CMAKE = (3, 21)  # the oldest cmake that llama-cpp-python's CMakeLists.txt allows
_LINKER_FLAGS = "CMAKE_SHARED_LINKER_FLAGS"
_SUFFIXES = (".so", ".dylib", ".dll")


def names_flags(prefix: str = PREFIX) -> tuple[str, ...]:
    """Returns CMake flags. With these flags each library is a single file, whose name has `prefix` and no version."""
    return (f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={OWN_NAMES}", f"-DLLAMABATCH_PREFIX={prefix}")


def compile_tree(
    tree: Path,
    build: Path,
    log: Path,
    flags: Sequence[str],
    targets: Sequence[str],
    environment: Mapping[str, str],
    *,
    is_cuda: bool = False,
    display: Callable[[str], Display] | None = None,
) -> None:
    """Configures and builds `targets` of the source in `tree`, in the folder `build`.

    Args:
        environment: environment of the compilers, with a cmake on its PATH, from `with_cmake`.
        is_cuda: True if the libraries link to the CUDA toolkit's libraries and must find them.
        display: makes a Display for a title. Default: a line on stderr now and then.

    Raises:
        SetupFailure: cmake or the compiler failed; the message names the reason and the log.
    """
    generator = ("-G", "Ninja") if shutil.which("ninja", path=environment["PATH"]) else ()
    n_jobs = environment.get("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs()))

    what = "llama.cpp" if targets == LIBRARIES else " and ".join(targets)

    def run(name: str, command: list[str | Path], shown: Display | None = None) -> None:
        if run_logged(command, log, name, environment, shown) != 0:
            reason = explain(log, "the compiler or cmake stopped, see the end of the log")
            raise SetupFailure(f"The build of {what} failed: {reason} (log: {log}).")

    run("configuring llama.cpp", ["cmake", "-S", tree, "-B", build, *generator, *flags])
    if is_cuda and sys.platform == "linux":
        run("configuring llama.cpp", ["cmake", build, toolkit_flag(_cmake_cache(build))])
    title = "building llama.cpp"
    options = ("--config", "Release", "--parallel", n_jobs, "--target", *targets)
    run(title, ["cmake", "--build", build, *options], display(title) if display else None)


def libraries(build: Path, prefix: str = PREFIX) -> list[Path]:
    """Returns the shared libraries in a build folder that was made with `names_flags(prefix)`.

    Raises:
        SetupFailure: libllama is not among them.
    """
    found = sorted(
        path
        for path in build.rglob("*")
        if prefix in path.name and path.suffix in _SUFFIXES and not path.is_symlink() and "CMakeFiles" not in path.parts
    )
    if not any(path.stem.removeprefix("lib") == f"{prefix}llama" for path in found):
        raise SetupFailure(f"The build made no library {prefix}llama: see {OWN_NAMES.name}.")
    return found


def with_cmake(place: Path, log: Path, python: str = sys.executable) -> dict[str, str]:
    """Returns the environment with a cmake on its PATH: the system's, or PyPI's in the folder `place`.

    Args:
        python: an interpreter with pip.

    Raises:
        SetupFailure: cmake is missing or too old, and pip cannot install it.
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
    ours = {"PATH": folder / "bin", "PYTHONPATH": folder}  # cmake and ninja are scripts that import from `folder`
    return {**os.environ, **{name: os.pathsep.join(filter(None, (str(ours[name]), before[name]))) for name in ours}}


def _cmake_version() -> tuple[int, ...]:
    """Returns the version of the cmake on PATH, or () if no cmake works."""
    try:
        done = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found and done.returncode == 0 else ()


def _cmake_cache(build: Path) -> str:
    return (build / "CMakeCache.txt").read_text(encoding="utf-8", errors="surrogateescape")


def toolkit_flag(cache: str) -> str:
    """Returns the option that lets the libraries find the CUDA toolkit's libraries in any folder.

    CMake leaves out the folders that nvcc itself adds for the linker. The system's loader knows these folders only if
    the toolkit came as a system package.

    Args:
        cache: the text of a CMakeCache.txt that was configured for CUDA.
    """
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache, flags=re.MULTILINE))
    found = (entries.get(f"CUDA_{name}_LIBRARY", "") for name in ("cudart", "cublas"))
    folders = dict.fromkeys(str(Path(library).parent) for library in found if Path(library).is_file())
    known = entries.get(_LINKER_FLAGS, "")
    given = shlex.split(known)
    paths = (path for folder in folders if (path := f"-Wl,-rpath,{folder}") not in given)
    return f"-D{_LINKER_FLAGS}={' '.join((known, *map(shlex.quote, paths))).strip()}"
