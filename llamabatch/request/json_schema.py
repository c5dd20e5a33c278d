"""Turns a JSON schema into a schema that a grammar can enforce. Annotations are left out, uniqueItems becomes a choice
of lists, and objects may have only the properties that the schema names. Keywords that a grammar cannot enforce are
reported."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from llamabatch.errors import SamplingError
from llamabatch.request.schema_patterns import of_ecma
from llamabatch.utils.checks import show

# Formats that llguidance enforces. Any other format is an annotation, as in the standard.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Keywords that no grammar can enforce. Either the schema is refused, or the keyword is left out and reported.
UNHELD = (
    *("if", "then", "else", "not", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
)
_VALUES = ("const", "default", "examples")  # keywords for which null is a value, not a mistake
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_WITH_SCHEMAS = (*_SCHEMAS_BY_NAME, *_LISTS_OF_SCHEMAS, *_SCHEMAS)
_MOST_LISTS = 512  # a schema with uniqueItems becomes a choice of at most this many lists
LENIENT = 'structured_outputs={"json": schema, "lenient": True}'
_LENIENT_ADVICE = f"leave it out, or give {LENIENT}: outputs list what is then ignored"
_DEEPEST = 64  # maximum length of a chain of references to an enumeration


def held(schema: Any, start: str = "", root: Any = None) -> tuple[Any, tuple[str, ...]]:
    """Returns a schema that a grammar can enforce, and the unknown formats that were left out, such as "format
    'password'".

    Args:
        start: the beginning of an error message.
        root: the schema that contains `schema`; None: `schema` itself. With a `root`, objects of `schema` may have
            properties that `schema` does not name, because another part of `root` may name them.

    Raises:
        SamplingError: the schema has a keyword that no grammar can enforce.
    """
    return _Reader(schema if root is None else root, "leave it out", start).read(schema)


def read(schema: Any, *, lenient: bool) -> tuple[Any, tuple[str, ...]]:
    """Returns a schema that a grammar can enforce, and the parts that were left out, such as "format 'password'" or
    "not".

    Args:
        lenient: True: keywords that no grammar can enforce are left out; False: they are refused.

    Raises:
        SamplingError: the schema has a keyword that no grammar can enforce, and lenient is False.
    """
    return _Reader(schema, None if lenient else _LENIENT_ADVICE).read(schema)


class _Reader:
    """Reads one schema. `advice` ends the error about an unsupported keyword; None: such keywords are left out."""

    def __init__(self, root: Any, advice: str | None, start: str = "") -> None:
        self._root = root
        self._advice = advice
        self._start = start
        self._left_out: list[str] = []
        self._merged: set[int] | None = None  # the result of _merged(root); None if only a part is read

    def read(self, given: Any) -> tuple[Any, tuple[str, ...]]:
        if given is self._root:
            self._merged = _merged(given)
        found = self.schema(given)
        if isinstance(found, dict) and given is self._root:
            targets = set(_references(given))
            for key in {path[0] for path in targets if path}.difference(_WITH_SCHEMAS).intersection(found):
                found[key] = self._elsewhere(found[key], (key,), targets)
        return found, tuple(dict.fromkeys(self._left_out))

    def _elsewhere(self, value: Any, path: tuple[str, ...], targets: set[tuple[str, ...]]) -> Any:
        """Reads the schemas in a keyword outside the standard, such as "components", if references point to them."""
        if path in targets:
            return self.schema(value)
        if not isinstance(value, dict):
            return value
        return {name: self._elsewhere(each, (*path, name), targets) for name, each in value.items()}

    def schema(self, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = with_parts({key: each for key, each in given.items() if self._keeps(key, each)}, self.schema)
        if isinstance(pattern := found.get("pattern"), str):
            found["pattern"] = self._pattern(pattern)
        if isinstance(patterns := found.get("patternProperties"), dict):
            found["patternProperties"] = {self._pattern(name): each for name, each in patterns.items()}
        if self._merged is not None and id(given) not in self._merged and _names_all(given):
            found.setdefault("additionalProperties", False)
        return self._unique(given, found) if given.get("uniqueItems") is True else found

    def _keeps(self, key: str, value: Any) -> bool:
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            self._left_out.append(f"format {value!r}")
            return False
        if value is None and key not in _VALUES:
            self._left_out.append(f"{key} null")
            return False
        if key == "propertyNames" and value in ({}, True, {"type": "string"}):
            return False  # the keyword allows every name
        if key in UNHELD:
            self._leave_out(key, f"{key} of a JSON schema is {show(value)}, which a grammar cannot enforce")
            return False
        return key != "uniqueItems" or not isinstance(value, bool)

    def _pattern(self, given: str) -> str:
        try:
            return of_ecma(given)
        except SamplingError as error:
            raise SamplingError(f"{self._start}{error}") from None

    def _unique(self, given: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """Returns the schema of a list without equal items. This is a choice of all possible lists. If these are too
        many, the choice has only one order for each set of items. If the list may have at most one item, returns
        `found` itself."""
        most = given.get("maxItems", math.inf)
        if isinstance(most, (int, float)) and most <= 1:
            return found
        is_plain = "prefixItems" not in given and given.get("type", "array") == "array"
        values = self._values(given.get("items")) if is_plain else None
        least = given.get("minItems", 0)
        if values is not None and isinstance(least, int) and isinstance(most, (int, float)):
            sizes = range(max(0, least), int(min(most, len(values))) + 1)
            for ways, count in ((itertools.permutations, math.perm), (itertools.combinations, math.comb)):
                if sizes and sum(count(len(values), size) for size in sizes) <= _MOST_LISTS:
                    rest = {key: each for key, each in found.items() if key not in _OF_LISTS}
                    return {**rest, "anyOf": [_exactly(each) for size in sizes for each in ways(values, size)]}
        self._leave_out(
            "uniqueItems",
            "uniqueItems of a JSON schema works where items has few values, or maxItems is 1; items "
            f"is {show(given.get('items'))}",
        )
        return found

    def _leave_out(self, key: str, message: str) -> None:
        if self._advice is not None:
            raise SamplingError(f"{self._start}{message}; {self._advice}")
        self._left_out.append(key)

    def _values(self, items: Any) -> list[Any] | None:
        """Returns the different values of an enumeration; None if the schema is not an enumeration."""
        for _ in range(_DEEPEST):
            if not isinstance(items, dict) or not isinstance(items.get("$ref"), str):
                break
            items = referred(items["$ref"], self._root)
        if not isinstance(items, dict):
            return None
        if "const" in items:
            return [items["const"]]
        if isinstance(items.get("enum"), list):
            return _different(items["enum"])
        if isinstance(items.get("anyOf"), list) and len(items) == 1:
            each = [self._values(part) for part in items["anyOf"]]
            return None if None in each else _different(value for values in each for value in values or ())
        low, high = items.get("minimum"), items.get("maximum")
        if items.get("type") == "integer" and type(low) is type(high) is int and {*items} <= _OF_INTEGERS:
            return [*range(low, high + 1)] if high - low < _MOST_LISTS else None
        known: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        return known.get(str(items.get("type")))


_OF_LISTS = ("type", "items", "minItems", "maxItems")
_OF_INTEGERS = frozenset(("type", "minimum", "maximum", "title", "description", "default", "examples"))


def _different(values: Iterable[Any]) -> list[Any]:
    """Returns the values without duplicates."""
    return [*{json.dumps(each, sort_keys=True): each for each in values}.values()]


def _names_all(schema: dict[str, Any]) -> bool:
    """Returns True if an object with only the named properties can satisfy `required` and `minProperties`.

    By the standard, a schema without additionalProperties allows any other properties. A model that may add properties
    writes long objects. llama.cpp and vLLM (xgrammar's strict mode) therefore exclude other properties, and so do we.
    """
    named, required = schema.get("properties"), schema.get("required")
    kinds = schema.get("type", "object")
    if not isinstance(named, dict) or not isinstance(kinds, (str, list, tuple)) or "object" not in kinds:
        return False
    least = schema.get("minProperties", 0)
    needs_others = isinstance(required, (list, tuple)) and not all(name in named for name in required)
    return not needs_others and isinstance(least, (int, float)) and least <= len(named)


def _merged(root: Any) -> set[int]:
    """Returns the id() of each schema whose object must also match another schema, which may name further properties.
    There are two kinds of such schemas. The first kind has several of allOf, anyOf, oneOf, $ref and properties, or
    several parts in allOf. The second kind is a part of such a schema, or the target of its $ref."""
    found: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    left: list[tuple[Any, bool]] = [(root, False)]
    while left:
        schema, is_merged = left.pop()
        if not isinstance(schema, dict) or (id(schema), is_merged) in seen:
            continue
        seen.add((id(schema), is_merged))
        parts = [schema[key] for key in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(key), (list, tuple))]
        reference = schema.get("$ref")
        n_parts = len(parts) + isinstance(reference, str) + isinstance(schema.get("properties"), dict)
        n_all = len(schema["allOf"]) if isinstance(schema.get("allOf"), (list, tuple)) else 0
        is_merged = is_merged or n_parts > 1 or n_all > 1
        if is_merged:
            found.add(id(schema))
        left += [(each, is_merged) for part in parts for each in part]
        if isinstance(reference, str):
            left.append((referred(reference, root), is_merged))
        for key, value in schema.items():
            if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
                left += [(each, False) for each in value.values()]
            elif key in ("prefixItems", *_SCHEMAS):
                left += [(each, False) for each in (value if isinstance(value, (list, tuple)) else [value])]
    return found


def referred(reference: str, root: object) -> object:
    """Returns the target of a reference (such as "#/$defs/size") in the root schema; None if the target does not
    exist."""
    path = _path(reference)
    if path is None:
        return None
    found = root
    for name in path:
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, (list, tuple)) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _path(reference: str) -> tuple[str, ...] | None:
    """Returns the keys that lead from the root to the target of a reference; None: the reference does not point into
    the root."""
    start, _, path = reference.partition("/")
    if start != "#":
        return None
    return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in path.split("/")) if path else ()


def _references(root: Any) -> Iterator[tuple[str, ...]]:
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str) and (path := _path(reference)) is not None:
                yield path
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a schema with `change` applied to its direct subschemas. `items` may be a list, the older form of
    prefixItems."""

    def changed(key: str, value: Any) -> Any:
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: change(each) for name, each in value.items()}
        if key in (*_LISTS_OF_SCHEMAS, *_SCHEMAS) and isinstance(value, (list, tuple)):
            return [change(each) for each in value]
        return change(value) if key in _SCHEMAS else value

    return {key: changed(key, value) for key, value in schema.items()}


def _exactly(values: tuple[Any, ...]) -> dict[str, Any]:
    """Returns a schema that accepts an array of exactly these values."""
    size = len(values)
    each = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": each, "items": False, "minItems": size, "maxItems": size}
