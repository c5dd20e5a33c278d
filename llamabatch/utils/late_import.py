"""Imports at the first use, in a process that may have no file descriptor left by then."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from llamabatch.errors import EngineError


@contextlib.contextmanager
def late_import(what: str) -> Iterator[None]:
    """A block of imports, which a later call tries again where they fail.

    Raises:
        EngineError: a file of theirs cannot be read.
    """
    try:
        yield
    except OSError as error:
        cure = "; this process has as many files open as it may (ulimit -n)" if error.errno == errno.EMFILE else ""
        raise EngineError(f"{what} could not be loaded: {error.strerror}{cure}. A later call tries again") from error
