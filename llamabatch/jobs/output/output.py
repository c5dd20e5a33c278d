"""The output of a job: a file that contains the record of each row once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs import formats
from llamabatch.jobs.output.conversion import check_installed, convert, has_columns
from llamabatch.jobs.output.files import MOVED, REMOVED, REPLACED, AppendFile, Files
from llamabatch.jobs.output.journal import AsFinished, Checksums, InOrder
from llamabatch.jobs.output.manifest import Ending
from llamabatch.jobs.output.own_files import LONGEST_SUFFIX, OwnFiles, ahead_of, free_rescued_name, sums_of
from llamabatch.jobs.output.parquet import COMPRESSIONS
from llamabatch.jobs.output.records import RecordOptions, has_error, number_in, number_of, record, refusal, to_line
from llamabatch.jobs.output.resume import JobFiles, identity
from llamabatch.jobs.output.survey import sums_of_lines
from llamabatch.jobs.rows import BadRow, Row, ShardIndex
from llamabatch.request.outputs import RequestOutput
from llamabatch.utils.checks import boolean, choice, number, show
from llamabatch.utils.closing import Closing
from llamabatch.utils.paths import shown
from llamabatch.utils.system import most_name_bytes

Order = Literal["input", "finished"]
ORDERS: tuple[Order, ...] = ("input", "finished")

# A function that returns the settings of a job. Its argument is the inputs in the output's manifest; None: no manifest.
Identity = Callable[[object], Mapping[str, Any]]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class OutputOptions:
    """The form of an output, and how a run resumes an existing output.

    Attributes:
        order: "input": rows are in the order of the input; "finished": rows are in the order in which they finish.
        shard: (i, n) of the rows, as in ReadOptions.
        records: the options of records.
        retry_errors: rows that failed in an earlier run are removed and computed again.
        force: resumes an output even if its settings differ, its manifest is missing, or lines are damaged.
        compression: the compression of the columns of a Parquet file.
        sync_s: seconds between two syncs to the disk while rows are written.

    Raises:
        ConfigError: a value is out of range.
    """

    order: Order = "input"
    shard: tuple[int, int] = (1, 1)
    records: RecordOptions = field(default_factory=RecordOptions)
    retry_errors: bool = False
    force: bool = False
    sync_s: float = 5.0
    compression: str = COMPRESSIONS[0]

    def __post_init__(self) -> None:
        choice(ConfigError, "order", self.order, ORDERS)
        boolean(ConfigError, "retry_errors", self.retry_errors)
        boolean(ConfigError, "force", self.force)
        number(ConfigError, "sync_s", self.sync_s, 0.0, 3600.0)
        choice(ConfigError, "compression", self.compression, COMPRESSIONS)


class RecordWriter(Closing):
    """An output that makes a record of each row and writes it."""

    options: OutputOptions

    @property
    def records(self) -> RecordOptions:
        """The options of records."""
        return self.options.records

    def done(self, row: Row, output: RequestOutput) -> None:
        """Writes the result of a row. Raises the errors of write."""
        self.write(row.number, record(row, output, self.records))

    def refused(self, row: Row | BadRow, error: str) -> None:
        """Writes the error of a row that could not be run. Raises the errors of write."""
        self.write(row.number, refusal(row, error, self.records))

    def write(self, number: int, record: Mapping[str, Any]) -> None:
        """Writes the record of a row."""
        raise NotImplementedError


def _guarded(method: Callable[Concatenate[Output, P], R]) -> Callable[Concatenate[Output, P], R]:
    """Decorates a method of Output. After the first error in any decorated method, each call raises OutputError, so
    that nothing is written after half a line."""

    @wraps(method)
    def guarded(self: Output, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._failed is not None:
            raise OutputError(str(self._failed)) from self._failed
        try:
            return method(self, *args, **kwargs)
        except OSError as error:  # reading failed; errors of writing are OutputErrors already
            self._failed = OutputError(f"{self.path}: {error.strerror or error}")
            raise self._failed from error
        except BaseException as error:
            self._failed = error
            raise

    return guarded


class Output(RecordWriter):
    """A file that contains each row once, even if the process is killed. Only one thread may use it.

    The state is only in files: OUT with the rows, OUT.sums with their checksums, OUT.ahead with lines that wait for an
    earlier row, and OUT.job.json, the manifest of the job. For a table or a compressed file, the lines are in OUT.part,
    and OUT is made from OUT.part at the end. OUT.lock keeps other processes out.

    Args:
        path: the file.
        settings: everything that decides the content of the rows, as plain JSON: model, inputs, parameters. May
            also be a function that returns them; see Identity. Output adds the order, shard and options of records.
        options: how results are written.
        files: the file operations; their `emit` gets messages about waiting for a full disk.
        check_ids: as in JobFiles.open.

    Attributes:
        finished: all rows were in the output when it was opened, so nothing is left to do.
        n_before: number of rows that were in the output when it was opened.
        n_errors_before: number of failed rows among them.
        resumed: the run resumes an existing output.

    Raises:
        ConfigError: the name cannot be written; the output belongs to another job or to no job; another process is
            writing the output.
        OutputError: the output cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any] | Identity,
        options: OutputOptions | None = None,
        files: Files | None = None,
        check_ids: Callable[[Mapping[int, str]], None] = lambda ids: None,
    ) -> None:
        self.path = path = _resolved(path)
        self.options = options or OutputOptions()
        if self.options.compression != COMPRESSIONS[0] and formats.suffixes(path)[0] not in formats.PARQUET:
            raise ConfigError(
                f"compression is {show(self.options.compression)}, which is only for .parquet; to compress "
                f"the output {path.name}, end its name with .gz or .zst"
            )
        check_installed(path)
        if has_columns(path):
            self.options = _for_tables(self.options)
        self._shard = ShardIndex(self.options.shard)
        self._failed: BaseException | None = None
        self._journal: InOrder | AsFinished | None = None
        self._n_errors = 0
        self.n_before = self.n_errors_before = 0
        self.resumed = self.finished = self._closed = self._is_whole = False
        _check_name(path)
        in_order = self.options.order == "input"
        self._job = JobFiles(
            *(path, files or Files(), self._shard),
            in_order=in_order,
            retry_errors=self.options.retry_errors,
            force=self.options.force,
            records=self.records,
        )
        try:
            self._open(settings, InOrder if in_order else AsFinished, check_ids)
        except OSError as error:  # reading one of the job's files or an input failed
            self._failed = error
            self.close()
            raise OutputError(f"{error.filename or path}: {error.strerror or error}") from error
        except BaseException as error:
            self._failed = error
            self.close()
            raise
        self._synced_at = time.monotonic()

    def _open(
        self,
        settings: Mapping[str, Any] | Identity,
        journal: type[InOrder | AsFinished],
        check_ids: Callable[[Mapping[int, str]], None],
    ) -> None:
        job = self._job
        job.open(lambda known: self._all_settings(settings(known) if callable(settings) else settings), check_ids)
        self.resumed = job.resumed
        if job.ending is not None:
            self.finished, self.n_before, self.n_errors_before = True, job.ending.rows, job.ending.errors
            return
        assert job.own is not None
        assert job.lines is not None
        self._journal = journal(job.own, job.lines, self._shard, job.found)
        self.n_before = self._journal.n_done
        self.n_errors_before = self._n_errors = self._journal.n_errors

    def _all_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = {"order": self.options.order, "shard": list(self.options.shard), **self.records.document()}
        return {**settings, "output": own}

    @property
    def seed(self) -> int:
        """The seed of the job, 0 .. 2**63 - 1. A resumed job has the same seed."""
        return self._job.manifest.seed

    def is_done(self, number: int) -> bool:
        """Returns True if the row of this number is in the files; False for rows of other shards."""
        index = self._shard.index(number)
        return index is not None and (self._journal is None or self._journal.is_done(index))

    @_guarded
    def write(self, number: int, record: Mapping[str, Any]) -> None:
        """Writes the record of a row. Rows may come in any order. A written row survives the end of the process.

        Blocks while the disk is full.

        Raises:
            OutputError: the write fails. This object then writes nothing more, and the next run resumes the job.
            ValueError: the row is in the output already or belongs to another shard, or the record has another number.
        """
        self._append(number, number_in(record), to_line(record), failed=record.get("error", "") is not None)

    @_guarded
    def copy(self, number: int, line: bytes) -> None:
        """Writes a line that was copied from another output of the job. Raises the errors of write."""
        self._append(number, number_of(line), line, failed=has_error(line))

    def _append(self, number: int, own: int | None, line: bytes, *, failed: bool) -> None:
        """Writes the line of a row. `own` is the number in the line."""
        index = self._shard.index(number)
        if self._journal is None or index is None or self._journal.is_done(index) or own != number:
            raise ValueError(f"row {number} is not due")
        self._journal.write(index, line)
        self._n_errors += failed
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Syncs the written rows if the last sync was `sync_s` seconds ago or earlier. Called even while no row
        finishes. Raises OutputError."""
        if time.monotonic() - self._synced_at >= self.options.sync_s:
            self.sync()

    @_guarded
    def sync(self) -> None:
        """Syncs all written rows to the disk.

        Raises:
            OutputError: the disk fails, or another program has removed or changed one of the files.
        """
        self._sync()
        self._synced_at = time.monotonic()

    def _sync(self) -> None:
        if self._journal is not None:
            self._journal.sync()
            self._check_files()

    @_guarded
    def finish(self) -> None:
        """Ends the output after the last row. Call close() afterwards.

        Raises:
            OutputError: a write fails, or another program has removed or changed one of the files.
            ValueError: a row is missing.
        """
        job = self._job
        if self._journal is None or job.lines is None or job.own is None:
            return
        self._journal.finish()
        self._check_files()
        size, sums = job.lines.size, self._sums_of_lines()
        if job.lines_path != self.path:
            size, sums = self._write_table(job.own)
        ending = Ending(self._journal.n_done, self._n_errors, size, sums)
        job.manifest = replace(job.manifest, ending=ending)
        job.write_manifest(job.own)
        self._is_whole = True
        self._journal.close()
        job.lines.close()
        job.remove_side_files(job.own)

    def _write_table(self, own: OwnFiles) -> tuple[int, str]:
        """Makes the output from its lines. Returns the size and the checksums of the output."""
        if self._job.table != identity(self.path):
            raise OutputError(
                f"{self.path} has been made, replaced or removed by something else while the job ran. Its rows are in "
                f"{self._job.lines_path}; move {self.path.name} away, and run the same command again, which makes the "
                "output from these rows"
            )
        over, compression = self._job.table is not None, self.options.compression
        return convert(own, self._job.lines_path, self.records, over=over, compression=compression)

    def _sums_of_lines(self) -> str:
        assert self._job.own is not None
        return sums_of_lines(Checksums.read(self._job.own, sums_of(self._job.lines_path)) or iter(()))

    def _check_files(self) -> None:
        """Raises OutputError if another program has changed a file. The rows are saved first if their file is gone."""
        lines = self._job.lines
        assert lines is not None
        assert self._journal is not None
        for file in self._journal.side_files:
            change = file.change()
            if change is not None:
                failure = self._saved(file, file.path) if change == REMOVED else None
                again = "" if failure is None else failure or ", and is written again"
                away = "" if change != REPLACED else f"move {file.path.name} away, and "
                raise OutputError(
                    f"{file.path} {change} while the job ran{again}. What is in {lines.path} stays; {away}run the "
                    "same command again, which does the rest, or says what is wrong"
                )
        change = lines.change()
        if change is not None:
            raise OutputError(self._rescue(lines, change))

    def _rescue(self, file: AppendFile, change: str) -> str:
        """Saves the lines of a removed or replaced file. Returns the error message, which says where the lines are."""
        assert self._journal is not None
        rows = f"rows ({self._journal.n_done - self._journal.n_waiting:,})"
        message = f"{file.path} {change} while the job ran. "
        if change in (REMOVED, REPLACED):
            rescued = free_rescued_name(file.path)
            away = f"move {file.path.name} away, " if change == REPLACED else ""
            if failure := self._saved(file, rescued):
                message += f"Its {rows} are lost{failure}"
            else:
                message += f"Its {rows} are saved in {rescued}: {away}rename that to {file.path.name}"
                message += ", and run the same command again, which goes on from there"
        elif change == MOVED:
            message += f"Its {rows} are in {_name_of(file.fd)}: move that back to {file.path.name}"
            message += ", and run the same command again, which goes on from there"
        else:
            message += "What is left in it stays; run the same command again, which does the rest, or says what is "
            message += "wrong with it"
        if self._journal.n_waiting:
            message += f". Rows that wait for an earlier one ({self._journal.n_waiting:,}) are in {ahead_of(file.path)}"
        return message

    def _saved(self, file: AppendFile, path: Path) -> str:
        """Copies the content of a file that lost its name. Returns "", or the reason of a failure in brackets."""
        try:
            file.copy_to(path)
        except (OutputError, OSError) as error:
            return f" ({error.__cause__ or error})"
        return ""

    def close(self) -> None:
        """Syncs and closes the files, finished or not. Raises OutputError if the disk fails."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._failed is None and not self._is_whole:
                self._sync()
        finally:
            if self._journal is not None:
                self._journal.close()
            self._job.close()


def _for_tables(options: OutputOptions) -> OutputOptions:
    """Returns the options for a table. All rows of a table must have the same shape."""
    records = options.records
    return replace(options, records=replace(records, shape="flat" if records.shape == "auto" else records.shape))


def _resolved(path: Path) -> Path:
    """Returns the path without links, so that no rename replaces a link. Raises ConfigError for a cycle of links."""
    try:
        found = Path(os.path.realpath(path))
        if not os.path.islink(found):
            return found
    except (OSError, ValueError) as error:
        raise ConfigError(f"the output is '{shown(path)}', which is no file name: {error}") from error
    raise ConfigError(f"the output is '{shown(path)}', a link that leads to itself; give another name")


def _check_name(path: Path) -> None:
    """Raises ConfigError if an output cannot have this name."""
    suffix, zipped = formats.suffixes(path)
    if zipped and suffix in formats.PARQUET:
        raise ConfigError(f"the output is '{shown(path)}'; Parquet is compressed in itself: leave {zipped} away")
    foreign = "one JSON document" if suffix == ".json" else formats.FOREIGN.get(suffix)
    if foreign is not None:
        possible = Path(path.name.removesuffix(zipped)).with_suffix(".jsonl")
        raise ConfigError(
            f"the output is '{shown(path)}', and {suffix} is {foreign}, which is not written; "
            f"what is written: {formats.WRITTEN}; for instance '{possible}'"
        )
    try:
        if path.is_dir():
            raise ConfigError(f"the output is '{shown(path)}', a directory; give the name of a file")
        if not path.parent.is_dir():
            raise ConfigError(f"the output is '{shown(path)}'; there is no directory {path.parent}")
        most = most_name_bytes(path.parent) - LONGEST_SUFFIX
        if len(os.fsencode(path.name)) > most:
            raise ConfigError(
                f"the output is '{shown(path)}', a name of {len(os.fsencode(path.name))} bytes; allowed are up "
                f"to {most}, because a job keeps files with longer names beside it: give a shorter one"
            )
        if path.exists() and not path.is_file():
            raise ConfigError(f"the output is '{shown(path)}', which is no regular file; give another name")
    except OSError as error:
        raise ConfigError(f"the output is '{shown(path)}': {error.strerror}; give another name") from error


def _name_of(fd: int) -> str:
    """Returns the new name of a file that was moved, or a phrase if the name cannot be found."""
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return path
    return "that file, wherever it is now"
