"""Templates that make a row's prompt from the columns of a table, or from the fields of a line of JSON.

There are two notations. jinja2 (`Classify: {{ text }}`) is sandboxed and limited, as in chat templates. In the
older notation, single braces contain a column's name (`Classify: {text}`), and `{{` or `}}` stands for a brace.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llamabatch.chat.template import BoundedTemplate, describe
from llamabatch.errors import ConfigError, PromptError
from llamabatch.utils.checks import nearest, show

MAX_CHARS = 2**20
ROW = "row"  # the variable with all columns: {{ row["a name with blanks"] }}

_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]+\}|[{}]")


class Template(Protocol):
    """A template of rows.

    Attributes:
        columns: the names of columns in the template, each once.
        reads_all: true if the template may read every column.
    """

    columns: tuple[str, ...]
    reads_all: bool

    def check(self, source: str, columns: Sequence[str]) -> None:
        """Raises ConfigError if the template names a column that the table does not have."""

    def fill(self, values: Mapping[str, Any]) -> str:
        """Returns the text with a row's values. Raises PromptError if a value is missing or the template fails."""


def template_of(text: str, *, jinja: bool = False, names_columns: bool = True) -> Template:
    """Returns the template in a text: jinja2 if `is_jinja` returns true, otherwise the notation with single braces.

    Args:
        jinja: true: the text is jinja2 in any case.
        names_columns: true: a template without any column is refused, because all rows would have the same prompt.

    Raises:
        ConfigError: the text is not a template, or does not name a column.
    """
    if not isinstance(text, str) or not text or len(text) > MAX_CHARS:
        raise ConfigError(f"template is {show(text)}; give a text of 1 to {MAX_CHARS} characters")
    template = JinjaTemplate(text) if jinja or is_jinja(text) else BracesTemplate(text)
    if names_columns and not template.columns and not template.reads_all:
        raise ConfigError(
            f"template is {show(text)}; it names no column, so all rows would have the same prompt; write a column as "
            "{{ name }}"
        )
    return template


def is_jinja(text: str) -> bool:
    """Returns True for jinja2: the text has {%, or it has {{ and no {name} in single braces."""
    if "{%" in text:
        return True
    return "{{" in text and not any(len(found) > 2 for found in _BRACES.findall(text))


class JinjaTemplate:
    """A jinja2 template, sandboxed and limited. Attributes, methods and errors as in Template."""

    def __init__(self, text: str) -> None:
        self._template = _compiled(text)
        self.columns = tuple(sorted(self._template.variables - {ROW}))
        self.reads_all = ROW in self._template.variables

    def check(self, source: str, columns: Sequence[str]) -> None:
        for name in self.columns:
            if name not in columns:
                raise ConfigError(f"{source} has no column {show(name)} for the template{nearest(name, columns)}")

    def fill(self, values: Mapping[str, Any]) -> str:
        # null counts as a missing field, so that default("") applies to both
        variables = {name: values[name] for name in self.columns if values.get(name) is not None}
        if self.reads_all:
            variables[ROW] = values.get(ROW, values)
        try:
            return self._template.render(variables)
        except Exception as error:  # a template may raise any error
            raise PromptError(f"the template cannot be filled: {describe(error)}") from error


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> BoundedTemplate:
    return BoundedTemplate(text, written=as_text)


class BracesTemplate:
    """A text with {column} for a column's value, and {{ and }} for braces. Attributes, methods and errors as in
    Template.

    The text between braces is always the name of a column: {a.b} means the column "a.b", not a part of a value.
    """

    reads_all = False

    def __init__(self, text: str) -> None:
        self._pieces: list[tuple[str, str | None]] = []
        end = 0
        for found in _BRACES.finditer(text):
            braces, literal = found[0], text[end : found.start()]
            if len(braces) == 1:
                raise ConfigError(
                    f"template is {show(text)}: the brace at character {found.start() + 1} does not enclose the name "
                    "of a column; write {{ or }} for a brace, or give a template of jinja2 as --prompt"
                )
            if braces in ("{{", "}}"):
                self._pieces.append((literal + braces[0], None))
            else:
                self._pieces.append((literal, braces[1:-1]))
            end = found.end()
        self._pieces.append((text[end:], None))
        self.columns = tuple(dict.fromkeys(name for _, name in self._pieces if name is not None))

    def check(self, source: str, columns: Sequence[str]) -> None:
        for name in self.columns:
            if name not in columns:
                raise ConfigError(
                    f"{source} has no column {show(name)}; single braces of a template hold the name of a column, and "
                    f"--prompt takes a template of jinja2{nearest(name, columns)}"
                )

    def fill(self, values: Mapping[str, Any]) -> str:
        texts = {}
        for name in self.columns:
            if name not in values:
                raise PromptError(f"there is no {show(name)} for the template{nearest(name, values)}")
            text = as_text(values[name])
            if text is None:
                raise PromptError(f"column {show(name)} holds {show(values[name])}, which is no text")
            texts[name] = text
        return "".join(literal + (texts[name] if name is not None else "") for literal, name in self._pieces)


def as_text(value: Any) -> str | None:
    """Returns a value as text, as a CSV file would hold it; None: the value has no text form."""
    if isinstance(value, str):
        return value
    if value is None:
        return None
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(value, (list, tuple, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return None
    return str(value)


def as_json(value: Any) -> Any:
    """Returns a table's value for JSON. Dates and other types become text; bytes that are not UTF-8 become null."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return as_text(value)
