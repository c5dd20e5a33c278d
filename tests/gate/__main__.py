"""Runs the gate's tests, for `make test`. Arguments are options of pytest."""

import sys

from tests.gate.run import run_marked

if __name__ == "__main__":
    sys.exit(run_marked("not slow", options=["-p", "tests.gate.unsteady", *sys.argv[1:]]))
