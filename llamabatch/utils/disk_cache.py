"""What was found out at some cost and holds until its subject changes: small JSON files in the user's cache.

One file a finding, written whole or not at all, so that processes side by side need no lock; of each kind the newest
are kept. A cache that cannot be written costs the finding again, in each process, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from llamabatch.utils import paths

logger = logging.getLogger(__name__)

MOST_OF_A_KIND = 512


def folder() -> Path:
    """Where they lie; it need not exist, and may be deleted at any time."""
    return paths.cache_dir() / "verdicts"


def read(kind: str, key: str) -> dict[str, Any] | None:
    """What was kept under this key; None if there is nothing, or nothing that can be read."""
    try:
        found: Any = json.loads(_file(kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def keep(kind: str, key: str, found: dict[str, Any]) -> None:
    """Keeps it over what was there, or says in the log why not."""
    target = _file(kind, key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
            json.dump(found, file)
        os.replace(file.name, target)
    except OSError as error:
        logger.debug("%s could not be kept: %s", target, error)
        return
    with contextlib.suppress(OSError):  # another process clears up, too
        for old in sorted(target.parent.glob(f"{kind}-*.json"), key=_time)[:-MOST_OF_A_KIND]:
            old.unlink(missing_ok=True)


def all_of(kind: str) -> list[dict[str, Any]]:
    """All of a kind that can be read, in no order."""
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
