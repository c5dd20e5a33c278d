"""A worker of pytest-xdist has a core of its own, and so have the engines and programs of its tests.

`-p tests.gate.workers -n auto --dist loadfile`: as many workers as there are cores.
"""

from __future__ import annotations

import os

import pytest

MOST = 8  # each takes some seconds and 300 MB to collect all tests


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(len(_cores()), MOST)


def pytest_configure(config: pytest.Config) -> None:
    config.option.maxworkerrestart = 0  # a worker that dies has met a defect
    worker = getattr(config, "workerinput", None)
    if worker and hasattr(os, "sched_setaffinity"):
        cores = _cores()
        os.sched_setaffinity(0, {cores[int(worker["workerid"].removeprefix("gw")) % len(cores)]})
        # Linux shares a core out by sessions first. Beside a session that was busy on two cores, that of an engine had
        # 1 % of its core (6.18); a worker with a session of its own is busy on one.
        os.setsid()
