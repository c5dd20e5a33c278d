"""How often the kernel has killed for want of memory."""

from __future__ import annotations

from pathlib import Path

_COUNTS = Path("/proc/vmstat")  # of the whole machine, containers included; the count rises before the signal is sent


def oom_kills() -> int | None:
    """Processes killed since the machine started; None where nobody tells (not Linux, or before 4.13)."""
    try:
        lines = _COUNTS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
