"""A cache on disk of results that cost something and hold until their subject changes: small JSON files.

One file a result, written whole or not at all, so that processes side by side need no lock. The newest of each kind
are kept. If the cache cannot be written, each process computes its results again; nothing else suffers.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from llamabatch.utils import paths
from llamabatch.utils.atomic_file import write_text

logger = logging.getLogger(__name__)

MOST_OF_A_KIND = 512


def folder() -> Path:
    """The folder of the cache; it need not exist, and may be deleted at any time."""
    return paths.cache_dir() / "verdicts"


def read(kind: str, key: str) -> dict[str, Any] | None:
    """The result kept under a key; None if there is none that can be read."""
    try:
        found: Any = json.loads(_file(kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def keep(kind: str, key: str, found: dict[str, Any]) -> None:
    """Keeps a result under a key, in place of the one before. A failure goes to the log."""
    target = _file(kind, key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json.dumps(found))
    except OSError as error:
        logger.debug("%s could not be kept: %s", target, error)
        return
    with contextlib.suppress(OSError):  # another process may remove old files at the same time
        for old in sorted(target.parent.glob(f"{kind}-*.json"), key=_time)[:-MOST_OF_A_KIND]:
            old.unlink(missing_ok=True)


def all_of(kind: str) -> list[dict[str, Any]]:
    """All results of a kind that can be read, in no order."""
    files = folder().glob(f"{kind}-*.json")
    found = (read(kind, file.stem.removeprefix(f"{kind}-")) for file in files)
    return [each for each in found if each is not None]


def _file(kind: str, key: str) -> Path:
    return folder() / f"{kind}-{key}.json"


def _time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
