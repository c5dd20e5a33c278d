"""`make test-devices`: tests engines on simulated devices, then runs tests of the model on two such devices.

python -m tests.devices [arguments of pytest for the tests of the model]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llamabatch.native_build.tools import SetupFailure
from tests.devices.conftest import WHOLE, devices

ROOT = Path(__file__).parents[2]
ON_TWO = tuple(f"test_{name}.py" for name in ("media", "equality", "prefix_cache", "draft_model", "overrides", "stops"))


def main() -> int:
    matrix = pytest([str(ROOT / "tests" / "devices")], {WHOLE: "1"})
    try:
        with devices(2) as environment:
            print("on two devices:", flush=True)
            chosen = sys.argv[1:] or [str(ROOT / "tests" / "model" / name) for name in ON_TWO]
            return matrix or pytest(chosen, environment)
    except SetupFailure as error:
        print(f"no devices: {error}", file=sys.stderr)
        return 1


def pytest(arguments: list[str], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.call(command, cwd=ROOT, env=os.environ | environment)


if __name__ == "__main__":
    raise SystemExit(main())
