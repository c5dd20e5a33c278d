"""NVIDIA GPUs through NVML: use, memory, power and energy. Without NVML or a GPU, there are no samples."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamabatch.planning.nvml import text, visible


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment. A figure that the driver does not report is None.

    Attributes:
        index: number of the GPU in NVML.
        name: name of the GPU in the driver.
        use_percent: how long the GPU computed for any process, as a percentage of the driver's last sample period.
        memory_used: bytes of the GPU that all processes use.
        memory_total: bytes of the GPU.
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
        nvml: the module to use; None: pynvml of the extra `gpu`, if it is installed.
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
        with contextlib.suppress(Exception):  # visible() fails, for example with a driver without UUIDs
            ours = visible(self._nvml, [handle for _, handle in found])
            self._handles = [(number, handle) for number, handle in found if handle is not None and handle in ours]

    def sample(self) -> tuple[GpuSample, ...]:
        """Returns one sample for each GPU."""
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
        """Returns {name: function} for GPUs with energy counters. A function returns joules since the driver loaded."""

        def reader(handle: Any) -> Callable[[], float | None]:
            def read() -> float | None:
                millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
                return None if millijoules is None else millijoules / 1000

            return read

        readers = {f"GPU {number}": reader(handle) for number, handle in self._handles}
        return {name: read for name, read in readers.items() if read() is not None}

    def close(self) -> None:
        """Ends the use of NVML. May be called twice."""
        if self._nvml is not None:
            self._ask("nvmlShutdown")
            self._nvml, self._handles = None, []

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Calls a function of NVML and returns its result; None if the GPU or the driver does not support it."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:
            return None
