"""The tests in which time matters, with slow steps and with instant ones: both at once, as they mostly wait."""

import os
import subprocess
import sys

from tests.paced import SPEED

COMMAND = [sys.executable, "-m", "pytest", "-m", "timed", "-p", "no:cacheprovider", "-q", "--durations", "5"]


def main(arguments: list[str]) -> int:
    started = {
        speed: subprocess.Popen(
            [*COMMAND, *(arguments or ["tests/model"])], env={**os.environ, SPEED: speed}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for speed in ("slow", "instant")
    }  # fmt: skip
    for speed, process in started.items():
        print(f"--- {speed} steps\n{process.communicate()[0]}", flush=True)
    return max(process.returncode != 0 for process in started.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
