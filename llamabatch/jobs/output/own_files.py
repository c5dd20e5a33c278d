"""The side files of a job, next to its output: their names, and their first line, which names the job.

| file | content |
|---|---|
| OUT.job.json | the manifest, which names the job of OUT |
| OUT.part | the lines of a table or a compressed output, until the last row is written |
| OUT.ahead | lines that wait for an earlier row |
| OUT.sums | a checksum of each line |
| OUT.lock | the lock of the process that writes |
| OUT.rescued | the lines of the output, if another program removed the file |
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
from llamabatch.jobs.output.files import PLAIN, AppendFile, Files

Kind = Literal["ahead", "part", "sums"]
KINDS: tuple[Kind, ...] = ("ahead", "part", "sums")

LONGEST_SUFFIX = 16  # characters of the longest suffix, ".part.rescued.99"

_MANIFEST, _AHEAD, _PART, _SUMS, _LOCK, _RESCUED = ".job.json", ".ahead", ".part", ".sums", ".lock", ".rescued"
_SUFFIXES = (_MANIFEST, _AHEAD, _PART, _SUMS, _LOCK, _RESCUED)
_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
_HEADER = re.compile(rb'\{"llamabatch": "(ahead|part|sums)", "job": "([0-9a-f]{16})"\}\n')
_HEAD_BYTES = 64
_LEAST_TORN = 16  # minimum length of a torn header: a shorter beginning may belong to another program's file
# The first bytes of outputs that are made at the end: Parquet, gzip, zstd, CSV.
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
    """The files of one job. A file is created under an unused name, and removed only if its content begins with
    the job's id.

    Attributes:
        files: the file operations.
        out: the output.
        job_id: 16 hexadecimal digits.
    """

    files: Files
    out: Path
    job_id: str

    def header(self, kind: Kind) -> bytes:
        """Returns the first line of the job's file of the kind `kind`."""
        return b'{"llamabatch": "%s", "job": "%s"}\n' % (kind.encode(), self.job_id.encode())

    @property
    def temporary(self) -> Path:
        """The path of a new file before it is renamed. The name has a part of the job's id."""
        return self.out.with_name(f"{self.out.name}.{self.job_id[:8]}.tmp")

    def exists(self, path: Path, kind: Kind) -> bool:
        """Returns True if the file exists. Raises ConfigError if the file does not belong to this job."""
        begin = head(path)
        if begin is None:
            return False
        if not begin.startswith(self.header(kind)):
            known = _HEADER.match(begin)
            raise foreign(path, "is of another job" if known else "is not of this job")
        return True

    def create(self, kind: Kind | None = None) -> AppendFile:
        """Creates a new file under a temporary name. `commit` changes this name. Raises OutputError."""
        file = AppendFile(self.files, self.temporary, new=True)
        try:
            if kind is not None:
                file.write(self.header(kind))
        except BaseException:
            file.close()
            raise
        return file

    def commit(self, file: AppendFile, path: Path, *, over: bool) -> None:
        """Syncs a new file and renames it.

        Args:
            over: true: the job's own file is replaced if there is one; false: the name must be free.

        Raises:
            ConfigError: another file has the name.
            OutputError: writing fails.
        """
        file.sync()
        if sys.platform == "win32":  # Windows cannot rename an open file
            file.close()
        if over and os.path.lexists(path):
            self.files.rename(file.path, path)
        else:
            try:
                self.files.name(file.path, path)
            except FileExistsError as error:
                raise foreign(path, "was created a moment ago by another program") from error
        file.path = path
        if sys.platform == "win32":
            file.reopen()

    def open(self, path: Path, kind: Kind) -> AppendFile:
        """Opens the job's file of this name, or creates it. Raises OutputError, and ConfigError as `exists` does."""
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
        """Removes the file if it exists. Raises OutputError, and ConfigError as `exists` does."""
        if self.exists(path, kind):
            self.files.remove(path)

    def remove_torn(self, path: Path, kind: Kind) -> None:
        """Removes a file that ends within its first line. Raises OutputError, and ConfigError as `head` does."""
        begin, due = head(path), self.header(kind)
        if begin is not None and begin.startswith(due[:_LEAST_TORN]) and begin != due and due.startswith(begin):
            self.files.remove(path)

    def remove_temporary(self, manifest: bytes) -> None:
        """Removes the temporary file that a killed process left.

        Args:
            manifest: the first bytes of this job's manifest.

        Raises:
            ConfigError: the file does not belong to this job. OutputError: removing fails.
        """
        begin = head(self.temporary)
        if begin is None:
            return
        if not any(_same_start(begin, due) for due in (*map(self.header, KINDS), manifest, *_MADE_STARTS)):
            raise foreign(self.temporary, "is not of this job")
        self.files.remove(self.temporary)


def head(path: Path) -> bytes | None:
    """Returns the first bytes of a file; None: there is no file.

    Raises:
        ConfigError: the file is a link, a folder or a pipe, or cannot be read.
    """
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise foreign(path, "is a link")
        fd = os.open(path, os.O_RDONLY | PLAIN)
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
    """Returns the error for another program's file that has a name the job needs."""
    return ConfigError(
        f"{path} {why}, and a job of this output would keep a file of its own there; move it away, or give the output "
        "another name"
    )


def job_of(path: Path, kind: Kind) -> str | None:
    """Returns the id of the job that the file names; None: no file, or no id. Raises ConfigError as `head` does."""
    match = _HEADER.match(head(path) or b"")
    return match[2].decode() if match and match[1] == kind.encode() else None


def manifest_of(out: Path) -> Path:
    """Returns the path of an output's manifest."""
    return out.with_name(out.name + _MANIFEST)


def lock_of(out: Path) -> Path:
    """Returns the path of an output's lock."""
    return out.with_name(out.name + _LOCK)


def part_of(out: Path) -> Path:
    """Returns the path of the lines of a table or a compressed output. The file exists until OUT is written."""
    return out.with_name(out.name + _PART)


def ahead_of(lines: Path) -> Path:
    """Returns the path of the lines that wait for an earlier row.

    Args:
        lines: the file of lines: OUT, or OUT.part of an output that is made at the end.
    """
    return lines.with_name(lines.name + _AHEAD)


def sums_of(lines: Path) -> Path:
    """Returns the path of the checksums for a file of lines."""
    return lines.with_name(lines.name + _SUMS)


def free_rescued_name(lines: Path) -> Path:
    """Returns a free path for the content of a file that lost its name."""
    name = lines.with_name(lines.name + _RESCUED)
    for n in range(2, 100):
        if not os.path.lexists(name):
            break
        name = lines.with_name(f"{lines.name}{_RESCUED}.{n}")
    return name


def all_names(out: Path) -> set[str]:
    """Returns the paths of an output and of all side files of its job, without links."""
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
    """Returns the name of the output that a file of this name may belong to; None: no file of a job has such a name."""
    if match := _TEMPORARY.search(name):
        return name[: match.start()] or None
    return next((name.removesuffix(each) for each in _SUFFIXES if name.endswith(each)), "") or None


def _same_start(begin: bytes, due: bytes) -> bool:
    """Returns True if one text starts with the other, because a killed process may have written only a part."""
    return begin[: len(due)] == due[: len(begin)]
