"""Jobs on Ray: each shard of a job is a task of the cluster, with its own output and journal on shared storage.

A shard runs like `run --shard k/N`, so a new task can continue the shard of a task that died. This file starts the
tasks, shows their progress, and joins the parts in the order of the input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamabatch.errors import (
    ConfigError,
    EngineClosedError,
    InputError,
    OutputError,
    SetupError,
    describe,
)
from llamabatch.integrations import needs
from llamabatch.integrations.ray_cluster import ShardSize
from llamabatch.integrations.ray_parts import PLACE, in_a_row, in_turn, part_bytes, part_of_shard
from llamabatch.integrations.ray_shard import Board, ShardTask, run_shard
from llamabatch.jobs.input import sources
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.input.total import Seen, Total
from llamabatch.jobs.job import READY, JobInterrupted
from llamabatch.jobs.loop import Stop
from llamabatch.jobs.output import manifest
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.lock import Lock
from llamabatch.jobs.output.manifest import plain
from llamabatch.jobs.output.output import Output
from llamabatch.jobs.output.own_files import all_names, lock_of, manifest_of
from llamabatch.jobs.output.parquet import COMPRESSIONS
from llamabatch.jobs.output.stream import STDOUT
from llamabatch.jobs.progress import JobSnapshot, Progress, Silent
from llamabatch.jobs.settings import Settings, identity
from llamabatch.jobs.stats import Counts, Timeline
from llamabatch.jobs.summary import Summary
from llamabatch.utils.checks import counted, integer, show
from llamabatch.utils.paths import shown

with needs("ray", "ray"):
    import ray

MOST_SHARDS = 10_000

_CONNECT_S = 10.0
_LOOK_S = 0.5
_BOARD_S = 5.0
_END_S = 20.0  # seconds to wait for the tasks of a stopped job to end
_ROOM_S = 60.0  # after this many seconds without a running shard, a message says that the job waits for free nodes
_TRIES = 5  # the job ends after this many consecutive attempts of a shard without a new row
_LONGEST_PAUSE_S = 30.0


def run(
    settings: Settings,
    address: str | None,
    n_shards: int,
    progress: Progress | None = None,
    *,
    stop: Stop | None = None,
) -> Summary:
    """Runs a job as `n_shards` tasks on a Ray cluster, or resumes a job that ended early.

    All nodes, and the machine that calls `run`, must see the inputs, the outputs and the model under the same paths.
    File locks on this storage must work across machines. Each shard writes its own output and journal in the folder
    OUT.shards. When the last shard is done, these parts are joined in OUT, and are not deleted. If the name of OUT
    contains "{shard}", each shard writes a file with "1-of-4" (for example) in place of "{shard}", and nothing is
    joined.

    If a task dies with its worker or its node, a new task continues its shard. If the call itself is killed, the same
    call resumes the job. Each row is written exactly once. Rows draw the same tokens as in one process, because a
    row's seed follows from the job's seed and the row's number.

    Args:
        settings: as for jobs.run, without a shard, stdin, stdout and metrics_file.
        address: the address of the cluster, as for ray.init: "auto", "host:6379", or "local" for a new cluster that
            lasts as long as the call. None: the cluster to which the program is connected.
        n_shards: the number of shards, 1 to 10,000. It must stay the same when a job resumes.
        progress, stop: as for jobs.run.

    Raises:
        ConfigError: n_shards is out of range, or differs from an earlier run; a setting does not work with shards; the
            output of the job or of a shard belongs to another job; another process is writing the output.
        SetupError: no cluster is at the address; a node does not share the storage, has another version or sees
            different files; Ray cannot run a task.
        MemoryPlanError: no node has enough memory for a shard.
        EngineClosedError: five consecutive attempts of a shard have ended without a new row. Finished rows are written,
            and the same call resumes after them.
        JobInterrupted and other errors: as for jobs.run.
    """
    _check(settings, n_shards)
    stop = Stop() if stop is None else stop
    with contextlib.ExitStack() as stack:
        job = _Job(settings, n_shards, progress or Silent(), stop)
        if job.open(stack):
            return job.summary()
        stack.enter_context(_connected(address))  # Ray sets a signal handler here, which listening() then replaces
        with stop.listening():
            try:
                job.run()
            except KeyboardInterrupt:
                if not stop:
                    raise
    if stop:
        raise JobInterrupted(job.summary())
    return job.summary()


def _check(settings: Settings, n_shards: int) -> None:
    """Raises ConfigError if the settings do not work with shards."""
    integer(ConfigError, "shards", n_shards, 1, MOST_SHARDS)
    if settings.output == STDOUT:
        raise ConfigError("the output of a job on Ray is '-'; give a file on storage that the nodes share")
    if sources.STDIN in settings.inputs:
        raise ConfigError("an input of a job on Ray is '-'; give files on storage that the nodes share")
    if settings.reading.shard != (1, 1):
        i, n = settings.reading.shard
        raise ConfigError(f"shard is {i}/{n}; on Ray give the number of all shards alone: shards={n}")
    if settings.metrics_file is not None:
        raise ConfigError("metrics_file is of one process; on Ray look at its dashboard, or leave it out")


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Connects to the cluster for the duration of the block. Uses an existing connection, and does not close it."""
    if address is None or ray.is_initialized():
        if not ray.is_initialized():
            raise SetupError("the program is connected to no Ray cluster; give its address, or call ray.init first")
        yield
        return
    try:
        _look_for(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise SetupError(
            f"no Ray cluster is reached at {show(address)}: {_first_line(error)}; give auto on one of its nodes, "
            "HOST:PORT of its head (6379, unless `ray start --head` was given another port), or local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _look_for(address: str) -> None:
    """Raises OSError or ValueError if nothing listens at HOST:PORT, because Ray itself would retry for six minutes."""
    if address in ("auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("it is no HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


@dataclass
class _Attempts:
    """The attempts of a shard. `n`: number of consecutive attempts that have failed without a new row."""

    n: int = 0
    due: float = 0.0  # time.monotonic() at which the next attempt may start
    size: tuple[int, int] = (0, 0)  # part_bytes() of the shard's output when the last attempt started


class _Job:
    """One run of a job; see the function `run`."""

    def __init__(self, settings: Settings, n_shards: int, progress: Progress, stop: Stop) -> None:
        self._settings = settings
        self._n_shards = n_shards
        self._progress = progress
        self._stop = stop
        self._out = Path(os.path.realpath(settings.output))
        self._joins = PLACE not in self._out.name
        self._parts = {k: part_of_shard(self._out, k, n_shards) for k in range(1, n_shards + 1)}
        self._start = time.perf_counter()
        self._summaries: dict[int, Summary] = {}
        self._snapshots: dict[int, JobSnapshot] = {}
        self._first_rows: dict[int, int] = {}
        self._attempts = {k: _Attempts() for k in self._parts}
        self._running: dict[Any, int] = {}  # reference to a task's result -> number of the task's shard
        self._joined: Output | None = None
        self._task: ShardTask  # a task with the fields that all shards share; set by open()
        self._done_before: tuple[int, int] | None = None  # rows and errors, if the output was complete at the start
        self._total: int | None = None
        self._estimated = False
        self._most_slots = self._most_engines = self._n_again = 0
        self._idle_since = time.monotonic()
        self._says_idle = True
        self._has_engine = False  # True after a shard has reported that its engine is ready

    def open(self, stack: contextlib.ExitStack) -> bool:
        """Finds the inputs. Locks the output until `stack` ends. Returns True if the output is already complete."""
        self._check_number()
        inputs = self._find_inputs()
        paths = tuple(str(source.path) for source in inputs)  # paths, because a glob could later match a part
        settings = replace(self._settings, inputs=paths)
        files = Files(self._progress.say, stopped=lambda: self._stop)
        if self._joins:
            self._joined = joined = Output(self._out, identity(settings, inputs), settings.writing, files)
            stack.enter_context(contextlib.closing(joined))
            if joined.finished:
                self._done_before = joined.n_before, joined.n_errors_before
                self._progress.say(f"{shown(self._out)} is complete: {counted(joined.n_before, 'row')}")
                return True
            # Parts are always uncompressed lines of JSON, with the records and the seed of the job.
            writing = replace(joined.options, compression=COMPRESSIONS[0])
            seed = joined.seed if settings.seed is None else settings.seed
            settings, job_id = replace(settings, writing=writing, seed=seed), manifest.id_of(joined.seed)
            self._make_folder()
            self._check_seeds(settings)
        else:
            lock = Lock(files, lock_of(self._out), self._out)
            stack.callback(lock.release)
            lock.write_id(job_id := secrets.token_hex(8))
        self._task = ShardTask(settings, plain(identity(settings, inputs)), lock_of(self._out), job_id)
        total = Total(inputs, settings.reading).rows(Seen())
        if total is not None:
            self._total, self._estimated = total.n, total.estimated
        return False

    def run(self) -> None:
        """Runs all shards and joins their parts. Raises the errors of the function `run`, but KeyboardInterrupt after a
        stop."""
        size = ShardSize.of(self._task.settings)
        with self._stop.noted(_do_nothing):
            try:
                self._compute(size)
            finally:
                self._cancel()
            if self._joined is not None:
                self._join(self._joined)
            else:
                first, last = (shown(self._parts[k]) for k in (1, self._n_shards))
                self._progress.say(f"the parts are in {first} to {Path(last).name}")

    def _check_number(self) -> None:
        """Raises ConfigError if the folder has parts of a job with another number of shards."""
        sample = part_of_shard(self._out, 1, 1)
        before, after = manifest_of(sample).name.split("1-of-1", 1)
        name = re.compile(re.escape(before) + r"\d+-of-(\d+)" + re.escape(after))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for each in sorted(os.listdir(sample.parent)):
                match = name.fullmatch(each)
                if match and int(match[1]) != self._n_shards:
                    raise ConfigError(
                        f"shards is {self._n_shards}, and {sample.parent / each} is of a job in {match[1]} shards; go "
                        f"on with shards={match[1]}, or give another output"
                    )

    def _find_inputs(self) -> list[Source]:
        own = {name for out in (self._out, *self._parts.values()) for name in all_names(out)}
        return sources.find(self._settings.inputs, without=own)

    def _make_folder(self) -> None:
        folder = self._parts[1].parent
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}, for the parts of the output, cannot be made: {error.strerror}") from error

    def _task_of(self, k: int, engine: Mapping[str, int]) -> ShardTask:
        settings = self._task.settings
        reading = replace(settings.reading, shard=(k, self._n_shards))
        engine = {**settings.engine, **engine}
        return replace(
            self._task, settings=replace(settings, reading=reading, output=str(self._parts[k]), engine=engine)
        )

    def _check_seeds(self, settings: Settings) -> None:
        """Raises ConfigError if the parts have another seed than this job. Such parts come from another job or a
        removed output."""
        if settings.writing.force:
            return
        for part in self._parts.values():
            found = manifest.read(manifest_of(part))
            if found is not None and found.manifest and found.manifest.settings.get("seed") != settings.seed:
                raise ConfigError(
                    f"{part.parent} has parts of another job with the same output, or of one whose {self._out.name} "
                    "was removed; move the folder away, or give another output"
                )

    def _compute(self, size: ShardSize) -> None:
        # If the board dies with its node, Ray restarts it empty on another node, and the shards report to it again.
        board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote()
        # A shard without progress must end the job. So this class counts attempts, and max_retries is 0: Ray's own
        # retries ignore progress, and never end if memory runs out.
        remote = ray.remote(run_shard)
        options = {"max_retries": 0, "scheduling_strategy": "SPREAD", **size.resources}
        left = list(self._parts)
        while left or self._running:
            if self._stop:
                raise KeyboardInterrupt
            now = time.monotonic()
            for k in [k for k in left if self._attempts[k].due <= now]:
                left.remove(k)
                self._attempts[k].size = part_bytes(self._parts[k])
                name = f"llamabatch shard {k}/{self._n_shards}"
                self._running[remote.options(name=name, **options).remote(self._task_of(k, size.engine), board)] = k
            done: list[Any] = []
            if self._running:
                done, _ = ray.wait(list(self._running), timeout=_LOOK_S)
            else:
                time.sleep(_LOOK_S)
            for reference in done:
                k = self._running.pop(reference)
                if (reason := self._ended(k, reference)) is not None:
                    self._again(k, reason)
                    left.append(k)
            self._look(board)
            self._say_if_idle(size)
            self._progress.show(self._snapshot)

    def _ended(self, k: int, reference: Any) -> str | None:
        """Stores the summary of a task that has ended, and returns None. If the shard must run again, returns the
        reason. Raises the errors of `run`."""
        name = f"shard {k}/{self._n_shards}"
        try:
            summary = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, (InputError, SetupError)):
                self._progress.say(f"{name} has ended with an error, which ends the job")
                raise cause from None
            # Another attempt may succeed: the cause may be a disk, an engine, or memory of a task that is still dying.
            return describe(cause) if isinstance(cause, Exception) else _last_line(error)
        except ray.exceptions.RayError as error:  # the task's worker or node died, or Ray killed the task for memory
            return f"{type(error).__name__}: {_first_line(error)}"
        if summary is None:
            return "a signal ended its process"
        self._summaries[k] = summary
        self._snapshots.pop(k, None)
        return None

    def _again(self, k: int, reason: str) -> None:
        """Sets the time of a shard's next attempt. Raises EngineClosedError after too many attempts without a new
        row."""
        attempts = self._attempts[k]
        before, now = attempts.size, part_bytes(self._parts[k])
        attempts.n = 1 if now[0] > before[0] or now[1] > before[1] else attempts.n + 1
        self._n_again += 1
        name = f"shard {k}/{self._n_shards}"
        if attempts.n >= _TRIES:
            raise EngineClosedError(
                f"{name} has ended {attempts.n} times in a row without a new row, the last time by: {reason}. "
                "Finished rows are written, and the same command continues from there"
            )
        attempts.due = time.monotonic() + min(_LONGEST_PAUSE_S, 2.0 ** (attempts.n - 1) - 1.0)
        self._progress.say(f"{name} has failed ({reason}), and is started again")
        if k in self._snapshots:
            self._snapshots[k] = replace(self._snapshots[k], tokens_per_s=0.0, running=0, slots=0)

    def _look(self, board: Any) -> None:
        """Reads messages and snapshots from the board. Does nothing while Ray restarts the board on another node."""
        try:
            messages, snapshots = ray.get(board.look.remote(), timeout=_BOARD_S)
        except ray.exceptions.RayError:
            return
        for k, text in messages:
            if text.startswith(READY):  # only the first such text is shown, because all shards load the same model
                if self._has_engine:
                    continue
                self._has_engine = True
            self._progress.say(f"shard {k}/{self._n_shards}: {text}")
        for k, snapshot in snapshots.items():
            if k not in self._summaries:
                self._snapshots[k] = snapshot
                self._first_rows.setdefault(k, snapshot.rows)
        at_work = [each for each in self._snapshots.values() if each.slots]
        self._most_engines = max(self._most_engines, len(at_work))
        self._most_slots = max(self._most_slots, sum(each.slots for each in at_work))
        if at_work or self._summaries:
            self._idle_since, self._says_idle = time.monotonic(), True

    def _say_if_idle(self, size: ShardSize) -> None:
        if self._says_idle and time.monotonic() - self._idle_since > _ROOM_S:
            self._says_idle = False
            self._progress.say(
                f"no shard has started within {_ROOM_S:.0f} s; each needs {size}. `ray status` shows the free "
                "resources. The job waits"
            )

    def _snapshot(self) -> JobSnapshot:
        begun = list(self._snapshots.values())
        ended = [summary.counts for summary in self._summaries.values()]
        rows = sum(each.rows for each in begun) + sum(counts.rows for counts in ended)
        new = rows - sum(self._first_rows.get(k, 0) for k in self._snapshots)
        new -= sum(summary.counts.done_before for summary in self._summaries.values())
        total = None if self._total is None else max(self._total, rows)
        elapsed = time.perf_counter() - self._start
        return JobSnapshot(
            rows,
            total,
            sum(each.failed for each in begun) + sum(counts.failed for counts in ended),
            sum(each.tokens_per_s for each in begun),
            sum(each.running for each in begun),
            sum(each.slots for each in begun),
            None if total is None or new <= 0 else (total - rows) * elapsed / new,
            estimated=self._estimated,
        )

    def _cancel(self) -> None:
        """Cancels the remaining tasks and waits for them to end, so that their locks become free."""
        for reference in self._running:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.cancel(reference, force=True)
        if self._running:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(list(self._running), num_returns=len(self._running), timeout=_END_S)

    def _join(self, output: Output) -> None:
        """Writes the lines of all parts to the output. Raises OutputError, or KeyboardInterrupt after a stop."""
        self._progress.say(f"all shards are done; {counted(self._n_shards, 'part')} are joined in {shown(self._out)}")
        order = output.options.order
        for number, line in (in_turn if order == "input" else in_a_row)(list(self._parts.values())):
            if self._stop:
                raise KeyboardInterrupt
            if not output.is_done(number):
                output.copy(number, line)
        try:
            output.finish()
        except ValueError as error:
            raise OutputError(f"rows are missing in {self._parts[1].parent}: {error}") from error
        self._progress.say(f"the parts stay in {shown(self._parts[1].parent)}")

    def summary(self) -> Summary:
        """Returns the summary of the rows so far."""
        counts = Counts()
        for each in self._summaries.values():
            counts.include(each.counts)
        if self._done_before is not None:
            counts.done_before, counts.failed_before = self._done_before
        config = self._settings.config
        return Summary(
            shown(self._out),
            counts,
            Timeline(1),
            max((each.load_s for each in self._summaries.values()), default=0.0),
            time.perf_counter() - self._start,
            os.path.basename(config.model),
            next((each.strategy for each in self._summaries.values() if each.slots), config.strategy),
            self._most_slots,
            max(1, self._most_engines),
            restarts=self._n_again + sum(each.restarts for each in self._summaries.values()),
            price_per_hour=self._settings.price_per_hour,
            signum=self._stop.signum,
        )


def _first_line(error: BaseException) -> str:
    """Returns the first sentence of an error, because Ray's errors are long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")


def _do_nothing() -> None: ...
