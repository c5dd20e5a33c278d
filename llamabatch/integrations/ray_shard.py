"""A shard of a job on Ray, on its node: a task that runs it, and an actor that gathers what the shards tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamabatch.errors import ConfigError, OutputBusyError, SetupError
from llamabatch.integrations import needs
from llamabatch.jobs.input import sources
from llamabatch.jobs.job import JobInterrupted
from llamabatch.jobs.job import run as run_job
from llamabatch.jobs.output import manifest
from llamabatch.jobs.output.lock import is_held
from llamabatch.jobs.progress import JobSnapshot
from llamabatch.jobs.settings import Settings, identity
from llamabatch.jobs.summary import Summary
from llamabatch.utils.version import __version__

with needs("ray", "ray"):
    import ray

_LOCK_S = 600.0  # the wait of a task for the lock of its output: its predecessor may end later than Ray believes
_TELL_S = 1.0


@dataclass(frozen=True)
class ShardTask:
    """A shard, as it is sent to a node.

    Attributes:
        settings: those of the job, with the shard and its output.
        identity: of the job, as the driver sees its files.
        lock, job_id: the lock that the driver holds on the storage, and the id in it.
        version: of the driver's llamabatch.
    """

    settings: Settings
    identity: Mapping[str, Any]
    lock: Path
    job_id: str
    version: str = __version__


def run_shard(task: ShardTask, board: Any) -> Summary | None:
    """Runs in a task: a shard; None: a signal has ended it. Raises as jobs.run, SetupError."""
    settings = task.settings
    shard = settings.reading.shard[0]
    if task.version != __version__:
        raise SetupError(f"{_here()} has llamabatch {__version__}, and the driver {task.version}; install the same")
    check_storage(task)
    found = sources.find(settings.inputs)
    differing = manifest.differences(task.identity, identity(settings, found))
    if differing:
        raise SetupError(
            f"{_here()} sees other files under the paths of the job than the driver ({'; '.join(differing[:3])}); "
            "keep inputs and model on storage that the nodes share, or in equal copies"
        )
    reports = _ToBoard(board, shard)
    until = time.monotonic() + _LOCK_S
    waits = False
    while True:
        try:
            return run_job(settings, reports)
        except OutputBusyError as error:
            # the task before this one, on a node that is cut off from the cluster and not yet from the storage: it
            # ends when its node notices, and until then it alone writes
            if time.monotonic() > until:
                raise
            if not waits:
                reports.say(f"{error}; up to {_LOCK_S:.0f} s")
            waits = True
            time.sleep(_TELL_S)
        except JobInterrupted:
            return None


def check_storage(task: ShardTask) -> None:
    """Raises SetupError: this node does not see the driver's files, or not its locks."""
    folder = task.lock.parent
    try:
        if is_held(task.lock, task.job_id):
            return
    except (OSError, ConfigError) as error:
        raise SetupError(
            f"{_here()} does not share the folder {folder} with the driver, whose lock {task.lock.name} it does not "
            f"see there ({getattr(error, 'strerror', None) or error}); give an output on storage that all nodes share"
        ) from error
    raise SetupError(
        f"{_here()} does not see the driver's lock on {task.lock}: the locks of this file system hold for one node "
        "only, and two tasks could write one output; mount it with locks for all nodes (NFS 4 without local_lock, "
        "CephFS, Lustre with flock)"
    )


def _here() -> str:
    return f"node {ray.util.get_node_ip_address()}"


class _ToBoard:
    """The Progress of a shard: what it shows goes to the board, once a second."""

    def __init__(self, board: Any, shard: int) -> None:
        self._board, self._shard = board, shard
        self._next = 0.0

    def say(self, text: str) -> None:
        self._board.say.remote(self._shard, text)

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _TELL_S
            self._board.show.remote(self._shard, snapshot())


class Board:
    """An actor: what the shards have to tell since the driver has looked last."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, str]] = []
        self._snapshots: dict[int, JobSnapshot] = {}

    def say(self, shard: int, text: str) -> None:
        self._messages.append((shard, text))

    def show(self, shard: int, snapshot: JobSnapshot) -> None:
        self._snapshots[shard] = snapshot

    def look(self) -> tuple[list[tuple[int, str]], dict[int, JobSnapshot]]:
        news = self._messages, self._snapshots
        self._messages, self._snapshots = [], {}
        return news
