"""LoadedResources: what an engine has loaded since its start."""

from __future__ import annotations

from typing import Any

from llamabatch.client.base import EngineMethod

Call = tuple[EngineMethod, str] | tuple[EngineMethod, str, str]


class LoadedResources:
    """Adapters and prefixes that an engine has loaded, so that the one in its place loads them again.

    Args:
        adapters: names and paths that the first engine loads by itself.

    Attributes:
        adapters: the paths by their names. prefixes: the paths, in the order of their loads.
    """

    def __init__(self, adapters: tuple[tuple[str, str], ...]) -> None:
        self.adapters = dict(adapters)
        self.prefixes: dict[str, None] = {}

    def record(self, method: EngineMethod, *arguments: Any) -> None:
        """An engine has answered this call."""
        if method == "load_adapter":
            self.adapters[arguments[0]] = arguments[1]
        elif method == "unload_adapter":
            self.adapters.pop(arguments[0], None)
        elif method == "load_prefix":
            self.prefixes[arguments[0]] = None
        elif method == "unload_prefix":
            self.prefixes.pop(arguments[0], None)

    def calls(self) -> list[Call]:
        """Methods and arguments that make a new engine the same."""
        adapters: list[Call] = [("load_adapter", name, path) for name, path in self.adapters.items()]
        return [*adapters, *(("load_prefix", path) for path in self.prefixes)]
