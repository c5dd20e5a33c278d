"""Runs batches: one thread looks after all batches, and each running batch has a thread of its own.

A batch is a job over its file on the engine of the server. It runs in the background: it uses only rows that other
requests leave free. Each finished line is added to a journal on the disk, so the batch continues after a restart or a
kill.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from llamabatch.client.base import EngineClient
from llamabatch.errors import EngineClosedError, LlamaBatchError
from llamabatch.jobs.input.lines import ParsedLine
from llamabatch.jobs.job import JobInterrupted, run
from llamabatch.jobs.loop import Stop
from llamabatch.jobs.progress import JobSnapshot
from llamabatch.jobs.settings import Settings
from llamabatch.jobs.shared import SharedEngine
from llamabatch.server.batches.check import check_lines
from llamabatch.server.batches.records import OUTPUT_PURPOSE, BatchRecord, FileRecord, Status
from llamabatch.server.batches.results import write_results
from llamabatch.server.batches.store import Store
from llamabatch.server.batches.window import Window
from llamabatch.server.http.errors import FULL, ApiError
from llamabatch.server.http.private_paths import without_paths
from llamabatch.utils.checks import counted

logger = logging.getLogger(__name__)

ReadLine = Callable[[Mapping[str, Any]], ParsedLine]

MOST_RUNNING = 4  # limit of running batches; a batch in the second half of its window starts anyway
MOST_WAITING = 256  # limit of unfinished batches, running or not
_LOOK_S = 0.25  # seconds between two checks of all batches, and between two updates of a batch's counts
_IDLE_S = 5.0  # seconds between two checks while all batches have ended
_PAUSE_S = 10.0  # seconds until a batch is tried again after an error of the engine or the disk
_CLEAN_S = 60.0  # seconds between two removals of expired files and batches
# Keys: the last status of a batch. Values: the error code of its lines that have not run.
_CODES: dict[Status, str] = {
    "completed": "batch_failed",
    "failed": "batch_failed",
    "expired": "batch_expired",
    "cancelled": "batch_cancelled",
}


class Host(Protocol):
    """The interface to the engine of a server."""

    @property
    def client(self) -> EngineClient:
        """The client of the engine."""

    def model_identity(self) -> dict[str, Any]:
        """Returns name, size and digest of the model."""

    def settings(self, source: Path, journal: Path) -> Settings:
        """Returns the settings of a job that reads the lines of `source` and writes `journal`."""

    def reader(self, endpoint: str) -> ReadLine:
        """Returns the reader for the lines of an endpoint."""


class Batches:
    """Runs all batches of a store, from `start` to `stop`.

    Args:
        store: the files and batches.
        host: the engine.

    Attributes:
        store, host: as given.
        mutex: held while the status of a batch changes.
    """

    def __init__(self, store: Store, host: Host) -> None:
        self.store = store
        self.host = host
        self.mutex = threading.RLock()
        self._running: dict[str, _Run] = {}
        self._wake = threading.Event()
        self._ends = False
        self._thread: threading.Thread | None = None
        self._model: dict[str, Any] = {}
        self._cleaned_at = -_CLEAN_S
        self._paused_until: dict[str, float] = {}  # batch id -> time.monotonic() at the end of its pause
        self._waits: dict[str, str] = {}  # batch id -> the reason of the pause, as text
        self._was_full = False

    def start(self) -> None:
        """Starts to run batches, including the unfinished batches of an earlier process."""
        self._model = self.host.model_identity()
        for batch in self.store.batches():
            if not batch.has_ended:
                logger.info("%s goes on: %s", batch.id, batch.status)
                if batch.model is not None and dict(batch.model) != self._model:
                    logger.warning(
                        "%s began with the model %s and waits for a server with that model; this server has %s",
                        *(batch.id, batch.model.get("name"), self._model.get("name")),
                    )
        self._thread = threading.Thread(target=self._look_after, name="llamabatch-batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Interrupts all batches, and waits for their threads. Another Batches object can continue the batches, also in
        another process. May be called twice."""
        with self.mutex:
            self._ends = True
            runs = list(self._running.values())
        self._wake.set()
        for each in runs:
            each.end("stopped")
        if self._thread is not None:
            self._thread.join()
        for each in runs:
            each.thread.join()

    def add(self, batch: BatchRecord) -> None:
        """Adds a batch. Raises ApiError if the file is missing or has results, or if too many batches run or wait."""
        with self.mutex, self.store.mutex:  # so that no thread deletes the file before the batch is stored
            file = self.store.file(batch.input_file_id)
            if file.purpose == OUTPUT_PURPOSE:
                raise ApiError(400, f"{file.id} holds results of a batch; give a file of lines", param="input_file_id")
            if len(self.store.unended()) >= MOST_WAITING:
                raise ApiError(429, f"{MOST_WAITING} batches have not ended; wait for one, or cancel one")
            self.store.put_batch(replace(batch, model=self._model))
        self._wake.set()

    def cancel(self, batch_id: str) -> BatchRecord:
        """Cancels a batch. Its results stay. Raises ApiError: there is no batch (404), or the batch has ended (409)."""
        with self.mutex:
            batch = self.store.batch(batch_id)
            if batch.status in ("cancelling", "cancelled"):
                return batch
            if batch.has_ended or batch.status == "finalizing":
                raise ApiError(409, f"{batch_id} is {batch.status}, and cannot be cancelled any more")
            batch = batch.entered("cancelling", self.store.clock())
            self.store.put_batch(batch)
            run = self._running.get(batch_id)
        if run is not None:
            run.end("cancelled")
        self._wake.set()
        return batch

    def waiting_for(self, batch: BatchRecord) -> str | None:
        """Returns the reason why a batch waits for the disk or the engine, as text; None: it does not wait for them."""
        with self.mutex:
            if batch.has_ended or batch.id in self._running:
                return None
            if self._was_full:
                return "disk: files and batches take all of the server's --max-disk-bytes; delete files"
            return self._waits.get(batch.id)

    @property
    def has_work(self) -> bool:
        """True while a batch runs or may begin. A batch that waits for another model, or for room in the folder, does
        not count."""
        with self.mutex:
            if self._running or self._was_full:
                return bool(self._running)
            return any(each.model is None or dict(each.model) == self._model for each in self.store.unended())

    def _look_after(self) -> None:
        while not self._ends:
            try:
                self._look()
            except Exception:
                logger.exception("batches could not be looked after; the next look comes")
            self._wake.wait(_LOOK_S if self.store.unended() else _IDLE_S)
            self._wake.clear()

    def _look(self) -> None:
        store, now = self.store, self.store.clock()
        if time.monotonic() - self._cleaned_at >= _CLEAN_S:
            self._cleaned_at = time.monotonic()
            store.remove_expired()
        waiting = [each for each in store.unended() if each.id not in self._running]
        if not waiting and not self._running:
            return
        is_full = store.is_full
        if is_full and not self._was_full:
            logger.warning("%s is full (--max-disk-bytes); batches wait until files are deleted", store.folder)
        self._was_full = is_full
        with self.mutex:
            for run in self._running.values():
                if is_full:
                    run.end("full")
            for batch in sorted(waiting, key=lambda each: (each.expires_at, each.created_at, each.id)):
                if self._ends:
                    return
                if self._may_start(batch, now, is_full):
                    self._running[batch.id] = _Run(self, batch)
                    self._running[batch.id].thread.start()

    def _may_start(self, batch: BatchRecord, now: float, is_full: bool) -> bool:
        if time.monotonic() < self._paused_until.get(batch.id, 0.0):
            return False
        if batch.status in ("cancelling", "finalizing") or now >= batch.expires_at:
            return True
        if is_full or (batch.model is not None and dict(batch.model) != self._model):
            return False
        urgent = Window(batch.created_at, batch.expires_at).is_near(now, 0)
        return urgent or len(self._running) < MOST_RUNNING

    def ended(self, run: _Run, waits: str = "") -> None:
        """Removes a run whose thread is about to end.

        Args:
            waits: the reason for a pause before the batch continues, as text; "": there is no pause.
        """
        with self.mutex:
            self._running.pop(run.batch_id, None)
            self._paused_until.pop(run.batch_id, None)
            self._waits.pop(run.batch_id, None)
            if waits:
                self._paused_until[run.batch_id] = time.monotonic() + _PAUSE_S
                self._waits[run.batch_id] = waits
        self._wake.set()


class _Run:
    """A running batch and its thread. The object is also the Progress of the batch's job.

    Attributes:
        thread: the thread; the caller starts it.
        shared: the engine, once the job runs.
    """

    def __init__(self, batches: Batches, batch: BatchRecord) -> None:
        self.batch_id = batch.id
        self.shared: SharedEngine | None = None
        self.thread = threading.Thread(target=self._run, name=f"llamabatch-{batch.id[:12]}", daemon=True)
        self._batches = batches
        self._store = batches.store
        self._stop = Stop()
        self._reason = ""
        self._window = Window(batch.created_at, batch.expires_at)
        self._next = 0.0

    def end(self, reason: str) -> None:
        """Ends the job. The job continues later unless `reason` is "cancelled" or "expired". Thread-safe."""
        if not self._reason:
            self._reason = reason
        self._stop.request()

    @property
    def _batch(self) -> BatchRecord:
        return self._store.batch(self.batch_id)

    def _put(self, batch: BatchRecord) -> BatchRecord:
        self._store.put_batch(batch)
        return batch

    def _enter(self, status: Status, **more: Any) -> BatchRecord:
        return self._put(self._batch.entered(status, self._store.clock(), **more))

    def _run(self) -> None:
        waits = ""
        try:
            self._advance()
        except EngineClosedError as error:
            logger.warning("%s waits for an engine: %s", self.batch_id, error)
            waits = "engine"
        except OSError as error:
            logger.error("%s is tried again, because the disk failed: %s", self.batch_id, error)
            waits = f"disk: {error.strerror or 'it failed'}"
        except BaseException as error:
            logger.exception("%s ends with an unexpected error", self.batch_id)
            self._fail_after(error)
        finally:
            self._batches.ended(self, waits)

    def _fail_after(self, error: BaseException) -> None:
        """Ends the batch as failed. Keeps the results of its finished lines if possible."""
        message = f"an internal error, {type(error).__name__}; the log of the server has it"
        errors = (_error("server_error", message),)
        try:
            if self._batch.status == "in_progress":
                self._put(replace(self._batch, errors=errors))
                self._finish("failed")
            elif not self._batch.has_ended:
                self._enter("failed", errors=errors)
        except Exception:
            logger.exception("%s could not be ended", self.batch_id)
            with contextlib.suppress(Exception):
                self._enter("failed", errors=errors)

    def _advance(self) -> None:
        """Moves the batch from its current status as far as possible."""
        if self._batch.status == "validating" and not self._is_over():
            self._validate()
        batch = self._batch
        if batch.status == "validating":  # the server or the window ended during the check
            if self._is_over():
                self._finish("expired")
        elif batch.status == "in_progress":
            ending = self._work()
            if ending is not None:
                self._finish(ending)
        elif batch.status == "cancelling":
            self._finish("cancelled")
        elif batch.status == "finalizing":
            self._finish(batch.ending or "completed")

    def _is_over(self) -> bool:
        return self._window.is_over(self._store.clock())

    def _validate(self) -> None:
        batch = self._batch
        source = self._store.content(batch.input_file_id)
        try:
            found = check_lines(source, batch.endpoint, lambda: self._stop or self._is_over())
        except FileNotFoundError:
            self._enter("failed", errors=(_error("invalid_file", f"{batch.input_file_id} is gone"),))
            return
        with self._batches.mutex:
            if self._batch.status != "validating" or self._stop or self._is_over():
                return  # the batch is cancelled or over, or the server ends
            if found.errors:
                self._enter("failed", errors=tuple(found.errors), total=found.total)
            else:
                self._enter("in_progress", total=found.total)

    def _work(self) -> Status | None:
        """Runs the job. Returns the next status; None: the job continues later."""
        host, batch = self._batches.host, self._batch
        source, journal = self._store.content(batch.input_file_id), self._store.journal(self.batch_id)
        if self._is_over():
            return "expired"
        try:
            settings = host.settings(source, journal)
            self.shared = SharedEngine(host.client, read_line=host.reader(batch.endpoint))
            self._promote_if_near(batch.total)
            summary = run(settings, self, shared=self.shared, stop=self._stop)
        except JobInterrupted:
            return {"cancelled": "cancelled", "expired": "expired"}.get(self._reason)  # type: ignore[return-value]
        except EngineClosedError:
            raise
        except (LlamaBatchError, ApiError) as error:
            if (full := _full_disk(error)) is not None:
                raise full from error  # the batch only pauses until the disk has room
            logger.error("%s has failed: %s", self.batch_id, error)
            self._put(replace(self._batch, errors=(_error("server_error", without_paths(str(error))),)))
            return "failed"
        counts = summary.counts
        self._count(counts.rows, counts.failed + counts.failed_before)
        return "completed"

    def say(self, text: str) -> None:
        """Logs a message of the job."""
        logger.info("%s: %s", self.batch_id, text)

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        """Updates the batch from the state of the job, a few times a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        state = snapshot()
        self._count(state.rows, state.failed + state.failed_before)
        batch = self._batch
        self._window.observe(self._store.clock(), state.rows)
        if self._is_over() and state.rows < batch.total:
            self.end("expired")
        else:
            self._promote_if_near(batch.total - state.rows)

    def _promote_if_near(self, n_left: int) -> None:
        now = self._store.clock()
        if self.shared is not None and self.shared.background and n_left and self._window.is_near(now, n_left):
            logger.info("%s leaves the background: %s", self.batch_id, self._window.describe(now, n_left))
            self.shared.promote()

    def _count(self, rows: int, failed: int) -> None:
        with self._batches.mutex:
            self._store.keep_counts(replace(self._batch, completed=rows - failed, failed=failed))

    def _finish(self, ending: Status) -> None:
        """Writes the files of results and errors, and ends the batch."""
        store, clock = self._store, self._store.clock
        with self._batches.mutex:
            batch = self._batch
            if batch.status == "cancelling":
                ending = "cancelled"
            elif batch.status != "finalizing":
                batch = self._enter("finalizing", ending=ending)
        source, journal = store.content(batch.input_file_id), store.journal(self.batch_id)
        written = write_results(
            *(source, journal, store.content(batch.output_id), store.content(batch.error_id), _CODES[ending]),
            lambda target: store.unfinished(target.stem),
        )
        made = (
            (batch.output_id, written.completed, written.output_bytes, "output"),
            (batch.error_id, written.failed, written.error_bytes, "error"),
        )
        for file_id, n_lines, n_bytes, kind in made:
            if n_lines:
                expires_at = None if batch.output_expires_s is None else int(clock()) + batch.output_expires_s
                name = f"{self.batch_id}_{kind}.jsonl"
                store.add_file(FileRecord(file_id, n_bytes, int(clock()), name, OUTPUT_PURPOSE, expires_at))
        with self._batches.mutex:
            self._enter(
                ending,
                output_file_id=batch.output_id if written.completed else None,
                error_file_id=batch.error_id if written.failed else None,
                completed=written.completed,
                failed=written.failed,
            )
        store.remove_journal(self.batch_id)
        logger.info(
            "%s is %s: %s, %s", self.batch_id, ending, counted(written.completed, "result"),
            counted(written.failed, "error"),
        )  # fmt: skip


def _full_disk(error: BaseException | None) -> OSError | None:
    """Returns the first OSError of a full disk in the chain of an error and its causes; None: there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__
    return None


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": None, "message": message, "param": None}
