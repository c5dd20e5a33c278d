"""Builds ggml's RPC backend as a plug-in, a library of its own, from the source of the build in use.

The plug-in is stored in `LLAMABATCH_CACHE`. Compiling it takes some 20 s of CPU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from llamabatch.errors import SetupError
from llamabatch.native_build import recipe, source
from llamabatch.native_build.plan import jobs
from llamabatch.native_build.tools import SetupFailure, cache_dir, lock, make_folder, run_logged
from llamabatch.planning.binding_choice import choose

FILE = "libggml-rpc.so"
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_RPC=ON", "-DGGML_CPU=OFF",
    *(f"-DLLAMA_BUILD_{name}=OFF" for name in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")),
    # gives the libraries the same names as `make setup`, which builds from llama-cpp-python's own CMake project
    f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={recipe.OWN_NAMES}", "-DLLAMABATCH_PREFIX=",
)  # fmt: skip


def backend() -> Path:
    """Returns the path of the plug-in, and builds it if the cache lacks it.

    Raises:
        SetupFailure: the plug-in cannot be built, or does not fit the build in use. The message has the reason.
    """
    try:
        build = choose().build
    except SetupError as error:
        raise SetupFailure(str(error)) from error
    if build.is_ours or build.marker is None:
        raise SetupFailure("the build in use is not that of `make setup`, whose libraries the plug-in needs")
    facts = [source.SHA256, *_FLAGS, *map(source.sha256_of, (*source.patches(), *source.kernels()))]
    folder = make_folder(cache_dir() / "devices") / hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    with lock(cache_dir() / "devices" / "lock"):
        if not (folder / FILE).is_file():
            _build(folder)
    return folder / FILE


def _build(folder: Path) -> None:
    log = make_folder(cache_dir() / "logs") / "rpc-backend.log"
    log.write_bytes(b"")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        tree = source.patched_tree(log, place) / "vendor" / "llama.cpp"
        environment = recipe.with_cmake(place, log)
        generator = ("-G", "Ninja") if shutil.which("ninja", path=environment["PATH"]) else ()
        target = place / "build"
        for command in (
            ["cmake", "-S", tree, "-B", target, *generator, *_FLAGS],
            ["cmake", "--build", target, "--parallel", str(jobs()), "--target", "ggml-rpc"],
        ):
            if run_logged(command, log, "building the RPC backend", environment) != 0:
                raise SetupFailure(f"the RPC backend cannot be built, see {log}")
        ready = make_folder(place / "ready")
        shutil.copy2(target / "bin" / FILE, ready / FILE)
        os.replace(ready, folder)
