"""Files that a job keeps beside its output: their names, and the first line by which each belongs to one job.

| file | content |
|---|---|
| OUT.job.json | the manifest: of which job OUT is |
| OUT.part | the lines of a table or a compressed output, until the last row is there |
| OUT.ahead | lines that wait for an earlier row |
| OUT.sums | a checksum of each line |
| OUT.lock | the lock of the process that writes |
| OUT.rescued | the lines of an output whose name something else has removed |
| OUT.0123abcd.tmp | a new file, before it is renamed |

Only a file that begins with the job's id is written or removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.files import NO_FOLLOW, AppendFile, Files

Kind = Literal["ahead", "part", "sums"]
KINDS: tuple[Kind, ...] = ("ahead", "part", "sums")

LONGEST_SUFFIX = 13  # characters: of a new manifest, of lines that wait beside a Parquet file's

_MANIFEST, _AHEAD, _PART, _SUMS, _LOCK, _RESCUED = ".job.json", ".ahead", ".part", ".sums", ".lock", ".rescued"
_SUFFIXES = (_MANIFEST, _AHEAD, _PART, _SUMS, _LOCK, _RESCUED)
_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
_HEADER = re.compile(rb'\{"llamabatch": "(ahead|part|sums)", "job": "([0-9a-f]{16})"\}\n')
_HEAD_BYTES = 64
_LEAST_TORN = 16  # bytes of a header that no other file begins with
# first bytes of outputs that are made at the end: Parquet, gzip, zstd, CSV
_MADE_STARTS = (
    b"PAR1",
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"row,id,",
    b"row\tid\t",
    b"id,custom_id,",
    b"id\tcustom_id\t",
)


@dataclass(frozen=True)
class OwnFiles:
    """The files of one job: created under names that are free, removed only where they begin with the job's id.

    Attributes:
        files: the operating system.
        out: the output.
        job_id: 16 hexadecimal digits.
    """

    files: Files
    out: Path
    job_id: str

    def header(self, kind: Kind) -> bytes:
        """The first line of a file of that kind."""
        return b'{"llamabatch": "%s", "job": "%s"}\n' % (kind.encode(), self.job_id.encode())

    @property
    def temporary(self) -> Path:
        """The name of a new file before it is renamed: in the same folder, with a part of the job's id."""
        return self.out.with_name(f"{self.out.name}.{self.job_id[:8]}.tmp")

    def exists(self, path: Path, kind: Kind) -> bool:
        """True where the file is there and belongs to this job. Raises ConfigError: it belongs to something else."""
        begin = head(path)
        if begin is None:
            return False
        if not begin.startswith(self.header(kind)):
            known = _HEADER.match(begin)
            raise foreign(path, "is of another job" if known else "is not of this job")
        return True

    def create(self, kind: Kind | None = None) -> AppendFile:
        """A new file under its temporary name; `commit` renames it. Raises OutputError."""
        file = AppendFile(self.files, self.temporary, new=True)
        try:
            if kind is not None:
                file.write(self.header(kind))
        except BaseException:
            file.close()
            raise
        return file

    def commit(self, file: AppendFile, path: Path, *, over: bool) -> None:
        """Renames a new file, once it is whole and on disk.

        Args:
            over: it replaces this job's own file, if there is one; else nothing may be there.

        Raises:
            ConfigError: something else has the name.
            OutputError: writing fails.
        """
        file.sync()
        if sys.platform == "win32":  # it renames no open file
            file.close()
        if over and os.path.lexists(path):
            self.files.rename(file.path, path)
        else:
            try:
                self.files.name(file.path, path)
            except FileExistsError as error:
                raise foreign(path, "has come to be just now") from error
        file.path = path
        if sys.platform == "win32":
            file.reopen()

    def open(self, path: Path, kind: Kind) -> AppendFile:
        """The job's file of that name, created if it is not there. Raises ConfigError as exists, OutputError."""
        if self.exists(path, kind):
            return AppendFile(self.files, path, new=False)
        file = self.create(kind)
        try:
            self.commit(file, path, over=False)
        except BaseException:
            file.close()
            raise
        return file

    def remove(self, path: Path, kind: Kind) -> None:
        """Removes the file if it is there. Raises ConfigError as exists, OutputError."""
        if self.exists(path, kind):
            self.files.remove(path)

    def remove_torn(self, path: Path, kind: Kind) -> None:
        """Removes a file that was cut within its first line. Raises ConfigError as exists, OutputError."""
        begin, due = head(path), self.header(kind)
        if begin is not None and begin.startswith(due[:_LEAST_TORN]) and begin != due and due.startswith(begin):
            self.files.remove(path)

    def remove_temporary(self, manifest: bytes) -> None:
        """Removes the new file that a killed process has left.

        Args:
            manifest: the first bytes of this job's manifest.

        Raises:
            ConfigError: the file is not of this job. OutputError.
        """
        begin = head(self.temporary)
        if begin is None:
            return
        if not any(_same_start(begin, due) for due in (*map(self.header, KINDS), manifest, *_MADE_STARTS)):
            raise foreign(self.temporary, "is not of this job")
        self.files.remove(self.temporary)


def head(path: Path) -> bytes | None:
    """The first bytes of a file; None: there is none.

    Raises:
        ConfigError: it is a link, a folder, a pipe, or cannot be read.
    """
    flags = os.O_RDONLY | NO_FOLLOW | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise foreign(path, "is a link")
        fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise foreign(path, f"cannot be read ({error.strerror})") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise foreign(path, "is no regular file")
        return os.read(fd, _HEAD_BYTES)
    finally:
        os.close(fd)


def foreign(path: Path, why: str) -> ConfigError:
    """The error for a file under a name that a job needs."""
    return ConfigError(
        f"{path} {why}, and a job of this output would keep a file of its own there; move it away, or give the output "
        "another name"
    )


def job_of(path: Path, kind: Kind) -> str | None:
    """The id of the job that keeps this file; None: it names none, or is not there. Raises ConfigError as head."""
    match = _HEADER.match(head(path) or b"")
    return match[2].decode() if match and match[1] == kind.encode() else None


def manifest_of(out: Path) -> Path:
    """The manifest of an output."""
    return out.with_name(out.name + _MANIFEST)


def lock_of(out: Path) -> Path:
    """The lock of an output."""
    return out.with_name(out.name + _LOCK)


def part_of(out: Path) -> Path:
    """The lines of a table or a compressed output, until it is written."""
    return out.with_name(out.name + _PART)


def ahead_of(lines: Path) -> Path:
    """The lines that wait for an earlier row.

    Args:
        lines: the file of lines: OUT, or OUT.part of an output that is made at the end.
    """
    return lines.with_name(lines.name + _AHEAD)


def sums_of(lines: Path) -> Path:
    """The checksums of a file of lines."""
    return lines.with_name(lines.name + _SUMS)


def free_rescued_name(lines: Path) -> Path:
    """A name that is free, for the content of a file that has lost its own."""
    name = lines.with_name(lines.name + _RESCUED)
    for n in range(2, 100):
        if not os.path.lexists(name):
            break
        name = lines.with_name(f"{lines.name}{_RESCUED}.{n}")
    return name


def all_names(out: Path) -> set[str]:
    """The paths of an output and of all that a job keeps beside it, without links."""
    out = Path(os.path.realpath(out))
    lines = (out, part_of(out))
    kept = (*lines, *map(ahead_of, lines), *map(sums_of, lines), manifest_of(out), lock_of(out))
    found = {str(each) for each in (*kept, *(each.with_name(each.name + _RESCUED) for each in lines))}
    with contextlib.suppress(OSError):
        found |= {
            str(out.with_name(name))
            for name in os.listdir(out.parent)
            if _TEMPORARY.search(name) and without_suffix(name) == out.name
        }
    return found


def without_suffix(name: str) -> str | None:
    """The name of the output that a file of this name may be kept beside; None: it has no suffix of a job's file."""
    if match := _TEMPORARY.search(name):
        return name[: match.start()] or None
    return next((name.removesuffix(each) for each in _SUFFIXES if name.endswith(each)), "") or None


def _same_start(begin: bytes, due: bytes) -> bool:
    """True where both agree as far as they go: a process may have been killed amid its first write."""
    return begin[: len(due)] == due[: len(begin)]
