"""Small models with random weights, one of each architecture. llama.cpp's own tests/test-llama-archs.cpp writes most of
them; the module writes the models in OURS itself, because that program cannot.

The program is compiled from the source of the build in use, and linked with that build, which takes some seconds. It
is stored in `LLAMABATCH_CACHE`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from llamabatch.errors import SetupError
from llamabatch.llama import build_info, library
from llamabatch.native_build import source
from llamabatch.native_build.tools import SetupFailure, cache_dir, lock, make_folder
from llamabatch.planning.binding_choice import choose
from tests.model.architectures import write as write_ours

HEADERS = Path(__file__).parent / "headers"
_LLAMA_CPP = f"{source.FOLDER}/vendor/llama.cpp/"
_NEEDED = tuple(_LLAMA_CPP + folder for folder in ("src/", "include/", "ggml/include/", "tests/test-llama-archs.cpp"))
_COMPILERS = ("c++", "g++", "clang++")
_SEED = "1"
OURS = ("apertus", "bert", "gemma3n", "gemma4", "rwkv6", "rwkv7", "step35", "t5")
"""Architectures that tests/model/architectures.py writes in its place."""


def write(folder: Path, architectures: Iterable[str] = ()) -> list[Path]:
    """Writes the models of these architectures, or of all that can be written. Returns their paths, each
    `architecture-dense.gguf` or `architecture-moe.gguf`.

    Raises:
        SetupFailure: the program cannot be compiled. The message has the reason.
    """
    names = list(architectures)
    for name in OURS:
        if not names or name in names:
            write_ours(name, folder / f"{name}-dense.gguf")
    pattern = "|".join(f"^{name}$" for name in names)
    command = [program(), "-o", str(folder), "-s", _SEED, *(["-a", pattern] if pattern else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupFailure(f"the models cannot be written: {done.stderr[-2000:]}")
    return sorted(folder.glob("*.gguf"))


def program() -> Path:
    """Returns the path of the program that writes the models, and compiles it if the cache lacks it. Raises
    SetupFailure."""
    try:
        build = choose().build
    except SetupError as error:
        raise SetupFailure(str(error)) from error
    if build.is_ours or build.marker is None:
        raise SetupFailure("the build in use is not that of `make setup`, whose libraries the program needs")
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise SetupFailure("there is no C++ compiler")
    libraries = build_info.library_dir(library.load())
    facts = [source.SHA256, str(libraries), *map(source.sha256_of, sorted(libraries.glob("libllama.*")))]
    facts += map(source.sha256_of, sorted(HEADERS.iterdir()))
    kept = make_folder(cache_dir() / "archs") / hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    with lock(kept.parent / "lock"):
        if not kept.is_file():
            _compile(compiler, libraries, kept)
    return kept


def _compile(compiler: str, libraries: Path, kept: Path) -> None:
    log = make_folder(cache_dir() / "logs") / "archs.log"
    log.write_bytes(b"")
    package = source.fetch(log)
    with tempfile.TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        with tarfile.open(package) as archive:  # safe: the hash of the package has been verified
            members = [member for member in archive if member.name.startswith(_NEEDED)]
            archive.extractall(place, members)
        tree = place / _LLAMA_CPP
        command = [
            compiler, "-O1", "-std=c++17", f"-I{HEADERS}", f"-I{tree / 'include'}", f"-I{tree / 'ggml' / 'include'}",
            str(tree / "tests" / "test-llama-archs.cpp"), "-o", str(place / "archs"),
            f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama", "-lggml", "-lggml-base", "-lggml-cpu",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupFailure(f"the program that writes the models cannot be compiled: {done.stderr[-2000:]}")
        os.replace(place / "archs", kept)
