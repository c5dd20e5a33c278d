"""The name and the abilities of this CPU, in the words of the operating system."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys


def cpu_name() -> str:
    """The name of the CPU's model."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or "unknown CPU"
    return _cpuinfo().get("model name") or platform.processor() or "unknown CPU"


def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU, in Linux's names; empty where the system lists none."""
    if sys.platform == "darwin":
        return _sysctl_flags()
    first = _cpuinfo()
    return frozenset((first.get("flags") or first.get("Features") or "").split())


def _cpuinfo() -> dict[str, str]:
    """The first processor's part of /proc/cpuinfo. The kernel writes the file for each reader, and a server has
    hundreds of parts: the rest is not read."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:
                    break
                found[name.strip()] = value.strip()
    except OSError:
        pass
    return found


def _sysctl_flags() -> frozenset[str]:
    names = {
        "hw.optional.AdvSIMD": "asimd", "hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.arm.FEAT_I8MM": "i8mm",
        "hw.optional.arm.FEAT_SME": "sme", "hw.optional.avx2_0": "avx2", "hw.optional.avx512f": "avx512f",
    }  # fmt: skip
    return frozenset(flag for name, flag in names.items() if _sysctl(name) == "1")


def _sysctl(name: str) -> str:
    if shutil.which("sysctl") is None:
        return ""
    try:
        done = subprocess.run(
            ["sysctl", "-n", name], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
