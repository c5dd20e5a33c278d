"""Reads the name and the instruction sets of this CPU from the operating system."""

from __future__ import annotations

import platform
import sys

from llamabatch.utils.system import command_output


def cpu_name() -> str:
    """Returns the name of the CPU's model."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or "unknown CPU"
    return _cpuinfo().get("model name") or platform.processor() or "unknown CPU"


def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets of the CPU by Linux's names; empty where the system lists none."""
    if sys.platform == "darwin":
        return _sysctl_flags()
    first = _cpuinfo()
    return frozenset((first.get("flags") or first.get("Features") or "").split())


def _cpuinfo() -> dict[str, str]:
    """Returns the entry of the first processor in /proc/cpuinfo. The other entries, hundreds on a server, are not read,
    since the kernel generates the file while it is read."""
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
    return command_output("sysctl", "-n", name).strip()
