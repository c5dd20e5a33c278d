"""A prompt from the columns of a table: "Translate: {text}"."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from llamabatch.checks import nearest, show
from llamabatch.errors import ConfigError

MAX_CHARS = 2**20


class Template:
    """A text with {column} for a column's value, and {{ and }} for braces.

    What stands between braces is a column's whole name, whatever its characters; nothing is looked up in a value.

    Attributes:
        columns: those that it names, each once.

    Raises:
        ConfigError: a brace is open, or something other than a name stands between two.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text or len(text) > MAX_CHARS:
            raise ConfigError(f"template is {show(text)}; give a text of 1 to {MAX_CHARS} characters")
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"template is {show(text)}: {error}; write {{{{ or }}}} for a brace") from error
        for _, name, spec, conversion in pieces:
            if name == "" or spec or conversion:
                raise ConfigError(f"template is {show(text)}; between braces stands a column's name and nothing else")
        self._pieces = [(literal, name) for literal, name, _, _ in pieces]
        if not any(name for _, name in self._pieces):
            raise ConfigError(f"template is {show(text)}; it names no column, so that all rows would ask the same")
        self.columns = tuple(dict.fromkeys(name for _, name in self._pieces if name is not None))

    def check(self, source: str, columns: Sequence[str]) -> None:
        """Raises ConfigError if it names a column that a table does not have."""
        for name in self.columns:
            if name not in columns:
                raise ConfigError(f"{source} has no column {show(name)} for the template{nearest(name, columns)}")

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with a row's values."""
        return "".join(literal + (values[name] if name is not None else "") for literal, name in self._pieces)
