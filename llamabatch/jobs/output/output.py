"""The output of a job: opened, gone on with, and finished."""

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
from llamabatch.jobs.output import files as endings
from llamabatch.jobs.output import manifest as manifests
from llamabatch.jobs.output.files import MOVED, REMOVED, REPLACED, AppendFile, Files
from llamabatch.jobs.output.journal import (
    AsFinished,
    Checksums,
    InOrder,
    Kind,
    OwnFiles,
    ahead_of,
    foreign,
    head,
    job_of,
    sums_of,
    waiting_line,
)
from llamabatch.jobs.output.lines import begins_as_row, checksum, has_error, lines_of, number_of, to_line
from llamabatch.jobs.output.lock import Lock, lock_file
from llamabatch.jobs.output.manifest import Ending, Manifest
from llamabatch.jobs.output.parquet import check_installed, convert, is_parquet, part_of, restore, sums_of_ranges
from llamabatch.jobs.output.records import RecordOptions, record, refusal
from llamabatch.jobs.output.rewrite import arrange, has_errors
from llamabatch.jobs.output.survey import EndedLines, Proof, RecordedLines, ShardIndex, Survey, sums_of_lines, survey
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request.outputs import RequestOutput
from llamabatch.utils.checks import boolean, choice, counted, number, show

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
        self.path = path = _resolved(path)
        self.options = options or OutputOptions()
        self._kept = path
        if is_parquet(path):
            check_installed()
            self._kept, self.options = part_of(path), _for_tables(self.options)
        self._files = files or Files()
        self._places = ShardIndex(self.options.shard)
        self._in_order = self.options.order == "input"
        self._failed: BaseException | None = None
        self._journal: InOrder | AsFinished | None = None
        self._file: AppendFile | None = None
        self._manifest: Manifest
        self._own: OwnFiles | None = None
        self.n_before = self.n_errors_before = 0
        self.resumed = self.finished = self._closed = self._is_whole = False
        _check_name(path)
        self._lock = Lock(self._files, _lock_of(path), path)
        try:
            self._open(self._all_settings(settings))
        except OSError as error:  # of reading
            self._failed = error
            self.close()
            raise OutputError(f"{path}: {error.strerror or error}") from error
        except BaseException as error:
            self._failed = error
            self.close()
            raise
        self._synced_at = time.monotonic()

    @staticmethod
    def names(path: Path) -> set[str]:
        """The paths of an output and of all that a job keeps beside it, without links."""
        path = Path(os.path.realpath(path))
        kept = (path, part_of(path))
        beside = (*kept, *map(ahead_of, kept), *map(sums_of, kept), manifests.path_of(path), _lock_of(path))
        found = {str(each) for each in (*beside, *(each.with_name(each.name + endings.RESCUED) for each in kept))}
        with contextlib.suppress(OSError):
            found |= {
                str(path.with_name(name))
                for name in os.listdir(path.parent)
                if endings.TEMPORARY.search(name) and endings.shortened(name) == path.name
            }
        return found

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
        """What was written has reached the disk when this returns. Raises OutputError; something else has removed or
        changed one of the files, too."""
        self._sync()
        self._synced_at = time.monotonic()

    def _sync(self) -> None:
        if self._journal is not None:
            self._journal.sync()
            self._check_files()

    @_guarded
    def finish(self) -> None:
        """All rows are written; close() follows.

        Raises:
            OutputError: it cannot be written; something else has removed or changed it.
            ValueError: a row is missing.
        """
        if self._journal is None or self._file is None or self._own is None:
            return
        self._journal.finish()
        self._check_files()
        size, sums = self._file.size, self._sums_of_lines()
        if self._kept != self.path:
            size, sums = self._make_table(self._own)
        ending = Ending(self._journal.n_done, self._n_errors, size, sums)
        self._manifest = replace(self._manifest, ending=ending)
        self._write_manifest()
        self._is_whole = True
        self._journal.close()
        self._file.close()
        self._remove_beside(self._own)

    def _make_table(self, own: OwnFiles) -> tuple[int, str]:
        if self._table != _identity(self.path):
            raise OutputError(
                f"{self.path} has been made, replaced or removed by something else while the job ran. Its rows are in "
                f"{self._kept}; move {self.path.name} away, and run the same command again, which makes it of them"
            )
        return convert(own, self._kept, self.records.shape, over=self._table is not None)

    def _sums_of_lines(self) -> str:
        assert self._own is not None
        return sums_of_lines(Checksums.read(self._own, sums_of(self._kept)) or iter(()))

    def _check_files(self) -> None:
        """Raises OutputError: a file is not what the job has made of it. What can be saved is."""
        assert self._file is not None
        assert self._journal is not None
        for file in self._journal.beside:
            change = file.change()
            if change is not None:
                failure = self._saved(file, file.path) if change == REMOVED else None
                again = "" if failure is None else failure or ", and is written again"
                away = "" if change != REPLACED else f"move {file.path.name} away, and "
                raise OutputError(
                    f"{file.path} {change} while the job ran{again}. What is in {self._file.path} stays; {away}run the "
                    "same command again, which does the rest, or says what is wrong"
                )
        change = self._file.change()
        if change is not None:
            raise OutputError(self._what_happened(self._file, change))

    def _what_happened(self, file: AppendFile, change: str) -> str:
        assert self._journal is not None
        rows = f"rows ({self._journal.n_done - self._journal.n_waiting:,})"
        message = f"{file.path} {change} while the job ran. "
        if change in (REMOVED, REPLACED):
            rescued = self._free_name(file.path)
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
        """Writes what a file without a name holds; returns why it fails, in brackets."""
        try:
            file.copy_to(path)
        except (OutputError, OSError) as error:
            return f" ({error.__cause__ or error})"
        return ""

    @staticmethod
    def _free_name(path: Path) -> Path:
        name = path.with_name(path.name + endings.RESCUED)
        for n in range(2, 100):
            if not os.path.lexists(name):
                break
            name = path.with_name(f"{path.name}{endings.RESCUED}.{n}")
        return name

    def close(self) -> None:
        """Ends it, finished or not; what was written stays, and is synced if the disk takes it. Raises OutputError if
        it does not."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._failed is None and not self._is_whole:
                self._sync()
        finally:
            if self._journal is not None:
                self._journal.close()
            if self._file is not None:
                self._file.close()
            try:
                if self._own is not None:
                    with contextlib.suppress(ConfigError, OutputError, OSError):
                        self._own.remove_temporary(manifests.start(int(self._own.job_id, 16)))
            finally:
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
        known = self._known_manifest()
        if self._lock.is_of_format_1 and (known is None or known.format != 1):
            self._lock.release(remove=False)
            raise foreign(_lock_of(self.path), "is no lock of a job")
        seed = self._seed_left_behind() if known is None else known.seed
        own = self._becomes(seed)
        kept, ahead, sums = self._kept, ahead_of(self._kept), sums_of(self._kept)
        beside: list[tuple[Path, Kind]] = [(ahead, "ahead"), (sums, "sums")]
        if kept != self.path:
            beside.append((kept, "part"))
        is_of_format_1 = self.options.force if known is None else known.format == 1
        for path, kind in beside:
            if is_of_format_1 and kind != "sums":
                self._take_over(own, path, kind)
            own.remove_torn(path, kind)
            own.check(path, kind)
        if not kept.exists() and not self.path.exists():  # an output that is removed begins anew
            own.remove(ahead, "ahead")
            own.remove(sums, "sums")
            seed = manifests.new_seed()
            own = self._becomes(seed)
        self.resumed = _size(self.path) + _size(kept, self._start) + _size(ahead, len(own.header("ahead"))) > 0
        if self.resumed:
            self._check_same(own, known, settings)
            self._manifest = Manifest.new(settings, seed) if known is None else known.changed_to(settings)
        else:
            self._manifest = Manifest.new(settings, seed)
        if self._ended(self._manifest):
            self._remove_beside(own)
            return
        self._table = _identity(self.path)
        found = self._mended(own, known)
        self._manifest = replace(self._manifest, ending=None, format=manifests.FORMAT)
        if self._manifest != known:
            self._write_manifest()
        self._open_journal(own, found)

    def _known_manifest(self) -> Manifest | None:
        path = self._manifest_path
        found = manifests.look(path)
        if found is None:
            return None
        if found.manifest is not None:
            return found.manifest
        if not found.is_own and not found.is_cut:
            raise foreign(path, f"is no manifest of a job ({found.problem})")
        if not self.options.force:
            raise ConfigError(
                f"{path}, which says of which job the output is, cannot be read ({found.problem}); --force goes on "
                "without it"
            )
        return None

    def _seed_left_behind(self) -> int:
        """That of a job whose manifest is gone or was never written; else a new one."""
        kept = self._kept
        found = self._lock.left_by
        if self.options.force:
            found = job_of(sums_of(kept), "sums") or job_of(ahead_of(kept), "ahead") or found
        return manifests.new_seed() if found is None else int(found, 16)

    def _becomes(self, seed: int) -> OwnFiles:
        """The files of the job with this seed, without what a killed process was about to write."""
        self._own = own = OwnFiles(self._files, self.path, manifests.id_of(seed))
        own.remove_temporary(manifests.start(seed))
        if (left := self._lock.left_by) not in (None, own.job_id):
            OwnFiles(self._files, self.path, left).remove_temporary(manifests.start(int(left, 16)))
        self._lock.note(own.job_id)
        return own

    def _take_over(self, own: OwnFiles, path: Path, kind: Kind) -> None:
        """A side file of the version before gets its first line, and its lines their checksums."""
        begin = head(path)
        if begin is None or begin.startswith(own.header(kind)):
            return
        if (begin and not begins_as_row(begin)) or manifests.output_of(path) == path:
            raise foreign(path, "is not of this job")
        with contextlib.closing(own.begin(kind)) as file:
            for line in lines_of(path):
                if kind == "part":
                    file.write(line.content)
                elif line.number is not None:
                    file.write(waiting_line(line.content))
            own.place(file, path, over=True)

    def _restore(self, own: OwnFiles) -> bool:
        """A Parquet file that is whole becomes lines again. Is it so?"""
        if self._kept != self.path and not self._kept.exists() and self.path.exists():
            restore(own, self.path, self._kept)
            return True
        return False

    def _remove_beside(self, own: OwnFiles) -> None:
        own.remove(ahead_of(self._kept), "ahead")
        if self._kept != self.path:
            own.remove(self._kept, "part")
        own.remove(sums_of(self._kept), "sums")

    def _write_manifest(self) -> None:
        assert self._own is not None
        path = self._manifest_path
        found = manifests.look(path)
        if found is not None and not found.is_own and not found.is_cut:
            raise OutputError(
                f"{path} was replaced by something else while the job ran. What is in {self._kept} stays; move that "
                "file away, and run the same command again with --force"
            )
        self._manifest.write(self._own, path, over=found is not None)

    def _check_same(self, own: OwnFiles, known: Manifest | None, settings: Mapping[str, Any]) -> None:
        if known is None:
            if not self.options.force:
                raise ConfigError(
                    f"{self.path} exists without {self._manifest_path.name}, which would say of which job it is; "
                    "give another name, or --force to go on with it if a job has written it"
                )
            self._restore(own)
            if damage := self._survey(None).damage:
                raise ConfigError(f"{self._kept} is not the output of a job, {damage}; give another name")
            return
        changed = manifests.differences(manifests.extended(known.settings, settings), settings)
        if changed and not self.options.force:
            if known.shard != tuple(self.options.shard):
                raise manifests.refuse_shard(self.path, known.shard, self.options.shard)
            raise manifests.refuse(self.path, changed)

    def _ended(self, known: Manifest) -> bool:
        """Has the job ended, and is there nothing to do again?"""
        ending = known.ending
        if ending is None or _size(self.path) != ending.bytes or (self.options.retry_errors and ending.errors):
            return False
        if not self._is_as_it_ended(ending):
            return False
        self.finished, self.n_before, self.n_errors_before = True, ending.rows, ending.errors
        return True

    def _is_as_it_ended(self, ending: Ending) -> bool:
        if ending.sums is None:
            return True
        if self._kept != self.path:
            return self.path.exists() and sums_of_ranges(self.path) == ending.sums
        lines = (checksum(line.content) for line in lines_of(self.path)) if self.path.exists() else iter(())
        return sums_of_lines(lines) == ending.sums

    def _mended(self, own: OwnFiles, known: Manifest | None) -> Survey:
        """What the output holds, once all of it is whole, and its checksums are those of its lines."""
        kept = self._kept
        damage, is_recorded = None, False
        proof: Proof | None = None
        ending = None if known is None else known.ending
        if known is not None and known.format == manifests.FORMAT:
            if ending is None and _size(kept, self._start):
                is_recorded, sums = True, Checksums.read(own, sums_of(kept))
                proof = None if sums is None else RecordedLines(sums)
                damage = None if proof else f"{sums_of(kept).name}, with the checksums of its lines, is gone"
            elif ending is not None and ending.sums is not None and kept == self.path:
                proof = EndedLines(ending.sums, ending.rows)
            elif ending is not None and self.path.exists() and not self._is_as_it_ended(ending):
                damage = "it is not as the job has written it"
        if damage is not None and not self.options.force:
            raise self._refuse(damage)
        if self._restore(own):
            is_recorded = False
        if kept.exists():
            self._file = AppendFile(self._files, kept, new=False)
            lock_file(self._file, self.path)
        found = self._survey(proof)
        if found.damage is not None and not self.options.force:
            raise self._refuse(found.damage)
        drop_errors = self.options.retry_errors and has_errors(kept, self._start)
        if self._file is not None and (found.damage is not None or drop_errors):
            arrange(
                own,
                self._file,
                self._start,
                self._places,
                in_order=self._in_order,
                drop_errors=drop_errors,
                is_damaged=found.damage is not None,
            )
            found, is_recorded = self._survey(None), False
        if self._file is not None and found.size < self._file.size:
            self._file.truncate(found.size)
            if found.n_unrecorded:
                lines = f"{counted(found.n_unrecorded, 'line')} without a checksum, as after a crash of the system"
                self._files.tell(f"{kept}: {lines}, {'is' if found.n_unrecorded == 1 else 'are'} done again")
        if found.n_rows and (not is_recorded or damage is not None):
            Checksums.make(own, sums_of(kept), (line.content for line in lines_of(kept, self._start)))
        return found

    def _refuse(self, damage: str) -> ConfigError:
        return ConfigError(
            f"{self._kept}: {damage}; has something else written there? Give another name, or --force to keep the "
            "lines that are whole and do the other rows again"
        )

    def _open_journal(self, own: OwnFiles, found: Survey) -> None:
        if self._file is None:
            is_table = self._kept != self.path
            self._file = own.open(self._kept, "part") if is_table else AppendFile(self._files, self._kept, new=True)
            lock_file(self._file, self.path)
        kind = InOrder if self._in_order else AsFinished
        self._journal = kind(own, self._file, self._places, found)
        self.n_before = self._journal.n_done
        self.n_errors_before = self._n_errors = self._journal.n_errors

    def _survey(self, proof: Proof | None) -> Survey:
        return survey(self._kept, self._places, in_order=self._in_order, start=self._start, proof=proof)

    @property
    def _start(self) -> int:
        """Where the lines begin in the file that keeps them."""
        return 0 if self._own is None or self._kept == self.path else len(self._own.header("part"))


def _for_tables(options: OutputOptions) -> OutputOptions:
    """A table has one kind of row."""
    records = options.records
    return replace(options, records=replace(records, shape="flat" if records.shape == "auto" else records.shape))


def _resolved(path: Path) -> Path:
    """Without links, so that a link stays one. Raises ConfigError: it leads nowhere."""
    try:
        found = Path(os.path.realpath(path))
        if not os.path.islink(found):
            return found
    except (OSError, ValueError) as error:
        raise ConfigError(f"the output is {show(str(path))}, which is no file name: {error}") from error
    raise ConfigError(f"the output is {show(str(path))}, a link that leads to itself; give another name")


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
    try:
        if path.is_dir():
            raise ConfigError(f"the output is {show(str(path))}, a directory; give the name of a file")
        if not path.parent.is_dir():
            raise ConfigError(f"the output is {show(str(path))}; there is no directory {path.parent}")
        most = _most_bytes(path.parent) - endings.LONGEST
        if len(os.fsencode(path.name)) > most:
            raise ConfigError(
                f"the output is {show(str(path))}, a name of {len(os.fsencode(path.name))} bytes; with the endings of "
                f"what a job keeps beside it, its folder takes {most}: give a shorter one"
            )
        if path.exists() and not path.is_file():
            raise ConfigError(f"the output is {show(str(path))}, which is no regular file; give another name")
    except OSError as error:
        raise ConfigError(f"the output is {show(str(path))}: {error.strerror}; give another name") from error


def _most_bytes(folder: Path) -> int:
    """Of a name in that folder."""
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # Windows has no such call
        return 255


def _name_of(fd: int) -> str:
    """Of a file that was moved, where the system tells."""
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return path
    return "that file, wherever it is now"


def _identity(path: Path) -> tuple[int, int] | None:
    """None: there is no such file."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + endings.LOCK)


def _size(path: Path, start: int = 0) -> int:
    """Bytes behind the first few; 0 of no file."""
    return max(0, path.stat().st_size - start) if path.exists() else 0
