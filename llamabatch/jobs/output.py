"""The output of a job: opened, gone on with, and finished."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from llamabatch.checks import boolean, choice, number, show
from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs import endings
from llamabatch.jobs import manifest as manifests
from llamabatch.jobs.arrange import arrange, has_errors
from llamabatch.jobs.files import Files, temporary
from llamabatch.jobs.journal import AsFinished, InOrder, ahead_of
from llamabatch.jobs.lines import has_error, number_of, to_line
from llamabatch.jobs.locks import Lock
from llamabatch.jobs.manifest import Ending, Manifest
from llamabatch.jobs.parquet_output import check_installed, convert, is_parquet, part_of, restore
from llamabatch.jobs.places import Places
from llamabatch.jobs.records import RecordOptions, record, refusal
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.jobs.survey import Survey, survey
from llamabatch.request import RequestOutput

Order = Literal["input", "finished"]
ORDERS: tuple[Order, ...] = ("input", "finished")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class OutputOptions:
    """How results are written.

    Attributes:
        order: "input": in the order of the input; "finished": as they come.
        shard: (i, n) of the rows that come, as in ReadOptions.
        records: what is written of a row.
        retry_errors: rows that failed in an earlier run are taken out, and count as not done.
        force: go on with an output though its settings differ, it has no manifest, or lines of it are damaged.
        sync_s: seconds after which what was written is made to reach the disk.

    Raises:
        ConfigError: a value is out of range.
    """

    order: Order = "input"
    shard: tuple[int, int] = (1, 1)
    records: RecordOptions = field(default_factory=RecordOptions)
    retry_errors: bool = False
    force: bool = False
    sync_s: float = 5.0

    def __post_init__(self) -> None:
        choice(ConfigError, "order", self.order, ORDERS)
        boolean(ConfigError, "retry_errors", self.retry_errors)
        boolean(ConfigError, "force", self.force)
        number(ConfigError, "sync_s", self.sync_s, 0.0, 3600.0)


def _guarded(method: Callable[Concatenate[Output, P], R]) -> Callable[Concatenate[Output, P], R]:
    """What fails once fails from then on: nothing is written behind half a line, or out of order."""

    @wraps(method)
    def guarded(self: Output, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._failed is not None:
            raise OutputError(str(self._failed)) from self._failed
        try:
            return method(self, *args, **kwargs)
        except OSError as error:  # of reading; all that writes is wrapped already
            self._failed = OutputError(f"{self.path}: {error.strerror or error}")
            raise self._failed from error
        except BaseException as error:
            self._failed = error
            raise

    return guarded


class Output:
    """Where rows end: a file that holds each row once, whatever happens to the process.

    One thread uses it. What is done stands in the files alone: OUT, beside it OUT.ahead with what waits for an earlier
    row, and OUT.job.json, which says of which job it is. Where OUT is a Parquet file the lines are in OUT.part, and OUT
    is made of them at the end. Another process is kept out by OUT.lock.

    Args:
        path: where the output goes.
        settings: all that decides what the rows are, as plain JSON: model, inputs, parameters. Order, shard and what
            records hold are added here.
        options: how results are written.
        files: the operating system; its `tell` gets messages about waiting for a full disk.

    Attributes:
        finished: all rows were there when it was opened; there is nothing to do.
        n_before: rows that were there when it was opened.
        n_errors_before: those of them that failed.
        resumed: it goes on with an output that was there.

    Raises:
        ConfigError: the name is none that can be written; the output is of another job, or of none; another process
            is writing it.
        OutputError: it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        options: OutputOptions | None = None,
        files: Files | None = None,
    ) -> None:
        self.path = path = Path(os.path.realpath(path))  # a link stays one
        self.options = options or OutputOptions()
        self._kept = path
        if is_parquet(path):
            check_installed()
            self._kept, self.options = part_of(path), _for_tables(self.options)
        self._files = files or Files()
        self._places = Places(self.options.shard)
        self._in_order = self.options.order == "input"
        self._failed: BaseException | None = None
        self._journal: InOrder | AsFinished | None = None
        self._manifest: Manifest
        self.n_before = self.n_errors_before = 0
        self.resumed = self.finished = self._closed = False
        _check_name(path)
        self._lock = Lock(self._files, _lock_of(path), path)
        try:
            self._open(self._all_settings(settings))
        except OSError as error:  # of reading
            self.close()
            raise OutputError(f"{path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        self._synced_at = time.monotonic()

    @staticmethod
    def names(path: Path) -> set[str]:
        """The paths of an output and of all that a job keeps beside it, without links."""
        path = Path(os.path.realpath(path))
        kept = (path, part_of(path))
        written = (*kept, *map(ahead_of, kept), manifests.path_of(path))
        return {str(each) for each in (*written, *map(temporary, written), _lock_of(path))}

    @property
    def records(self) -> RecordOptions:
        """What is written of a row."""
        return self.options.records

    @property
    def seed(self) -> int:
        """Of the job, the same whenever it goes on: 0 .. 2**63 - 1."""
        return self._manifest.seed

    @property
    def n_done(self) -> int:
        """Rows that are in the files."""
        return self.n_before if self._journal is None else self._journal.n_done

    def is_done(self, number: int) -> bool:
        """Is the row of this number in the files? Rows of other shards are not."""
        place = self._places.of(number)
        return place is not None and (self._journal is None or self._journal.is_done(place))

    def done(self, row: Row, output: RequestOutput) -> None:
        """Writes what came of a row. Raises as write."""
        self.write(row.number, record(row, output, self.records))

    def refused(self, row: Row | BadRow, error: str) -> None:
        """Writes that a row could not be run. Raises as write."""
        self.write(row.number, refusal(row, error, self.records))

    @_guarded
    def write(self, number: int, record: Mapping[str, Any]) -> None:
        """Rows come in any order; each is in a file of the system's when this returns, and survives the process.

        While the disk is full it waits, and the rows that finish meanwhile wait with the caller.

        Raises:
            OutputError: it cannot be written. Nothing else is written by this object, and the next run goes on.
            ValueError: the row is there already, or of another shard, or the record is not its.
        """
        place, line = self._places.of(number), to_line(record)
        if self._journal is None or place is None or self._journal.is_done(place) or number_of(line) != number:
            raise ValueError(f"row {number} is not due")
        self._journal.write(place, line)
        self._n_errors += has_error(line)
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """To be called every now and then while nothing is written. Raises OutputError."""
        if time.monotonic() - self._synced_at >= self.options.sync_s:
            self.sync()

    @_guarded
    def sync(self) -> None:
        """What was written has reached the disk when this returns. Raises OutputError."""
        if self._journal is not None:
            self._journal.sync()
        self._synced_at = time.monotonic()

    @_guarded
    def finish(self) -> None:
        """All rows are written; close() follows.

        Raises:
            OutputError: it cannot be written.
            ValueError: a row is missing.
        """
        if self._journal is not None:
            size = self._journal.finish()
            if self._kept != self.path:
                size = convert(self._files, self._kept, self.path, self.records.shape)
            ending = Ending(self._journal.n_done, self._n_errors, size)
            self._manifest = replace(self._manifest, ending=ending)
            self._manifest.write(self._files, self._manifest_path)
            self._remove_kept()

    def close(self) -> None:
        """Ends it, finished or not; what was written stays, and is synced if the disk takes it. Raises OutputError if
        it does not."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._journal is not None and self._failed is None:
                self._journal.sync()
        finally:
            if self._journal is not None:
                self._journal.close()
            self._lock.release()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _all_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = {"order": self.options.order, "shard": list(self.options.shard), **vars(self.records)}
        return {**settings, "output": own}

    @property
    def _manifest_path(self) -> Path:
        return manifests.path_of(self.path)

    def _open(self, settings: Mapping[str, Any]) -> None:
        kept, ahead = self._kept, ahead_of(self._kept)
        for each in (self.path, kept, ahead, self._manifest_path):
            self._files.remove(temporary(each))
        if not kept.exists() and not self.path.exists():
            self._files.remove(ahead)  # who removes the output begins anew
        known = self._known_manifest()
        self.resumed = _size(self.path) + _size(kept) + _size(ahead) > 0
        if self.resumed:
            self._check_same(known, settings)
        self._manifest = Manifest.new(settings) if known is None or not self.resumed else known.changed_to(settings)
        if self._ended(self._manifest):
            self._remove_kept()
            return
        self._manifest = replace(self._manifest, ending=None)
        if self._manifest != known:
            self._manifest.write(self._files, self._manifest_path)
        self._restore()
        self._open_journal()

    def _restore(self) -> None:
        """A Parquet file that is whole becomes lines again."""
        if self._kept != self.path and not self._kept.exists() and self.path.exists():
            restore(self._files, self.path, self._kept)

    def _remove_kept(self) -> None:
        if self._kept != self.path:
            self._files.remove(self._kept)

    def _known_manifest(self) -> Manifest | None:
        try:
            return manifests.read(self._manifest_path)
        except ConfigError:
            if not self.options.force and _size(self.path) + _size(self._kept):
                raise
            return None

    def _check_same(self, known: Manifest | None, settings: Mapping[str, Any]) -> None:
        if known is None:
            if not self.options.force:
                raise ConfigError(
                    f"{self.path} exists without {self._manifest_path.name}, which would say of which job it is; "
                    "give another name, or --force to go on with it if a job has written it"
                )
            self._restore()
            if damage := self._survey().damage:
                raise ConfigError(f"{self._kept} is not the output of a job, {damage}; give another name")
            return
        changed = manifests.differences(manifests.extended(known.settings, settings), settings)
        if changed and not self.options.force:
            before = known.settings.get("output", {}).get("shard", self.options.shard)
            if list(before) != list(self.options.shard):
                raise manifests.refuse_shard(self.path, before, self.options.shard)
            raise manifests.refuse(self.path, changed)

    def _ended(self, known: Manifest) -> bool:
        """Has the job ended, and is there nothing to do again?"""
        ending = known.ending
        if ending is None or _size(self.path) != ending.bytes or (self.options.retry_errors and ending.errors):
            return False
        self.finished, self.n_before, self.n_errors_before = True, ending.rows, ending.errors
        return True

    def _open_journal(self) -> None:
        found = self._survey()
        if found.damage is not None and not self.options.force:
            raise ConfigError(
                f"{self._kept}: {found.damage}; has something else written there? Give another name, or --force to "
                "keep the lines that are whole and do the other rows again"
            )
        drop_errors = self.options.retry_errors and has_errors(self._kept)
        if found.damage is not None or drop_errors:
            arrange(self._files, self._kept, self._places, in_order=self._in_order, drop_errors=drop_errors)
            found = self._survey()
        kind = InOrder if self._in_order else AsFinished
        self._journal = kind(self._files, self._kept, self._places, found)
        self.n_before = self._journal.n_done
        self.n_errors_before = self._n_errors = self._journal.n_errors

    def _survey(self) -> Survey:
        return survey(self._kept, self._places, in_order=self._in_order)


def _for_tables(options: OutputOptions) -> OutputOptions:
    """A table has one kind of row."""
    records = options.records
    return replace(options, records=replace(records, shape="flat" if records.shape == "auto" else records.shape))


def _check_name(path: Path) -> None:
    ending, zipped = endings.suffixes(path)
    if zipped:
        raise ConfigError(f"the output is {show(str(path))}; it is not compressed while it is written: leave .gz away")
    foreign = "one JSON document" if ending == ".json" else endings.FOREIGN.get(ending)
    if foreign is not None or ending in (".csv", ".tsv"):
        raise ConfigError(
            f"the output is {show(str(path))}, and {ending} is {foreign or 'a table of text'}, which is not written; "
            f"what is written: {endings.WRITTEN}; {path.with_suffix('.jsonl').name}, for instance"
        )
    if path.is_dir():
        raise ConfigError(f"the output is {show(str(path))}, a directory; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"the output is {show(str(path))}; there is no directory {path.parent}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"the output is {show(str(path))}, which is no regular file; give another name")


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + endings.LOCK)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
