"""Files that are read again when they change: keys and certificates."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from llamabatch.errors import LlamaBatchError

logger = logging.getLogger(__name__)

LOOK_S = 5.0


async def watch(paths: Sequence[str], reload: Callable[[], None], what: str, look_s: float = LOOK_S) -> None:
    """Calls `reload`, on a thread, whenever one of the files has changed and two looks in a row have found the same, as
    one may come in the middle of writing; until it is cancelled. What it raises goes to the log, and all stays as it
    was.

    Args:
        what: of the log, as "keys".
        look_s: seconds between two looks.
    """
    loop = asyncio.get_running_loop()
    before = now = await loop.run_in_executor(None, _marks, paths)
    while True:
        await asyncio.sleep(look_s)
        last, now = now, await loop.run_in_executor(None, _marks, paths)
        if now == before or now != last or None in now:  # a file that is just being replaced is there at the next look
            continue
        before = now
        try:
            await loop.run_in_executor(None, reload)
        except (LlamaBatchError, OSError, ValueError) as error:  # ssl's errors are OSErrors
            why = error.strerror if isinstance(error, OSError) else error
            logger.warning("the %s were changed and cannot be read: %s; those before stay", what, why)
        else:
            logger.info("the %s were read again", what)


def _marks(paths: Sequence[str]) -> list[tuple[int, int, int] | None]:
    """A value that changes with each file; None for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            at = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((at.st_ino, at.st_size, at.st_mtime_ns))
    return found
