"""Finds the processes that a test started, without those of other tests."""

import contextlib
from collections.abc import Iterable

import psutil


def alive(pids: Iterable[int]) -> list[int]:
    """Returns the pids of processes that still run. A zombie does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


class Started:
    """Finds children of this process that have started since the object was made."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))

    def __call__(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child not in self._before]
