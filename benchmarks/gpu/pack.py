"""`make gpu-pack`: one file with all that a machine with a GPU and without a network needs for `make gpu-check`.

python -m benchmarks.gpu.pack [--python 3.11,3.12] [--out FILE]

The bundle contains this revision, the source package of llama-cpp-python without the files that our builds never read,
and for each Python the wheels that the check needs. If 60 MiB allow, wheels of matplotlib for the picture and of cmake
follow.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.places import ROOT, log_folder
from llamabatch.native_build import source
from llamabatch.native_build.tools import SetupFailure, explain, main_guard, make_folder, run_logged, say

MOST_BYTES = 60 * 2**20
FOLDER = "gpu-check"
"""The top folder of the bundle."""
MANIFEST = "pack.json"
START = "start.py"
NEEDED = (
    "pip", "numpy>=1.24", "click>=8.1", "psutil>=5.9", "jinja2>=3.1.6", "msgpack>=1.0.7", "llguidance>=1.9,<2",
    "platformdirs>=4.0", "rich>=13.7", "diskcache", "typing_extensions", "gguf>=0.17", "pytest>=8.0",
    "pytest-timeout>=2.3", "hypothesis>=6.100", "nvidia-ml-py>=12",
)  # fmt: skip
WISHED = (("matplotlib>=3.8",), ("cmake>=3.21", "ninja"))
"""Packages to add with their dependencies, the most useful first, as long as the bundle is not too large."""

_LLAMA = "vendor/llama.cpp/"
_KEPT = (
    *("CMakeLists.txt", "LICENSE.md", "README.md", "pyproject.toml", "llama_cpp/", _LLAMA),
    *(".git/HEAD", ".git/modules/vendor/llama.cpp/HEAD"),
)
_DROPPED = (
    *("models/", "docs/", "media/", "benches/", "examples/", "tests/", "gguf-py/", "conversion/", ".github/"),
    *(".devops/", "pocs/", "ci/", "grammars/", "app/", "skills/", "requirements/", "tools/ui/src/"),
    *("tools/ui/static/", "tools/ui/tests/", "tools/ui/package-lock.json"),
    *(
        f"ggml/src/ggml-{name}/"
        for name in (
            *("cann", "et", "hexagon", "hip", "metal", "musa", "opencl", "openvino", "sycl", "virtgpu", "vulkan"),
            *("webgpu", "zdnn", "zendnn"),
        )
    ),
)
_OLDEST_GLIBC, _NEWEST_GLIBC = 5, 39


def is_kept(name: str) -> bool:
    """Returns True for a file of the source package that a build for CUDA, RPC or a CPU may read.

    Args:
        name: path of the file below the top folder.
    """
    if name.startswith(_LLAMA):
        return not name.removeprefix(_LLAMA).startswith(_DROPPED)
    return name.startswith(_KEPT)


def trim(package: Path, target: Path) -> None:
    """Copies the source package to `target`, without the files that `is_kept` rejects."""
    with tarfile.open(package) as whole, tarfile.open(target, "w:xz") as small:
        for member in whole:
            if member.isfile() and is_kept(member.name.partition("/")[2]):
                small.addfile(member, whole.extractfile(member))


def platforms() -> list[str]:
    """Returns the tags of wheels for Linux on this kind of processor, the newest glibc first."""
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{machine}", f"manylinux1_{machine}"]


def download(packages: Sequence[str], version: str, folder: Path, log: Path) -> None:
    """Downloads wheels of packages and of their dependencies, for a Python on Linux. Raises SetupFailure."""
    tags = [part for tag in platforms() for part in ("--platform", tag)]
    command: list[str | Path] = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", version, *tags, "--dest", folder, *packages,
    ]  # fmt: skip
    if run_logged(command, log, f"downloading wheels for Python {version}") != 0:
        reason = explain(log, "pip could not download them")
        raise SetupFailure(f"Wheels of {', '.join(packages)} for Python {version} are not to be had: {reason} ({log}).")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def add_wished(
    wished: Iterable[Sequence[str]], versions: Sequence[str], folder: Path, room: int, log: Path
) -> tuple[dict[str, list[str]], list[str]]:
    """Adds wheels as long as there is room.

    Args:
        room: bytes that the wheels may take.

    Returns:
        The added packages by version of Python, and a description of each group that was left out.
    """
    added: dict[str, list[str]] = {version: [] for version in versions}
    left_out: list[str] = []
    for packages in wished:
        for version in versions:
            name = f"{', '.join(packages)} for Python {version}"
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                place = Path(temporary)
                try:
                    download(packages, version, place, log)
                except SetupFailure as failure:
                    say(f"  left out: {failure}")
                    left_out.append(name)
                    continue
                new = [path for path in sorted(place.iterdir()) if not (folder / path.name).exists()]
                size = sum(path.stat().st_size for path in new)
                if size > room:
                    left_out.append(f"{name} ({size / 2**20:.0f} MiB)")
                    continue
                for path in new:
                    os.replace(path, folder / path.name)
                room -= size
                added[version] += packages
    return added, left_out


def revision(folder: Path) -> str:
    """Writes the files of HEAD to `folder`, without uncommitted changes; returns the commit. Raises SetupFailure."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    made = subprocess.run(["git", "archive", "--format=tar", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    if found.returncode != 0 or made.returncode != 0:
        raise SetupFailure("The bundle holds a commit of this checkout, and git finds none here: run it in a clone.")
    archive = folder.with_suffix(".tar")
    archive.write_bytes(made.stdout)
    with tarfile.open(archive) as files:
        if hasattr(tarfile, "data_filter"):
            files.extractall(folder, filter="data")
        else:
            files.extractall(folder)
    archive.unlink()
    return found.stdout.strip()


def make(versions: Sequence[str], out: Path, most: int = MOST_BYTES) -> dict[str, object]:
    """Writes the bundle; returns its manifest. Raises SetupFailure."""
    log = log_folder() / "gpu-pack.log"
    log.write_bytes(b"")
    make_folder(out.parent)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix="gpu-pack-") as temporary:
        top = make_folder(Path(temporary) / FOLDER)
        wheels, sources = make_folder(top / "wheels"), make_folder(top / "sources")
        commit = revision(top / "project")
        start = top / "project" / "benchmarks" / "gpu" / START
        (top / FOLDER).write_bytes(start.read_bytes())
        (top / FOLDER).chmod(0o755)
        archive = sources / source.FILE_NAME.replace(".tar.gz", ".tar.xz")
        trim(source.fetch(log), archive)
        for version in versions:
            download(NEEDED, version, wheels, log)
        packed = Path(temporary) / "project.tar.xz"
        with tarfile.open(packed, "w:xz") as file:
            file.add(top / "project", "project")
        room = most - packed.stat().st_size - size_of(wheels) - size_of(sources) - 2**19
        added, left_out = add_wished(WISHED, versions, wheels, room, log)
        manifest: dict[str, object] = {
            "commit": commit,
            "llama_cpp_python": source.VERSION,
            "source_sha256": source.sha256_of(archive),
            "pythons": list(versions),
            "requirements": {version: [*NEEDED, *added[version]] for version in versions},
            "left_out": left_out,
            "wheels": {path.name: source.sha256_of(path) for path in sorted(wheels.iterdir())},
        }
        (top / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        made = Path(temporary) / out.name
        with tarfile.open(made, "w:xz", preset=0) as file:  # preset=0: wheels are compressed already
            file.add(top, FOLDER)
        size = made.stat().st_size
        if size > most:
            raise SetupFailure(
                f"The bundle has {size / 2**20:.1f} MiB; at most {most / 2**20:.0f} are allowed: name fewer versions "
                f"with --python (now {', '.join(versions)})."
            )
        os.replace(made, out)
    return manifest


def main() -> None:
    here = f"3.{sys.version_info.minor}"
    default = ",".join(dict.fromkeys((here, "3.11", "3.12")))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", default=default, help=f"versions on the machine with the GPU (default: {default})")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check.tar.xz", help="the file to write")
    options = parser.parse_args()
    versions = [part.strip() for part in options.python.split(",") if part.strip()]
    manifest = make(versions, options.out.absolute())
    size = options.out.stat().st_size / 2**20
    digest = hashlib.sha256(options.out.read_bytes()).hexdigest()
    say(f"{options.out}: {size:.1f} MiB, sha256 {digest}")
    left_out = manifest["left_out"]
    assert isinstance(left_out, list)
    if left_out:
        say(f"Left out: {'; '.join(left_out)}")
    say(f"There: tar xJf {options.out.name} && cd {FOLDER} && ./{FOLDER}, again until nothing is left")


if __name__ == "__main__":
    sys.exit(main_guard(main))
