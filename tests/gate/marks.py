"""The marker `slow`: the tests that slow.txt names, which wait for `make test-all`.

A line has the measured seconds and the name of a test; a name without brackets stands for all cases of a function.
`make test-seconds` writes the file. A test of the marker `guard` alone guards a promise: it runs in the gate although
it is slow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("slow.txt")
SLOW_S = 0.5  # what takes longer is written into the file
LIMIT_S = 1.0  # what takes longer and is not in the file fails `make test-all`
YARDSTICK_S = 0.0087  # what `yardstick_s` is on the machine for which these seconds are


@cache
def slow() -> frozenset[str]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split(" ", 1)[1] for line in lines if line and not line.startswith("#"))


def function_of(nodeid: str) -> str:
    """The name of a test without the case in brackets."""
    return nodeid.partition("[")[0]


def is_slow(nodeid: str) -> bool:
    return nodeid in slow() or function_of(nodeid) in slow()


def mark(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("guard") is None and is_slow(item.nodeid):
            item.add_marker("slow")


def yardstick_s() -> float:
    """Seconds of the same work on any machine: the shortest of several."""
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        sum(number * number % 7 for number in range(200_000))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
