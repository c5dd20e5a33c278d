"""`make test-server`: makes the environment of the clients if it is missing, and runs tests/server in it.

python -m tests.server [arguments of pytest]
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
CLIENTS = "LLAMABATCH_TEST_CLIENTS"
"""Set in the environment of the clients; without it the tests of this folder are not collected."""

# Other people's packages warn, so warnings are no errors. langchain-tests has tests that are coroutines.
SETTINGS = (
    "-o",
    "filterwarnings=default",
    "-o",
    "timeout=3600",  # ten thousand cases of schemathesis are one test
    "-o",
    "asyncio_mode=auto",
    "-o",
    "asyncio_default_fixture_loop_scope=function",
)


def main() -> int:
    python = environment()
    named = {CLIENTS: "1", "PYTHONPATH": str(ROOT), "LLAMABATCH_SERVER_PYTHON": sys.executable}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *SETTINGS]
    with tempfile.TemporaryDirectory(prefix="llamabatch-clients-") as folder:
        rooted = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        return subprocess.call([*command, *rooted, *arguments("server")], cwd=folder, env=os.environ | named)


def arguments(folder: str) -> list[str]:
    """Returns the arguments of pytest: those of this program, with absolute paths. If they name no tests, adds the
    folder of tests."""
    given = sys.argv[1:]
    paths = {each: str((ROOT / each).resolve()) for each in given if (ROOT / each.split("::")[0]).exists()}
    return [*(paths.get(each, each) for each in given), *([] if paths else [str(ROOT / "tests" / folder)])]


def environment(requirements: Path = REQUIREMENTS, name: str = "test-server") -> Path:
    """Returns the Python of an environment with these requirements. It also sees the packages of this environment, but
    prefers its own.

    Args:
        name: name of its folder in build/.
    """
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = ROOT / "build" / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marker = folder / "made"
    if marker.exists() and marker.read_text() == digest:
        return python
    print(f"{name}: {requirements.name} is installed into {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "--requirement", str(requirements)], check=True)
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([str(python), "-c", purelib], check=True, capture_output=True, text=True).stdout.strip()
    Path(found, "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    marker.write_text(digest)
    return python


if __name__ == "__main__":
    sys.exit(main())
