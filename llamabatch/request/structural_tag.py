"""Converts a structural_tag to Lark. A structural_tag is free text with structured parts that begin with triggers.

The notations are vLLM's: the older {"structures": [{"begin", "schema", "end"}], "triggers": […]}, and {"format": …} as
xgrammar reads it. Free text becomes a lexeme that ends at the first trigger (a lazy lexeme of llguidance). The schema
of a part applies only after its trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llamabatch.errors import SamplingError
from llamabatch.request.json_schema import held
from llamabatch.request.lark_rules import ANY, GUIDANCE, quoted, slashed
from llamabatch.utils.checks import nearest, show

MAX_DEPTH = 32  # maximum depth of nested formats
MAX_TAGS = 256  # maximum number of items in a list

_TEXT = f"TEXT: {ANY}\n"


class Special(NamedTuple):
    """A special token in a text.

    Attributes:
        name: the token's name in a grammar of Lark.
    """

    name: str


Part = str | Special  # a part of a text: plain text, or a special token
Split = Callable[[str], Sequence[Part]]


def to_lark(text: str, split: Split) -> str:
    """Returns the grammar of a structural tag.

    Args:
        text: JSON of one of the two notations.
        split: splits a text into its plain pieces and special tokens.

    Raises:
        SamplingError: the text is not a structural tag, or has a format that is not supported.
    """
    document = _object("structural_tag", json.loads(text))
    document = document.get("structural_tag", document)  # some clients wrap the tag in one more object
    is_older = "structures" in document
    top = _from_structures(document) if is_older else _object("format of structural_tag", document.get("format"))
    lark = _Lark(split)
    start = lark.of(top, (), 0)
    return f"%llguidance {{}}\nstart: {start}\n{''.join(lark.rules)}{_TEXT}"


def _from_structures(document: Mapping[str, Any]) -> dict[str, Any]:
    tags = []
    for each in _list("structures of structural_tag", document["structures"]):
        structure = _object("a structure of structural_tag", each)
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end", "")})
    return {"type": "triggered_tags", "triggers": document.get("triggers"), "tags": tags}


class _Lark:
    """The rules of one grammar. A format and the text after it become one expression, because an expression for free
    text must include the text that ends it."""

    def __init__(self, split: Split) -> None:
        self.rules: list[str] = []
        self._split = split
        self._formats: dict[str, Callable[[Mapping[str, Any], tuple[Part, ...], int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "optional": lambda given, end, depth: self._repeated(given, "?", end, depth),
            "star": lambda given, end, depth: self._repeated(given, "*", end, depth),
            "plus": lambda given, end, depth: self._repeated(given, "+", end, depth),
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def of(self, given: object, end: tuple[Part, ...], depth: int) -> str:
        """Returns the expression of a format followed by `end`."""
        if depth > MAX_DEPTH:
            raise SamplingError(f"structural_tag nests formats more than {MAX_DEPTH} deep")
        known = _object("a format of structural_tag", given)
        kind = known.get("type", "tag" if "begin" in known else None)
        if not isinstance(kind, str) or kind not in self._formats:
            shown = show(kind)
            raise SamplingError(f"structural_tag has a format of type {shown}{nearest(shown, tuple(self._formats))}")
        return self._formats[kind](known, end, depth + 1)

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}\n")
        return name

    def text(self, parts: Sequence[Part]) -> str:
        """Returns the expression of a literal text; "" for an empty text."""
        return " ".join(part.name if isinstance(part, Special) else quoted(part) for part in parts)

    def free(self, end: Sequence[Part]) -> str:
        """Returns an expression for any text up to and including `end`; for any text at all if `end` is empty."""
        if not end:
            return "TEXT"
        first, *rest = end
        if isinstance(first, Special):
            return f"TEXT {self.text(end)}"
        return f"{self.rule(f'TEXT {quoted(first)}', '[lazy]')} {self.text(rest)}".rstrip()

    def _parts(self, name: str, given: object, *, empty: bool = False) -> tuple[Part, ...]:
        if isinstance(given, (list, tuple)) and len(given) == 1:
            [given] = given
        if not isinstance(given, str) or not (given or empty):
            raise SamplingError(f"{name} of structural_tag is {show(given)}; give a text")
        return tuple(self._split(given))

    def _const_string(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        return self.text(_joined(self._parts("value", given.get("value")), end))

    def _json_schema(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        schema = given.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise SamplingError(f"json_schema of structural_tag is {show(schema)}; give a schema")
        rule = self.rule(f"%json {json.dumps({**held(schema)[0], 'x-guidance': GUIDANCE})}")
        return f"{rule} {self.text(end)}".rstrip()

    def _regex(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        pattern = given.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            raise SamplingError(f"pattern of structural_tag is {show(pattern)}; give a regular expression")
        name = f"R{len(self.rules)}"
        self.rules.append(f"{name}: /{slashed(pattern)}/\n")
        return f"{name} {self.text(end)}".rstrip()

    def _any_text(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        for name in ("excludes", "excluded_str"):
            if given.get(name):
                raise SamplingError(f"{name} of structural_tag is {show(given[name])}, which is not supported")
        return self.free(end)

    def _sequence(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        elements = _list("elements of structural_tag", given.get("elements"))
        made = []
        for at, element in enumerate(elements):
            is_last = at == len(elements) - 1
            if not is_last:
                _check_ends(element)
            made.append(self.of(element, end if is_last else (), depth))
        return " ".join(filter(None, made))

    def _or(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        elements = _list("elements of structural_tag", given.get("elements"))
        return f"({' | '.join(self.of(element, end, depth) for element in elements)})"

    def _repeated(self, given: Mapping[str, Any], sign: str, end: tuple[Part, ...], depth: int) -> str:
        _check_ends(given.get("content"))
        return f"({self.of(given.get('content'), (), depth)}){sign} {self.text(end)}".rstrip()

    def _tag(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        begin, rest = self._tag_parts(given, end, depth)
        return f"{self.text(begin)} {rest}".lstrip()

    def _tag_parts(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> tuple[tuple[Part, ...], str]:
        """Returns the text at the start of a tag, and an expression for the rest of the tag."""
        own = self._parts("end", given.get("end", ""), empty=True)
        content = self.of(given.get("content"), _joined(own, end), depth)
        return self._parts("begin", given.get("begin"), empty=True), content

    def _tags(self, given: Mapping[str, Any], *, loops: bool) -> list[Mapping[str, Any]]:
        tags = [_object("a tag of structural_tag", tag) for tag in _list("tags of structural_tag", given.get("tags"))]
        for tag in tags:
            if loops and not tag.get("end"):
                _check_ends(tag.get("content"))
        return tags

    def _triggered_tags(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        at_least_one, stops = (_flag(given, name) for name in ("at_least_one", "stop_after_first"))
        triggers = _list("triggers of structural_tag", given.get("triggers"))
        by_trigger: dict[tuple[Part, ...], list[str]] = {}
        whole = []
        for tag in self._tags(given, loops=True):
            begin = str(tag.get("begin"))
            fitting = [each for each in triggers if each and begin.startswith(str(each))]
            if len(fitting) != 1:
                raise SamplingError(
                    f"a tag of structural_tag begins with {show(begin)}, which {len(fitting)} of its triggers match; "
                    "exactly one must match"
                )
            _, rest = self._tag_parts(tag, (), depth)
            rest = self.rule(f"{self.text(self._parts('begin', begin[len(fitting[0]) :], empty=True))} {rest}".strip())
            trigger = self._parts("trigger", fitting[0])
            by_trigger.setdefault(trigger, []).append(rest)
            whole.append(f"{self.text(trigger)} {rest}")
        later = " | ".join(f"{self.free(trigger)} ({' | '.join(tags)})" for trigger, tags in by_trigger.items())
        first, behind = f"({' | '.join(whole)})", self.text(end)
        if at_least_one:
            return f"{first} {behind}".rstrip() if stops else f"{first} ({later})* {self.free(end)}"
        if stops:
            return f"(({later}) {behind} | {self.free(end)})"
        return f"({later})* {self.free(end)}"

    def _tags_with_separator(self, given: Mapping[str, Any], end: tuple[Part, ...], depth: int) -> str:
        at_least_one, stops = (_flag(given, name) for name in ("at_least_one", "stop_after_first"))
        separator = self.text(self._parts("separator", given.get("separator", ""), empty=True))
        tag = self.rule(" | ".join(self._tag(each, (), depth) for each in self._tags(given, loops=True)))
        several = tag if stops else f"{tag} ({separator} {tag})*"
        return f"{several if at_least_one else f'({several})?'} {self.text(end)}".rstrip()


def _object(name: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise SamplingError(f"{name} is {show(given)}; give a mapping")
    return given


def _list(name: str, given: object) -> Sequence[Any]:
    if not isinstance(given, (list, tuple)) or not 1 <= len(given) <= MAX_TAGS:
        what = f"{len(given)} items" if isinstance(given, (list, tuple)) else show(given)
        raise SamplingError(f"{name} is {what}; give a list of 1 to {MAX_TAGS}")
    return given


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise SamplingError(f"{name} of structural_tag is {show(value)}; give True or False")
    return value


def _check_ends(given: object) -> None:
    """Raises SamplingError for a format whose last part is free text without an end."""
    left = [given]
    while left:
        known = left.pop()
        if not isinstance(known, Mapping):
            continue
        kind = known.get("type")
        if kind == "any_text" or (kind == "triggered_tags" and known.get("stop_after_first") is not True):
            raise SamplingError(f"structural_tag has {kind} without an end; put it last, or into a tag with an end")
        elements = known.get("elements")
        if kind == "sequence" and isinstance(elements, (list, tuple)) and elements:
            left.append(elements[-1])
        elif kind == "or" and isinstance(elements, (list, tuple)):
            left += elements
        elif "begin" in known and not known.get("end"):
            left.append(known.get("content"))


def _joined(first: Sequence[Part], second: Sequence[Part]) -> tuple[Part, ...]:
    """Joins two texts. Merges the pieces at the joint if both are plain text."""
    if first and second and isinstance(first[-1], str) and isinstance(second[0], str):
        return (*first[:-1], first[-1] + second[0], *second[1:])
    return (*first, *second)
