"""A JSON body read by a table of its fields: known, refused, or ignored and named in a header. Knows nothing of HTTP
but the text of a body and its headers."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from llamabatch.errors import InputError, PromptError, SamplingError
from llamabatch.request.sampling_params import ALIASES
from llamabatch.server.errors import ApiError
from llamabatch.utils.checks import boolean, choice, integer, nearest, number, show

logger = logging.getLogger(__name__)

Json = dict[str, Any]
T = TypeVar("T")

IGNORED_HEADER = "X-Llamabatch-Ignored"
TIMEOUT_HEADER = "X-Request-Timeout"
MAX_DEPTH = 128  # of lists and objects; Python's own limit lies near 1,000, for all that works on them
MAX_DIGITS = 40  # of a whole number: reading one takes the square of their count

_MAX_HEADER = 1024  # bytes of the value of IGNORED_HEADER
_MAX_LOGGED = 1024  # names of ignored fields that are remembered as logged
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_MAYBE_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half a surrogate pair, if the other half is not there
_HALF = re.compile("[\ud800-\udfff]")
_VERB = re.compile(r" (?:is|are|has|have|holds|names|needs) |[;:]")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Fields that become another without being an alias of it.
_FORMS = {
    **dict.fromkeys(("grammar", "json_schema", "structural_tag"), "structured_outputs"),
    **dict.fromkeys(("reasoning_budget_tokens", "thinking_budget_tokens"), "thinking_token_budget"),
    "n_cmpl": "n",
}
_CURL_TYPE = "application/x-www-form-urlencoded"
_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)


@dataclass(frozen=True)
class Rules:
    """The part of a server's options by which it reads bodies.

    Attributes:
        strict: a body with unknown fields is refused; otherwise they are ignored, and named in a header.
        trust_templates: a body may bring a chat template, which is a program.
        sampling: values of SamplingParams where a body has none.
        template: of the server, in place of the model's.
        template_kwargs: variables of the chat template where a body does not set them.
        verbose: whole answers have __verbose.
        enable_thinking: of a template that reads it, likewise; None: as the template has it.
        timeout_s: seconds that the headers of the request allow.
        variables: names that the server's chat template reads; None: they are not known.
        thinks: the model marks its thinking, in a way that is known.
    """

    strict: bool = False
    trust_templates: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    verbose: bool = False
    timeout_s: float | None = None
    variables: frozenset[str] | None = None
    thinks: bool = True

    def reads(self, name: str) -> bool:
        """True if the chat template reads a variable, or may do so."""
        return self.variables is None or name in self.variables


RULES = Rules()


@dataclass(frozen=True)
class Field:
    """A known field of a body.

    Attributes:
        schema: JSON schema of its values.
        doc: for the OpenAPI document.
        only: the values that are accepted, since they ask for what happens anyway; None: the reader of the body
            decides. null is always as if the field were not there.
        advice: the cure, for the message about another value.
    """

    schema: Json
    doc: str = ""
    only: tuple[object, ...] | None = None
    advice: str = "leave it out"


Fields = Mapping[str, Field]


def read_json(data: bytes, headers: Mapping[str, str] | None = None) -> Json:
    """The object in the body of a request.

    Args:
        headers: of the request, names in lower case; None: its type is known.

    Raises:
        ApiError: 415 for another type than JSON in UTF-8; 400 for what is no JSON object, or has a name twice, NaN, a
            number without end, half a character, or lists in lists more than MAX_DEPTH deep.
    """
    if headers is not None:
        _check_type(headers)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {show(value)}; give a JSON object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH or _MAYBE_HALF.search(text):
        _check_values(value)
    return value


def _check_type(headers: Mapping[str, str]) -> None:
    given, _, parameters = headers.get("content-type", "application/json").partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w.-]+)", parameters, re.IGNORECASE)
    is_json = _JSON_TYPE.fullmatch(given.strip()) or _is_of_curl(given, headers)
    if not is_json or (charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii")):
        raise ApiError(
            415,
            f"Content-Type is {show(headers['content-type'])}; give application/json "
            "(curl: -H 'Content-Type: application/json')",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, f"Content-Encoding is {show(headers['content-encoding'])}; send the body as it is")


def _is_of_curl(given: str, headers: Mapping[str, str]) -> bool:
    """The type is that of `curl -d` without a header, which llama-server takes, and no page has sent the request: a
    browser names the page in Origin, and may send this type anywhere without a preflight."""
    from_page = "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)
    return given.strip().lower() == _CURL_TYPE and not from_page


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; at most {MAX_DIGITS} are allowed")
    return int(text)


def _decimal(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is larger than any that can be kept")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> Json:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 10_000 else names[0]
        raise ValueError(f"the name {show(twice)} stands twice in one object")
    return value


_DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=_decimal, parse_constant=_no_number, object_pairs_hook=_object
)


def _too_deep() -> ApiError:
    return ApiError(400, f"the body has lists or objects within each other, more than {MAX_DEPTH} deep")


def _check_values(value: object) -> None:
    """Raises ApiError for values nested too deep, and for texts with half a character."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            below += (*each, *each.values()) if isinstance(each, dict) else each
        for text in below:
            if isinstance(text, str) and (half := _HALF.search(text)):
                raise ApiError(400, f"a text of the body has half a character, \\u{ord(half[0]):x}, at {half.start()}")
        level = [each for each in below if isinstance(each, (dict, list))]
        if not level:
            return
    raise _too_deep()


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Seconds in the header X-Request-Timeout: 30, 0.5 or 30s; None: there is none. Raises ApiError."""
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
    """The header that names the ignored fields of a body, of at most 1 kB of safe characters; {}: there are none."""
    text = ", ".join(dict.fromkeys(_UNSAFE.sub("?", name[:64]) or "?" for name in names))
    if not text:
        return {}
    if len(text) > _MAX_HEADER:
        text = text[: text.rindex(", ", 0, _MAX_HEADER - 3)] + ", ..."
    return {IGNORED_HEADER: text}


_logged: set[str] = set()


def log_ignored(names: Iterable[str]) -> None:
    """Writes each name to the log, once in the life of the process; never a value."""
    for name in names:
        if name not in _logged and len(_logged) < _MAX_LOGGED:
            _logged.add(name)
            logger.info("a request has the unknown field %s, which is ignored (strict refuses it)", show(name[:64]))


class Body:
    """The values of a body, taken one by one. Those that only mean what happens anyway are checked at once.

    Args:
        body: the object. fields: the table of the endpoint.

    Attributes:
        ignored: names of unknown fields.

    Raises:
        ApiError: a field cannot be honoured; rules.strict, and a name is unknown.
    """

    def __init__(self, body: Mapping[str, Any], fields: Fields, rules: Rules = RULES) -> None:
        unknown = [name for name in body if name not in fields]
        if unknown and rules.strict:
            name = unknown[0]
            raise ApiError(
                400, f"there is no field {show(name)}{nearest(name, fields)}", code="unknown_parameter", param=name
            )
        self.ignored = unknown
        self._strict = rules.strict
        self._fields = fields
        self._values = {name: value for name, value in body.items() if value is not None and name in fields}
        for name in [name for name in self._values if fields[name].only is not None]:
            value, known = self._values.pop(name), fields[name]
            if not any(type(value) is type(one) and value == one for one in known.only or ()):
                raise ApiError(
                    400,
                    f"{name} is {show(value)}, which is not supported; {known.advice}",
                    code="unsupported_parameter",
                    param=name,
                )

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def ignore(self, name: str, value: object, why: str) -> None:
        """Adds a known field to `ignored`, as this model has no use for its value. Raises ApiError: rules.strict.

        Args:
            name: with points before the names of nested fields.
        """
        if self._strict:
            message = f"{name} is {show(value)}, which would change nothing: {why}; leave it out"
            raise ApiError(400, message, code="unsupported_parameter", param=name.partition(".")[0])
        self.ignored.append(name)

    def take(self, name: str) -> Any:
        """The value of a field, once; None: it has none."""
        return self._values.pop(name, None)

    def put(self, name: str, value: Any) -> None:
        """Sets the value of a field; None: it has none."""
        self._values.pop(name, None)
        if value is not None:
            self._values[name] = value

    def boolean(self, name: str, default: bool = False) -> bool:
        """The value of a field that is true or false. Raises SamplingError."""
        value = self.take(name)
        return default if value is None else boolean(SamplingError, name, value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """The value of a field that is a whole number. Raises SamplingError."""
        value = self.take(name)
        return None if value is None else integer(SamplingError, name, value, low, high)

    def number(self, name: str, low: float, high: float) -> float | None:
        """The value of a field that is a number. Raises SamplingError."""
        value = self.take(name)
        return None if value is None else number(SamplingError, name, value, low, high)

    def choice(self, name: str, known: Iterable[str]) -> str | None:
        """The value of a field that is one of some words. Raises SamplingError."""
        value = self.take(name)
        return None if value is None else choice(SamplingError, name, value, known)

    def text(self, name: str) -> str | None:
        """The value of a field that is a text. Raises PromptError."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise PromptError(f"{name} is {show(value)}; give a text")
        return value

    def needed(self, name: str, what: str) -> Any:
        """The value of a field that must be there. Raises ApiError."""
        value = self.take(name)
        if value is None:
            raise ApiError(400, f"the body has no {name}; give {what}", code="missing_required_parameter", param=name)
        return value

    def nested(self, name: str, known: Iterable[str]) -> Json:
        """The object of a field; its unknown names are added to `ignored`. Raises PromptError."""
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise PromptError(f"{name} is {show(value)}; give an object")
        known = tuple(known)
        self.ignored += [f"{name}.{each}" for each in value if each not in known]
        return {each: value[each] for each in known if value.get(each) is not None}

    def rest(self) -> Json:
        """The values that were not taken."""
        return dict(self._values)


R = TypeVar("R", bound=Callable[..., Any])


def reads(read: R) -> R:
    """A decorator of the reader of a body, its first argument: an InputError becomes an ApiError that names the field
    at the beginning of its message, by the name that the body has for it."""

    @functools.wraps(read)
    def call(body: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        try:
            return read(body, *args, **options)
        except InputError as error:
            raise ApiError.of(error, param_of(str(error), body)) from error

    return call  # type: ignore[return-value]  # the same parameters


def param_of(message: str, body: Mapping[str, Any]) -> str | None:
    """The field of a body that a message is about: one of its first words, or the name that the body has for such a
    parameter; None: it is about no single field."""
    head = _VERB.split(message, maxsplit=1)[0]
    for word in _WORD.findall(head):
        if word in body:
            return str(word)
        for given in body:
            if ALIASES.get(given, _FORMS.get(given)) == word:
                return given
    return None
