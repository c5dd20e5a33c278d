"""Integrations into other frameworks. A framework is imported only by the files of its integration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llamabatch.errors import SetupError


@contextlib.contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Converts a failed import of `package` in the block to an error that names the extra to install.

    Raises:
        SetupError: `package` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise SetupError(f"{package} is not installed; run: pip install 'llamabatch[{extra}]'") from error
