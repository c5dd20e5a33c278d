"""Files that are complete at any time: written under another name in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Errors of os.fsync on file systems that cannot sync folders.
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yields a temporary file in the folder of `path`. Renames the file to `path` at the end of the block, or deletes
    the file if the block raises. Only the owner may read the file. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Writes a folder's file names to disk, so that a renamed file keeps its new name after a power failure. Does
    nothing on Windows, which cannot open folders. Raises OSError."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in NO_FOLDER_SYNC:
                raise
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes a text to `path` in UTF-8, in place of an older file. Raises OSError."""
    with replacement(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
