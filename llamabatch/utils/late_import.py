"""Imports at the first use, in a process that may have no file descriptor left by then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llamabatch.errors import EngineError
from llamabatch.utils.checks import reason


@contextlib.contextmanager
def late_import(what: str) -> Iterator[None]:
    """A block of imports, which a later call tries again where they fail.

    Raises:
        EngineError: a file of theirs cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise EngineError(f"{what} could not be loaded: {reason(error)}. A later call tries again") from error
