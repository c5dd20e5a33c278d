"""What a child was told to load, so that the one that takes its place loads it again. Pure Python."""

from __future__ import annotations


class Loaded:
    """Adapters and prefixes, kept by the messages that load and unload them.

    Args:
        adapters: names and paths that the first child loads by itself.
    """

    def __init__(self, adapters: tuple[tuple[str, str], ...]) -> None:
        self._adapters = dict(adapters)
        self._prefixes: dict[str, None] = {}

    def note(self, kind: str, *arguments: str) -> None:
        """A child has done what this message asks for."""
        if kind == "load_adapter":
            self._adapters[arguments[0]] = arguments[1]
        elif kind == "unload_adapter":
            self._adapters.pop(arguments[0], None)
        elif kind == "load_prefix":
            self._prefixes[arguments[0]] = None
        elif kind == "unload_prefix":
            self._prefixes.pop(arguments[0], None)

    def messages(self) -> list[tuple[str, ...]]:
        """What makes a new child the same."""
        adapters = [("load_adapter", name, path) for name, path in self._adapters.items()]
        return [*adapters, *(("load_prefix", path) for path in self._prefixes)]
