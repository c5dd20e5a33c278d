"""Opens the files of a job's output at the start of a run: locks them, checks their job, and repairs crash damage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from llamabatch.errors import ConfigError, OutputError
from llamabatch.jobs.output import manifest as manifests
from llamabatch.jobs.output.conversion import is_made_at_end, restore, sums_of_ranges
from llamabatch.jobs.output.files import AppendFile, Files
from llamabatch.jobs.output.journal import Checksums, waiting_lines
from llamabatch.jobs.output.lock import Lock, lock_file
from llamabatch.jobs.output.manifest import Ending, Manifest
from llamabatch.jobs.output.own_files import (
    Kind,
    OwnFiles,
    ahead_of,
    foreign,
    job_of,
    lock_of,
    manifest_of,
    part_of,
    sums_of,
)
from llamabatch.jobs.output.records import RecordOptions, checksum, id_in, lines_of
from llamabatch.jobs.output.rewrite import has_errors, rewrite
from llamabatch.jobs.output.survey import EndedLines, Proof, RecordedLines, Survey, sums_of_lines, survey
from llamabatch.jobs.rows import ShardIndex
from llamabatch.utils.checks import counted


class JobFiles:
    """The files of one output, locked from the constructor to close(). `open` finds the job of the files, or begins a
    new job.

    Args:
        out: the output, as a path without links.
        files: the file operations.
        shard: the shard of the rows.
        in_order: rows are in the order of the input.
        retry_errors, force, records: as in OutputOptions.

    Attributes:
        out: the output.
        lines_path: the file of the lines: OUT, or OUT.part for an output that is made at the end.
        own: the files of the job; None before the seed is known.
        manifest: the identity of the job.
        lines: the open file of the lines; None before it is open.
        found: the state of the lines when the output was opened.
        resumed: the job resumes an existing output.
        ending: the end of a complete job; None: rows are missing.
        table: device and inode of OUT when the run began; None: there was no such file.

    Raises:
        ConfigError, OutputError: as in Lock.
    """

    def __init__(
        self,
        out: Path,
        files: Files,
        shard: ShardIndex,
        *,
        in_order: bool,
        retry_errors: bool,
        force: bool,
        records: RecordOptions,
    ) -> None:
        self.out = out
        self._records = records
        self.lines_path = part_of(out) if is_made_at_end(out) else out
        self._files = files
        self._shard = shard
        self._in_order = in_order
        self._retry_errors = retry_errors
        self._force = force
        self.own: OwnFiles | None = None
        self.manifest: Manifest
        self.lines: AppendFile | None = None
        self.found = Survey()
        self.resumed = False
        self.ending: Ending | None = None
        self.table: tuple[int, int] | None = None
        self._lock = Lock(files, lock_of(out), out)

    def open(
        self,
        make_settings: Callable[[object], Mapping[str, Any]],
        check_ids: Callable[[Mapping[int, str]], None] = lambda ids: None,
    ) -> None:
        """Finds the job of the output and repairs its lines, or begins a new job.

        Args:
            make_settings: returns everything that decides the content of the rows and of the output, as plain JSON. It
                gets the inputs in the manifest, or None without a manifest.
            check_ids: gets {number: id} of finished rows if --force resumes with other inputs or without a manifest.
                It raises ConfigError if the inputs have another id for one of these numbers.

        Raises:
            ConfigError: the output belongs to another job or to no job, or check_ids raises.
            OutputError: writing fails. OSError: reading fails.
        """
        known, has_manifest = self._known_manifest()
        settings = make_settings(None if known is None else known.settings.get("inputs"))
        left = self._seed_left_behind() if known is None else known.seed
        seed = manifests.new_seed() if left is None else left
        own = self._adopt(seed)
        lines, ahead, sums = self.lines_path, ahead_of(self.lines_path), sums_of(self.lines_path)
        side_files: list[tuple[Path, Kind]] = [(ahead, "ahead"), (sums, "sums")]
        if lines != self.out:
            side_files.append((lines, "part"))
        for path, kind in side_files:
            own.remove_torn(path, kind)
            own.exists(path, kind)  # raises ConfigError for a file of another job
        if left is not None and not lines.exists() and not self.out.exists():  # the output was removed: begin a new job
            own.remove(ahead, "ahead")
            own.remove(sums, "sums")
            seed = manifests.new_seed()
            own = self._adopt(seed)
        self.resumed = _size(self.out) + _size(lines, self.start) + _size(ahead, len(own.header("ahead"))) > 0
        if self.resumed:
            self._check_same_job(own, known, settings)
            self.manifest = Manifest.new(settings, seed) if known is None else known.changed_to(settings)
        else:
            self.manifest = Manifest.new(settings, seed)
        if self._is_complete(self.manifest.ending):
            self.ending = self.manifest.ending
            self.remove_side_files(own)
            return
        self.table = identity(self.out)
        self.found = self._repair(own, known)
        if self.resumed and (known is None or known.settings.get("inputs") != settings.get("inputs")):
            check_ids(self._ids())
        self.manifest = replace(self.manifest, ending=None)
        if self.manifest != known:
            self.manifest.write(own, manifest_of(self.out), over=has_manifest)
        if self.lines is None:
            is_table = lines != self.out
            self.lines = own.open(lines, "part") if is_table else AppendFile(self._files, lines, new=True)
            lock_file(self.lines, self.out)

    @property
    def start(self) -> int:
        """The offset of the first line in `lines_path`."""
        return 0 if self.own is None or self.lines_path == self.out else len(self.own.header("part"))

    def write_manifest(self, own: OwnFiles) -> None:
        """Writes the manifest at the end of a job.

        Raises:
            OutputError: another program has replaced the manifest, or the disk fails.
        """
        path = manifest_of(self.out)
        found = manifests.read(path)
        if found is not None and not found.is_own and not found.is_cut:
            raise OutputError(
                f"{path} was replaced by something else while the job ran. What is in {self.lines_path} stays; move "
                "that file away, and run the same command again with --force"
            )
        self.manifest.write(own, path, over=found is not None)

    def remove_side_files(self, own: OwnFiles) -> None:
        """Removes the files that a complete job no longer needs."""
        own.remove(ahead_of(self.lines_path), "ahead")
        if self.lines_path != self.out:
            own.remove(self.lines_path, "part")
        own.remove(sums_of(self.lines_path), "sums")

    def close(self) -> None:
        """Closes the lines, removes the temporary file if one is left, and releases the lock."""
        if self.lines is not None:
            self.lines.close()
        try:
            if self.own is not None:
                with contextlib.suppress(ConfigError, OutputError, OSError):
                    self.own.remove_temporary(manifests.first_bytes(int(self.own.job_id, 16)))
        finally:
            self._lock.release()

    def _known_manifest(self) -> tuple[Manifest | None, bool]:
        """Returns the manifest, and True if its file exists. --force ignores a manifest that cannot be read."""
        path = manifest_of(self.out)
        found = manifests.read(path)
        if found is None:
            return None, False
        if found.manifest is not None:
            return found.manifest, True
        if not found.is_own and not found.is_cut:
            raise foreign(path, f"is no manifest of a job ({found.problem})")
        if not self._force:
            raise ConfigError(
                f"{path}, which identifies the job of the output, cannot be read ({found.problem}); --force "
                "continues without it"
            )
        return None, True

    def _seed_left_behind(self) -> int | None:
        """Returns the seed of a job whose manifest is gone or was never written; None: there was no such job."""
        found = self._lock.left_by
        if self._force:
            lines = self.lines_path
            found = job_of(sums_of(lines), "sums") or job_of(ahead_of(lines), "ahead") or found
        return None if found is None else int(found, 16)

    def _adopt(self, seed: int) -> OwnFiles:
        """Returns the files of the job with this seed. Removes temporary files of a killed process."""
        self.own = own = OwnFiles(self._files, self.out, manifests.id_of(seed))
        own.remove_temporary(manifests.first_bytes(seed))
        if (left := self._lock.left_by) not in (None, own.job_id):
            OwnFiles(self._files, self.out, left).remove_temporary(manifests.first_bytes(int(left, 16)))
        self._lock.write_id(own.job_id)
        return own

    def _check_same_job(self, own: OwnFiles, known: Manifest | None, settings: Mapping[str, Any]) -> None:
        if known is None:
            if not self._force:
                raise ConfigError(
                    f"{self.out} exists without {manifest_of(self.out).name}, which identifies its job; "
                    "give another name, or --force to continue it if a job has written it"
                )
            self._restore_lines(own)
            if damage := self._survey(None).damage:
                raise ConfigError(f"{self.lines_path} is not the output of a job, {damage}; give another name")
            return
        changed = manifests.differences(manifests.extended(known.settings, settings), settings)
        if changed and not self._force:
            if known.shard != tuple(self._shard.shard):
                raise manifests.refuse_shard(self.out, known.shard, self._shard.shard)
            raise manifests.refuse(self.out, changed)

    def _is_complete(self, ending: Ending | None) -> bool:
        """Returns True if the job has ended, the output is unchanged since then, and no row must run again."""
        if ending is None or _size(self.out) != ending.bytes or (self._retry_errors and ending.errors):
            return False
        return self._is_as_it_ended(ending)

    def _is_as_it_ended(self, ending: Ending) -> bool:
        if self.lines_path != self.out:
            return self.out.exists() and sums_of_ranges(self.out) == ending.sums
        sums = (checksum(line.content) for line in lines_of(self.out)) if self.out.exists() else iter(())
        return sums_of_lines(sums) == ending.sums

    def _repair(self, own: OwnFiles, known: Manifest | None) -> Survey:
        """Repairs the lines and their checksums, and returns the state of the lines."""
        lines = self.lines_path
        damage, is_recorded = None, False
        proof: Proof | None = None
        ending = None if known is None else known.ending
        if known is not None:
            if ending is None and _size(lines, self.start):
                is_recorded, sums = True, Checksums.read(own, sums_of(lines))
                proof = None if sums is None else RecordedLines(sums)
                damage = None if proof else f"{sums_of(lines).name}, with the checksums of its lines, is gone"
            elif ending is not None and lines == self.out:
                proof = EndedLines(ending.sums, ending.rows)
            elif ending is not None and self.out.exists() and not self._is_as_it_ended(ending):
                damage = "it has changed since the job wrote it"
        if damage is not None and not self._force:
            raise self._refusal(damage)
        if self._restore_lines(own):
            is_recorded = False
        if lines.exists():
            self.lines = AppendFile(self._files, lines, new=False)
            lock_file(self.lines, self.out)
        found = self._survey(proof)
        if found.damage is not None and not self._force:
            raise self._refusal(found.damage)
        drop_errors = self._retry_errors and has_errors(lines, self.start)
        if self.lines is not None and (found.damage is not None or drop_errors):
            rewrite(
                own,
                self.lines,
                self.start,
                self._shard,
                in_order=self._in_order,
                drop_errors=drop_errors,
                is_damaged=found.damage is not None,
            )
            found, is_recorded = self._survey(None), False
        if self.lines is not None and found.size < self.lines.size:
            self.lines.truncate(found.size)
            if found.n_unrecorded:
                n = counted(found.n_unrecorded, "line")
                again = f"{'is' if found.n_unrecorded == 1 else 'are'} done again"
                self._files.emit(f"{lines}: {n} without a checksum, as after a crash of the system, {again}")
        if found.n_rows and (not is_recorded or damage is not None):
            Checksums.write(own, sums_of(lines), (line.content for line in lines_of(lines, self.start)))
        return found

    def _ids(self) -> dict[int, str]:
        """Returns the ids of finished rows, by number."""
        ahead = ahead_of(self.lines_path)
        waiting = waiting_lines(ahead) if ahead.exists() else ()
        found: dict[int, str] = {}
        for line in chain(lines_of(self.lines_path, self.start), waiting):
            if line.number is not None and (own := id_in(line.content)) is not None:
                found[line.number] = own
        return found

    def _restore_lines(self, own: OwnFiles) -> bool:
        """Turns a complete table or compressed output into lines again. Returns False if there was nothing to do."""
        if self.lines_path != self.out and not self.lines_path.exists() and self.out.exists():
            restore(own, self.out, self.lines_path, self._records)
            return True
        return False

    def _survey(self, proof: Proof | None) -> Survey:
        return survey(self.lines_path, self._shard, in_order=self._in_order, start=self.start, proof=proof)

    def _refusal(self, damage: str) -> ConfigError:
        return ConfigError(
            f"{self.lines_path}: {damage}; has something else written there? Give another name, or --force to keep the "
            "lines that are whole and do the other rows again"
        )


def identity(path: Path) -> tuple[int, int] | None:
    """Returns the device and the inode of a file; None: there is no such file."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _size(path: Path, start: int = 0) -> int:
    """Returns the number of bytes of a file from the byte `start` on; 0 if there is no file."""
    return max(0, path.stat().st_size - start) if path.exists() else 0
