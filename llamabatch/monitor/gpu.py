"""NVIDIA GPUs through NVML: use, memory, power and energy. None where the library, the driver or a GPU is missing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamabatch.planning.nvml import text, visible


@dataclass(frozen=True)
class GpuSample:
    """One GPU now; what it does not tell is None.

    Attributes:
        index: NVML's number. name: as the driver gives it.
        use_percent: of the last moments in which anything was computed on it, by anybody.
        memory_used, memory_total: bytes, by all its users.
        power_w: watts.
    """

    index: int
    name: str
    use_percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_w: float | None = None


class Gpus:
    """The GPUs that this process may use: all, or those of CUDA_VISIBLE_DEVICES (numbers or UUIDs).

    Args:
        nvml: the module to ask; None: pynvml of the extra `gpu`, where it is installed.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: list[tuple[int, Any]] = []
        try:
            if nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception:  # no library or no driver
            self._nvml = None
            return
        count = self._ask("nvmlDeviceGetCount") or 0
        found = [(number, self._ask("nvmlDeviceGetHandleByIndex", number)) for number in range(count)]
        with contextlib.suppress(Exception):  # a driver that does not tell UUIDs, say
            ours = visible(self._nvml, [handle for _, handle in found])
            self._handles = [(number, handle) for number, handle in found if handle is not None and handle in ours]

    def sample(self) -> tuple[GpuSample, ...]:
        return tuple(self._sample(number, handle) for number, handle in self._handles)

    def _sample(self, number: int, handle: Any) -> GpuSample:
        name = text(self._ask("nvmlDeviceGetName", handle) or "GPU")
        rates, memory = self._ask("nvmlDeviceGetUtilizationRates", handle), self._ask("nvmlDeviceGetMemoryInfo", handle)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        return GpuSample(
            number,
            name,
            use_percent=None if rates is None else float(rates.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power_w=None if milliwatts is None else milliwatts / 1000,
        )

    def counters(self) -> dict[str, Callable[[], float | None]]:
        """For each GPU that counts its energy: what reads the counter, joules since the driver was loaded."""

        def reader(handle: Any) -> Callable[[], float | None]:
            def read() -> float | None:
                millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
                return None if millijoules is None else millijoules / 1000

            return read

        readers = {f"GPU {number}": reader(handle) for number, handle in self._handles}
        return {name: read for name, read in readers.items() if read() is not None}

    def close(self) -> None:
        if self._nvml is not None:
            self._ask("nvmlShutdown")
            self._nvml, self._handles = None, []

    def _ask(self, function: str, *arguments: Any) -> Any:
        """None for what this GPU or driver does not tell."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:
            return None
