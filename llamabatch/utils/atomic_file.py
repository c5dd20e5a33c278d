"""Files that are complete at any time: written under another name in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yields a temporary file, which becomes `path` at the end of the block, or is deleted if the block raises. The
    file lies in the same folder, and only its owner may read it. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text to `path` in UTF-8, in place of an older file. Raises OSError."""
    with replacement(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
