"""Makes columns from a JSON schema of objects: types from the schema's fields, and values from answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.records import resolved
from llamabatch.request.structured_outputs import Structure, structure
from llamabatch.utils.checks import show

STRING, INTEGER, NUMBER, BOOLEAN, JSON = "string", "integer", "number", "boolean", "json"
_SCALARS = (STRING, INTEGER, NUMBER, BOOLEAN)
_MOST_DEPTH = 32  # maximum number of levels of nested lists and alternatives
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Kind:
    """The type of a column. Any value may be null.

    Attributes:
        name: "string", "integer" (64 bits), "number" (a 64-bit float), "boolean", or "json" (a text of JSON).
        is_list: the values are lists of `name`.
    """

    name: str
    is_list: bool = False

    def value(self, given: Any) -> Any:
        """Turns a value of JSON into a value of the column. Raises ValueError if the given value has another type."""
        if given is None:
            return None
        if not self.is_list:
            return _scalar(self.name, given)
        if not isinstance(given, list):
            raise ValueError(f"{show(given)}, and not a list")
        return [None if each is None else _scalar(self.name, each) for each in given]


@dataclass(frozen=True)
class Field:
    """A property of the schema. It becomes a column of the same name."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class Schema:
    """A JSON schema of objects.

    Attributes:
        form: the structure that answers must have, made from the schema.
        fields: the properties, in order.
    """

    form: Structure
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, given: object) -> Schema:
        """Makes a Schema from a JSON schema (a mapping or its text) or a pydantic class.

        Raises:
            SamplingError: `given` is not a JSON schema.
            ConfigError: `given` does not describe objects with properties.
        """
        found = structure({"json": given})
        if found is None:
            raise ConfigError(f"schema is {show(given)}; give a JSON schema or a pydantic class")
        root = json.loads(found.text)
        schema = resolved(root, root)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            raise ConfigError(
                "schema has no properties, which would be the columns; for another form give "
                "params={'structured_outputs': …}, whose text is one column"
            )
        return cls(found, tuple(Field(name, _kind(each, root, 0)) for name, each in properties.items()))

    def values(self, text: str) -> dict[str, Any]:
        """Returns the fields of an answer; a missing field is None. Raises ValueError if `text` breaks the schema."""
        try:
            answer = json.loads(text)
        except RecursionError:
            raise ValueError("the answer is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"the answer is no JSON: {error}") from None
        if not isinstance(answer, dict):
            raise ValueError(f"the answer is {show(answer)}, and no object")
        values = {}
        for field in self.fields:
            try:
                values[field.name] = field.kind.value(answer.get(field.name))
            except ValueError as error:
                raise ValueError(f"{field.name} of the answer is {error}") from None
        return values


def _scalar(name: str, given: Any) -> Any:
    if name == JSON:
        return json.dumps(given, ensure_ascii=False)
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if name == STRING and isinstance(given, str):
        return given
    if name == BOOLEAN and isinstance(given, bool):
        return given
    if name == INTEGER and is_number and given == given // 1 and int(given) in _INT64:
        return int(given)
    if name == NUMBER and is_number and abs(given) < 2**1023:
        return float(given)
    what = {STRING: "a string", BOOLEAN: "a boolean", INTEGER: "a whole number of 64 bits", NUMBER: "a number"}[name]
    raise ValueError(f"{show(given)}, and not {what}")


def _kind(schema: object, root: Mapping[str, Any], depth: int) -> Kind:
    """Returns the column's type for the values of a schema: "json" if the values may have several types."""
    found = _of_alternatives(schema, root, depth)
    if found is not None:
        return found
    schema = resolved(schema, root)
    if "enum" in schema and isinstance(schema["enum"], list):
        return _of_values(schema["enum"])
    if "const" in schema:
        return _of_values([schema["const"]])
    types = schema.get("type")
    types = [each for each in (types if isinstance(types, list) else [types]) if each != "null"]
    if types == ["array"]:
        item = _kind(schema.get("items"), root, depth + 1) if depth < _MOST_DEPTH else Kind(JSON)
        return Kind(JSON) if item.is_list or item.name == JSON else Kind(item.name, is_list=True)
    return _common(Kind(each if each in _SCALARS else JSON) for each in types)


def _of_alternatives(schema: object, root: Mapping[str, Any], depth: int) -> Kind | None:
    """Returns the common type of the alternatives of a schema; None: the schema has no alternatives."""
    schema = resolved(schema, root)
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and (key != "allOf" or len(parts) == 1):
            if depth >= _MOST_DEPTH:
                return Kind(JSON)
            return _common(_kind(each, root, depth + 1) for each in parts if each != {"type": "null"})
    return None


def _of_values(values: list[Any]) -> Kind:
    names = {str: STRING, bool: BOOLEAN, int: INTEGER, float: NUMBER}
    return _common(Kind(names.get(type(value), JSON)) for value in values if value is not None)


def _common(kinds: Iterable[Kind]) -> Kind:
    found = set(kinds)
    if found == {Kind(INTEGER), Kind(NUMBER)}:
        return Kind(NUMBER)
    return found.pop() if len(found) == 1 else Kind(JSON)
