"""The marker `slow`: tests that slow.txt names run only in `make test-all`.

A line has the measured seconds and the name of a test. A name without brackets means all cases of a function.
`make test-seconds` writes the file. The marker `guard` is for the only test of a promise: it runs in the gate even if
it is slow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("slow.txt")
SLOW_S = 0.5  # a test that takes longer is written into the file
LIMIT_S = 1.0  # a test that takes longer and is not in the file fails `make test-all`
YARDSTICK_S = 0.0087  # result of `yardstick_s` on the machine where the seconds of the file were measured


@cache
def slow() -> frozenset[str]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split(" ", 1)[1] for line in lines if line and not line.startswith("#"))


def function_of(nodeid: str) -> str:
    """Returns the name of a test without the case in brackets."""
    return nodeid.partition("[")[0]


def is_slow(nodeid: str) -> bool:
    return nodeid in slow() or function_of(nodeid) in slow()


def mark(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("guard") is None and is_slow(item.nodeid):
            item.add_marker("slow")


def yardstick_s() -> float:
    """Returns the seconds that a fixed amount of work takes on this machine: the shortest of several runs."""
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        sum(number * number % 7 for number in range(200_000))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
