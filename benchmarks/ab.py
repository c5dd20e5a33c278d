"""Compares the speed of this working tree with that of another revision: `make bench-ab REF=HEAD~3`.

    python -m benchmarks.ab REF [--pairs N] [--workload NAME]... [--json FILE]

The program unpacks the other revision into the user's cache and runs it there. If both revisions need the same build
of llama.cpp, the other one runs in this environment, otherwise in an environment of its own. Both engines are loaded at
once and run the same requests in turn; each pair of runs gives a ratio of tokens/s. The program prints the median ratio
of this revision over the other and its 95 % bootstrap interval.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import click

from benchmarks import places
from benchmarks.pairs import Side, compare, options
from benchmarks.process import PeerFailure, environment
from llamabatch.native_build.tools import make_folder, run_logged
from llamabatch.utils.paths import cache_dir

COMPARED = ("burst", "ragged", "tiny", "burst, hybrid", "one request, hybrid")


def unpack(reference: str) -> tuple[str, Path]:
    """Returns the short hash of the commit that REF names, and the folder of its files in the cache.

    Raises PeerFailure if there is no such commit.
    """
    asked = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}"],
        cwd=places.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    commit = asked.stdout.strip()
    if asked.returncode != 0:
        raise PeerFailure(f"{reference!r} is no commit of this repository")
    folder = make_folder(cache_dir() / "ab") / commit[:12]
    if not folder.is_dir():
        done = subprocess.run(["git", "archive", commit], cwd=places.ROOT, capture_output=True, check=True)
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(part)  # safe, since the archive is our own commit
        os.replace(part, folder)
    return commit[:12], folder


_SAMPLER = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
try:
    from llamabatch.native_build import sampler_library as sampler
except ImportError:  # a revision with native_patches within the package
    from llamabatch.native_patches import helper as sampler
path = folder / "llamabatch" / "sampling" / sampler.LIBRARY
sys.exit(None if path.is_file() else sampler.compile_library(path) or None)
"""


def compile_sampler(folder: Path, log: Path) -> None:
    """Compiles the sampler of an unpacked revision; without it that revision samples with numpy. Raises PeerFailure."""
    if run_logged([sys.executable, "-c", _SAMPLER, folder], log, "compiling its sampler") != 0:
        raise PeerFailure(f"the sampler of the other revision could not be compiled (log: {log})")


def interpreter(folder: Path, log: Path) -> Path:
    """Returns the Python that runs the other revision: this one if both need the same wheel.

    Otherwise it is the Python of an environment with the other revision's wheel, which is made once.
    """
    older = (folder / "llamabatch" / "native_patches").is_dir()  # before native_patches moved to the top folder
    builder = ("llamabatch.native_patches.build", "--print-wheel") if older else ("native_patches.local_wheel",)
    asked = subprocess.run(
        [sys.executable, "-m", *builder], cwd=folder, stdout=subprocess.PIPE, text=True,
        check=False, env=environment(os.environ),
    )  # fmt: skip
    if asked.returncode != 0:
        raise PeerFailure(f"its build of llama.cpp could not be made (folder: {folder})")
    wheel = Path(asked.stdout.strip())
    if wheel.parent.name == places.installed_build():
        return Path(sys.executable)
    venv = folder / ".venv"
    python = venv / "bin" / "python"
    if not (venv / "ready").is_file():
        pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        commands: tuple[list[str | Path], ...] = (
            [sys.executable, "-m", "venv", "--clear", venv],
            [*pip, wheel],
            [*pip, "--editable", folder],
        )
        for command in commands:
            if run_logged(command, log, "installing the other revision") != 0:
                raise PeerFailure(f"the other revision could not be installed (log: {log})")
        (venv / "ready").touch()
    return python


def sides(reference: str) -> tuple[Side, Side]:
    """Returns this working tree and the other revision as sides. Raises PeerFailure, SetupFailure."""
    commit, folder = unpack(reference)
    log = places.log_folder() / "ab.log"
    compile_sampler(folder, log)
    return Side("this", places.ROOT, Path(sys.executable)), Side(commit, folder, interpreter(folder, log))


@click.command()
@click.argument("reference", metavar="REF")
@options
def main(reference: str, **given: Any) -> None:
    """Measure this working tree and the revision REF, alternating."""
    compare(lambda: sides(reference), COMPARED, "python -m benchmarks.ab", **given)


if __name__ == "__main__":
    main()
