"""Measures the peak memory of child processes and the CPU use of other processes. Kills children after a failure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import psutil

from llamabatch.monitor.host import system_times
from llamabatch.utils.system import kernel_lines, usable_cores

_MUCH_CORES, _MUCH_SHARE = 1 / 3, 0.02
_SAMPLE_S = 0.02
_KILL_TIMEOUT_S = 10.0


class PeakMemory:
    """The peak of resident memory of several processes: the sum of each process's peak, in bytes.

    Linux records the peak of each process (VmHWM in /proc/PID/status, proc(5)). On other systems a thread reads the
    memory every 20 ms. If two processes share pages of a mapped model file, these pages count twice.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._sampled: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if any(_high_water_mark(pid) is None for pid in pids):
            self._thread = threading.Thread(target=self._sample, name="llamabatch-memory", daemon=True)

    def read(self) -> int | None:
        """Returns the sum of the peaks so far; None if the peak of a process is unknown."""
        peaks = [_high_water_mark(pid) or self._sampled.get(pid, 0) for pid in self._pids]
        return sum(peaks) if all(peaks) else None

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            for pid in self._pids:
                with contextlib.suppress(psutil.Error):
                    resident = int(psutil.Process(pid).memory_info().rss)
                    self._sampled[pid] = max(resident, self._sampled.get(pid, 0))

    def __enter__(self) -> PeakMemory:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def _high_water_mark(pid: int) -> int | None:
    peaks = [line.split()[1] for line in kernel_lines(f"/proc/{pid}/status") if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else None


@dataclass(frozen=True)
class OthersUse:
    """The CPU use of other processes, on those cores that this process may use.

    Attributes:
        percent: CPU time of other processes in percent of the cores' time, 0 to 100. Includes time that the host took
            from this virtual machine.
        cores: number of logical cores that this process may use.
    """

    percent: float = 0.0
    cores: int = 1

    @property
    def is_much(self) -> bool:
        """True if other processes used so much that speeds measured at the same time are unreliable.

        A single busy core delays all threads of a computation, since the threads wait for one another. On a machine
        with many cores the limit is a share of the cores, because some system services always run.
        """
        return self.percent * self.cores > 100 * max(_MUCH_CORES, _MUCH_SHARE * self.cores)

    @property
    def sentence(self) -> str:
        return f"Meanwhile other processes used {self.percent:.0f} % of the CPU"


class OtherProcesses:
    """The CPU use of all processes except this one and its descendants.

    Raises psutil.Error if the system does not report CPU times.
    """

    def __init__(self) -> None:
        self._cores = usable_cores()
        self._own_s, (self._busy_s, self._total_s) = _own_seconds(), system_times(self._cores)

    def use(self) -> OthersUse:
        """Returns the CPU use of other processes since this object was made."""
        own_s, (busy_s, total_s) = _own_seconds(), system_times(self._cores)
        span_s = total_s - self._total_s
        others_s = busy_s - self._busy_s - (own_s - self._own_s)
        return OthersUse(max(0.0, 100 * others_s / span_s) if span_s > 0 else 0.0, len(self._cores))


def _own_seconds() -> float:
    """Returns the CPU seconds of this process and of all its descendants, including ended descendants."""
    seconds = 0.0
    for process in (psutil.Process(), *_children()):
        with contextlib.suppress(psutil.NoSuchProcess):  # a parent's children_… times include ended children
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


@contextlib.contextmanager
def no_child_left() -> Iterator[None]:
    """If the block raises (for example after Ctrl-C), kills all child processes that were started in the block.

    Closing the clients is not enough: close() waits for a running step, and a client that was interrupted in its
    constructor cannot be closed.
    """
    before = _children()
    try:
        yield
    except BaseException:
        _kill(_children() - before)
        raise


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # the process has ended by itself
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_TIMEOUT_S)
