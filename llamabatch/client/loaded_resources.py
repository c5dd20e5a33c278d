"""LoadedResources: the adapters and prefixes loaded in an engine."""

from __future__ import annotations

from typing import Any

from llamabatch.client.base import EngineMethod

Call = tuple[EngineMethod, str] | tuple[EngineMethod, str, str]


class LoadedResources:
    """The adapters and prefixes loaded in an engine. The engine that replaces this one loads them again.

    Args:
        adapters: names and paths of the adapters in the config. The engine itself loads these.

    Attributes:
        adapters: paths by name.
        prefixes: paths, in the order in which they were loaded.
    """

    def __init__(self, adapters: tuple[tuple[str, str], ...]) -> None:
        self.adapters = dict(adapters)
        self.prefixes: dict[str, None] = {}

    def record(self, method: EngineMethod, *arguments: Any) -> None:
        """Records a call answered by an engine."""
        if method == "load_adapter":
            self.adapters[arguments[0]] = arguments[1]
        elif method == "unload_adapter":
            self.adapters.pop(arguments[0], None)
        elif method == "load_prefix":
            self.prefixes[arguments[0]] = None
        elif method == "unload_prefix":
            self.prefixes.pop(arguments[0], None)

    def calls(self) -> list[Call]:
        """Returns the calls that load the same resources into a new engine."""
        adapters: list[Call] = [("load_adapter", name, path) for name, path in self.adapters.items()]
        return [*adapters, *(("load_prefix", path) for path in self.prefixes)]
