"""A shard of a job on Ray: the task that runs the shard on a node, and the actor that collects the shards' messages."""

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

_LOCK_S = 600.0  # seconds to wait for the output's lock: the previous task may end later than Ray believes
_TELL_S = 1.0


@dataclass(frozen=True)
class ShardTask:
    """The description of a shard, which is sent to a node.

    Attributes:
        settings: the job's settings, with this shard and its output.
        identity: the job's identity, which the driver has computed from its view of the job's files.
        lock, job_id: the driver's lock file on the storage, and the id in this file.
        version: the version of the driver's llamabatch.
    """

    settings: Settings
    identity: Mapping[str, Any]
    lock: Path
    job_id: str
    version: str = __version__


def run_shard(task: ShardTask, board: Any) -> Summary | None:
    """Runs a shard in a task. Returns None if a signal ended it. Raises the errors of jobs.run, and SetupError."""
    settings = task.settings
    shard = settings.reading.shard[0]
    if task.version != __version__:
        raise SetupError(f"{_here()} has llamabatch {__version__}, and the driver {task.version}; install the same")
    check_storage(task)
    found = sources.find(settings.inputs)
    differing = manifest.differences(task.identity, identity(settings, found))
    if differing:
        raise SetupError(
            f"{_here()} and the driver see different files under the job's paths ({'; '.join(differing[:3])}); "
            "keep inputs and model on storage that the nodes share, or in equal copies"
        )
    reports = _ToBoard(board, shard)
    until = time.monotonic() + _LOCK_S
    waits = False
    while True:
        try:
            return run_job(settings, reports)
        except OutputBusyError as error:
            # The previous task of this shard still runs: its node has lost the cluster but not the storage. Only that
            # task may write, until its node notices the loss and ends the task.
            if time.monotonic() > until:
                raise
            if not waits:
                reports.say(f"{error}; up to {_LOCK_S:.0f} s")
            waits = True
            time.sleep(_TELL_S)
        except JobInterrupted:
            return None


def check_storage(task: ShardTask) -> None:
    """Raises SetupError if this node does not see the driver's lock file, or does not see that this file is locked."""
    folder = task.lock.parent
    try:
        if is_held(task.lock, task.job_id):
            return
    except (OSError, ConfigError) as error:
        raise SetupError(
            f"{_here()} does not share the folder {folder} with the driver: the driver's lock {task.lock.name} is not "
            f"there ({getattr(error, 'strerror', None) or error}); give an output on storage that all nodes share"
        ) from error
    raise SetupError(
        f"{_here()} does not see the driver's lock on {task.lock}: this file system locks a file for one node only, so "
        "two tasks could write one output; mount it with locks for all nodes (NFS 4 without local_lock, CephFS, Lustre "
        "with flock)"
    )


def _here() -> str:
    return f"node {ray.util.get_node_ip_address()}"


class _ToBoard:
    """The Progress of a shard. Sends each message to the board immediately, but snapshots at most once a second."""

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
    """An actor that stores the shards' messages and snapshots until the driver reads them."""

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
