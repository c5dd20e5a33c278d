"""Adapters of engines in child processes: each loads its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from llamabatch.adapters import adapter_path, check_known
from llamabatch.config import EngineConfig
from llamabatch.errors import LlamaBatchError
from llamabatch.supervisor import Supervisor


class ChildAdapters:
    """All children hold the same. What one of them refuses is taken back in the others."""

    def __init__(self, children: Sequence[Supervisor], config: EngineConfig) -> None:
        self._children = children
        self._paths = dict(config.adapters)
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return sorted(self._paths)

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """As EngineClient.load_adapter."""
        absolute = adapter_path(name, path)
        with self._lock:
            self._everywhere(("load_adapter", name, absolute), ("unload_adapter", name))
            self._paths[name] = absolute

    def unload(self, name: str) -> None:
        """As EngineClient.unload_adapter."""
        with self._lock:
            check_known(((name, 1.0),), self._paths)
            path = self._paths.pop(name)  # from here on no request can ask for it
            try:
                self._everywhere(("unload_adapter", name), ("load_adapter", name, path))
            except LlamaBatchError:
                self._paths[name] = path
                raise

    def _everywhere(self, command: tuple[str, ...], undo: tuple[str, ...]) -> None:
        done: list[Supervisor] = []
        try:
            for child in self._children:
                if child.alive or len(self._children) == 1:  # the only one tells that it is gone
                    _carry_out(child, command)
                    done.append(child)
        except LlamaBatchError:
            for child in done:
                with contextlib.suppress(LlamaBatchError):
                    _carry_out(child, undo)
            raise


def _carry_out(child: Supervisor, command: tuple[str, ...]) -> None:
    kind, *arguments = command
    getattr(child, kind)(*arguments)
