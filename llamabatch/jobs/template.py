"""A prompt from the columns of a table: "Translate: {text}"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llamabatch.checks import nearest, show
from llamabatch.errors import ConfigError

MAX_CHARS = 2**20

_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]+\}|[{}]")


class Template:
    """A text with {column} for a column's value, and {{ and }} for braces.

    What stands between braces is a column's whole name, whatever its other characters; nothing is looked up in a value.

    Attributes:
        columns: those that it names, each once.

    Raises:
        ConfigError: a brace is open, or no name stands between two.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text or len(text) > MAX_CHARS:
            raise ConfigError(f"template is {show(text)}; give a text of 1 to {MAX_CHARS} characters")
        self._pieces: list[tuple[str, str | None]] = []
        end = 0
        for found in _BRACES.finditer(text):
            braces, literal = found[0], text[end : found.start()]
            if len(braces) == 1:
                raise ConfigError(
                    f"template is {show(text)}: the brace at character {found.start() + 1} is no pair with a column's "
                    "name between; write {{ or }} for a brace"
                )
            if braces in ("{{", "}}"):
                self._pieces.append((literal + braces[0], None))
            else:
                self._pieces.append((literal, braces[1:-1]))
            end = found.end()
        self._pieces.append((text[end:], None))
        self.columns = tuple(dict.fromkeys(name for _, name in self._pieces if name is not None))
        if not self.columns:
            raise ConfigError(f"template is {show(text)}; it names no column, so that all rows would ask the same")

    def check(self, source: str, columns: Sequence[str]) -> None:
        """Raises ConfigError if it names a column that a table does not have."""
        for name in self.columns:
            if name not in columns:
                raise ConfigError(f"{source} has no column {show(name)} for the template{nearest(name, columns)}")

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with a row's values."""
        return "".join(literal + (values[name] if name is not None else "") for literal, name in self._pieces)
