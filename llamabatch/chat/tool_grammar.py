"""Makes the grammar of a family's tool calls from the schemas of the tools.

There are three grammars: one for required calls, one for free text with calls, and one for either calls or an answer
with a given structure.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llamabatch.chat import tool_parsers
from llamabatch.chat.tagged_arguments import Tags, arguments
from llamabatch.chat.tagged_values import LARK
from llamabatch.chat.tool_formats import JsonNotation, TaggedNotation, ToolFormat, written
from llamabatch.chat.tool_schemas import Budget, Schemas, names_of, refused
from llamabatch.errors import SamplingError
from llamabatch.request.json_schema import held
from llamabatch.request.lark_rules import ANY, CALL, GUIDANCE, PARAMETERS, Rules, Spell, quoted
from llamabatch.request.tool_calls import ToolCall
from llamabatch.utils.checks import show

_PLAIN = re.compile("[a-zA-Z0-9_-]{1,64}")  # matches names that every family can read
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class CallGrammar(NamedTuple):
    """A grammar of tool calls in Lark's notation.

    Attributes:
        left_out: the parts of schemas that the grammar does not enforce, such as "format 'password'", and the functions
            that are left out, such as "function 'f'". "grammar 'f.input'" means the Lark grammar of the argument
            `input` of f. JSON notations cannot enforce a Lark grammar, because strings in JSON have escapes.
    """

    lark: str
    left_out: tuple[str, ...]


def grammar(tool_format: ToolFormat, tools: Schemas, spell: Spell, *, parallel: bool) -> CallGrammar:
    """Returns the grammar of one call, or several calls, in the family's notation.

    Args:
        tools: the tools that may be called. A tool that the grammar cannot express is left out if other tools
            remain.
        spell: returns a mark of the family in Lark's notation.
        parallel: True: more than one call is allowed.

    Raises:
        SamplingError: the notation cannot express any of the tools, because of their names or parts of their schemas.
    """
    return _grammar(tool_format, tool_format.notation, tools, spell, parallel, may_leave_out=True)


def lazy_grammar(tool_format: ToolFormat, tools: Schemas, spell: Spell, *, parallel: bool) -> CallGrammar | None:
    """Returns the grammar of free text in which every call has the right form.

    Returns None if the calls of the family do not begin with a mark, or if the family has a ToolFormat.thought. The
    arguments mean the same as in grammar(), but no tool is left out.

    Raises:
        SamplingError: the notation cannot express a name or a part of a schema.
    """
    notation = tool_format.notation
    opening = notation.before or notation.head if isinstance(notation, JsonNotation) else notation.head
    mark = next((each for each in tool_format.marks if opening.startswith(each)), None)
    if mark is None or tool_format.thought is not None:
        return None
    rest, several = opening[len(mark) :], False
    behind: JsonNotation | TaggedNotation
    if isinstance(notation, JsonNotation) and notation.before:
        behind, several = replace(notation, before=rest), parallel
    else:
        behind = replace(notation, head=rest)
    inner = _grammar(tool_format, behind, tools, spell, several, may_leave_out=False)
    first = spell(mark)
    free = f"free[lazy]: TEXT {first}" if first == quoted(mark) else f"free: TEXT {first}"
    calls = f"(free calls){'*' if parallel else '?'}"
    lark = f"start: {calls} TEXT\n{free}\nTEXT: {ANY}\n" + inner.lark.replace("start:", "calls:", 1)
    return inner._replace(lark=lark)


def answer_grammar(tool_format: ToolFormat, tools: Schemas, form: str, spell: Spell, *, parallel: bool) -> CallGrammar:
    """Returns a grammar that accepts either calls, as in grammar(), or a text with a given structure.

    The other arguments mean the same as in grammar(), but no tool is left out.

    Args:
        form: the structure of the text: the right side of a Lark rule.

    Raises:
        SamplingError: the notation cannot express a name or a part of a schema.
    """
    return _grammar(tool_format, tool_format.notation, tools, spell, parallel, may_leave_out=False, form=form)


def _grammar(
    tool_format: ToolFormat,
    notation: JsonNotation | TaggedNotation,
    tools: Schemas,
    spell: Spell,
    parallel: bool,
    *,
    may_leave_out: bool,
    form: str | None = None,
) -> CallGrammar:
    rules = Rules(tool_format.marks, spell)
    calls: list[str] = []
    left_out: list[str] = []
    errors: list[SamplingError] = []
    budget = Budget()
    for n, (name, given) in enumerate(tools.items()):
        own = Rules(tool_format.marks, spell)
        try:
            formats = _add_call(own, tool_format, notation, n, name, given, budget, beside_form=form is not None)
        except (SamplingError, RecursionError) as error:
            if isinstance(error, RecursionError):
                error = refused(f"{PARAMETERS} of {show(name)}", "are nested too deeply")
            if not may_leave_out:
                raise error from None
            errors.append(error)
            left_out.append(f"function {show(name)}")
            continue
        left_out += formats
        rules.add(own)
        calls.append(f"{CALL}{n}")
    if errors and not calls:
        raise errors[0]
    call = rules.rule(CALL if may_leave_out else f"any_{CALL}", " | ".join(calls))
    several = call
    if parallel and notation.between is not None:
        several = f"{call} ({rules.text(notation.between)} {call})*"
    if isinstance(notation, JsonNotation):
        around = f"{rules.text(notation.before)} {several} {rules.text(notation.after)}"
        if notation.only_if_several:
            several = f"{call} | {around}" if parallel else call
        else:
            several = around
    if form is not None:
        rules.about = "the form"
        several = f"{several} | {rules.text(tool_format.answer)} {rules.rule('form', form)}"
    if tool_format.thought is not None:
        several = f"thought? ({several})"
        begin, end = tool_format.thought
        rules.rule("thought", f"{rules.text(begin)} {rules.up_to(end)}")
    return CallGrammar(f"start: {several}\n{rules}", tuple(dict.fromkeys(left_out)))


def _add_call(
    rules: Rules,
    tool_format: ToolFormat,
    notation: JsonNotation | TaggedNotation,
    n: int,
    name: str,
    given: Mapping[str, Any],
    budget: Budget,
    *,
    beside_form: bool,
) -> tuple[str, ...]:
    """Adds the rules of one call. Returns the parts that the rules do not enforce. Raises SamplingError."""
    if not _reads(tool_format, name, ()):
        raise _unreadable(tool_format, f"a function has the name {show(name)}", " 64 of them at most")
    rules.about = f"{PARAMETERS} of {show(name)}"
    schema = {**given, "type": "object"} if given else _NO_ARGUMENTS  # of several given types, "object" counts
    schema, formats = _held(schema, name)
    if isinstance(notation, JsonNotation):
        formats += tuple(f"grammar {show(f'{name}.{each}')}" for each in _in_lark(schema))
    if isinstance(notation, JsonNotation) and beside_form and notation.head.startswith("{"):
        # A call and the answer may start with the same text. The grammar can keep both possible only if both rules are
        # %json.
        call = _json(_whole_call(notation, name, _closed(schema)))
    elif isinstance(notation, JsonNotation):
        call = _json_call(rules, notation, n, name, _closed(schema))
    else:
        check = functools.partial(_check_names, tool_format, name)
        tags = Tags(notation.key, notation.value, notation.end)
        call = f"{rules.text(notation.head + name + notation.middle)} "
        call += f"{arguments(rules, tags, n, name, schema, check, budget)} {rules.text(notation.tail)}"
    rules.about = f"function {show(name)}"
    rules.rule(f"{CALL}{n}", call)
    return formats


def _json_call(rules: Rules, notation: JsonNotation, n: int, name: str, schema: Mapping[str, Any]) -> str:
    shown = json.dumps(name, ensure_ascii=False)[1:-1] if notation.quoted else name
    inner = rules.rule(f"arguments{n}", _json(schema))
    parts = rules.text(notation.head + shown, *notation.middle), inner, rules.text(notation.tail)
    return " ".join(filter(None, parts))


def _whole_call(notation: JsonNotation, name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a call that is one JSON object."""
    empty = f"{notation.head}{''.join(map(str, notation.middle))}{{}}{notation.tail}"
    of_name, of_arguments = json.loads(empty)
    inner = _moved(schema, f"#/properties/{of_arguments}")
    properties = {of_name: {"const": name}, of_arguments: inner}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """Returns the schema with changed references, for use at `place` within another schema."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: part if key in ("const", "enum") else _moved(part, place) for key, part in schema.items()}
    if isinstance(target := schema.get("$ref"), str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': GUIDANCE})}"


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema that allows only named arguments. If `schema` has additionalProperties, or if names_of() returns
    None, returns `schema` itself."""
    names = names_of(schema)
    if names is None or "additionalProperties" in schema:
        return schema
    properties = schema.get("properties")
    named = dict(properties) if isinstance(properties, Mapping) else {}
    others: dict[str, Any] = {name: {} for name in names if name not in named}
    return {**schema, "properties": {**named, **others}, "additionalProperties": False}


def _held(schema: Mapping[str, Any], function: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Returns the schema of a function as far as a grammar can express it, and the formats that are left out."""
    about = f"{PARAMETERS} of {show(function)}"
    try:
        properties = schema.get("properties")
        for name, part in properties.items() if isinstance(properties, Mapping) else ():
            held(part, f"tools are refused: argument {show(name)} of {show(function)}: ", schema)
        found, formats = held(schema, f"tools are refused: {about}: ")
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise refused(about, "have a lone surrogate") from None
    return found, formats


def _in_lark(schema: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arguments that have a Lark grammar."""
    properties = schema.get("properties")
    named = properties.items() if isinstance(properties, Mapping) else ()
    return [name for name, part in named if isinstance(part, Mapping) and isinstance(part.get(LARK), str)]


def _check_names(tool_format: ToolFormat, function: str, names: Sequence[str]) -> None:
    """Raises SamplingError if tool calls in this format cannot contain the name of an argument."""
    if _reads(tool_format, function, names):
        return
    for name in names:
        if not _reads(tool_format, function, [name]):
            raise _unreadable(tool_format, f"an argument of {show(function)} has the name {show(name)}")


def _unreadable(tool_format: ToolFormat, what: str, most: str = "") -> SamplingError:
    return SamplingError(
        f"{what}, which calls of {tool_format.name} cannot express; give letters, digits, _ and -{most and ','}{most}"
    )


def _reads(tool_format: ToolFormat, name: str, names: Sequence[str]) -> bool:
    """Returns True if a call with these names, written in this format, is read back with the same names."""
    if all(map(_PLAIN.fullmatch, (name, *names))):
        return True
    given = dict.fromkeys(names, "x")
    parser = tool_parsers.ToolParser(tool_format.reader, {name: {}}, lambda index, name: "")
    delta = parser.finish(written(tool_format, [(name, given)]))
    if delta.text or len(delta.tool_calls) != 1:
        return False
    found = ToolCall("", delta.tool_calls[0].name or "", delta.tool_calls[0].arguments)
    return found.name == name and (found.parsed or {}).keys() == given.keys()
