"""Makes the grammar rules of a value between tags.

A string is written between the tags without quotes and escapes, so the schema of a string becomes one regular
expression. This expression also matches null, true, false and numbers. Lists and objects are written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llamabatch.chat.text_patterns import containing, found_in_text, of_format
from llamabatch.chat.tool_parsers import to_json
from llamabatch.chat.tool_schemas import (
    NESTED,
    STRING,
    TYPES,
    Budget,
    TypesOf,
    checked_parts,
    count,
    lists_of_values,
    of_argument,
    parts,
    refused,
    types_named,
    types_of_value,
    unknown_type,
)
from llamabatch.request.json_schema import referred, with_parts
from llamabatch.request.lark_rules import ANY, GUIDANCE, MAX_CHARS, Rules, quoted
from llamabatch.utils.checks import show

LARK = "x-lark"
"""Key in the schema of a string argument: a Lark grammar of the string. The key counts only where the notation writes
strings as they are. JSON writes strings with escapes, which the grammar does not describe."""

_NO_NAME = "\0"  # a name that no argument has
_DEEPEST = 64  # maximum length of a chain of $refs
_SPACE = r"[\s\x1c-\x1f]*"  # white space that the readers strip
# Texts that look like JSON of a type. If a schema allows the type, a reader does not read these texts as strings.
_WHOLE, _FRACTION = "-?(0|[1-9][0-9]*)", r"(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_LOOKS = {
    "null": "null",
    "boolean": "true|false",
    "number": _WHOLE + _FRACTION,
    "integer": _WHOLE + _FRACTION,
    "array": r"\[(?s:.*)\]",
    "object": r"\{(?s:.*)\}",
    "string": '"(?s:.*)"',
}
_BEGINS = {"number": "[0-9-]", "integer": "[0-9-]", "array": r"\[", "object": r"\{"}
_NUMBERS = frozenset(("number", "integer"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_SOME_WHOLE, _SOME_NUMBER = 7919 * 10**12 + 1, 0.7919e-12  # two numbers that are surely not in any schema


class Values:
    """A writer of the rules for the values of one function's arguments.

    Args:
        rules: the grammar to add rules to.
        end: the text after each value.
        root: the schema of all arguments, as far as a grammar can express it.
        budget: the budget of the request.
    """

    def __init__(self, rules: Rules, end: str, function: str, root: Mapping[str, Any], budget: Budget) -> None:
        self._rules = rules
        self._budget = budget
        self._types_of = TypesOf(root, lambda: budget.spend(rules.about))
        self._end = end
        self._function = function
        self._root = root

    def rule(self, place: str, name: str, start: str, schema: object) -> str | None:
        """Adds the rules for an argument. Returns the expression that uses these rules; None: no value fits the schema.

        Strings and _Words share one terminal, which includes the texts before and after the value. There is no such
        terminal if the schema allows neither strings nor words.

        Args:
            place: suffix of the rules' names; no other argument has this suffix.
            name: name of the argument; "": any name that is not in the schema.
            start: the text before the value, as an expression of a terminal.
        """
        about = f"argument {show(name)}" if name else "an argument"
        self._rules.about = f"{about} of {show(self._function)}"
        end = quoted(self._end)
        if isinstance(schema, Mapping) and isinstance(schema.get(LARK), str):
            inner = self._rules.rule(f"value{place}", f"%lark {{\n{schema[LARK]}\n}}")
            return f"{start} {inner} {end}"
        texts = Texts(self._root, self._rules.about, self._end.strip(), self._read_as(name), self._budget)
        if _allows_all(schema):
            return self._rules.lazy(f"text{place}", texts.readable(ANY, as_any=True), end, start)
        text = texts.of(schema)
        types = self._types_of(schema)
        words = _Words(schema, self._root, lambda looks: self._budget.spend(self._rules.about, looks), self._types_of)
        nested = types & (NESTED | _NUMBERS if words.is_bounded else NESTED)
        terms = [] if text is None else [f"({texts.readable(text, apart_from=nested)})"]
        content = " | ".join([*terms, *(words.expressions() if types - STRING else ())])
        if not content:
            return f"{start} {self._json(place, schema, nested)}" if nested else None
        if not nested:
            return self._rules.lazy(f"text{place}", content, end, start)
        text = self._rules.lazy(f"text{place}", content, end)
        return f"{start} ({text} | {self._json(place, schema, nested)})"

    def _read_as(self, name: str) -> frozenset[str]:
        """Returns the possible types of an argument's value. A reader converts the value to one of these types."""
        return self._types_of(of_argument(self._root, name or _NO_NAME))

    def _json(self, place: str, schema: object, types: frozenset[str]) -> str:
        """Adds a rule for the values of these types, written as JSON."""
        whole = schema if types >= self._types_of(schema) else {"allOf": [schema, {"type": sorted(types)}]}
        made = json.dumps({**self._with_definitions(whole), "x-guidance": GUIDANCE})
        return f"{self._rules.rule(f'json{place}', f'%json {made}')} {quoted(self._end)}"

    def _with_definitions(self, schema: object) -> dict[str, Any]:
        """Returns the schema with its own $defs: copies of all schemas that its references point to."""
        names: dict[str, str] = {}

        def renamed(part: Any) -> Any:
            if not isinstance(part, Mapping):
                return part
            made = with_parts({key: each for key, each in part.items() if key not in _DEFINITIONS}, renamed)
            if isinstance(reference := part.get("$ref"), str):
                made["$ref"] = "#/$defs/" + names.setdefault(reference, f"{len(names)}")
            return made

        found = renamed(schema)
        made = {} if found is True else dict(found)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(names):
            reference = list(names)[len(definitions)]
            definitions[names[reference]] = renamed(_target(reference, self._root, self._rules.about))
        return {**made, "$defs": definitions} if definitions else made


_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated", "$comment", "$id", "$schema")
)


def _allows_all(schema: object) -> bool:
    return schema is True or (isinstance(schema, Mapping) and schema.keys() <= _ANNOTATIONS)


def _target(reference: str, root: object, about: str) -> object:
    found = referred(reference, root)
    if found is None:
        raise refused(about, f"has the $ref {show(reference)}, where its schema has nothing")
    return found


class _Words:
    """The allowed JSON words of a schema: null, true, false and numbers.

    Between tags, nothing distinguishes a word from a string. So one terminal must match both.

    Attributes:
        is_bounded: the schema restricts numbers by bounds or by oneOf. In this case, numbers are not among the words.
    """

    def __init__(
        self, schema: object, root: object, spend: Callable[[int], None], types_of: Callable[[object], frozenset[str]]
    ) -> None:
        self.is_bounded = False
        self._spend = spend
        self._types_of = types_of
        self._schema = schema
        self._root = root
        self._numbers: dict[int | float, None] = {}  # numbers listed in the schema
        self._look(schema, set())

    def expressions(self) -> list[str]:
        """Returns the allowed words of the schema, as expressions of a terminal. Numbers are left out if
        `is_bounded`."""
        words = [value for value in (None, True, False) if self._fits(self._schema, value)]
        found = [quoted(json.dumps(value)) for value in words]
        if self.is_bounded:
            return found
        if self._fits(self._schema, _SOME_NUMBER):
            found.append(f"/{_WHOLE}{_FRACTION}/")
        elif self._fits(self._schema, _SOME_WHOLE):
            found.append(f"/{_WHOLE}/")
        return found + [quoted(json.dumps(each)) for each in self._numbers if self._fits(self._schema, each)]

    def _look(self, schema: object, seen: set[str]) -> None:
        """Collects the numbers listed in a schema, and looks for bounds. Also reads the schema's allOf, anyOf, oneOf
        and $ref."""
        if not isinstance(schema, Mapping):
            return
        self._spend(1)
        of_numbers = [part for part in parts(schema, "oneOf") if self._types_of(part) & _NUMBERS]
        self.is_bounded |= not _BOUNDS.isdisjoint(schema) or len(of_numbers) > 1
        for choices in lists_of_values(schema):
            self._numbers |= {each: None for each in choices if type(each) in (int, float)}
        for key in ("allOf", "anyOf", "oneOf"):
            for part in parts(schema, key):
                self._look(part, seen)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            self._look(referred(reference, self._root), seen)

    def _fits(self, schema: object, value: object, references: tuple[str, ...] = ()) -> bool:
        """Returns True if null, a boolean or a number fits a schema. Bounds of numbers are not checked."""
        self._spend(1 + sum(map(len, lists_of_values(schema))) if isinstance(schema, Mapping) else 1)
        if not isinstance(schema, Mapping):
            return schema is not False
        if not types_named(schema) & types_of_value(value):
            return False
        if not all(any(_same(value, each) for each in choices) for choices in lists_of_values(schema)):
            return False
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = referred(reference, self._root)
            if reference in references or not self._fits(target, value, (*references, reference)):
                return False
        fits = {
            key: [self._fits(part, value, references) for part in parts(schema, key)]
            for key in ("allOf", "anyOf", "oneOf")
        }
        return all(fits["allOf"]) and (any(fits["anyOf"]) or not fits["anyOf"]) and sum(fits["oneOf"] or [True]) == 1


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


class Texts:
    """A converter of a schema's strings to expressions. A terminal of the grammar can use these expressions.

    Args:
        about: the argument, as messages name it.
        closing: the text after each value. A reader of the call stops at this text.
        read_as: possible types of the value. A reader converts the text to one of these types.
    """

    def __init__(self, root: object, about: str, closing: str, read_as: frozenset[str], budget: Budget) -> None:
        self._root = root
        self._budget = budget
        self._about = about
        self._closing = closing
        self._read_as = read_as

    def readable(self, content: str, *, as_any: bool = False, apart_from: frozenset[str] = frozenset()) -> str:
        """Returns an expression for texts that match `content`. It leaves out texts that a reader would not return
        unchanged as strings.

        Args:
            as_any: True: texts that a reader reads as JSON are also allowed.
            apart_from: types that have a terminal of their own. Texts that begin like a value of such a type are left
                out, because the first character must show which terminal follows.
        """
        never = [containing(self._closing)]
        if self._read_as != STRING and not as_any:
            looks = "|".join(f"({_LOOKS[each]})" for each in sorted(self._read_as))
            never.append(f"/{_SPACE}({looks}){_SPACE}/")
        never += [f"/{_BEGINS[each]}(?s:.*)/" for each in sorted(apart_from)]
        return f"({content}) & ~({' | '.join(never)})"

    def of(self, schema: object, references: tuple[str, ...] = ()) -> str | None:
        """Returns an expression for the strings that fit a schema; None: no string fits."""
        self._budget.spend(self._about)
        if len(references) > _DEEPEST:
            raise refused(self._about, f"has a chain of more than {_DEEPEST} $refs")
        if isinstance(schema, bool):
            return ANY if schema else None
        if not isinstance(schema, Mapping):
            raise refused(self._about, f"has {show(schema)}; give a JSON schema")
        if (unknown := unknown_type(schema)) is not None:
            raise refused(self._about, f"is of type {show(unknown)}; JSON has {', '.join(sorted(TYPES))}")
        if "string" not in types_named(schema):
            return None
        terms = [*self._choices(schema), *self._plain(schema)]
        for part in checked_parts(schema, "allOf", self._about):
            terms.append(self.of(part, references))
        if isinstance(reference := schema.get("$ref"), str):
            if reference in references:
                return None  # no value of finite depth fits a schema that refers to itself here
            terms.append(self.of(_target(reference, self._root, self._about), (*references, reference)))
        if "anyOf" in schema:
            each = [self.of(part, references) for part in checked_parts(schema, "anyOf", self._about)]
            terms.append(_any_of(each))
        if "oneOf" in schema:
            each = [self.of(part, references) for part in checked_parts(schema, "oneOf", self._about)]
            found = [part for part in each if part is not None]
            self._check_size(sum(map(len, found)) * len(found))
            terms.append(_any_of([_alone(found, n) for n in range(len(found))]))
        known = [term for term in terms if term is not None]
        if len(known) < len(terms):
            return None
        self._check_size(sum(map(len, known)))
        known = [f"({term})" for term in known if term != ANY]
        return " & ".join(known) or ANY

    def _check_size(self, n_chars: int) -> None:
        if n_chars > MAX_CHARS:
            raise refused(self._about, f"is a grammar of more than {MAX_CHARS:,} characters")

    def _choices(self, schema: Mapping[str, Any]) -> Iterator[str | None]:
        for choices in lists_of_values(schema):
            yield _any_of([self._literal(each) for each in choices if isinstance(each, str)])

    def _literal(self, text: str) -> str:
        is_read = self._closing not in text
        if is_read and self._read_as != STRING:
            is_read = json.loads(to_json(text, self._read_as)) == text
        if not is_read:
            raise refused(self._about, f"may be {show(text)}, which no call in this notation can hold; leave it out")
        return quoted(text)

    def _plain(self, schema: Mapping[str, Any]) -> Iterator[str]:
        least, most = (count(schema, key, self._about) for key in ("minLength", "maxLength"))
        if least is not None or most is not None:
            yield f"/(?s:.{{{least or 0},{'' if most is None else most}}})/"
        if (pattern := schema.get("pattern")) is not None:
            if not isinstance(pattern, str):
                raise refused(self._about, f"has the pattern {show(pattern)}; give a regular expression")
            yield found_in_text(pattern)
        if isinstance(name := schema.get("format"), str):
            yield of_format(name)


def _any_of(terms: Sequence[str | None]) -> str | None:
    known = [f"({term})" for term in terms if term is not None]
    return " | ".join(known) if known else None


def _alone(terms: Sequence[str], n: int) -> str:
    """Returns an expression for the texts that match term `n` and no other term."""
    others = [f"({term})" for k, term in enumerate(terms) if k != n]
    return f"({terms[n]}) & ~({' | '.join(others)})" if others else terms[n]
