"""A cache on disk of small JSON files, for results that are expensive to compute and rarely change.

Each result is one file that is written atomically, so parallel processes need no lock. The newest files of each kind
are kept. If the cache cannot be written, each process computes its results again.
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
    """Returns the folder of the cache. The folder need not exist, and may be deleted at any time."""
    return paths.cache_dir() / "verdicts"


def read(kind: str, key: str) -> dict[str, Any] | None:
    """Returns the result under a key, or None if there is no readable result."""
    try:
        found: Any = json.loads(_file(kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def keep(kind: str, key: str, found: dict[str, Any]) -> None:
    """Stores a result under a key, in place of an older result. A failure is only logged."""
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
    """Returns all readable results of a kind, in any order."""
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
