"""The use of the machine by an engine's processes and by all processes: CPU, memory, power, GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from llamabatch.monitor.energy import POWERCAP, EnergyMeter
from llamabatch.monitor.gpu import Gpus, GpuSample


@dataclass(frozen=True)
class MachineSample:
    """The use of the machine since the last sample. A figure that the machine does not report is None.

    Attributes:
        cpu_percent: CPU time of this process and the engine's child processes; 100: one core was always busy.
        system_cpu_percent: use of all cores by all processes, 0 to 100.
        memory_bytes: resident memory of this process and the engine's child processes. If several processes map a model
            file, its pages count in each of these processes.
        system_available_bytes: memory available on the machine.
        cpu_power_w: watts of CPUs and their memory (RAPL), for all processes.
        gpus: one sample for each GPU.
    """

    cpu_percent: float | None = None
    system_cpu_percent: float | None = None
    memory_bytes: int | None = None
    system_available_bytes: int | None = None
    cpu_power_w: float | None = None
    gpus: tuple[GpuSample, ...] = ()

    @property
    def others_cpu_percent(self) -> float | None:
        """CPU time of other processes plus time that the hypervisor took (steal), as a percentage of all cores."""
        if self.cpu_percent is None or self.system_cpu_percent is None:
            return None
        return max(0.0, self.system_cpu_percent - self.cpu_percent / (psutil.cpu_count() or 1))

    def document(self) -> dict[str, Any]:
        """Returns the sample as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, packed: dict[str, Any]) -> MachineSample:
        """Makes a sample from the result of `document`."""
        gpus = tuple(GpuSample(**gpu) for gpu in packed["gpus"])
        return cls(**{**packed, "gpus": gpus})


class MachineSampler:
    """A sampler of the machine, for one thread.

    Args:
        pids: returns the ids of the engine's child processes at this moment.
        clock: returns seconds.
        powercap, nvml: as for EnergyMeter.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
        powercap: Path = POWERCAP,
        nvml: Any = None,
    ) -> None:
        self._pids = pids
        self._clock = clock
        self._gpus = Gpus(nvml)
        self._meter = EnergyMeter(gpus=False, powercap=powercap).start()
        self._busy_s: dict[int, float] = {}
        self._system = system_times()
        self._joules = self._meter.read()
        self._last_s = clock()
        self._processes()

    def sample(self) -> MachineSample:
        """Returns the use of the machine since the last call."""
        now, joules, system = self._clock(), self._meter.read(), system_times()
        span_s = now - self._last_s
        busy_s, memory = self._processes()
        busy, total = system[0] - self._system[0], system[1] - self._system[1]
        power = None
        if joules is not None and self._joules is not None and span_s > 0:
            power = (joules - self._joules) / span_s
        self._last_s, self._joules, self._system = now, joules, system
        return MachineSample(
            cpu_percent=100 * busy_s / span_s if span_s > 0 else None,
            system_cpu_percent=min(max(100 * busy / total, 0.0), 100.0) if total > 0 else None,
            memory_bytes=memory or None,
            system_available_bytes=int(psutil.virtual_memory().available),
            cpu_power_w=power,
            gpus=self._gpus.sample(),
        )

    def close(self) -> None:
        """Stops the counters."""
        self._meter.stop()
        self._gpus.close()

    def _processes(self) -> tuple[float, int]:
        """Returns two sums over the running processes: CPU seconds since the last call, and resident bytes."""
        seen: dict[int, float] = {}
        grown, memory = 0.0, 0
        for pid in (os.getpid(), *self._pids()):
            try:
                process = psutil.Process(pid)
                times = process.cpu_times()
                memory += int(process.memory_info().rss)
            except psutil.Error:
                continue
            seen[pid] = times.user + times.system
            grown += max(0.0, seen[pid] - self._busy_s.get(pid, seen[pid]))
        self._busy_s = seen
        return grown, memory


def system_times(cores: Collection[int] | None = None) -> tuple[float, float]:
    """Returns busy seconds and total seconds, both summed over the logical cores `cores`. If `cores` is None, all cores
    count."""
    of_each = psutil.cpu_times(percpu=True)
    if cores is not None and max(cores) < len(of_each):  # otherwise cores are offline, and missing in of_each
        of_each = [of_each[core] for core in cores]
    busy, total = 0.0, 0.0
    for times in of_each:
        # user and nice already include guest and guest_nice.
        spent = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        total += spent
        busy += spent - times.idle - getattr(times, "iowait", 0.0)
    return busy, total
