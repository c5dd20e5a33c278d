"""`make test-browser`: makes the environment if it is missing, and runs tests/browser in it.

python -m tests.browser [arguments of pytest]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.__main__ import ROOT, arguments, environment

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
BROWSER = "LLAMABATCH_TEST_BROWSER"
"""Path of the browser; set in the environment of the tests, without which those of this folder are not collected."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser() -> str | None:
    """Returns the path of the browser; None if there is none."""
    return os.environ.get(BROWSER) or next(filter(None, map(shutil.which, PROGRAMS)), None)


def main() -> int:
    program = browser()
    if program is None:
        print(f"test-browser: skipped, as there is none of {', '.join(PROGRAMS)}; {BROWSER} names one", file=sys.stderr)
        return 0
    python = environment(REQUIREMENTS, "test-browser")
    named = {BROWSER: program, "PYTHONPATH": str(ROOT), "LLAMABATCH_SERVER_PYTHON": sys.executable}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    with tempfile.TemporaryDirectory(prefix="llamabatch-browser-") as folder:
        return subprocess.call([*command, *arguments("browser")], cwd=folder, env=os.environ | named)


if __name__ == "__main__":
    sys.exit(main())
