"""Reads the schemas of tools: finds the names, schemas and types of arguments in all parts of a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llamabatch.errors import SamplingError
from llamabatch.request.json_schema import referred
from llamabatch.utils.checks import integer, show

Schemas = Mapping[str, Mapping[str, Any]]  # name of a tool -> JSON schema of its parameters

TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
STRING = frozenset(("string",))
NESTED = frozenset(("array", "object"))

_DEEPEST = 64  # maximum depth of schemas within schemas
_MOST_LOOKS = 50_000  # maximum number of schema reads for a request; usual tools need about ten for each argument
_MOST_PARTS = 2000  # maximum number of schema parts to search for one name


def refused(about: str, what: str) -> SamplingError:
    """Returns the error for tools whose calls no grammar can express.

    Args:
        about: the part of the tools at fault, such as "argument 'x' of 'f'".
        what: the fault, such as "are nested too deeply".
    """
    return SamplingError(f"tools are refused: {about} {what}")


class Budget:
    """A limit for the work on the schemas of one request, because schemas may refer to one another many times."""

    def __init__(self) -> None:
        self._left = _MOST_LOOKS

    def spend(self, about: str, looks: int = 1) -> None:
        """Takes schema reads from the budget. Raises SamplingError when the budget is spent."""
        self._left -= looks
        if self._left < 0:
            raise SamplingError(f"tools are refused: {about}: the schema is too large, or has too many references")


def types_of(schema: object, root: object) -> frozenset[str] | None:
    """Returns the allowed types of a JSON schema; None: any type. "number" includes "integer".

    Args:
        root: the whole schema, for "$ref".
    """
    found = TypesOf(root)(schema)
    return None if found == TYPES else found


def types_of_value(value: object) -> frozenset[str]:
    """Returns the types of a JSON value; 1.0 counts as a number and as an integer."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, (int, float)):
        is_whole = isinstance(value, int) or value.is_integer()
        return frozenset(("number", "integer") if is_whole else ("number",))
    names = {str: "string", list: "array", tuple: "array", type(None): "null"}
    return frozenset((names.get(type(value), "object"),))


class TypesOf:
    """A callable that returns the types of a schema's values. A schema may refer to itself.

    Only values of finite depth count, so a schema that always requires itself allows no value.

    Args:
        root: as for types_of().
        spend: called for each schema read; None: nothing is called, and a schema that needs too many reads allows any
            type.
    """

    def __init__(self, root: object, spend: Callable[[], None] | None = None) -> None:
        self._root = root
        self._spend = spend
        self._known: dict[str, frozenset[str]] = {}  # $ref -> the types found so far
        self._new: list[str] = []  # references whose schemas have not been read yet
        self._left = _MOST_LOOKS

    def __call__(self, schema: object) -> frozenset[str]:
        """Returns the types of a schema; TYPES if the schema allows any type."""
        found = self._of(schema, 0)
        if not self._new:
            return found if self._left > 0 else TYPES
        while self._new:
            reference = self._new.pop()
            self._known[reference] = self._of(referred(reference, self._root), 0)
        before = None
        while before != self._known and self._left > 0:
            before = dict(self._known)
            for reference in reversed(list(self._known)):  # first the targets, then the schemas that refer to these
                self._known[reference] = self._of(referred(reference, self._root), 0)
        return self._of(schema, 0) if self._left > 0 else TYPES

    def _of(self, schema: object, depth: int) -> frozenset[str]:
        self._left -= 1
        if self._spend is not None:
            self._spend()
        if not isinstance(schema, Mapping) or depth > _DEEPEST or self._left <= 0:
            return frozenset() if schema is False else TYPES
        found = types_named(schema)
        for choices in lists_of_values(schema):
            found &= frozenset().union(*map(types_of_value, choices))
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._known:
                self._known[reference] = frozenset()
                self._new.append(reference)
            found &= self._known[reference]
        for part in parts(schema, "allOf"):
            found &= self._of(part, depth + 1)
        for key in ("anyOf", "oneOf"):
            if several := parts(schema, key):
                found &= frozenset().union(*(self._of(part, depth + 1) for part in several))
        return found


def types_named(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types in the "type" of a schema; all types if there is no "type"."""
    names = _type_names(schema)
    if names is None:
        return TYPES
    found = TYPES.intersection(name for name in names if isinstance(name, str))
    return found | {"integer"} if "number" in found else found


def unknown_type(schema: Mapping[str, Any]) -> object:
    """Returns the first part of "type" that is not a JSON type; None: all parts are JSON types."""
    names = _type_names(schema)
    if names is None:
        return schema.get("type")
    return next((name for name in names if not isinstance(name, str) or name not in TYPES), None)


def lists_of_values(schema: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yields the lists of allowed values, from const and enum. A value must be in each of these lists."""
    if "const" in schema:
        yield [schema["const"]]
    if isinstance(choices := schema.get("enum"), (list, tuple)):
        yield choices


def _type_names(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    given = schema.get("type")
    names = (given,) if isinstance(given, str) else given
    return names if isinstance(names, (list, tuple)) else None


def parts(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Returns the schemas in allOf, anyOf or oneOf; no schemas if the keyword is missing or its value is not a list."""
    given = schema.get(key)
    return given if isinstance(given, (list, tuple)) else ()


def checked_parts(schema: Mapping[str, Any], key: str, about: str) -> Sequence[Any]:
    """Returns the same as parts(). Raises SamplingError if the value of the keyword is not a list."""
    if not isinstance(schema.get(key, ()), (list, tuple)):
        raise SamplingError(f"tools are refused: {about}: {key} is {show(schema[key])}; give a list of schemas")
    return parts(schema, key)


def count(schema: Mapping[str, Any], key: str, about: str) -> int | None:
    """Returns a bound such as minLength or maxProperties; None: no bound is given. Raises SamplingError."""
    given = schema.get(key)
    if given is None:
        return None
    return integer(SamplingError, f"tools are refused: {about}: {key}", given, 0, 2**31 - 1)


def of_argument(root: Mapping[str, Any], name: str) -> object:
    """Returns the schema of an argument, joined from all parts that mention it. Returns True if no part mentions it.

    Args:
        root: the schema of all arguments.
    """
    found = _of_argument(root, name, root, iter(range(_MOST_PARTS)), 0)
    return True if found is None else found.schema


class _Named(NamedTuple):
    """One argument's schema, as found in a part of the whole schema.

    Attributes:
        always: True: `schema` applies whichever branches of anyOf and oneOf are taken.
    """

    schema: object
    always: bool


def _of_argument(schema: object, name: str, root: object, budget: Iterator[int], depth: int) -> _Named | None:
    if not isinstance(schema, Mapping):
        return None
    if depth > _DEEPEST or next(budget, None) is None:
        return _Named(True, True)
    own = _here(schema, name)
    found = [None if own is None else _Named(own, True)]
    joined = list(parts(schema, "allOf"))
    if isinstance(reference := schema.get("$ref"), str):
        joined.append(referred(reference, root))
    found += (_of_argument(part, name, root, budget, depth + 1) for part in joined)
    for key in ("anyOf", "oneOf"):
        each = [_of_argument(part, name, root, budget, depth + 1) for part in parts(schema, key)]
        ways = [part for part in each if part is not None]
        if ways:
            found.append(_Named({"anyOf": [part.schema for part in ways]}, all(part and part.always for part in each)))
    named = [part for part in found if part is not None]
    always = [part.schema for part in named if part.always]
    if always:  # schemas that apply only sometimes may be left out
        return _Named({"allOf": always}, True)
    return _Named({"anyOf": [part.schema for part in named]}, False) if named else None


def _here(schema: Mapping[str, Any], name: str) -> object:
    """Returns the schema of an argument in `schema` itself. Ignores $ref, allOf, anyOf and oneOf. None: `schema` does
    not mention the argument.

    A name outside of `properties` counts as a match of every pattern. The patterns are not run, because Python's
    regular expressions can run forever.
    """
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    rest = schema.get("additionalProperties")
    if not isinstance(patterns, Mapping):
        return rest
    return {"anyOf": [*patterns.values(), True if rest is None else rest]}


def names_of(root: Mapping[str, Any]) -> list[str] | None:
    """Returns the argument names in all parts of a schema; None: no part has `properties`, or an inner part allows any
    name."""
    is_listed, found = False, dict[str, None]()
    left: list[object] = [root]
    seen: set[str] = set()
    while left:
        part = left.pop(0)
        if not isinstance(part, Mapping):
            continue
        is_open = part.get("additionalProperties", False) is not False or part.get("patternProperties")
        if is_open and part is not root:
            return None
        if isinstance(properties := part.get("properties"), Mapping):
            is_listed = True
            found.update(dict.fromkeys(properties))
        found.update(dict.fromkeys(name for name in parts(part, "required") if isinstance(name, str)))
        if isinstance(reference := part.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            left.append(referred(reference, root))
        for key in ("allOf", "anyOf", "oneOf"):
            left += parts(part, key)
    return list(found) if is_listed else None
