"""Status files with the figures of each running monitor, for `llamabatch top`. They contain no prompts or outputs."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llamabatch.engine.stats import EngineStats
from llamabatch.errors import InputError
from llamabatch.monitor.host import MachineSample
from llamabatch.monitor.snapshot import Snapshot
from llamabatch.utils.atomic_file import write_text
from llamabatch.utils.paths import cache_dir

WINDOW_S = 30.0  # seconds over which `top` shows rates and percentiles
_HISTORY = 60  # maximum number of points in the curve of speeds
_VERSION = 1
logger = logging.getLogger(__name__)
_numbers = itertools.count()


def folder() -> Path:
    """Returns the folder of this machine's status files. Machines may share a home, so each machine has a folder."""
    return cache_dir() / "running" / (platform.node() or "localhost")


@dataclass(frozen=True)
class Status:
    """The state of one monitored engine.

    Attributes:
        pid: id of the process.
        created_s: start of the process, seconds since 1970. A later process with the same id has another value.
        written_s: time of writing, seconds since 1970.
        every_s: seconds between two writes.
        title: name of the engine.
        elapsed_s: seconds since the monitor started.
        stats: figures since the engine started.
        recent: figures of the last window_s seconds.
        window_s: seconds that `recent` covers.
        speeds: generated tokens per second, one value for each snapshot, the latest last.
        machine: as in Snapshot.
        job: progress of the job, if there is one: rows, total, left_s, errors.
    """

    pid: int
    created_s: float
    written_s: float
    every_s: float
    title: str
    elapsed_s: float
    stats: EngineStats
    recent: EngineStats
    window_s: float
    speeds: tuple[float, ...]
    machine: MachineSample
    job: Mapping[str, Any]

    def document(self) -> dict[str, Any]:
        """Returns the status as plain values for JSON."""
        return {
            **vars(self),
            "version": _VERSION,
            "stats": self.stats.to_wire(),
            "recent": self.recent.to_wire(),
            "machine": self.machine.document(),
            "job": dict(self.job),
        }

    @classmethod
    def from_document(cls, packed: dict[str, Any]) -> Status:
        """Makes a status from the result of `document`. Raises KeyError, TypeError or ValueError for other values."""
        if packed.pop("version") != _VERSION:
            raise ValueError("a status of another release")
        own = {name: EngineStats.from_wire(packed[name]) for name in ("stats", "recent")}
        machine, speeds = MachineSample.from_document(packed["machine"]), tuple(packed["speeds"])
        return cls(**{**packed, **own, "machine": machine, "speeds": speeds})

    @property
    def is_running(self) -> bool:
        """True while the process that wrote the status runs."""
        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.created_s) < 1)
        except psutil.Error:
            return False


class StatusFile:
    """The status file of one monitor. Readers always find a complete file. Only the owner can read the file.

    Args:
        title, every_s, job: as for Monitor.
    """

    def __init__(self, title: str, every_s: float, job: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self.path = folder() / f"{os.getpid()}-{next(_numbers)}.json"
        self._title = title
        self._every_s = every_s
        self._job = job or dict
        self._created_s = psutil.Process().create_time()
        self._past: deque[tuple[float, EngineStats]] = deque()
        self._speeds: deque[float] = deque(maxlen=_HISTORY)

    def write(self, snapshot: Snapshot) -> None:
        """Writes the file from a snapshot. Only logs an OSError, because this error must not disturb a job."""
        try:
            self._write(snapshot)
        except OSError as error:
            logger.debug("the status file for llamabatch top cannot be written: %s", error)

    def _write(self, snapshot: Snapshot) -> None:
        now = snapshot.elapsed_s
        if not self._past:
            self._past.append((now - snapshot.interval_s, snapshot.stats.since(snapshot.recent)))
        while len(self._past) > 1 and self._past[1][0] <= now - WINDOW_S:
            self._past.popleft()
        since, before = self._past[0]
        self._past.append((now, snapshot.stats))
        self._speeds.append(round(snapshot.generated_tokens_per_s, 1))
        status = Status(
            pid=os.getpid(),
            created_s=self._created_s,
            written_s=snapshot.time_s,
            every_s=self._every_s,
            title=self._title,
            elapsed_s=now,
            stats=snapshot.stats,
            recent=snapshot.stats.since(before),
            window_s=now - since,
            speeds=tuple(self._speeds),
            machine=snapshot.machine,
            job=self._job(),
        )
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(self.path, json.dumps(status.document()))

    def remove(self) -> None:
        """Deletes the file."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def read(path: Path) -> Status:
    """Returns the status in a file. Raises InputError if the file is missing or not a status file of this release."""
    try:
        return Status.from_document(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is no status file of this release of llamabatch") from error


def running() -> list[Status]:
    """Returns the status of each monitor whose process runs, the oldest process first. Deletes stale files."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            status = read(path)
        except InputError:
            continue  # the file was deleted, or another release has written the file
        if status.is_running:
            found.append(status)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda status: status.created_s)


def age_s(status: Status) -> float:
    """Returns the seconds since a status was written."""
    return max(0.0, time.time() - status.written_s)
