"""The pinned source package of llama-cpp-python, with our kernels and patches.

A kernel is a separate source file in `kernels/`. The patch for a kernel contains only the calls of its functions.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from llamabatch.native_build.tools import SetupFailure, cache_dir, explain, make_folder, run_logged, say

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FILE_NAME = f"llama_cpp_python-{VERSION}.tar.gz"
FOLDER = FILE_NAME.removesuffix(".tar.gz")
"""The top folder of the source package."""


def _patch_folder() -> Path:
    """Returns the folder native_patches. In a wheel, the folder is in this package. In a checkout or a source package,
    it is at the top."""
    inside = Path(__file__).resolve().parent / "native_patches"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "native_patches"


PATCH_FOLDER = _patch_folder()
KERNEL_FOLDER = PATCH_FOLDER / "kernels"
UNCOUNTED_FOLDER = PATCH_FOLDER / "uncounted"
"""The folder of patches that do not count in the hash of a build.

GCC makes the same code with these patches and without. Other compilers need them to compile the code at all.
"""

VARIABLE = "LLAMABATCH_SOURCE"
"""The environment variable that names a source package of llama-cpp-python, for builds without a network."""
DIGEST_VARIABLE = "LLAMABATCH_SOURCE_SHA256"
"""The environment variable with the sha256 of LLAMABATCH_SOURCE's file if it is not PyPI's (see `make gpu-pack`)."""

_NO_PATCH_TOOL = "Neither git nor patch is installed: install git and run it again."

_LLAMA_CPP = Path("vendor", "llama.cpp")
_CPU = _LLAMA_CPP / "ggml" / "src" / "ggml-cpu"

KERNELS = {
    "clip-repack.h": _LLAMA_CPP / "tools" / "mtmd",
    "delta-net.h": _CPU,
    "fattn-block.cpp": _CPU,
    "fattn-block.h": _CPU,
    "fattn-few.h": _CPU,
    "fattn-many.h": _CPU,
    "fattn-tiles.h": _CPU,
    "llama-prompts.cpp": _LLAMA_CPP / "src",
    "llama-ragged.cpp": _LLAMA_CPP / "src",
    "llama-states.cpp": _LLAMA_CPP / "src",
    "repack-any-rows.h": _CPU,
    "repack-floats.h": _CPU / "arch" / "x86",
    "repack-prompts.h": _CPU / "arch" / "x86",
    "repack-rows.cpp": _CPU / "arch" / "x86",
    "repack-rows.h": _CPU / "arch" / "x86",
    "repack-rows-k.h": _CPU / "arch" / "x86",
    "repack-tiles.h": _CPU,
    "repack-vector.h": _CPU / "arch" / "x86",
    "repack-wide.cpp": _CPU / "arch" / "x86",
    "repack-wide.h": _CPU,
    "unicode-regex.h": _LLAMA_CPP / "src",
}
"""File name of each kernel, and the folder of the source package that the kernel is copied to."""


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def patches(folder: Path = PATCH_FOLDER) -> list[Path]:
    """Returns the patches in the order of their numbers. They are applied in this order."""
    return sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))


def kernels(folder: Path = KERNEL_FOLDER) -> list[Path]:
    """Returns the source files that are copied into llama.cpp, sorted by name, without the checks in `tests/`."""
    return [folder / name for name in sorted(KERNELS)]


def build_files() -> list[Path]:
    """Returns all files in `PATCH_FOLDER` that a build of llama.cpp or of the sampler reads. A wheel contains these."""
    sampler = (path for path in sorted((PATCH_FOLDER / "sampler").iterdir()) if path.is_file())
    own_names = PATCH_FOLDER / "own_names.cmake"
    return [*patches(), *patches(UNCOUNTED_FOLDER), *kernels(), *sampler, own_names]


def header(patch: Path) -> str:
    """Returns the description of a patch: the text before the first changed file."""
    text = patch.read_text(encoding="utf-8")
    return re.split(r"^(?:diff |--- )", text, maxsplit=1, flags=re.MULTILINE)[0].strip()


def patched_tree(log: Path, folder: Path, python: str = sys.executable) -> Path:
    """Unpacks the source into `folder`, and adds kernels and patches. Returns the source's top folder. Raises
    SetupFailure."""
    tree = unpack(fetch(log, python), folder)
    copy_kernels(tree)
    for patch in (*patches(), *patches(UNCOUNTED_FOLDER)):
        apply(patch, tree)
    return tree


def copy_kernels(tree: Path) -> None:
    """Copies each kernel to its folder in `tree`. Raises SetupFailure if llama.cpp has a file of the same name."""
    for kernel in kernels():
        target = tree / KERNELS[kernel.name] / kernel.name
        if target.exists():
            raise SetupFailure(
                f"llama-cpp-python {VERSION} has a file {target.relative_to(tree)} of its own: "
                f"rename native_patches/kernels/{kernel.name}, or delete it if it has been merged."
            )
        shutil.copyfile(kernel, target)


def fetch(log: Path, python: str = sys.executable) -> Path:
    """Returns the verified source package: from LLAMABATCH_SOURCE, from the cache, or downloaded with `python`'s pip.
    Raises SetupFailure."""
    if named := os.environ.get(VARIABLE):
        return _named(Path(named))
    folder = make_folder(cache_dir() / "sources")
    package = folder / FILE_NAME
    if package.is_file() and sha256_of(package) == SHA256:
        return package
    say(f"  downloading the source of llama-cpp-python {VERSION} (77 MB)")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [
            python, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps",
            "--no-binary", "llama-cpp-python", "--dest", temporary, f"llama-cpp-python=={VERSION}",
        ]  # fmt: skip
        if run_logged(command, log, "downloading") != 0:
            reason = explain(log, "pip could not download it")
            raise SetupFailure(f"The source of llama-cpp-python {VERSION} cannot be downloaded: {reason} (log: {log}).")
        fetched = Path(temporary) / FILE_NAME
        found = sha256_of(fetched) if fetched.is_file() else "no such file"
        if found != SHA256:
            raise SetupFailure(
                f"{FILE_NAME} from the package index is not the file that llamabatch was made with "
                f"(sha256 {found}, expected {SHA256}): check which index pip uses, then run the set-up again."
            )
        os.replace(fetched, package)
    return package


def _named(package: Path) -> Path:
    if not package.is_file():
        raise SetupFailure(f"{VARIABLE} is {str(package)!r}, which is no file: correct it, or unset it.")
    found, wanted = sha256_of(package), os.environ.get(DIGEST_VARIABLE) or SHA256
    if found != wanted:
        raise SetupFailure(
            f"{VARIABLE} is {str(package)!r}, whose sha256 is {found}, not {wanted}: it is another file, or damaged; "
            f"{DIGEST_VARIABLE} names the digest of a package that was made from it."
        )
    return package


def unpack(package: Path, folder: Path) -> Path:
    """Unpacks a source package into `folder`. Returns the top folder of the source."""
    with tarfile.open(package) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:  # early releases of Python 3.10 and 3.11 lack filters, but the archive's hash has been verified
            archive.extractall(folder)
    return folder / FOLDER


def apply(patch: Path, source: Path) -> None:
    """Applies one patch completely or not at all. Raises SetupFailure with the patch's header if the patch does not
    fit."""
    before = {name: _digest_or_none(source / name) for name in _changed_files(patch)}
    command, environment = _patch_command(patch, source)
    result = subprocess.run(
        command, cwd=source, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    unchanged = [name for name, digest in before.items() if _digest_or_none(source / name) == digest]
    if result.returncode != 0 or unchanged or not before:
        complaint = " ".join((result.stderr or result.stdout).split())[:300]
        why = complaint or f"it left {', '.join(unchanged) or 'every file'} unchanged"
        raise SetupFailure(
            f"The patch {patch.name} does not apply to llama-cpp-python {VERSION} ({why}): adapt it, or delete it if "
            f"it has been merged. It says:\n\n{header(patch)}\n"
        )


def _changed_files(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _digest_or_none(path: Path) -> str | None:
    return sha256_of(path) if path.is_file() else None


def require_patch_tool() -> None:
    """Raises SetupFailure if no tool can apply patches. For use before the download."""
    if not shutil.which("git") and not shutil.which("patch"):
        raise SetupFailure(_NO_PATCH_TOOL)


def _patch_command(patch: Path, source: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the command and its environment: `git apply`, or `patch` if git is missing."""
    if git := shutil.which("git"):
        # `git apply` silently skips files if the source lies in a repository. So git must not look above the source.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return [git, "apply", "--whitespace=nowarn", str(patch)], {
            **kept,
            "GIT_CEILING_DIRECTORIES": str(source.resolve().parent),
        }
    if tool := shutil.which("patch"):
        return [tool, "--batch", "--forward", "--fuzz=0", "-p1", "-i", str(patch)], dict(os.environ)
    raise SetupFailure(_NO_PATCH_TOOL)
