"""The prompt and the seed of a row. A jinja2 template or a function makes the prompt from the row's columns."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import Undefined
from jinja2.exceptions import UndefinedError

from llamabatch.chat.messages import Message
from llamabatch.chat.template import BoundedTemplate, describe
from llamabatch.errors import ConfigError, PromptError
from llamabatch.errors import describe as describe_error
from llamabatch.media.parts import message_with_media
from llamabatch.request.media import IMAGE, SOUND, Kind
from llamabatch.utils.checks import nearest, show

Content = str | list[Message] | list[int]
PromptFunction = Callable[[dict[str, Any]], Content]

ROW = "row"  # the variable with all columns: {{ row["a name with blanks"] }}
_MARKS = ("{{", "{%")
_NO_MEDIA: Mapping[Kind, Sequence[str]] = {}
_ARGUMENTS = {IMAGE: "image", SOUND: "audio"}
# Names that are not columns, because jinja2 or the environment of templates defines them.
_NOT_COLUMNS = frozenset(
    ("range", "dict", "cycler", "joiner", "namespace", "raise_exception", "strftime_now", "loop", "self", "caller")
)


@dataclass(frozen=True)
class RowPrompt:
    """The prompt of one row.

    Attributes:
        content: a text, messages, or token ids.
        system: the system message before the conversation.
        seed: the seed of the row.
        id: the id of the row; None: no column has ids.
        error: the reason why the row cannot be run; None: the row can be run.
    """

    content: Content = ""
    system: str | None = None
    seed: int = 0
    id: str | int | None = None
    error: str | None = None

    def for_engine(self, chat: bool) -> Content:
        """Returns the prompt for LLM.as_completed.

        Args:
            chat: True: a text becomes the message of a user.
        """
        content: Any = self.content
        if isinstance(content, str):
            if not chat:
                return self.content
            content = [{"role": "user", "content": content}]
        found: list[Any] = list(content)
        if self.system is not None and found and isinstance(found[0], Mapping):
            found.insert(0, {"role": "system", "content": self.system})
        return found

    def digest(self) -> bytes:
        """Returns a digest of 32 bytes. Different prompts have different digests."""
        return hashlib.sha256(_canonical([self.content, self.system, self.seed, self.error])).digest()


class Prompts:
    """Makes the prompts of rows. An instance can be pickled if its function can be pickled.

    Args:
        prompt: a jinja2 template, or a function of a row.
        system: a template of the system message; None: no system message.
        id_column: the column of the ids; None: no ids.
        media_columns: columns with pictures and audio. The media are put before the text of a user's message.
        seed: a seed for all rows. Each row's own seed is made of this seed.

    Raises:
        ConfigError: a template cannot be compiled, or does not name a column.
    """

    def __init__(
        self,
        prompt: str | PromptFunction,
        system: str | None = None,
        id_column: str | None = None,
        seed: int = 0,
        media_columns: Mapping[Kind, Sequence[str]] = _NO_MEDIA,
    ) -> None:
        if isinstance(prompt, str):
            if not any(mark in prompt for mark in _MARKS) and not any(media_columns.values()):
                raise ConfigError(
                    f"prompt is {show(prompt)}, which names no column, so all rows would have the same prompt; give a "
                    "template of jinja2, as 'Classify: {{ text }}'"
                )
        elif not callable(prompt):
            raise ConfigError(f"prompt is {show(prompt)}; give a template of jinja2, or a function of a row")
        if system is not None and not isinstance(system, str):
            raise ConfigError(f"system is {show(system)}; give a text, or a template of jinja2")
        if id_column is not None and not isinstance(id_column, str):
            raise ConfigError(f"id is {show(id_column)}; give the name of a column")
        self._prompt, self._system, self._id_column, self._seed = prompt, system, id_column, seed
        self._media_columns = {kind: tuple(names) for kind, names in media_columns.items() if names}
        read = self._variables
        if isinstance(prompt, str) and not _variables("prompt", prompt) and not self._media_columns:
            raise ConfigError(f"prompt is {show(prompt)}; it names no column, so all rows would have the same prompt")
        self._reads_all = callable(prompt) or ROW in read

    @property
    def _variables(self) -> dict[str, str]:
        """The names of variables in the templates, each with the template that reads it: "system" or "prompt"."""
        given = {"system": self._system, "prompt": self._prompt}
        return {
            name: argument
            for argument, source in given.items()
            if isinstance(source, str)
            for name in _variables(argument, source)
        }

    def wanted(self, columns: Sequence[str]) -> list[str]:
        """Returns the columns that must be read. Raises ConfigError if a column is missing."""
        variables = self._variables
        for name, argument in variables.items():
            if name not in columns and name != ROW:
                raise ConfigError(f"{argument} reads {show(name)}, and there is no such column{nearest(name, columns)}")
        own = [("id", self._id_column)] if self._id_column is not None else []
        own += [(_ARGUMENTS[kind], name) for kind, names in self._media_columns.items() for name in names]
        for argument, name in own:
            if name not in columns:
                raise ConfigError(f"{argument} is {show(name)}, and there is no such column{nearest(name, columns)}")
        if self._reads_all:
            return list(columns)
        needed = {*variables, *(name for _, name in own)}
        return [name for name in columns if name in needed]

    def of(self, rows: Iterator[dict[str, Any]]) -> Iterator[RowPrompt]:
        """Yields the prompt of each row. A row must have at least the `wanted` columns."""
        for row in rows:
            identity = None
            try:
                identity = self._identity(row)
                yield self._of_row(row, identity)
            except PromptError as error:
                yield RowPrompt(id=identity, error=str(error))

    def _of_row(self, row: dict[str, Any], identity: str | int | None) -> RowPrompt:
        if callable(self._prompt):
            content = _called(self._prompt, row)
        else:
            content = _rendered("prompt", self._prompt, row)
        if self._media_columns:
            content = self._with_media(content, row)
        system = None if self._system is None else _rendered("system", self._system, row)
        source = identity if self._id_column is not None else [content, system]
        return RowPrompt(content, system, seed_of(self._seed, source), identity)

    def _with_media(self, content: Content, row: Mapping[str, Any]) -> Content:
        """Returns a user's message with the pictures and audio of a row before the text."""
        if isinstance(content, str):
            message: Message = message_with_media(content, row, self._media_columns)
            return [message]
        kind, names = next(iter(self._media_columns.items()))
        what, listed = "picture" if kind == IMAGE else "sound", ", ".join(map(show, names))
        raise PromptError(f"the prompt is {show(content)}; beside a {what} of {listed} give a text")

    def _identity(self, row: Mapping[str, Any]) -> str | int | None:
        if self._id_column is None:
            return None
        value = row[self._id_column]
        if isinstance(value, float) and value.is_integer():  # pandas may turn whole numbers into floats
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise PromptError(f"the id in {show(self._id_column)} is {_null(value)}; give a text or a whole number")
        return value


def seed_of(seed: int, source: object) -> int:
    """Makes the seed of a row (0 .. 2**64 - 1) from the seed of all rows and the row's id or prompt (`source`)."""
    digest = hashlib.blake2b(_canonical([seed, source]), digest_size=8, person=b"llamabatch row").digest()
    return int.from_bytes(digest, "big")


class _Null(Undefined):
    """A cell without a value. In a template it is undefined and false. Writing it into the text raises an error."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__(f"column {show(name)} is null in this row")

    def __str__(self) -> NoReturn:
        raise UndefinedError(self._undefined_hint)


def _rendered(argument: str, source: str, row: Mapping[str, Any]) -> str:
    cells = {name: _Null(name) if value is None else value for name, value in row.items()}
    try:
        return _compiled(argument, source).render({ROW: cells, **cells})
    except Exception as error:  # a template is a program and can raise any exception
        raise PromptError(f"the {argument} cannot be made: {describe(error)}") from error


def _called(function: PromptFunction, row: dict[str, Any]) -> Content:
    try:
        content: Any = function(dict(row))
    except Exception as error:
        raise PromptError(f"the prompt cannot be made: {describe_error(error)}") from error
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        try:
            _canonical(content)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"the prompt is {show(content)}, which has no form in JSON: {error}") from error
        return list(content)
    raise PromptError(f"the prompt is {_null(content)}; give a text, a list of messages, or token ids")


def _null(value: object) -> str:
    return "null" if value is None else show(value)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=_of_media).encode()


def _of_media(value: Any) -> object:
    """Returns a JSON value for a path, bytes, an image, a numpy array or a numpy number. Otherwise raises TypeError."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "convert"):  # a PIL image: its bytes may be indexes of a palette, not colours
        value = value.convert("RGBA")
    data = value.tobytes() if hasattr(value, "tobytes") else value
    return [hashlib.sha256(data).hexdigest(), *(str(getattr(value, name, "")) for name in ("size", "shape", "dtype"))]


def _variables(argument: str, source: str) -> frozenset[str]:
    return _compiled(argument, source).variables - _NOT_COLUMNS


@functools.lru_cache(maxsize=32)
def _compiled(argument: str, source: str) -> BoundedTemplate:
    try:
        return BoundedTemplate(source)
    except ConfigError as error:
        raise ConfigError(str(error).replace("the chat template", f"the template of {argument}")) from error
