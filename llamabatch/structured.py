"""What `structured_outputs` may ask for, brought to one plain form: a kind and a text, which compare, hash and travel.

Nothing is compiled here: that takes a vocabulary, and the time to refuse what is hostile (llama/grammars.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from llamabatch.checks import nearest, show
from llamabatch.errors import SamplingError

MAX_CHARS = 2**18  # of a schema, a regex, a grammar, or all choices together
KINDS = ("json", "regex", "choice", "grammar")
ANY_OBJECT = '{"type": "object"}'

_KEPT = 16  # structures that were found right
_KEYS = (*KINDS, "json_object")
_FORMATS = ("json_schema", "json_object", "text")


class Structure(NamedTuple):
    """What an output must look like.

    Attributes:
        kind: "json", "regex", "choice" or "grammar".
        text: a JSON schema; a regular expression; a JSON list of strings; a grammar in Lark's or llama.cpp's notation.
    """

    kind: str
    text: str


def structure(given: object) -> Structure | None:
    """The one form of everything that `structured_outputs` takes; None stays None. Raises SamplingError."""
    if given is None:
        return None
    if isinstance(given, Structure):
        return _checked(given) if isinstance(given.kind, str) and isinstance(given.text, str) else _plain(*given)
    if not isinstance(given, Mapping):
        raise SamplingError(f"structured_outputs is {show(given)}; give a mapping with one of {', '.join(_KEYS)}")
    if "type" in given and not any(key in given for key in KINDS):
        return _response_format(given)
    asked = {key: value for key, value in given.items() if value is not None and value is not False}
    for key in asked:
        if key not in _KEYS:
            raise SamplingError(f"structured_outputs has no {show(key)}{nearest(show(key), _KEYS)}")
    if len(asked) != 1:
        names = ", ".join(asked) or "nothing"
        raise SamplingError(f"structured_outputs holds {names}; give exactly one of {', '.join(_KEYS)}")
    [(key, value)] = asked.items()
    if key == "json_object":
        if value is not True:
            raise SamplingError(f"json_object of structured_outputs is {show(value)}; give True or False")
        return Structure("json", ANY_OBJECT)
    return _plain(key, value)


def _plain(kind: object, value: object) -> Structure:
    if not isinstance(kind, str) or kind not in KINDS:
        raise SamplingError(f"the kind of structured_outputs is {show(kind)}{nearest(show(kind), KINDS)}")
    return Structure(kind, _short_enough(kind, _TEXTS[kind](value)))


@functools.lru_cache(_KEPT)
def _checked(given: Structure) -> Structure:
    """Cached, as each copy of the parameters of a request comes here again with a text that is long."""
    if given.kind != "choice":
        return _plain(*given)
    try:
        choices = json.loads(_short_enough("choice", given.text))
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"choice of structured_outputs is no JSON list: {error}") from error
    return _plain("choice", choices)


def _response_format(given: Mapping[Any, Any]) -> Structure | None:
    """OpenAI's response_format, and llama_cpp.Llama's, which has the schema beside the type."""
    kind = given["type"]
    if kind not in _FORMATS:
        raise SamplingError(f"the type of structured_outputs is {show(kind)}{nearest(show(kind), _FORMATS)}")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")
        return Structure("json", ANY_OBJECT) if schema is None else structure({"json": schema})
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise SamplingError('structured_outputs of type "json_schema" needs {"json_schema": {"schema": …}}')
    return structure({"json": inner["schema"]})


def _schema_text(given: object) -> str:
    make = getattr(given, "model_json_schema", None)
    if callable(make):  # a pydantic model class
        try:
            given = make()
        except Exception as error:  # whatever pydantic finds wrong with the class
            raise SamplingError(f"json of structured_outputs has no JSON schema: {error}") from error
    if isinstance(given, str):
        _short_enough("json", given)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise SamplingError(f"json of structured_outputs is no JSON: {error}") from error
    if given is True:
        given = {}
    if not isinstance(given, Mapping):
        raise SamplingError(f"json of structured_outputs is {show(given)}; give a schema or a pydantic model class")
    try:
        return json.dumps(dict(given), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(f"json of structured_outputs cannot be written as JSON: {error}") from error


def _plain_text(kind: str, given: object) -> str:
    if not isinstance(given, str):
        raise SamplingError(f"{kind} of structured_outputs is {show(given)}; give a string")
    return _writable(kind, given)


def _writable(kind: str, given: str) -> str:
    """No empty text, and none that UTF-8 or a grammar's notation cannot hold."""
    if not given or "\0" in given or any("\ud800" <= c <= "\udfff" for c in given):
        raise SamplingError(f"{kind} of structured_outputs has {show(given)}; give a text without zeros and surrogates")
    return given


def _choices(given: object) -> str:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, (list, tuple)) or not given:
        raise SamplingError(f"choice of structured_outputs is {show(given)}; give a list of strings")
    for each in given:
        if not isinstance(each, str):
            raise SamplingError(f"choice of structured_outputs holds {show(each)}; give strings")
        _writable("choice", each)
    return json.dumps(given)


_TEXTS = {
    "json": _schema_text,
    "regex": lambda given: _plain_text("regex", given),
    "grammar": lambda given: _plain_text("grammar", given),
    "choice": _choices,
}


def _short_enough(kind: str, text: str) -> str:
    if len(text) > MAX_CHARS:
        raise SamplingError(f"{kind} of structured_outputs has {len(text)} characters; allowed are up to {MAX_CHARS}")
    return text
