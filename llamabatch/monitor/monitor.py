"""Monitor: a thread that samples an engine at an interval, for a callback, a metrics file and `llamabatch top`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from llamabatch.client.front_client import FrontClient
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import ConfigError, EngineClosedError
from llamabatch.monitor.host import MachineSampler
from llamabatch.monitor.prometheus import MetricsFile
from llamabatch.monitor.snapshot import Snapshot
from llamabatch.monitor.status import StatusFile
from llamabatch.utils import checks

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """An EngineClient with only the members that a Monitor needs."""

    def stats(self) -> EngineStats: ...

    @property
    def pids(self) -> list[int]: ...


class Monitor:
    """Takes a Snapshot every `every_s` seconds, from `start` (or `with`) until `stop` (or the end of the `with`).

    The monitor takes a last snapshot at `stop`, or when the LLM is closed. A snapshot does not wait for a step of the
    engine. After a slow callback, the next snapshot is late, and the snapshots in between are skipped. A monitor does
    not keep the engine alive.

    Args:
        client: the engine.
        callback: called with each Snapshot, on the monitor's thread. Exceptions of the callback are logged, and the
            monitor continues. The callback may use the LLM, but must not wait for the end of a request that it submits.
        every_s: the interval in seconds, 0.01 to 3600.
        metrics_file: path of the file for Prometheus, written at each snapshot; see MetricsFile.
        publish: True: shows the engine in `llamabatch top`.
        title: name of the engine in `top`.
        job: returns the progress of a job for `top`: a mapping with rows, total and left_s (seconds).

    Raises:
        ConfigError: every_s is out of range, or the metrics file cannot be written.
        SetupError: a metrics file needs prometheus_client, which is missing.
    """

    def __init__(
        self,
        client: Watched,
        callback: Callable[[Snapshot], object] | None = None,
        *,
        every_s: float = 1.0,
        metrics_file: str | os.PathLike[str] | MetricsFile | None = None,
        publish: bool = False,
        title: str = "",
        job: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        checks.number(ConfigError, "every_s", every_s, 0.01, 3600)
        self._client = weakref.ref(client)
        self._every_s = every_s
        self._listeners: list[Callable[[Snapshot], object]] = [] if callback is None else [callback]
        if metrics_file is not None:
            file = metrics_file if isinstance(metrics_file, MetricsFile) else MetricsFile(metrics_file)
            file.model = file.model or title
            self._listeners.append(file.write)
        self._status = StatusFile(title, every_s, job) if publish else None
        if self._status is not None:
            self._listeners.append(self._status.write)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: set[int] = set()  # indices of listeners whose last call raised; their next errors are not logged

    def start(self) -> Monitor:
        """Starts the thread. Returns this monitor. A monitor starts once.

        Raises:
            EngineClosedError: the engine is closed, or the monitor was stopped.
        """
        client = self._client()
        if client is None or self._stop.is_set():
            raise EngineClosedError("the engine is closed, or this monitor has been stopped")
        if self._thread is None:
            self._last = client.stats()
            self._started_s = self._last_s = time.monotonic()
            self._sampler = MachineSampler(self._pids)
            self._thread = threading.Thread(target=self._watch, name="llamabatch-monitor", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Takes the last snapshot and ends the thread. May be called twice, and by the callback."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _pids(self) -> list[int]:
        client = self._client()
        return [] if client is None else client.pids

    def _watch(self) -> None:
        due_s = self._started_s
        try:
            is_last = False
            while not is_last:
                due_s = max(due_s + self._every_s, time.monotonic())
                is_last = self._stop.wait(max(0.0, due_s - time.monotonic()))
                with contextlib.suppress(EngineClosedError):
                    if not self._sample():
                        break
                    continue
                break
        finally:
            self._sampler.close()
            if self._status is not None:
                self._status.remove()

    def _sample(self) -> bool:
        """Takes a snapshot. Returns False if the engine was garbage-collected. Raises EngineClosedError."""
        client = self._client()
        if client is None:
            return False
        stats, now = client.stats(), time.monotonic()
        del client  # a slow callback must not keep the engine alive
        snapshot = Snapshot(
            time_s=time.time(),
            elapsed_s=now - self._started_s,
            stats=stats,
            interval_s=now - self._last_s,
            recent=stats.since(self._last),
            machine=self._sampler.sample(),
        )
        self._last, self._last_s = stats, now
        for number, listener in enumerate(self._listeners):
            try:
                listener(snapshot)
                self._failed.discard(number)
            except Exception:
                if number not in self._failed:
                    logger.exception("a listener of a monitor failed; it gets the next snapshot all the same")
                self._failed.add(number)
        return True

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def monitor_client(
    client: FrontClient,
    callback: Callable[[Snapshot], object] | None,
    *,
    every_s: float,
    metrics_file: str | os.PathLike[str] | None,
    publish: bool,
) -> Monitor:
    """Returns a Monitor with the name of the client's model. The monitor stops when the client closes. See Monitor."""
    made = Monitor(
        client,
        callback,
        every_s=every_s,
        metrics_file=metrics_file,
        publish=publish,
        title=client.model.path.name,
    )
    client.at_close(made.stop)
    return made
