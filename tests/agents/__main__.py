"""`make test-agents`: installs the programs of docs/agents.md into build/, and runs tests/agents without a network.

python -m tests.agents [arguments of pytest]

The tests, the server and the programs run in a network namespace that has loopback alone. A program that connects to
anything but the server therefore fails. If LLAMABATCH_AGENTS_JSON names a file, the figures are written to it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.browser.__main__ import browser
from tests.server.__main__ import ROOT, arguments

HERE = Path(__file__).parent
INSTALLED = ROOT / "build" / "test-agents"
AGENTS = "LLAMABATCH_TEST_AGENTS"
"""The folder of the programs; set in the environment of the tests, without which those of this folder are not
collected."""
FROM_PYPI = ("aider", "llm")
OPEN_WEBUI = "open_webui"
APART = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def main() -> int:
    missing = [program for program in ("npm", "unshare", "ip") if shutil.which(program) is None]
    if missing or subprocess.call([*APART, "true"]) != 0:
        why = f"there is no {' and no '.join(missing)}" if missing else "the system allows no network namespace"
        print(f"test-agents: skipped, as {why}", file=sys.stderr)
        return 0
    install()
    named = {AGENTS: str(INSTALLED), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=900"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    with tempfile.TemporaryDirectory(prefix="llamabatch-agents-") as folder:
        command += ["--basetemp", f"{folder}/tests"]
        return subprocess.call([*APART, *command, *arguments("agents")], cwd=folder, env=os.environ | named)


def install() -> None:
    """Installs each program whose version is not installed yet."""
    package = HERE / "package.json"
    if _is_new("npm", package):
        folder = INSTALLED / "npm"
        folder.mkdir(parents=True)
        shutil.copy(package, folder)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"], cwd=folder, check=True)
        _made("npm", package)
    for name in (*FROM_PYPI, *((OPEN_WEBUI,) if without_open_webui() is None else ())):
        requirements = HERE / f"{name}.txt"
        if _is_new(name, requirements):
            venv.create(INSTALLED / name, with_pip=True)
            pip = [str(INSTALLED / name / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
            subprocess.run([*pip, "--quiet", "--requirement", str(requirements)], check=True)
            _made(name, requirements)


def without_open_webui() -> str | None:
    """Returns the reason why Open WebUI cannot run here; None if it can."""
    if not (3, 11) <= sys.version_info < (3, 13):
        return "Open WebUI needs Python 3.11 or 3.12"
    return None if browser() else "there is no Chromium for the page of Open WebUI"


def _is_new(name: str, versions: Path) -> bool:
    """Returns True if the folder of a program was not made from this file of versions, and then removes the folder."""
    made = INSTALLED / name / "made"
    if made.exists() and made.read_text() == _digest(versions):
        return False
    print(f"test-agents: {versions.name} is installed into {INSTALLED / name}", file=sys.stderr)
    shutil.rmtree(INSTALLED / name, ignore_errors=True)
    return True


def _made(name: str, versions: Path) -> None:
    (INSTALLED / name / "made").write_text(_digest(versions))


def _digest(versions: Path) -> str:
    return hashlib.sha256(versions.read_bytes() + sys.version.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
