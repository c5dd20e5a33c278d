"""What this process may use of the machine: cores and memory, with affinity, cgroup and limits counted in."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Machine:
    """What this process may use.

    Attributes:
        cores: from affinity, cgroup quota and physical cores.
        available_bytes: free memory, cgroup and RLIMIT_AS included.
        n_gpus: devices that llama.cpp would offload to.
        fast_attention: the llama.cpp in use has our flash attention for CPUs (native_patches/0003).
    """

    cores: int
    available_bytes: int
    n_gpus: int = 0
    fast_attention: bool = False

    @classmethod
    def here(cls, n_gpus: int = 0, fast_attention: bool = False) -> Machine:
        return cls(_cores(), _available_bytes(), n_gpus, fast_attention)


def _cores() -> int:
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        allowed = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, _cgroup_cores() or allowed))


def _cgroup_cores() -> int | None:
    """The cgroup's CPU quota in whole cores."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def _available_bytes() -> int:
    limits = [int(psutil.virtual_memory().available)]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            limits.append(int(limit) - used + _reclaimable())
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - int(psutil.Process().memory_info().vms))
    return max(0, min(limits))


def _reclaimable() -> int:
    """Page cache that the cgroup counts as used but gives back on demand."""
    for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
