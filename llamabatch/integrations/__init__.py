"""Other people's frameworks over llamabatch: a file for each, which imports it. Nothing else imports these files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llamabatch.errors import SetupError


@contextlib.contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Names the extra of llamabatch that brings `package`, where an import of it fails within the block.

    Raises:
        SetupError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise SetupError(f"{package} is not installed; run: pip install 'llamabatch[{extra}]'") from error
