"""Stores the results of a run in a file, so that the next run can continue a stopped one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any


class Memory:
    """Values by names, in a JSON file. Each change replaces the whole file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def get(self, name: str) -> Any:
        """Returns the value of a name; None if there is none."""
        return self._found.get(name)

    def remember(self, name: str, value: object) -> None:
        with self._mutex:
            self._found[name] = value
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
            new.replace(self._path)
