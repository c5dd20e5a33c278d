"""ToolFormat: the notation in which a family of models calls tools, found from its chat template.

A row of FORMATS has the reader of such text, and the notation as data, from which grammar() makes the grammar that
holds a model to its calls (tool_choice="required").
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

from llamabatch.chat import tool_parsers
from llamabatch.chat.tool_parsers import STRING, Reader, Schemas, types_of
from llamabatch.errors import SamplingError
from llamabatch.request.json_schema import held
from llamabatch.request.structured_outputs import TOOLS
from llamabatch.request.tool_calls import ToolCall
from llamabatch.utils.checks import integer, show

T = TypeVar("T")


class Raw(NamedTuple):
    """A regular expression within a notation, and a text that it matches."""

    regex: str
    sample: str


Part = str | Raw


@dataclass(frozen=True)
class JsonNotation:
    """Calls that hold their arguments as JSON.

    Attributes:
        head, middle, tail: around the name and the arguments of a call.
        before, between, after: around all calls, and between two; None: an answer has one call at most.
        only_if_several: `before` and `after` stand around several calls only.
        quoted: the name is a JSON string.
    """

    head: str
    middle: tuple[Part, ...]
    tail: str = ""
    before: str = ""
    between: str | None = ""
    after: str = ""
    only_if_several: bool = False
    quoted: bool = False


@dataclass(frozen=True)
class TaggedNotation:
    """Calls that hold each argument between tags.

    Attributes:
        head, middle, tail: before the name, behind it, and behind the arguments.
        key, value, end: before the name of an argument, before its value, and behind that.
        between: between two calls.
    """

    head: str
    middle: str
    tail: str
    key: str
    value: str
    end: str
    between: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """The notation of a family.

    Attributes:
        name: of the family.
        signs: texts that all stand in its chat templates.
        reader: of text in it.
        notation: the form that grammar() makes; variants of it are read as well.
        marks: texts of the notation that may be special tokens of a vocabulary.
        ends_thinking: marks of calls that also end a thinking which nothing has closed.
        thought: text that may stand before the calls: the beginning and the end of a thinking part, where the grammar
            itself has to allow it.
        id_letters: letters and digits of the ids that are made for calls; 0: as OpenAI's, "call_" and 24 of them.
    """

    name: str
    signs: tuple[str, ...]
    reader: Reader
    notation: JsonNotation | TaggedNotation
    marks: tuple[str, ...] = ()
    ends_thinking: tuple[str, ...] = ()
    thought: tuple[str, str] | None = None
    id_letters: int = 0

    @classmethod
    def of(cls, template: str | None) -> ToolFormat:
        """The format of a model with this chat template; GENERIC for one that is not known."""
        for each in FORMATS:
            if template is not None and all(sign in template for sign in each.signs):
                return each
        return GENERIC


_OBJECT = '{"name": "', ('", "arguments": ',), "}"
_QWEN = TaggedNotation(
    *("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    *("<parameter=", ">\n", "\n</parameter>\n", "\n"),
)
_SEED = TaggedNotation(
    *("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
    *("<parameter=", ">", "</parameter>\n", "\n"),
)
_GLM = TaggedNotation(
    "<tool_call>", "\n", "</tool_call>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "\n"
)
_GLM_4_7 = TaggedNotation("<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key><arg_value>", "</arg_value>")
_TAGS = ("<tool_call>", "</tool_call>")
_DEEPSEEK = tuple(f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
_KIMI = tuple(
    f"<|tool_{each}|>"
    for each in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

# The first row with all signs in the template holds.
FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        "gpt-oss",
        ("<|channel|>commentary", "functions."),
        tool_parsers.harmony,
        JsonNotation("<|channel|>commentary to=functions.", (" <|constrain|>json<|message|>",), between=None),
        _HARMONY,
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    ToolFormat(
        "kimi-k2",
        (_KIMI[0],),
        tool_parsers.kimi,
        JsonNotation(
            *(f"{_KIMI[1]}functions.", (":", Raw("[0-9]{1,3}", "0"), _KIMI[2]), _KIMI[3]),
            before=_KIMI[0],
            after=_KIMI[4],
        ),
        _KIMI,
        ends_thinking=_KIMI[:2],
    ),
    ToolFormat(
        "deepseek-v3",
        (_DEEPSEEK[0], "```json"),
        tool_parsers.deepseek,
        JsonNotation(
            *(f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}", ("\n```json\n",), f"\n```{_DEEPSEEK[3]}"),
            before=_DEEPSEEK[0],
            between="\n",
            after=_DEEPSEEK[4],
        ),
        _DEEPSEEK,
    ),
    ToolFormat(
        "deepseek-v3.1",
        (_DEEPSEEK[0],),
        tool_parsers.deepseek,
        JsonNotation(_DEEPSEEK[1], (_DEEPSEEK[2],), _DEEPSEEK[3], before=_DEEPSEEK[0], after=_DEEPSEEK[4]),
        _DEEPSEEK,
    ),
    ToolFormat("glm-4.7", ("<arg_key>", "</arg_key><arg_value>"), tool_parsers.glm, _GLM_4_7, _TAGS),
    ToolFormat("glm-4.5", ("<arg_key>", "<arg_value>"), tool_parsers.glm, _GLM, _TAGS),
    ToolFormat(
        "seed-oss",
        ("<seed:tool_call>", "<parameter="),
        tool_parsers.seed_oss,
        _SEED,
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    ToolFormat("qwen3-coder", ("<function=", "<parameter="), tool_parsers.qwen3_coder, _QWEN, _TAGS),
    ToolFormat(
        "mistral-v11",
        ("[TOOL_CALLS]", "[CALL_ID]"),
        tool_parsers.mistral,
        JsonNotation("[TOOL_CALLS]", ("[CALL_ID]", Raw("[a-zA-Z0-9]{9}", "000000000"), "[ARGS]")),
        _MISTRAL,
        id_letters=9,
    ),
    ToolFormat(
        "mistral-v13",
        ("[TOOL_CALLS]", "[ARGS]"),
        tool_parsers.mistral,
        JsonNotation("[TOOL_CALLS]", ("[ARGS]",)),
        _MISTRAL,
        id_letters=9,
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        tool_parsers.mistral,
        JsonNotation(*_OBJECT, before="[TOOL_CALLS][", between=", ", after="]", quoted=True),
        _MISTRAL,
        id_letters=9,
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>", "arguments", '"name'),
        tool_parsers.hermes,
        JsonNotation(*('<tool_call>\n{"name": "', ('", "arguments": ',), "}\n</tool_call>"), between="\n", quoted=True),
        _TAGS,
    ),
    ToolFormat(
        "llama-3",
        ("<|start_header_id|>", '{"name": ', '"parameters": '),
        tool_parsers.bare_json,
        JsonNotation('{"name": "', ('", "parameters": ',), "}", between="; ", quoted=True),
        ("<|python_tag|>",),
    ),
)

_BARE = JsonNotation(*_OBJECT, before="[", between=", ", after="]", only_if_several=True, quoted=True)
# Templates without tools, and those with a notation that is not known here.
GENERIC = ToolFormat("generic", (), tool_parsers.bare_json, _BARE)


def written(tool_format: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls, each a name and arguments, as text in the notation of the family."""
    notation = tool_format.notation
    if isinstance(notation, TaggedNotation):
        return notation.between.join(_written_tags(notation, name, arguments) for name, arguments in calls)
    before, after = (notation.before, notation.after) if not notation.only_if_several or len(calls) > 1 else ("", "")
    middle = "".join(part.sample if isinstance(part, Raw) else part for part in notation.middle)
    parts = (
        f"{notation.head}{json.dumps(name, ensure_ascii=False)[1:-1] if notation.quoted else name}"
        f"{middle}{json.dumps(arguments, ensure_ascii=False)}{notation.tail}"
        for name, arguments in calls
    )
    return before + (notation.between or "").join(parts) + after


def _written_tags(notation: TaggedNotation, name: str, arguments: Mapping[str, Any]) -> str:
    values = (notation.key + key + notation.value + _as_text(value) + notation.end for key, value in arguments.items())
    return notation.head + name + notation.middle + "".join(values) + notation.tail


def example(tool_format: ToolFormat) -> str:
    """The form of a call, for a model that has to be told."""
    return written(tool_format, [("<function>", {"<parameter>": "<value>"})])


_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def call_id(tool_format: ToolFormat, seed: int, prompt_token_ids: Sequence[int], continuation: int, index: int) -> str:
    """The id of a call, made of what decides its text, so that a retry or a resumed job gives the same.

    Args:
        seed: of the request.
        continuation: number of the continuation among those of the prompt.
        index: number of the call in it.
    """
    digest = hashlib.blake2b(struct.pack("<QII", seed & (2**64 - 1), continuation, index), digest_size=24)
    digest.update(b"".join(struct.pack("<I", token_id) for token_id in prompt_token_ids))
    number = int.from_bytes(digest.digest(), "little")
    letters = []
    for _ in range(tool_format.id_letters or 24):
        number, digit = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[digit])
    return ("" if tool_format.id_letters else "call_") + "".join(letters)


Spell = Callable[[str], str]  # a mark -> its form in Lark: a text in quotes, or the name of a special token

LARK = "x-lark"
"""Of the schema of an argument that is a string: a grammar in Lark's notation, which it follows where a notation holds
strings as they are. As JSON they have escapes, which no grammar of the text has."""

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_GUIDANCE = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})", "json_allowed_escapes": 'nrbtf\\"'}


def grammar(tool_format: ToolFormat, tools: Schemas, spell: Spell, *, parallel: bool) -> str:
    """A grammar in Lark's notation: one call of one of the tools, or several, in the notation of the family.

    Args:
        tools: those that may be called.
        spell: of a mark of the family.
        parallel: any number of calls from one on.

    Raises:
        SamplingError: the notation cannot hold a name or a choice of the tools, or a bound is no whole number.
    """
    _check_readable(tool_format, tools)
    return _grammar(tool_format, tools, spell, parallel)


def _grammar(tool_format: ToolFormat, tools: Schemas, spell: Spell, parallel: bool) -> str:
    lark = _Lark(tool_format.marks, spell)
    notation = tool_format.notation
    json_calls = isinstance(notation, JsonNotation)
    calls = []
    for n, (name, schema) in enumerate(tools.items()):
        schema = _closed(schema)
        if isinstance(notation, JsonNotation):
            written = json.dumps(name, ensure_ascii=False)[1:-1] if notation.quoted else name
            arguments = lark.rule(
                f"arguments{n}", f"%json {json.dumps({**held(schema, TOOLS), 'x-guidance': _GUIDANCE})}"
            )
            parts = lark.text(notation.head + written, *notation.middle), arguments, lark.text(notation.tail)
            calls.append(lark.rule(f"call{n}", " ".join(filter(None, parts))))
        else:
            calls.append(lark.rule(f"call{n}", _tagged(lark, notation, n, name, schema)))
    call = lark.rule("call", " | ".join(calls))
    several = call
    if parallel and notation.between is not None:
        several = f"{call} ({lark.text(notation.between)} {call})*"
    if json_calls:
        assert isinstance(notation, JsonNotation)
        around = f"{lark.text(notation.before)} {several} {lark.text(notation.after)}"
        if notation.only_if_several:
            several = f"{call} | {around}" if parallel else call
        else:
            several = around
    if tool_format.thought is not None:
        several = f"thought? ({several})"
        begin, end = tool_format.thought
        lark.rule("thought", f"{lark.text(begin)} {lark.up_to(end)}")
    return f"start: {several}\n" + "".join(lark.rules)


def lazy_grammar(tool_format: ToolFormat, tools: Schemas, spell: Spell, *, parallel: bool) -> str | None:
    """A grammar of free text in which calls are held to their form; None: calls of the family begin with no mark.

    Args:
        as for grammar().

    Raises:
        SamplingError: as grammar().
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
    _check_readable(tool_format, tools)
    inner = _grammar(replace(tool_format, notation=behind), tools, spell, several)
    first = spell(mark)
    free = f"free[lazy]: TEXT {first}" if first == quoted_mark(mark) else f"free: TEXT {first}"
    calls = f"(free calls){'*' if parallel else '?'}"
    return f"start: {calls} TEXT\n{free}\nTEXT: /(?s:.*)/\n" + inner.replace("start:", "calls:", 1)


def _check_readable(tool_format: ToolFormat, tools: Schemas) -> None:
    """Raises SamplingError for a name or a choice that the reader of the family does not find in a call."""
    advice = f"which the calls of {tool_format.name} cannot hold"
    names = "give letters, digits, _ and -"
    for name, schema in tools.items():
        if not _reads(tool_format, tools, name, {}):
            raise SamplingError(f"a function has the name {show(name)}, {advice}; {names}, 64 of them at most")
        if isinstance(tool_format.notation, JsonNotation):
            continue  # the rest is JSON
        properties = schema.get("properties")
        for key, value in properties.items() if isinstance(properties, Mapping) else ():
            if not _reads(tool_format, tools, name, {key: "x"}):
                raise SamplingError(f"an argument of {show(name)} has the name {show(key)}, {advice}; {names}")
            for choice in _choices(value) or ():
                if isinstance(choice, str) and not _reads(tool_format, tools, name, {key: choice}):
                    what = f"argument {show(key)} of {show(name)} may be {show(choice)}"
                    raise SamplingError(f"{what}, {advice}; leave it out")


def _reads(tool_format: ToolFormat, tools: Schemas, name: str, arguments: Mapping[str, str]) -> bool:
    parser = tool_parsers.ToolParser(tool_format.reader, tools, lambda index, name: "")
    delta = parser.finish(written(tool_format, [(name, arguments)]))
    if delta.text or len(delta.tool_calls) != 1:
        return False
    found = ToolCall("", delta.tool_calls[0].name or "", delta.tool_calls[0].arguments)
    values = found.parsed or {}
    changed = any(
        isinstance(value, str) and value != arguments[key] for key, value in values.items() if key in arguments
    )
    return found.name == name and values.keys() == arguments.keys() and not changed


def _choices(value: object) -> Sequence[object] | None:
    """The values that a schema of an argument lists; None: it lists none."""
    given = value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, Mapping) else None
    return given if isinstance(given, (list, tuple)) else None


def _as_text(value: object) -> str:
    """A value as the notations with tags write it."""
    return value if isinstance(value, str) else json.dumps(value)


def _tagged(lark: _Lark, notation: TaggedNotation, n: int, name: str, schema: Mapping[str, Any]) -> str:
    parts = [lark.text(notation.head + name + notation.middle)]
    required = schema.get("required") or ()
    properties = schema.get("properties")
    for k, (key, value) in enumerate((properties or {}).items()):
        made = lark.text(notation.key + key + notation.value) + " " + _tagged_value(lark, notation, n, k, value, schema)
        parts.append(made if key in required else f"({made})?")
    if properties is None and schema.get("additionalProperties") is not False:
        any_value = lark.lazy(f"any{n}", "(?s:.*)", notation.end)
        name_of = Raw(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,63}", "x")
        parts.append(f"({lark.text(notation.key, name_of, notation.value)} {any_value})*")
    parts.append(lark.text(notation.tail))
    return " ".join(parts)


def _tagged_value(lark: _Lark, notation: TaggedNotation, n: int, k: int, value: Any, schema: Mapping[str, Any]) -> str:
    """A value with the text behind it: JSON by its schema; a string as it is, up to the text behind it."""
    rule = f"value{n}_{k}"
    types = types_of(value, schema)
    if types is not None and "string" not in types:
        inner = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        made = {**value, **inner, "x-guidance": _GUIDANCE}
        return lark.rule(rule, f"%json {json.dumps(held(made, TOOLS))}") + " " + lark.text(notation.end)
    if isinstance(value, Mapping) and isinstance(value.get(LARK), str):
        return lark.rule(rule, f"%lark {{\n{value[LARK]}\n}}") + " " + lark.text(notation.end)
    choices = _choices(value)
    if choices is not None:
        return "(" + " | ".join(lark.text(_as_text(each)) for each in choices) + ") " + lark.text(notation.end)
    least, most = 0, cast("int | str", "")
    if types == STRING and isinstance(value, Mapping):
        least, most = _bound(value, "minLength", 0), _bound(value, "maxLength", "")
    return lark.lazy(rule, f"(?s:.{{{least},{most}}})", notation.end)


def _bound(schema: Mapping[str, Any], key: str, default: T) -> int | T:
    given = schema.get(key)
    return default if given is None else integer(SamplingError, key, given, 0, 2**31 - 1)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that has no other arguments than it names, unless it says so."""
    if not schema:
        return _NO_ARGUMENTS
    made = {**schema, "type": "object"}  # of several types this one
    properties, required = made.get("properties"), made.get("required")
    if not isinstance(properties, Mapping):
        return made
    if isinstance(required, (list, tuple)) and made.get("additionalProperties") is not False:
        made["properties"] = {**properties, **{key: {} for key in required if key not in properties}}
    return {"additionalProperties": False, **made}


class _Lark:
    """Rules of a grammar."""

    def __init__(self, marks: tuple[str, ...], spell: Spell) -> None:
        self.rules: list[str] = []
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        self._spell = spell

    def rule(self, name: str, right: str) -> str:
        self.rules.append(f"{name}: {right}\n")
        return name

    def lazy(self, name: str, regex: str, end: str) -> str:
        """A text up to the first `end`, with that."""
        self.rules.append(f"{name}[lazy]: /{regex}{_escaped(end)}/\n")
        return name

    def up_to(self, end: str) -> str:
        """Any text up to the first `end`, with that; `end` begins with a mark."""
        mark = self._marks.match(end)
        assert mark is not None
        if self._spell(mark[0]) == quoted_mark(mark[0]):
            return self.lazy("any", "(?s:.*)", end)
        return f"/(?s:.*)/ {self.text(end)}"  # no text has a special token in it

    def text(self, *parts: Part) -> str:
        """Literal text, in which marks may be special tokens."""
        made: list[str] = []
        for part in parts:
            if isinstance(part, Raw):
                made.append(f"/{part.regex}/")
                continue
            at = 0
            for found in self._marks.finditer(part):
                made += [_quoted(part[at : found.start()]), self._spell(found[0])]
                at = found.end()
            made.append(_quoted(part[at:]))
        return " ".join(filter(None, made))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def _escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n").replace("\\ ", " ").replace("\\<", "<")


def quoted_mark(mark: str) -> str:
    """The form in Lark of a mark that is no special token."""
    return _quoted(mark)
