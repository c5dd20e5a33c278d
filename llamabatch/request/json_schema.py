"""A JSON schema as a grammar can hold it: annotations are left out, unique items become lists of values, and keywords
that no grammar holds are named.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from llamabatch.errors import SamplingError
from llamabatch.request.schema_patterns import of_ecma
from llamabatch.utils.checks import show

# Formats that llguidance holds; any other is an annotation, as the standard has it.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Keywords that no grammar holds: refused, or left out and named.
UNHELD = (
    *("if", "then", "else", "not", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
)
_VALUES = ("const", "default", "examples")  # keywords of which null is a value, and no slip
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_WITH_SCHEMAS = (*_SCHEMAS_BY_NAME, *_LISTS_OF_SCHEMAS, *_SCHEMAS)
_MOST_LISTS = 512  # of values that stand for a list of unique items
_LENIENT_ADVICE = 'leave it out, or give "lenient": True beside "json": the output names what is not held'
_DEEPEST = 64  # references that lead to the values of an enumeration


def held(schema: Any, start: str = "", root: Any = None) -> tuple[Any, tuple[str, ...]]:
    """The schema that a grammar holds, and the formats that it does not know, which are left out: "format 'password'".

    Args:
        start: of an error.
        root: the schema in which this one stands; None: none.

    Raises:
        SamplingError: a keyword that no grammar holds.
    """
    return _Reader(schema if root is None else root, "leave it out", start).read(schema)


def read(schema: Any, *, lenient: bool) -> tuple[Any, tuple[str, ...]]:
    """The schema that is held to, and what was left out of the given one: "format 'password'", "not".

    Args:
        lenient: leave out what no grammar holds; else it is refused.

    Raises:
        SamplingError: a keyword that no grammar holds, and lenient is False.
    """
    return _Reader(schema, None if lenient else _LENIENT_ADVICE).read(schema)


class _Reader:
    """Args: advice: what an error about a keyword says; None: such keywords are left out."""

    def __init__(self, root: Any, advice: str | None, start: str = "") -> None:
        self._root = root
        self._advice = advice
        self._start = start
        self._left_out: list[str] = []

    def read(self, given: Any) -> tuple[Any, tuple[str, ...]]:
        found = self.schema(given)
        if isinstance(found, dict) and given is self._root:
            targets = set(_references(given))
            for key in {path[0] for path in targets if path}.difference(_WITH_SCHEMAS).intersection(found):
                found[key] = self._elsewhere(found[key], (key,), targets)
        return found, tuple(dict.fromkeys(self._left_out))

    def _elsewhere(self, value: Any, path: tuple[str, ...], targets: set[tuple[str, ...]]) -> Any:
        """A value of a keyword that is none of the standard's, as "components", in which schemas stand: references lead
        to them."""
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
        return self._unique(given, found) if given.get("uniqueItems") is True else found

    def _keeps(self, key: str, value: Any) -> bool:
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            self._left_out.append(f"format {value!r}")
            return False
        if value is None and key not in _VALUES:
            self._left_out.append(f"{key} null")
            return False
        if key == "propertyNames" and value in ({}, True, {"type": "string"}):
            return False  # which each name fits
        if key in UNHELD:
            self._leave_out(key, f"{key} of a JSON schema is {show(value)}, which no grammar holds")
            return False
        return key != "uniqueItems" or not isinstance(value, bool)

    def _pattern(self, given: str) -> str:
        try:
            return of_ecma(given)
        except SamplingError as error:
            raise SamplingError(f"{self._start}{error}") from None

    def _unique(self, given: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """The schema of a list without equal items: each list that there can be, or in one order where these are many.

        A list of at most one item has no equal ones.
        """
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
            "uniqueItems of a JSON schema is held for lists of a few values (enum), and for maxItems of 1; these items "
            f"are {show(given.get('items'))}",
        )
        return found

    def _leave_out(self, key: str, message: str) -> None:
        if self._advice is not None:
            raise SamplingError(f"{self._start}{message}; {self._advice}")
        self._left_out.append(key)

    def _values(self, items: Any) -> list[Any] | None:
        """The values that a schema allows, without equal ones; None: they are no enumeration."""
        for _ in range(_DEEPEST):
            if not isinstance(items, dict) or not isinstance(items.get("$ref"), str):
                break
            items = referred(items["$ref"], self._root)
        if not isinstance(items, dict):
            return None
        if "const" in items:
            return [items["const"]]
        if isinstance(items.get("enum"), list):
            return list({json.dumps(each, sort_keys=True): each for each in items["enum"]}.values())
        known: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        return known.get(str(items.get("type")))


_OF_LISTS = ("type", "items", "minItems", "maxItems")


def referred(reference: str, root: object) -> object:
    """The schema at a place of the root, as "#/$defs/size"; None: there is none."""
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
    """The names on the way from the root to a place in it; None: it is elsewhere."""
    start, _, path = reference.partition("/")
    if start != "#":
        return None
    return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in path.split("/")) if path else ()


def _references(root: Any) -> Iterator[tuple[str, ...]]:
    """The paths of all references in a schema."""
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
    """A schema with each schema that stands directly in it changed; lists are an older form of prefixItems."""

    def changed(key: str, value: Any) -> Any:
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: change(each) for name, each in value.items()}
        if key in (*_LISTS_OF_SCHEMAS, *_SCHEMAS) and isinstance(value, (list, tuple)):
            return [change(each) for each in value]
        return change(value) if key in _SCHEMAS else value

    return {key: changed(key, value) for key, value in schema.items()}


def _exactly(values: tuple[Any, ...]) -> dict[str, Any]:
    """The schema of the list of these values alone."""
    size = len(values)
    each = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": each, "items": False, "minItems": size, "maxItems": size}
