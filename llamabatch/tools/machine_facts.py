"""Describes the machine of a measurement."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from llamabatch.llama import library
from llamabatch.planning.cpu import cpu_name
from llamabatch.planning.machine import Machine
from llamabatch.utils.checks import counted
from llamabatch.utils.version import __version__


@dataclass(frozen=True)
class MachineFacts:
    """A machine and its installed software.

    Attributes:
        cpu: name of the CPU's model.
        cores: cores that this process may use.
        logical_cores: logical cores of the machine.
        memory_bytes: memory of the machine.
        devices: devices that llama.cpp can compute on.
        versions: versions of llamabatch, llama-cpp-python, llama.cpp and Python.
        patches: patches in the build of llama.cpp; None for a stock build.
    """

    cpu: str
    cores: int
    logical_cores: int
    memory_bytes: int
    os: str
    devices: tuple[str, ...]
    versions: dict[str, str]
    patches: tuple[str, ...] | None

    @property
    def summary(self) -> str:
        """The CPU, cores, memory and accelerators, in one line."""
        accelerators = [device.partition(": ")[2] for device in self.devices if not device.startswith("CPU")]
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        return ", ".join([self.cpu, counted(self.cores, "core"), memory, *accelerators])

    def document(self) -> dict[str, Any]:
        """Returns plain values for JSON, in two parts: "machine" and "versions"."""
        machine = asdict(self)
        versions = machine.pop("versions")
        return {"machine": machine, "versions": versions}

    @classmethod
    def here(cls) -> MachineFacts:
        info = library.library_info()
        return cls(
            cpu=cpu_name(),
            cores=Machine.here().cores,
            logical_cores=psutil.cpu_count() or 1,
            memory_bytes=int(psutil.virtual_memory().total),
            os=platform.platform(),
            devices=tuple(f"{device.name}: {device.description}" for device in info.devices),
            versions={
                "llamabatch": __version__,
                "llama_cpp_python": info.binding_version,
                "llama_cpp": info.llama_version,
                "python": platform.python_version(),
            },
            patches=None if info.marker is None else tuple(info.marker.get("patches", ())),
        )
