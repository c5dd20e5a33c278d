"""What a run has found, in a file that the next run reads: it goes on where this one was stopped."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any


class Memory:
    """Values by names, in a JSON file that is replaced as a whole each time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def get(self, name: str) -> Any:
        """None: there is none yet."""
        return self._found.get(name)

    def remember(self, name: str, value: object) -> None:
        with self._mutex:
            self._found[name] = value
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
            new.replace(self._path)
