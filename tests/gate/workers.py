"""Gives each worker of pytest-xdist a core of its own. The engines and programs of its tests share this core.

`-p tests.gate.workers -n auto --dist loadfile` starts as many workers as there are cores, up to MOST.
"""

from __future__ import annotations

import os

import pytest

MOST = 8  # most workers: each needs some seconds and 300 MB to collect all tests


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(len(_cores()), MOST)


def pytest_configure(config: pytest.Config) -> None:
    config.option.maxworkerrestart = 0  # a worker dies only of a defect, so it is not replaced
    worker = getattr(config, "workerinput", None)
    if worker and hasattr(os, "sched_setaffinity"):
        cores = _cores()
        os.sched_setaffinity(0, {cores[int(worker["workerid"].removeprefix("gw")) % len(cores)]})
        # Linux first divides a core among sessions. An engine got only 1 % of its core beside a session that was busy
        # on two cores (Linux 6.18). With a session of its own, a worker is busy on one core only.
        os.setsid()
