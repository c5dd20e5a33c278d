"""A thread that runs in slices of time. Between two slices the caller's thread does other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class SlicedThread:
    """Runs one job after another, but only during `advance`. So the job and the caller never compute at the same time.

    The job calls `may_go_on` where it can stop, and ends early if the call returns False. One thread runs all jobs, so
    that OpenMP keeps its team of threads. The thread starts with the first job and ends with `close`.

    One of the two threads always waits, so no lock is needed: `advance` sets `_go` and waits for `_stopped`, and the
    job's thread sets `_stopped` and waits for `_go`. Only `close` may be called from a third thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._job: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._go = threading.Event()
        self._stopped = threading.Event()
        self._until = 0.0
        self._ends = False
        self.is_cancelled = False  # True if the job should end early

    @property
    def is_busy(self) -> bool:
        """True while a job is unfinished."""
        return self._job is not None

    def start(self, job: Callable[[], None]) -> None:
        """Gives the thread a job. The previous job must be done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self.is_cancelled = False
        self._job = job

    def advance(self, seconds: float) -> bool:
        """Lets the job run for `seconds`, and then until the next place where it can stop. Returns True once the job is
        done. Raises the job's exception."""
        self._until = time.perf_counter() + seconds
        self._stopped.clear()
        self._go.set()
        self._stopped.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._job is None

    def may_go_on(self) -> bool:
        """Waits for the next slice if this slice is over. Returns False if the job should end. Only the job calls this
        method."""
        if time.perf_counter() >= self._until:
            self._wait()
        return not (self._ends or self.is_cancelled)

    def cancel(self) -> None:
        """Asks the job to end at the next place where it can stop. The job gets there only during a call of
        `advance`."""
        self.is_cancelled = True

    def close(self) -> None:
        """Ends the job and the thread."""
        self._ends = self.is_cancelled = True
        self._go.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _wait(self) -> None:
        self._go.clear()
        self._stopped.set()
        if not self._ends:  # if clear() has just undone the `set` of `close`, this wait would never end
            self._go.wait()

    def _serve(self) -> None:
        self._go.wait()
        while not self._ends:
            if self._job is not None:
                try:
                    self._job()
                except BaseException as error:
                    self._error = error
                self._job = None
            self._wait()
        self._stopped.set()
