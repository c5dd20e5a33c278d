"""Files that are read again when they change: keys and certificates."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from llamabatch.errors import LlamaBatchError

logger = logging.getLogger(__name__)

LOOK_S = 1.0


async def watch(paths: Sequence[str], reload: Callable[[], None], what: str, look_s: float = LOOK_S) -> None:
    """Calls `reload` on a thread whenever one of the files has changed. Runs until its task is cancelled.

    After a change, `reload` is called only when two checks in a row have found the same state, because another program
    may still be writing the files. If `reload` fails, the error is logged and the old values stay.

    Args:
        what: the name of the files in the log, such as "keys".
        look_s: seconds between two checks.
    """
    before = now = await asyncio.to_thread(_marks, paths)
    while True:
        await asyncio.sleep(look_s)
        last, now = now, await asyncio.to_thread(_marks, paths)
        if now == before or now != last or None in now:  # a missing file may be in the middle of a replacement
            continue
        before = now
        try:
            await asyncio.to_thread(reload)
        except (LlamaBatchError, OSError, ValueError) as error:  # ssl's errors are OSErrors
            why = error.strerror if isinstance(error, OSError) else error
            logger.warning("the %s were changed and cannot be read: %s; the old ones stay in use", what, why)
        else:
            logger.info("the %s were read again", what)


def _marks(paths: Sequence[str]) -> list[tuple[int, int, int] | None]:
    """Returns the inode, size and time of change of each file; None: the file does not exist."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            at = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((at.st_ino, at.st_size, at.st_mtime_ns))
    return found
