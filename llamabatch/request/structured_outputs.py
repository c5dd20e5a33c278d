"""Structure: `structured_outputs` as a kind and a text, which can be compared, hashed and sent to other processes.

Grammars are compiled in sampling/, because this needs a vocabulary and a trial of hostile grammars.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llamabatch.errors import SamplingError
from llamabatch.request import json_schema, structural_tag
from llamabatch.request.lark_rules import MAX_CHARS  # also the limit of a schema, a regex, or all choices together
from llamabatch.utils.checks import boolean, half_character, items, mapping, nearest, show, string

KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
TOOLS = "tools"  # a grammar that llamabatch makes from a conversation's tools; callers cannot name it
IN_REASONING = "enable_in_reasoning"
LENIENT = "lenient"  # key next to "json"; True: leaves out keywords that no grammar can enforce
ANY_OBJECT = '{"type": "object"}'

CANNOT_FOLLOW = "structured_outputs cannot be followed any further"  # start of the error for a costly grammar
_MOST_NAMED = 1000  # maximum number of parts in not_held
_MOST_KEPT = 16  # number of checked structures in the cache
_KEYS = (*KINDS, "json_object")
_FORMATS = ("json_schema", "json_object", "structural_tag", "text")
_MAYBE_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # perhaps half a surrogate pair; the other half may follow
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # characters that UTF-8 or the notation of a grammar cannot contain


class Structure(NamedTuple):
    """The structure that an output must have.

    Attributes:
        kind: "json", "regex", "choice", "grammar", "structural_tag" or TOOLS.
        text: a JSON schema; a regular expression; a JSON list of strings; a grammar in Lark's or llama.cpp's notation;
            JSON of a structural tag.
        in_reasoning: True: the structure applies from the first token on; False: after the thinking, if the model
            thinks.
        not_held: parts of the caller's JSON schema that are not in `text`.
    """

    kind: str
    text: str
    in_reasoning: bool = False
    not_held: tuple[str, ...] = ()


def structure(given: object) -> Structure | None:
    """Converts a value of `structured_outputs` to a Structure. Returns None for None. Raises SamplingError."""
    if given is None:
        return None
    if isinstance(given, Structure):
        return _checked(given)
    fields = mapping(given)
    if fields is None:
        raise SamplingError(f"structured_outputs is {show(given)}; give a mapping with one of {', '.join(_KEYS)}")
    lenient = boolean(SamplingError, LENIENT, fields.pop(LENIENT, None) or False)
    kind = string(fields.get("type"))
    if kind in KINDS and kind in fields:
        del fields["type"]  # {"type": "grammar", "grammar": …}, as some clients write it
    if "type" in fields and not any(key in fields for key in KINDS):
        form = _response_format(fields, lenient)
        in_reasoning = boolean(SamplingError, IN_REASONING, fields.get(IN_REASONING) or False)
        return form if form is None else form._replace(in_reasoning=in_reasoning)
    in_reasoning = boolean(SamplingError, IN_REASONING, fields.pop(IN_REASONING, None) or False)
    fields = {key: value for key, value in fields.items() if value is not None and value is not False}
    for key in fields:
        if not isinstance(key, str) or string(key) not in _KEYS:
            raise SamplingError(
                f"structured_outputs has no {show(key)}{nearest(show(key), (*_KEYS, IN_REASONING, LENIENT))}"
            )
    if len(fields) != 1:
        names = ", ".join(fields) or "nothing"
        raise SamplingError(f"structured_outputs holds {names}; give exactly one of {', '.join(_KEYS)}")
    [(key, value)] = ((str.__str__(key), value) for key, value in fields.items())
    if key == "json_object":
        if value is not True:
            raise SamplingError(f"json_object of structured_outputs is {show(value)}; give True or False")
        return Structure("json", ANY_OBJECT, in_reasoning)
    if key == "json":
        return _json_structure(_short_enough(key, _schema_text(value)), lenient)._replace(in_reasoning=in_reasoning)
    if lenient:
        raise SamplingError(f"{LENIENT} is True with {key}; it works with json only")
    return Structure(key, _short_enough(key, _TEXTS[key](value)), in_reasoning)


def _json_structure(text: str, lenient: bool) -> Structure:
    """Returns the Structure of a JSON schema, including the field not_held. Raises SamplingError."""
    try:
        schema, not_held = json_schema.read(json.loads(text), lenient=lenient)
        return Structure("json", _short_enough("json", json.dumps(schema)), not_held=not_held)
    except RecursionError as error:
        raise SamplingError("json of structured_outputs is nested too deeply") from error


def _checked(given: Structure) -> Structure:
    """Checks a Structure like any other value, because a caller or another process may have made it. Returns the
    checked Structure."""
    kind, text = string(given.kind), string(given.text)
    if kind is None or kind not in _TEXTS:
        raise SamplingError(f"the kind of structured_outputs is {show(given.kind)}{nearest(show(given.kind), KINDS)}")
    in_reasoning = boolean(SamplingError, IN_REASONING, given.in_reasoning)
    read = Structure(kind, _short_enough(kind, _TEXTS[kind](given.text))) if text is None else _read(kind, text)
    not_held = tuple(map(str, items(given.not_held, _MOST_NAMED) or ()))
    return read._replace(in_reasoning=in_reasoning, not_held=not_held) if in_reasoning or not_held else read


@functools.lru_cache(_MOST_KEPT)
def _read(kind: str, text: str) -> Structure:
    """Returns a checked Structure. Cached, because every copy of a request's parameters repeats the check."""
    content: object = text
    if kind == "choice":
        try:
            content = json.loads(_short_enough(kind, text))
        except (ValueError, RecursionError) as error:
            raise SamplingError(f"choice of structured_outputs is no JSON list: {error}") from error
    return Structure(kind, _short_enough(kind, _TEXTS[kind](content)))


def _response_format(given: dict[Any, Any], lenient: bool) -> Structure | None:
    """Returns the Structure of a response_format: OpenAI's, or llama_cpp.Llama's with its schema next to the type."""
    kind = string(given["type"])
    if kind is None or kind not in _FORMATS:
        shown = show(given["type"])
        raise SamplingError(f"the type of structured_outputs is {shown}{nearest(shown, _FORMATS)}")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return structure({kind: {key: value for key, value in given.items() if key not in ("type", IN_REASONING)}})
    if kind == "json_object":
        schema = given.get("schema")
        return Structure("json", ANY_OBJECT) if schema is None else structure({"json": schema, LENIENT: lenient})
    inner = mapping(given.get("json_schema"))
    if inner is None or inner.get("schema") is None:
        raise SamplingError('structured_outputs of type "json_schema" needs {"json_schema": {"schema": …}}')
    return structure({"json": inner["schema"], LENIENT: lenient})


def _schema_text(given: object) -> str:
    if not isinstance(given, (str, Mapping)):
        try:
            make = getattr(given, "model_json_schema", None)
            given = make() if callable(make) else given  # a pydantic model class
        except Exception as error:  # pydantic may raise any error
            raise SamplingError(f"json of structured_outputs has no JSON schema: {error}") from error
    text = string(given)
    if text is not None:
        try:
            given = json.loads(_short_enough("json", text))
        except (ValueError, RecursionError) as error:
            raise SamplingError(f"json of structured_outputs is no JSON: {error}") from error
    schema = {} if given is True else mapping(given)
    if schema is None:
        raise SamplingError(f"json of structured_outputs is {show(given)}; give a schema or a pydantic model class")
    try:
        text = json.dumps(schema, allow_nan=False)
    except Exception as error:  # a value of any class may raise any error
        raise SamplingError(f"json of structured_outputs cannot be written as JSON: {error}") from error
    return _encodable("json", text)


def _structural_tag(given: object) -> str:
    text = string(given)
    try:
        text = json.dumps(mapping(given) if text is None else json.loads(_short_enough("structural_tag", text)))
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(f"structural_tag of structured_outputs is no JSON: {error}") from error
    try:
        text = _encodable("structural_tag", _short_enough("structural_tag", text))
        structural_tag.to_lark(text, lambda part: [part] if part else [])
    except RecursionError as error:
        raise SamplingError("structural_tag of structured_outputs is nested too deeply") from error
    return text


def _encodable(kind: str, text: str) -> str:
    """Returns the JSON text. Raises SamplingError if a string in it has half a surrogate pair."""
    try:
        half = half_character(json.loads(text)) if _MAYBE_HALF.search(text) else None
    except RecursionError as error:
        raise SamplingError(f"{kind} of structured_outputs is nested too deeply") from error
    if half is not None:
        raise SamplingError(
            f"{kind} of structured_outputs has {show(half)}, which holds a lone surrogate; give whole characters"
        )
    return text


def _plain_text(kind: str, given: object) -> str:
    text = string(given)
    if text is None:
        raise SamplingError(f"{kind} of structured_outputs is {show(given)}; give a string")
    return _writable(kind, text)


def _writable(kind: str, text: str) -> str:
    """Returns the text. Raises SamplingError if it is empty, or if UTF-8 or a grammar's notation cannot contain it."""
    if not text or _UNWRITABLE.search(text):
        raise SamplingError(f"{kind} of structured_outputs has {show(text)}; give a text without NUL and surrogates")
    return text


def _choices(given: object) -> str:
    choices = items(given, MAX_CHARS)
    if not choices:
        raise SamplingError(f"choice of structured_outputs is {show(given)}; give a list of strings")
    texts = []
    for each in choices:
        text = string(each)
        if text is None:
            raise SamplingError(f"choice of structured_outputs holds {show(each)}; give strings")
        texts.append(_writable("choice", text))
    return json.dumps(texts)


_TEXTS: dict[str, Callable[[Any], str]] = {
    "json": _schema_text,
    "regex": lambda given: _plain_text("regex", given),
    "grammar": lambda given: _plain_text("grammar", given),
    "choice": _choices,
    "structural_tag": _structural_tag,
    TOOLS: lambda given: _plain_text(TOOLS, given),
}


def special_name(name: str) -> str:
    """Returns the name of a special token in a grammar, in angle brackets: <|eot|> stays, [INST] becomes <INST>.

    Args:
        name: the name in the vocabulary.
    """
    return name if _IN_BRACKETS.fullmatch(name) else "<" + _NOT_IN_NAMES.sub("", name) + ">"


_IN_BRACKETS = re.compile(r"<[^<>\[\]\s]+>")
_NOT_IN_NAMES = re.compile(r"[<>\[\]\s]")


def _short_enough(kind: str, text: str) -> str:
    if len(text) > MAX_CHARS:
        raise SamplingError(f"{kind} of structured_outputs has {len(text)} characters; allowed are up to {MAX_CHARS}")
    return text
