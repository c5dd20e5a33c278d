"""Imports modules at the first use. Such an import may fail, because the process may have no free file descriptor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llamabatch.errors import EngineError
from llamabatch.utils.checks import reason


@contextlib.contextmanager
def late_import(what: str) -> Iterator[None]:
    """Wraps a block of imports. If an import fails, a later call can try again.

    Raises:
        EngineError: a file of the imported modules cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise EngineError(f"{what} could not be loaded: {reason(error)}. A later call tries again") from error
