"""Unpacks llama.cpp's server tests from the source package of our builds, and runs them."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamabatch.native_build import source
from llamabatch.native_build.tools import SetupFailure, cache_dir, make_folder, run_logged
from tests.server_peer.models import write_downloads, write_hub, write_models, write_pictures, write_presets

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-llama-server"
TIMEOUT_S = 120
"""Of one test; it starts its server anew."""

_LLAMA_CPP = "vendor/llama.cpp"
_TESTS = f"{_LLAMA_CPP}/tools/server/tests"
_COMMIT = ".git/modules/vendor/llama.cpp/HEAD"
_TAKEN = (
    *(f"{_TESTS}/", f"{_LLAMA_CPP}/tools/mtmd/test-1.jpeg", f"{_LLAMA_CPP}/models/templates/"),
    *(f"{_LLAMA_CPP}/models/ggml-vocab-bert-bge.gguf", _COMMIT),
)
_PACKAGES = ("filelock", "openai", "pytest", "requests", "wget")  # those of requirements.txt that the tests import

ASIDE = {
    "test_mcp_servers.py": "MCP",
    "test_proxy.py": "MCP: the proxy of its page",
    "test_router.py::test_router_delete_model": "a hub",
    "test_router.py::test_router_download_model": "a hub",
    "test_router.py::test_router_remote_preset": "a hub",
    "test_stream.py": "streams that are read again",
    "test_tools_builtin.py": "router: tools for files and shells, without a model",
    "test_security.py::test_cors_proxy_only_forwards_explicit_proxy_headers": "MCP: the proxy of its page",
}
"""Modules and tests that are not run, with the reason."""


@dataclass(frozen=True)
class Outcome:
    """The end of one test.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        why: the line that says what failed.
    """

    outcome: str
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Suite:
    """The unpacked tests.

    Attributes:
        folder: folder in which they run.
        python: an interpreter with the packages that they import.
        models: result of write_models().
        presets: result of write_presets().
        hub: result of write_hub().
        commit: commit of llama.cpp.
    """

    folder: Path
    python: Path
    models: Mapping[str, str]
    presets: Path
    hub: Path
    commit: str


def prepare(place: Path, say: Callable[[str], None]) -> Suite:
    """Unpacks tests and writes models below `place`. Installs the tests' packages if they are missing. Raises
    SetupFailure."""
    package = source.fetch(make_folder(cache_dir() / "logs") / "server-peer.log")
    with tarfile.open(package) as archive:
        top = f"{package.name.removesuffix('.tar.gz')}/"
        members = [each for each in archive if each.name.removeprefix(top).startswith(_TAKEN)]
        archive.extractall(place, members, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    tree = place / top
    folder = tree / _TESTS
    folder_of_models = make_folder(place / "models")
    models = write_models(folder_of_models, tree / _LLAMA_CPP / "models")
    write_downloads(folder / "tmp")
    write_pictures(folder)
    return Suite(
        folder,
        _python(folder / "requirements.txt", say),
        models,
        write_presets(folder_of_models / "router.ini", models),
        write_hub(place / "hub", models),
        (tree / _COMMIT).read_text(encoding="utf-8").strip(),
    )


def _python(requirements: Path, say: Callable[[str], None]) -> Path:
    """Returns the interpreter of VENV. Makes VENV if it is missing or has other packages."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line.startswith(_PACKAGES) and not line.startswith("pytest-")]
    packages = [*wanted, "pytest-timeout"]
    python, stamp = VENV / "bin" / "python", VENV / "packages.txt"
    text = "\n".join([sys.version, *packages])
    if python.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == text:
        return python
    say(f"Installing {', '.join(packages)} into {VENV.name}")
    log = make_folder(cache_dir() / "logs") / "server-peer.log"
    commands: tuple[list[str | Path], ...] = (
        [sys.executable, "-m", "venv", "--clear", VENV],
        [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *packages],
    )
    for command in commands:
        if run_logged(command, log, "installing the packages of llama.cpp's tests") != 0:
            raise SetupFailure(f"The packages of llama.cpp's server tests could not be installed (log: {log}).")
    stamp.write_text(text, encoding="utf-8")
    return python


def run(
    suite: Suite, server: Sequence[str], environment: Mapping[str, str], ids: Sequence[str] | None, log: Path,
    tell: Callable[[str, Outcome], None] = lambda name, outcome: None,
) -> dict[str, Outcome]:  # fmt: skip
    """Runs tests against a server, and returns the outcome of each.

    Args:
        server: the command of the server, which accepts llama-server's options.
        environment: variables for the server, in addition to those of this process.
        ids: the tests, as "module.py::name"; None: all except those of ASIDE and those marked as slow.
        log: file to which the tests' output is added.
        tell: called with each outcome when it comes.
    """
    table, outcomes = suite.folder / "peer.json", suite.folder / "outcomes.jsonl"
    table.write_text(
        json.dumps(
            {
                "command": list(server),
                "environment": {"HF_HUB_CACHE": str(suite.hub), "HF_HUB_OFFLINE": "1", **environment},
                "models": dict(suite.models),
                "presets": str(suite.presets),
            }
        ),
        encoding="utf-8",
    )
    outcomes.write_bytes(b"")
    program = suite.folder / "llama-server"
    command = shlex.join([sys.executable, str(HERE / "llama_server.py")])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    chosen = [f"unit/{each}" for each in ids] if ids is not None else ["unit", "-m", "not slow"]
    aside = [f"--deselect=unit/{name}" for name in ASIDE] if ids is None else []
    begun = [
        str(suite.python), "-m", "pytest", "-p", "plugin", "-q", "--color=no", f"--timeout={TIMEOUT_S}",
        *aside, *chosen,
    ]  # fmt: skip
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "PYTEST_"))} | {
        "LLAMA_SERVER_BIN_PATH": str(program),
        "LLAMABATCH_PEER": str(table),
        "LLAMABATCH_PEER_OUTCOMES": str(outcomes),
        "PYTHONPATH": str(HERE),
        "PORT": str(_free_port()),
    }
    found: dict[str, Outcome] = {}
    with open(log, "ab") as output, open(outcomes, encoding="utf-8") as lines:
        process = subprocess.Popen(
            begun, cwd=suite.folder, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            ended = False
            while not ended:
                try:
                    process.wait(timeout=0.5)
                    ended = True
                except subprocess.TimeoutExpired:
                    pass
                for line in lines:
                    fields = json.loads(line)
                    name = str(fields.pop("id"))
                    found[name] = Outcome(**fields)
                    tell(name, found[name])
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode not in (0, 1):  # 1: some tests failed
        raise SetupFailure(f"pytest ended with status {process.returncode} (log: {log}).")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
