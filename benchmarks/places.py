"""Makes the files of a benchmark once, and again if stale: models, and the peers' environment and programs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import stock
from benchmarks.llama_programs import PROGRAMS, folder, programs
from benchmarks.peers.base import Model
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library
from llamabatch.llama.model import Model as LoadedModel
from llamabatch.native_build import machine, source
from llamabatch.native_build.tools import SetupFailure, lock, make_folder, run_logged
from llamabatch.planning import binding_choice
from llamabatch.tools import synth
from llamabatch.utils.paths import cache_dir

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-bench"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"
SHAPE, QUANT = "qwen2.5-0.5b", "Q8_0"
LARGER = ("Q4_K_M", "llama-3.2-1b")
HYBRID, WINDOW = ("Q8_0", "qwen3.5-0.8b"), ("Q8_0", "gemma-3-270m")
_SERVER = "examples/server/server.py"

Say = Callable[[str], None]


def log_folder() -> Path:
    return make_folder(cache_dir() / "logs" / "bench")


def synth_model(say: Say, quant: str = QUANT, shape: str = SHAPE) -> Path:
    """Returns the model with random weights, from the cache or written now."""
    folder = make_folder(cache_dir() / "models")
    path = folder / f"{shape}-{quant}-seed0.gguf"
    with lock(folder / "lock"):
        if not path.is_file():
            say(f"Writing {path.name}, once")
            synth.write_model(synth.find_shape(shape), path, quant)
    return path


def describe_model(path: Path) -> Model:
    """Returns the model of a file, with the size of its vocabulary and the tokens that end a generation."""
    loaded = LoadedModel(path)
    try:
        eog = tuple(token for token in range(loaded.n_vocab) if loaded.is_eog(token))
        return Model(path, loaded.n_vocab, eog)
    finally:
        loaded.close()


def models(names: set[str], say: Say) -> dict[str, Model]:
    """The models that workloads name: "synth", "synth 1B", "synth hybrid", "synth window" and "tiny"."""
    paths = {
        "synth": lambda: synth_model(say),
        "synth 1B": lambda: synth_model(say, *LARGER),
        "synth hybrid": lambda: synth_model(say, *HYBRID),
        "synth window": lambda: synth_model(say, *WINDOW),
        "tiny": lambda: resolve("tiny"),
    }
    return {name: describe_model(paths[name]()) for name in sorted(names)}


def installed_build() -> str:
    """Returns the build key of the installed llama-cpp-python. Ours and its peers run on that build.

    Raises:
        SetupFailure: native_patches did not build it, or ours would run on another build.
    """
    info = library.library_info()
    installed = binding_choice.installed(binding_choice.FOREIGN)
    if installed is None:
        raise SetupFailure("the peers need an installed llama-cpp-python: run make setup")
    if info.choice.build.folder.resolve() != installed.resolve():
        raise SetupFailure(
            f"llamabatch runs on {info.choice.build.describe()}, and its peers on the installed llama-cpp-python: set "
            f"{binding_choice.VARIABLE}={installed} in the environment"
        )
    marker = info.marker
    if marker is None:
        raise SetupFailure("the installed llama-cpp-python is not the one that native_patches builds: run make setup")
    return str(marker["key"])


def built_programs(say: Say) -> Path | None:
    """Returns the folder of llama-server and llama-batched-bench of the installed build.

    Without such programs the function prints the reason and returns None.
    """
    try:
        return _programs()
    except SetupFailure as failure:
        say(f"llama-server, patched and the limit are left out: {failure}")
        return None


def stock_programs(say: Say) -> Path | None:
    """Returns the folder of llama-server and llama-batched-bench without our patches, with this checkout's flags.

    If they cannot be built, the function prints the reason and returns None.
    """
    try:
        return stock.stock_programs(machine.make_plan("auto"))
    except SetupFailure as failure:
        say(f"llama-server, stock is left out: {failure}")
        return None


def _programs() -> Path:
    """Returns the programs of the installed build; with others the peers would not run the same library as ours."""
    installed, plan = installed_build(), machine.make_plan("auto")
    if installed == plan.key:
        return programs(plan)
    if all((folder(installed) / name).is_file() for name in PROGRAMS):
        return folder(installed)
    raise SetupFailure(f"the installed build is {installed}, the sources now make {plan.key}: run make setup")


def bench_python(say: Say) -> Path | None:
    """Returns the interpreter of .venv-bench, which is made now if it is missing or stale.

    If it cannot be made, the function prints the reason and returns None.
    """
    try:
        return _bench_python(say)
    except SetupFailure as failure:
        say(f"xllamacpp and llama-cpp-python's server are left out: {failure}")
        return None


def _bench_python(say: Say) -> Path:
    wheel = next((cache_dir() / "wheels" / installed_build()).glob("*.whl"), None)
    if wheel is None:
        raise SetupFailure("the wheel of the installed build is not in the cache any more: run make setup")
    python, stamp = VENV / "bin" / "python", VENV / "llamabatch-bench.txt"
    wanted = f"{wheel.name}\n{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()}\n"
    if python.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say("Installing the peers into .venv-bench")
    log = log_folder() / "venv.log"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    commands: tuple[list[str | Path], ...] = (
        [sys.executable, "-m", "venv", "--clear", VENV],
        [*pip, "-r", REQUIREMENTS],
        [*pip, "--no-deps", "--force-reinstall", wheel],
    )
    for command in commands:
        if run_logged(command, log, "installing the peers") != 0:
            raise SetupFailure(f"their packages could not be installed (log: {log})")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def lcp_server(say: Say) -> Path | None:
    """Returns examples/server/server.py from the source package of llama-cpp-python.

    If the package cannot be fetched, the function prints the reason and returns None.
    """
    target = make_folder(cache_dir() / "bench") / f"server-{source.VERSION}.py"
    if target.is_file():
        return target
    try:
        package = source.fetch(log_folder() / "source.log")
    except SetupFailure as failure:
        say(f"llama-cpp-python's server is left out: {failure}")
        return None
    with tarfile.open(package) as archive:
        member = archive.extractfile(f"{package.name.removesuffix('.tar.gz')}/{_SERVER}")
        assert member is not None
        target.write_bytes(member.read())
    return target


def peer_versions(python: Path | None) -> dict[str, str]:
    """Returns the versions of the packages in .venv-bench."""
    if python is None:
        return {}
    code = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    pairs = (line.split("==", 1) for line in done.stdout.splitlines() if "==" in line)
    return dict(sorted((name, version) for name, version in pairs))
