"""`make test-real`: tests a newcomer's first steps with trained models, then measures each type of weights against F32.

python -m tests.real [arguments of pytest; with them, only pytest runs]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import trained
from llamabatch.native_build.tools import main_guard

NAMED = "LLAMABATCH_TEST_REAL"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KILOBYTES = {"smollm2": "50", "gemma3": "48"}  # for benchmarks.closeness; a row of Gemma's logits is a megabyte


def main() -> None:
    environment = {**os.environ, NAMED: str(trained.folder())}
    for name in trained.MODELS:
        trained.model(name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[1:] or [str(HERE)])]
    status = subprocess.call(command, cwd=ROOT, env=environment)
    for name, size in KILOBYTES.items() if not sys.argv[1:] else ():
        print(f"\n{name}:", flush=True)
        program = [sys.executable, "-m", "benchmarks.closeness", name, "--kilobytes", size]
        status = subprocess.call([*program, "--json", f"build/closeness-{name}.json"], cwd=ROOT) or status
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(main_guard(main))
