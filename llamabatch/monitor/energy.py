"""Energy counters of the machine: RAPL for CPUs and their memory (Linux), NVML for NVIDIA GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from llamabatch.monitor.gpu import Gpus

POWERCAP = Path("/sys/class/powercap")
_READ_EVERY_S = 30.0  # seconds between two reads; a package's counter wraps after 262 kJ, or 7 minutes at 600 W


class EnergyMeter:
    """A meter of joules over a span of time. A source that cannot be read is left out silently.

    ::

        with EnergyMeter() as meter:
            ...
            print(meter.read(), meter.sources)

    A thread reads the counters every 30 s, to notice each wrap of a counter. If there are no sources, there is no
    thread. On Linux, only root may read RAPL by default; a chmod of /sys/class/powercap/*/energy_uj allows other users.

    Args:
        gpus: True: also counts all GPUs that this process may use, including the energy for other processes.
        powercap: the folder of RAPL's zones.
        nvml: as for Gpus.

    Attributes:
        sources: names of the counters: "package-0", "dram-0", "GPU 0" and so on.
    """

    def __init__(self, *, gpus: bool = True, powercap: Path = POWERCAP, nvml: Any = None) -> None:
        self._gpus = Gpus(nvml) if gpus else None
        self._counters = [_Counter(name, *zone) for name, zone in _rapl_zones(powercap).items()]
        if self._gpus is not None:
            self._counters += [_Counter(name, read, None) for name, read in self._gpus.counters().items()]
        self.sources = tuple(counter.name for counter in self._counters)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> EnergyMeter:
        """Starts counting. Returns this meter."""
        if self._counters and self._thread is None:
            self._thread = threading.Thread(target=self._keep_reading, name="llamabatch-energy", daemon=True)
            with self._lock:
                for counter in self._counters:
                    counter.start()
            self._thread.start()
        return self

    def read(self) -> float | None:
        """Returns the joules since `start`; None: there are no sources."""
        return sum(joules.values()) if (joules := self.by_source()) else None

    def by_source(self) -> dict[str, float]:
        """Returns the joules since `start`, by source."""
        with self._lock:
            return {counter.name: counter.read() for counter in self._counters}

    def stop(self) -> float | None:
        """Stops counting. Returns the joules since `start`. May be called twice."""
        joules = self.read()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._gpus is not None:
            self._gpus.close()
        return joules

    def _keep_reading(self) -> None:
        while not self._stop.wait(_READ_EVERY_S):
            self.read()

    def __enter__(self) -> EnergyMeter:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class _Counter:
    """One energy counter. Adds up the joules since `start`.

    Args:
        read: returns the counter's joules, or None if reading fails.
        range_j: the range in joules: the counter wraps to 0 at this value; None: unknown.
    """

    def __init__(self, name: str, read: Callable[[], float | None], range_j: float | None) -> None:
        self.name = name
        self._read = read
        self._range_j = range_j
        self._last: float | None = None
        self._sum = 0.0

    def start(self) -> None:
        self._last, self._sum = self._read(), 0.0

    def read(self) -> float:
        now = self._read()
        if now is not None and self._last is not None:
            grown = now - self._last
            if grown < 0:  # the counter has wrapped; with an unknown range, the growth counts as 0
                grown = grown + self._range_j if self._range_j else 0.0
            self._sum += grown
        if now is not None:
            self._last = now
        return self._sum


_Zone = tuple[Callable[[], float | None], float | None]


def _rapl_zones(powercap: Path) -> dict[str, _Zone]:
    """Returns the zones of packages and memory by name. Skips psys, and the zones of cores and graphics in packages."""
    zones: dict[str, _Zone] = {}
    try:
        folders = sorted(powercap.glob("intel-rapl:*"))
    except OSError:
        return {}
    for folder in folders:
        name, number = _text_of(folder / "name"), folder.name.split(":")[1]
        if name is None or not (name.startswith("package") or name == "dram"):
            continue
        range_uj = _number_of(folder / "max_energy_range_uj")
        read = _reader(folder / "energy_uj")
        if read() is not None:
            zones[f"dram-{number}" if name == "dram" else name] = (read, None if range_uj is None else range_uj / 1e6)
    return zones


def _reader(path: Path) -> Callable[[], float | None]:
    def read() -> float | None:
        microjoules = _number_of(path)
        return None if microjoules is None else microjoules / 1e6

    return read


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number_of(path: Path) -> int | None:
    try:
        return int(_text_of(path) or "")
    except ValueError:
        return None
