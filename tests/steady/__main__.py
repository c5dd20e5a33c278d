"""`make test-steady`: runs the gate's tests under unusual timing, in a random order of files, without reruns.

ARGS="half slow" chooses conditions, ARGS="busy tests/model/test_stops.py" also tests, ARGS="--seed 7" an order.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.gate.run import NO_TESTS, TESTS, WORKERS, run_marked
from tests.paced import SPEED


@dataclass(frozen=True)
class Condition:
    """A kind of timing that differs from that of a quiet machine.

    Attributes:
        about: description for people.
        one_core: everything runs on one core.
        busy: another process keeps each used core busy.
        steps: "slow" or "instant" steps of engines; None: normal steps.
        workers: number of workers; 0: one for each core. There can be more with slow steps, which sleep.
        marked: expression of markers that chooses the gate's tests.
    """

    about: str
    one_core: bool = False
    busy: bool = False
    steps: str | None = None
    workers: int = 0
    marked: str = "not slow"


CONDITIONS = {
    "busy": Condition("a busy process on each core", busy=True),
    "half": Condition("half of one core", one_core=True, busy=True),
    "slow": Condition("steps 20 times as long", steps="slow", workers=8),
    "instant": Condition("steps that compute nothing, where time matters", steps="instant", marked="timed"),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-steady")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CONDITIONS)}, or a file of tests")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="of the order of files")
    asked = parser.parse_intermixed_args(arguments)
    if not hasattr(os, "sched_setaffinity"):
        parser.error("it gives cores to processes, which only Linux can")
    files = [name for name in asked.names if name not in CONDITIONS]
    names = [name for name in asked.names if name in CONDITIONS] or list(CONDITIONS)
    codes = {}
    for name in names:
        print(f"--- {name}: {CONDITIONS[name].about}; --seed {asked.seed}", flush=True)
        began = time.monotonic()
        codes[name] = _run(CONDITIONS[name], files or TESTS, asked.seed)
        outcome = {0: "passed", NO_TESTS: "has none of these tests"}.get(codes[name], "failed")
        print(f"--- {name}: {outcome} in {time.monotonic() - began:.0f} s", flush=True)
    return max(codes.values(), key=lambda code: code if code != NO_TESTS else -1)


def _run(condition: Condition, tests: Sequence[str], seed: int) -> int:
    """Runs tests under a condition, and returns the exit code of pytest."""
    cores = sorted(os.sched_getaffinity(0))[: 1 if condition.one_core else None]
    options = ["-p", "tests.steady.order", "--order", str(seed)]
    workers = [*WORKERS[:-1], str(condition.workers)] if condition.workers else WORKERS
    environment = os.environ | ({SPEED: condition.steps} if condition.steps else {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on(cores))
        for core in cores if condition.busy else ():
            stack.enter_context(_busy(core))
        return run_marked(condition.marked, tests, options, workers, environment)


@contextlib.contextmanager
def _on(cores: list[int]) -> Iterator[None]:
    """Restricts this process, and those that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _busy(core: int) -> Iterator[None]:
    """Runs a process that keeps a core busy. Linux divides a core among sessions first, so the process has a session of
    its own, and gets half of the core."""
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}: pass"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
