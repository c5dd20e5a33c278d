"""Stores files and batches in a folder. A lock protects the folder, its size is limited, and each record is complete at
any time.

| name | content |
|---|---|
| `lock` | the lock of the server that uses the folder |
| `files/ID.json` | the record of a file, written after its content |
| `files/ID.jsonl` | the content |
| `files/ID.new` | content that is being written |
| `batches/ID.json` | the record of a batch |
| `batches/ID/` | the journal of a batch, until the batch has ended |

Content without a record comes from a killed process and is removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.lock import Lock
from llamabatch.server.batches.records import BatchRecord, FileRecord, is_batch_id, is_file_id
from llamabatch.server.http.errors import ApiError
from llamabatch.utils.atomic_file import sync_folder
from llamabatch.utils.format import file_size

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # minimum number of seconds between two measurements of the folder
_LOOK_SHARE = 50  # minimum time between two measurements, as a multiple of the duration of one measurement
_JOURNAL = "results.jsonl"
_MOST_FILES = 10_000
_MOST_BATCHES = 10_000
_KEPT_S = 30 * 86400  # seconds from the end of a batch's window to the removal of its record


class _Record(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def created_at(self) -> int: ...


R = TypeVar("R", bound=_Record)


class Store:
    """Stores files and batches in a folder. The folder is locked from the constructor to close(). Thread-safe.

    Args:
        folder: the folder. It is made if needed, for its owner alone.
        max_bytes: the maximum number of bytes in the folder.
        clock: returns seconds since 1970.

    Attributes:
        folder, max_bytes, clock: as given.
        mutex: held while several dependent records change.

    Raises:
        ConfigError: another server uses the folder, or the folder cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.clock = clock
        self.mutex = threading.RLock()
        self._reserved = 0  # bytes that running uploads have reserved and not written yet
        self._measured = 0
        self._measured_at = -math.inf
        self._look_s = _LOOK_S
        try:
            for each in (folder, folder / "files", folder / "batches"):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = Lock(Files(), folder / "lock", folder)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. Two servers cannot share a folder; give one of them another --data-dir"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"data_dir is {folder}, which cannot be written: {error.strerror or error}; give another folder"
            ) from error
        try:
            self._files = _Table(folder / "files", is_file_id, FileRecord.read)
            self._batches = _Table(folder / "batches", is_batch_id, BatchRecord.read)
            self._remove_leavings()
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Releases the folder. May be called twice."""
        self._lock.release()

    # Methods for files.

    def file(self, file_id: str) -> FileRecord:
        """Returns the record of a file. Raises ApiError (404)."""
        record = self._files.get(file_id)
        if record is None or self._is_over(record):
            raise ApiError(404, f"there is no file {file_id!r}", param="file_id")
        return record

    def files(self) -> list[FileRecord]:
        """Returns all files, the newest first."""
        return [each for each in self._files.newest_first() if not self._is_over(each)]

    def content(self, file_id: str) -> Path:
        """Returns the path of the content of a file."""
        return self.folder / "files" / f"{file_id}.jsonl"

    def unfinished(self, file_id: str) -> Path:
        """Returns the path of content that is being written."""
        return self.folder / "files" / f"{file_id}.new"

    def add_file(self, record: FileRecord) -> None:
        """Adds the record of a file. Moves the content from the path of `unfinished` if needed. Raises OSError."""
        with self.mutex:
            new, content = self.unfinished(record.id), self.content(record.id)
            if new.exists() or not content.exists():  # otherwise a killed process has moved the content already
                os.replace(new, content)
            self._files.put(record, vars(record))
            self._measured_at = -math.inf

    def discard(self, file_id: str) -> None:
        """Removes content that will not be finished."""
        self.unfinished(file_id).unlink(missing_ok=True)
        with self.mutex:
            self._measured_at = -math.inf

    def delete_file(self, file_id: str) -> None:
        """Deletes a file. Raises ApiError: there is no such file (404), or an unfinished batch reads it (409)."""
        with self.mutex:
            self.file(file_id)
            for batch in self.unended():
                if batch.input_file_id == file_id:
                    raise ApiError(409, f"{file_id} is the input of {batch.id}, which has not ended; cancel that first")
            self._remove_file(file_id)

    def _remove_file(self, file_id: str) -> None:
        self._files.remove(file_id)  # the record first, because a restart removes content without a record
        self.content(file_id).unlink(missing_ok=True)
        self._measured_at = -math.inf

    def check_count(self) -> None:
        """Checks the number of files. Raises ApiError (507) if there are too many."""
        if len(self._files) >= _MOST_FILES:
            raise ApiError(507, f"there are {_MOST_FILES:,} files; delete some", code="too_many_files")

    # Methods for batches.

    def batch(self, batch_id: str) -> BatchRecord:
        """Returns the record of a batch. Raises ApiError (404)."""
        record = self._batches.get(batch_id)
        if record is None:
            raise ApiError(404, f"there is no batch {batch_id!r}", param="batch_id")
        return record

    def batches(self) -> list[BatchRecord]:
        """Returns all batches, the newest first."""
        return self._batches.newest_first()

    def unended(self) -> list[BatchRecord]:
        """Returns the batches that have not ended, in any order."""
        return [each for each in self._batches.all() if not each.has_ended]

    def put_batch(self, record: BatchRecord) -> None:
        """Writes the record of a batch. Raises OSError, and ApiError (507) if there are too many batches."""
        with self.mutex:
            if self._batches.get(record.id) is None and len(self._batches) >= _MOST_BATCHES:
                raise ApiError(507, f"there are {_MOST_BATCHES:,} batches", code="too_many_batches")
            self._batches.put(record, record.document())

    def keep_counts(self, record: BatchRecord) -> None:
        """Stores the counts of a running batch only in memory, because the journal on the disk has the counts too."""
        self._batches.keep(record)

    def journal(self, batch_id: str) -> Path:
        """Returns the path of the journal of a batch, and makes its folder. Raises OSError."""
        folder = self.folder / "batches" / batch_id
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / _JOURNAL

    def remove_journal(self, batch_id: str) -> None:
        """Removes the journal of a batch with its folder."""
        shutil.rmtree(self.folder / "batches" / batch_id, ignore_errors=True)
        self._measured_at = -math.inf

    def remove_expired(self) -> None:
        """Removes expired files, and records of batches that ended long ago."""
        with self.mutex:
            in_use = {batch.input_file_id for batch in self.unended()}
            for file in self._files.all():
                if self._is_over(file) and file.id not in in_use:
                    self._remove_file(file.id)
            for batch in self.batches():
                if batch.has_ended and self.clock() > batch.expires_at + _KEPT_S:
                    self._batches.remove(batch.id)

    def _is_over(self, file: FileRecord) -> bool:
        return file.expires_at is not None and self.clock() >= file.expires_at

    # Methods for the disk.

    @property
    def used(self) -> int:
        """The bytes in the folder (measured at most once a second) plus the reserved bytes of running uploads."""
        with self.mutex:
            now = time.monotonic()
            if now - self._measured_at >= self._look_s:
                self._measured, self._measured_at = sum(_sizes(self.folder)), now
                self._look_s = max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - now))
            return self._measured + self._reserved

    @property
    def is_full(self) -> bool:
        return self.used >= self.max_bytes

    def reserve(self, n_bytes: int) -> None:
        """Reserves bytes for an upload. Call `written` after the write. Raises ApiError (507) if there is no room."""
        with self.mutex:
            if self.used + n_bytes > self.max_bytes:
                raise ApiError(
                    507,
                    f"the files and batches of this server take {file_size(self.used)}, and may take "
                    f"{file_size(self.max_bytes)} (--max-disk-bytes); delete files that are no longer needed",
                    code="disk_full",
                )
            self._reserved += n_bytes

    def written(self, n_bytes: int) -> None:
        """Counts reserved bytes as bytes in the folder from now on. Call this method even if the write failed."""
        with self.mutex:
            self._reserved -= n_bytes
            self._measured += n_bytes

    def _remove_leavings(self) -> None:
        """Removes the uploads, contents and journals of a killed process."""
        awaited = {name for batch in self.unended() for name in (batch.output_id, batch.error_id)}
        for path in (self.folder / "files").iterdir():
            file_id = path.name.split(".")[0]
            of_a_file = path.suffix in (".jsonl", ".new") and is_file_id(file_id)
            if path.name.startswith(".") or (of_a_file and file_id not in awaited and self._files.get(file_id) is None):
                path.unlink(missing_ok=True)
        for path in (self.folder / "batches").iterdir():
            batch = self._batches.get(path.name)
            if path.is_dir() and is_batch_id(path.name) and (batch is None or batch.has_ended):
                shutil.rmtree(path, ignore_errors=True)


class _Table(Generic[R]):
    """The records of one kind, in memory and as small files."""

    def __init__(self, folder: Path, is_id: Callable[[str], bool], read: Callable[[Any], R]) -> None:
        self._folder = folder
        self._records: dict[str, R] = {}
        self._mutex = threading.Lock()
        for path in folder.glob("*.json"):
            if not is_id(path.stem):
                continue
            try:
                self._records[path.stem] = read(json.loads(path.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.error("%s cannot be read and is left alone: %r", path, error)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, record_id: str) -> R | None:
        return self._records.get(record_id)

    def all(self) -> list[R]:
        with self._mutex:
            return list(self._records.values())

    def newest_first(self) -> list[R]:
        return sorted(self.all(), key=lambda each: (each.created_at, each.id), reverse=True)

    def put(self, record: R, document: dict[str, Any]) -> None:
        write_whole(self._folder / f"{record.id}.json", json.dumps(document).encode())
        self.keep(record)

    def keep(self, record: R) -> None:
        with self._mutex:
            self._records[record.id] = record

    def remove(self, record_id: str) -> None:
        (self._folder / f"{record_id}.json").unlink(missing_ok=True)
        with self._mutex:
            self._records.pop(record_id, None)


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a small file in one step. The data is on the disk when the call returns. Raises OSError."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def _sizes(folder: Path) -> Iterable[int]:
    """Yields the size in bytes of each file below a folder. Leaves out files that vanish during the call."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(Path(entry.path))
            else:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False).st_size
