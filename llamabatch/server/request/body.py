"""Body: reads the values of a JSON body by a table of known fields. Other fields are refused, or ignored and named in a
header. The headers are the only part of HTTP in this module."""

from __future__ import annotations

import functools
import heapq
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llamabatch.errors import InputError, PromptError, SamplingError
from llamabatch.request.media import Kind
from llamabatch.request.parameter_names import ALIASES
from llamabatch.server.http.errors import ApiError
from llamabatch.utils.checks import boolean, choice, integer, nearest, present, show

logger = logging.getLogger(__name__)

Json = dict[str, Any]

# Schemas of fields that may be null.
BOOLEAN: Json = {"type": ["boolean", "null"]}
TEXT: Json = {"type": ["string", "null"]}
OBJECT: Json = {"type": ["object", "null"]}

IGNORED_HEADER = "X-Llamabatch-Ignored"
TIMEOUT_HEADER = "X-Request-Timeout"
MAX_REPEATED = 256  # limit of characters in a text that is repeated in answers but never read by the model

_LOGPROBS = ("logprobs", "top_logprobs", "n_probs", "prompt_logprobs", "logprob_token_ids")
_MAX_HEADER = 1024  # limit of bytes in the value of IGNORED_HEADER
_MAX_IGNORED = 1024  # limit of ignored names in a body, because the event loop writes them to header and log
_MAX_IGNORED_NAME = 64  # limit of characters in an ignored name, because log_ignored keeps the names for ever
_MAX_NAMES = 512  # limit of names in IGNORED_HEADER: each takes at least 3 bytes, so more do not fit into _MAX_HEADER
_MAX_LOGGED = 1024  # limit of ignored names that a process logs; further names are not logged
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:\-\[\]]")
_PLACE = re.compile(r"\[[0-9]+\]")
_PART = re.compile(r"[.:\[]")  # separates the name of a field from the rest of a path
_VERB = re.compile(r" (?:is|are|has|have|holds|names|needs) |[;:]")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Keys: names of fields that ALIASES does not contain. Values: the parameters that readers make from the fields.
_FORMS = {
    **dict.fromkeys(("grammar", "json_schema", "structural_tag"), "structured_outputs"),
    **dict.fromkeys(("reasoning_budget_tokens", "thinking_budget_tokens"), "thinking_token_budget"),
    "n_cmpl": "n",
}


@dataclass(frozen=True)
class Rules:
    """A server's options for reading bodies.

    Attributes:
        strict: True: unknown fields are refused, and so are unsupported values of optional fields. False: such fields
            are ignored and named in a header.
        max_logprobs: limit of the logprobs at each position; -1: as many as SamplingParams allows.
        trust_templates: a body may contain a chat template. A chat template is a program.
        sampling: default values of SamplingParams, for fields that a body does not set.
        template: the server's chat template, in place of the model's.
        template_kwargs: default variables of the chat template.
        verbose: answers that are not streamed have the entry __verbose.
        enable_thinking: the default of the template variable of this name; None: the template decides.
        timeout_s: the time limit in the headers of the request, in seconds; None: no limit.
        variables: names of the variables in the server's chat template; None: unknown.
        thinks: the model puts its thinking between known tags.
        media: readable kinds of media.
        addresses: a body may give media by address. MediaSources decides which addresses are allowed.
        slot_files: the server can save slots to files.
    """

    strict: bool = False
    max_logprobs: int = 20
    trust_templates: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    verbose: bool = False
    timeout_s: float | None = None
    variables: frozenset[str] | None = None
    thinks: bool = True
    media: frozenset[Kind] = frozenset()
    addresses: bool = False
    slot_files: bool = False

    def reads(self, name: str) -> bool:
        """True if the chat template reads a variable, or if the template's variables are unknown."""
        return self.variables is None or name in self.variables


RULES = Rules()


@dataclass(frozen=True)
class Field:
    """A known field of a body.

    Attributes:
        schema: JSON schema of its values.
        doc: the description in the OpenAPI document.
        only: the accepted values, which change nothing. None: the reader of the body checks the value. In every field,
            known or not, null means that the field is absent.
        advice: how to fix the body, for the error message about a value outside `only`.
        optional: True: values outside `only` need not be obeyed. Fields with such values are ignored and named in a
            header, or refused if the server is strict. False: values outside `only` are always refused.
    """

    schema: Json
    doc: str = ""
    only: tuple[object, ...] | None = None
    advice: str = "leave it out"
    optional: bool = False


Fields = Mapping[str, Field]


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds in the header X-Request-Timeout (30, 0.5 or 30s); None: no header. Raises ApiError."""
    given = headers.get(TIMEOUT_HEADER.lower())
    if given is None:
        return None
    try:
        seconds = float(given.strip().removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= 1e9:
        raise ApiError(
            400, f"{TIMEOUT_HEADER} is {show(given)}; give seconds, above 0 to 1e+09, as 30", param=TIMEOUT_HEADER
        )
    return seconds


def ignored_headers(names: Iterable[str]) -> dict[str, str]:
    """Returns the header with the sorted ignored names, at most 1 kB of safe characters; {}: nothing was ignored."""
    first = heapq.nsmallest(_MAX_NAMES, set(names))
    text = ", ".join(dict.fromkeys(_UNSAFE.sub("?", name[:_MAX_IGNORED_NAME]) or "?" for name in first))
    if not text:
        return {}
    if len(text) > _MAX_HEADER:
        text = text[: text.rindex(", ", 0, _MAX_HEADER - 3)] + ", ..."
    return {IGNORED_HEADER: text}


_logged: set[str] = set()


def log_ignored(names: Iterable[str]) -> None:
    """Logs each name once in the life of the process, without list indexes and without values."""
    for name in (_PLACE.sub("", name) for name in names):
        if name not in _logged and len(_logged) < _MAX_LOGGED:
            _logged.add(name)
            logger.info("a request has %r, which is ignored (strict refuses it)", name)


class Body:
    """The values of a body. A reader removes them one by one. The constructor checks the fields with an `only`.

    Args:
        body: the JSON object.
        fields: the endpoint's table of known fields.

    Attributes:
        ignored: names of unknown fields, and of known fields and parts without effect; at most 1,024 names.

    Raises:
        ApiError: a field has an unsupported value, or a name is unknown and the rules are strict.
    """

    def __init__(self, body: Mapping[str, Any], fields: Fields, rules: Rules = RULES) -> None:
        body = present(body)
        self.ignored: list[str] = []
        self._strict = rules.strict
        self.reads, self.reads_addresses = rules.media, rules.addresses
        self._fields = fields
        for name in body:
            if name not in fields:
                self._ignore_unknown(name, fields, name)
        self._check_logprobs(body, fields, rules.max_logprobs)
        self._values = {name: value for name, value in body.items() if name in fields}
        for name in [name for name in self._values if fields[name].only is not None]:
            value, known = self._values.pop(name), fields[name]
            if any(type(value) is type(one) and value == one for one in known.only or ()):
                continue
            if known.optional and not rules.strict:
                self._add_ignored(name)
            else:
                raise ApiError(
                    400,
                    f"{name} is {show(value)}, which is not supported; {known.advice}",
                    code="unsupported_parameter",
                    param=name,
                )

    @staticmethod
    def _check_logprobs(body: Mapping[str, Any], fields: Fields, most: int) -> None:
        """Raises ApiError if a body asks for more than `most` logprobs at each position. The reader checks types."""
        for name in _LOGPROBS if most >= 0 else ():
            given = body.get(name)
            count = len(given) if isinstance(given, list) else given
            if name not in fields or isinstance(count, bool) or not isinstance(count, (int, float)):
                continue
            if not 0 <= count <= most:
                what = f"a list of {count} ids" if isinstance(given, list) else show(count)
                raise ApiError(
                    400, f"{name} is {what}; allowed are 0 to {most} (max_logprobs of the server)", param=name
                )

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def _add_ignored(self, name: str) -> None:
        if len(self.ignored) < _MAX_IGNORED:
            self.ignored.append(name[:_MAX_IGNORED_NAME])

    def _ignore_unknown(self, name: str, known: Iterable[str], param: str) -> None:
        if self._strict:
            message = f"there is no field {show(name)}{nearest(name, known)}"
            raise ApiError(400, message, code="unknown_parameter", param=param)
        self._add_ignored(name)

    def ignore(self, name: str, value: object, why: str) -> None:
        """Adds a known field to `ignored`, because its value has no effect. Raises ApiError if strict.

        Args:
            name: the name of the field; for a nested field, its path with dots.
        """
        if self._strict:
            message = f"{name} is {show(value)}, which has no effect: {why}; leave it out"
            raise ApiError(400, message, code="unsupported_parameter", param=_PART.split(name, maxsplit=1)[0])
        self._add_ignored(name)

    def ignore_not_held(self, place: str, parts: Iterable[str]) -> None:
        """Adds parts of a structured output to `ignored`, because no grammar enforces them. Raises ApiError if strict.

        Args:
            place: the field that asks for the structured output.
            parts: as in Structure.not_held, such as "format 'password'".
        """
        for part in parts:
            keyword, _, value = part.replace("'", "").partition(" ")
            name = f"{place}.{keyword}{value and ':'}{value}"
            self.ignore(name, value or keyword, "a grammar cannot hold it")

    def ignore_kind(self, place: str, kind: str, why: str, code: str) -> None:
        """Adds the path and the type of a part to `ignored`. Raises ApiError if strict.

        Args:
            place: path of the part, such as tools[2].
            code: the code of the error.
        """
        if self._strict:
            message = f"{place} is of type {show(kind)}; {why}"
            raise ApiError(400, message, code=code, param=_PART.split(place, maxsplit=1)[0])
        self._add_ignored(f"{place}:{kind}")

    def take(self, name: str) -> Any:
        """Removes the value of a field and returns it; None: no value."""
        return self._values.pop(name, None)

    def put(self, name: str, value: Any) -> None:
        """Sets the value of a field, or removes the field if the value is None."""
        self._values.pop(name, None)
        if value is not None:
            self._values[name] = value

    def boolean(self, name: str, default: bool = False) -> bool:
        """Removes and returns the value of a boolean field. Raises SamplingError."""
        value = self.take(name)
        return default if value is None else boolean(SamplingError, name, value)

    def label(self, name: str) -> str | None:
        """Removes and returns a text, to be repeated in the answer. Raises PromptError, also if the text is too
        long."""
        value = self.text(name)
        check_repeated(name, value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Removes and returns the value of an integer field. Raises SamplingError."""
        value = self.take(name)
        return None if value is None else integer(SamplingError, name, value, low, high)

    def choice(self, name: str, known: Iterable[str]) -> str | None:
        """Removes and returns a value that must be one of `known`. Raises SamplingError."""
        value = self.take(name)
        return None if value is None else choice(SamplingError, name, value, known)

    def text(self, name: str) -> str | None:
        """Removes and returns the value of a text field. Raises PromptError."""
        value = self.take(name)
        return None if value is None else string(name, value)

    def needed(self, name: str, what: str) -> Any:
        """Removes and returns the value of a required field. Raises ApiError if the body has none.

        Args:
            what: describes a correct value, for the error message.
        """
        value = self.take(name)
        if value is None:
            raise ApiError(400, f"the body has no {name}; give {what}", code="missing_required_parameter", param=name)
        return value

    def nested(self, name: str, known: Iterable[str]) -> Json:
        """Removes and returns the object of a field. Adds the object's unknown names to `ignored`. Raises PromptError,
        and ApiError for an unknown name if strict."""
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise PromptError(f"{name} is {show(value)}; give an object")
        known = tuple(known)
        for each in value:
            if each not in known:
                self._ignore_unknown(f"{name}.{each}", [f"{name}.{other}" for other in known], name)
        return {each: value[each] for each in known if value.get(each) is not None}

    def rest(self) -> Json:
        """Returns the values that were not removed by a reader."""
        return dict(self._values)


def string(where: str, value: object) -> str:
    """Returns a value that must be a text. Raises PromptError."""
    if not isinstance(value, str):
        raise PromptError(f"{where} is {show(value)}; give a text")
    return value


def null_as_empty(part: Mapping[str, Any], name: str) -> object:
    """Returns a field of a history; None: the field is missing. null becomes "", because some programs store null."""
    return "" if name in part and part[name] is None else part.get(name)


def text_in(where: str, part: Mapping[str, Any], name: str = "text") -> str:
    """Returns a text of a history; "" for null. Raises PromptError if the field is missing or is not a text."""
    return string(f"{where}.{name}", null_as_empty(part, name))


def check_repeated(name: str, value: object) -> None:
    """Raises PromptError for a text that is too long to be repeated in an answer or in each event of a stream."""
    if isinstance(value, str) and len(value) > MAX_REPEATED:
        raise PromptError(f"{name} has {len(value)} characters; allowed are up to {MAX_REPEATED}")


R = TypeVar("R", bound=Callable[..., Any])


def reads(read: R) -> R:
    """Returns a reader that raises ApiErrors in place of InputErrors. The first argument of the reader is a body. The
    `param` of an ApiError names the wrong field of the body."""

    @functools.wraps(read)
    def call(body: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        try:
            return read(body, *args, **options)
        except InputError as error:
            raise ApiError.of(error, param_of(str(error), body)) from error

    return call  # type: ignore[return-value]  # the same parameters


def param_of(message: str, body: Mapping[str, Any]) -> str | None:
    """Finds the field of a body in an error message. Returns its name, or None if the message names no field of the
    body.

    One of the message's first words is the field's name, or the name of the parameter to which the field belongs.
    """
    head = _VERB.split(message, maxsplit=1)[0]
    for word in _WORD.findall(head):
        if word in body:
            return str(word)
        for given in body:
            if ALIASES.get(given, _FORMS.get(given)) == word:
                return given
    return None
