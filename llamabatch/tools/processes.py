"""Child processes of a measurement: their peak memory, and their end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil

_SAMPLE_S = 0.02
_KILL_TIMEOUT_S = 10.0


class PeakMemory:
    """The largest resident memory of processes, summed over them, in bytes.

    Linux keeps the peak of each process itself (VmHWM in /proc/PID/status, proc(5)); elsewhere a thread looks every
    20 ms. Pages of a mapped model file that two processes share count in both.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._sampled: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if any(_high_water_mark(pid) is None for pid in pids):
            self._thread = threading.Thread(target=self._sample, name="llamabatch-memory", daemon=True)

    def read(self) -> int | None:
        """The peak so far; None where the system does not say."""
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
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else None


@contextlib.contextmanager
def no_child_left() -> Iterator[None]:
    """Kills all child processes that were started in the body, if an exception leaves it.

    A client that is closed waits for the step under way, and one that was interrupted in its constructor cannot be
    closed at all; Ctrl-C must wait for neither.
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
        with contextlib.suppress(psutil.Error):  # it has ended by itself
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_TIMEOUT_S)
