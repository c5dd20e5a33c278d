"""The processor time of a process, for the benchmark and its child programs."""

from __future__ import annotations

import psutil


def cpu_s(process: psutil.Process) -> float:
    """Returns the seconds of user and system time of a process, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)
