"""Finds tool calls in generated text, with one reader for each family of models.

A reader reads the text once (scanner.py). The reader reports three things to ToolParser: text, the beginning of a call,
and pieces of the arguments of a call. A call begins when the reader has read the name of a given tool and the arguments
begin. Before this point, a part that does not fit becomes text, together with its markers. After this point, the call
remains a call: arguments that are not JSON, or are cut off, are emitted as the model wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence

from llamabatch.chat.scanner import JsonScan, Reading, Scanner
from llamabatch.chat.tool_schemas import STRING, TYPES, Schemas, TypesOf, of_argument, types_of_value
from llamabatch.request.delta import Delta
from llamabatch.request.tool_calls import ToolCallDelta

Reader = Callable[["ToolParser"], Generator[None, None, None]]

_MOST_HEADER = 512  # maximum number of characters in the part of a call that contains the name
_NEVER = ("\0\0",)  # a marker that no model writes
_NO, _WHOLE, _BROKEN = range(3)  # results of a reader: no call; a whole call; a call with invalid or cut-off arguments


class ToolParser:
    """A parser that finds tool calls in text that comes piece by piece.

    Args:
        reader: the reader of the model's family.
        tools: the schemas of the parameters, by the name of the tool.
        make_id: (index, name) -> id of a call.
        parallel: False: calls after the first one are dropped.
    """

    def __init__(
        self, reader: Reader, tools: Schemas, make_id: Callable[[int, str], str], *, parallel: bool = True
    ) -> None:
        self.tools = tools
        self.scanner = Scanner()
        self._make_id = make_id
        self._parallel = parallel
        self._n_calls = 0
        self._n_text = 0  # number of characters of text so far
        # Whitespace that is held back: other text emits this whitespace, a call drops it. None: text came after the
        # last call.
        self._spaces: str | None = ""
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._reading = reader(self)

    def feed(self, text: str) -> Delta:
        """Appends text. Returns the parts that are certain now."""
        self.scanner.push(text)
        return self._go_on()

    def finish(self, text: str = "") -> Delta:
        """Appends the last piece of text. Returns all parts that were held back."""
        self.scanner.push(text)
        self.scanner.ended = True
        delta = self._go_on()
        rest = self._spaces if self._spaces and not self._n_calls else ""
        self._spaces = None
        return Delta(text=delta.text + rest, tool_calls=delta.tool_calls)

    def _go_on(self) -> Delta:
        next(self._reading, None)
        delta = Delta(text="".join(self._text), tool_calls=tuple(self._deltas))
        self._text.clear()
        self._deltas.clear()
        return delta

    def text(self, text: str) -> None:
        """Adds text outside of calls. Readers call this method. Text next to a call is dropped if it is only
        whitespace."""
        if self._spaces is None:
            self._add(text)
        elif text and not text.isspace():
            self._add(self._spaces + text)
            self._spaces = None
        else:
            self._spaces += text

    def _add(self, text: str) -> None:
        self._text.append(text)
        self._n_text += len(text)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begins a call. Readers call this method."""
        self.scanner.unmark()
        self._spaces = ""
        index, self._n_calls = self._n_calls, self._n_calls + 1
        if self._counts:
            call_id = call_id or self._make_id(index, name)
            self._deltas.append(ToolCallDelta(index, call_id, name, text_offset=self._n_text))

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the last call. Readers call this method."""
        if not text or not self._counts:
            return
        last = self._deltas[-1] if self._deltas else None
        index = self._n_calls - 1
        if last is not None and last.index == index:
            self._deltas[-1] = ToolCallDelta(index, last.id, last.name, last.arguments + text, last.text_offset)
        else:
            self._deltas.append(ToolCallDelta(index, arguments=text))

    def not_a_call(self, marker: str) -> None:
        """Emits the marker at the scanner's mark as text, and continues after the marker. Readers call this method."""
        self.scanner.back(len(marker))
        self.text(marker)

    @property
    def _counts(self) -> bool:
        return self._parallel or self._n_calls <= 1


def hermes(p: ToolParser) -> Reading[None]:
    """Reads <tool_call>{"name": …, "arguments": {…}}</tool_call>, also with several objects or a list of objects."""
    s, begin, end = p.scanner, "<tool_call>", "</tool_call>"
    while marker := (yield from s.until((begin,), p.text)):
        s.mark(len(marker))
        yield from s.spaces()
        found = yield from (_json_list(p, end) if (yield from s.accept("[")) else _json_objects(p, (end,)))
        if found == _NO:
            p.not_a_call(marker)
        elif found == _WHOLE:
            yield from s.spaces()
            yield from s.accept(end)


def bare_json(p: ToolParser) -> Reading[None]:
    """Reads {"name": …, "parameters": {…}} after <|python_tag|>. At the beginning of the text, a call or a list of
    calls may come without this tag."""
    s, tag = p.scanner, "<|python_tag|>"
    marker = ""
    s.mark(0)
    while True:
        skipped = marker + (yield from s.spaces())
        opening = yield from s.accept("{", *([] if marker else ["["]))
        found = _NO
        if opening:
            s.at -= opening == "{"
            found = yield from (_json_list(p) if opening == "[" else _json_objects(p))
        if found == _NO:
            p.not_a_call(skipped)
        if not (marker := (yield from s.until((tag,), p.text))):
            return
        s.mark(len(marker))


def mistral(p: ToolParser) -> Reading[None]:
    """Reads [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[CALL_ID]id[ARGS]{…} for each call."""
    s, begin = p.scanner, "[TOOL_CALLS]"
    while marker := (yield from s.until((begin,), p.text)):
        s.mark(len(marker))
        yield from s.spaces()
        if (yield from s.accept("[")):
            found = yield from _json_list(p)
        else:
            found = yield from _mistral_call(p)
        if found == _NO:
            p.not_a_call(marker)


def _json_list(p: ToolParser, *ends: str) -> Reading[int]:
    """Reads the calls of a list. The opening bracket has been read already."""
    found = yield from _json_objects(p, ends, ",")
    if found == _WHOLE:
        yield from p.scanner.spaces()
        yield from p.scanner.accept("]")
    return found


def _json_objects(p: ToolParser, ends: tuple[str, ...] = (), *separators: str) -> Reading[int]:
    """Reads calls one after another. Returns the result of the last call, or _NO if the first object is not a call.

    Args:
        ends: markers that end the arguments if these are not JSON.
        separators: texts between two calls; if none is given, whitespace or a semicolon separates calls.
    """
    s = p.scanner
    yield from s.spaces()
    found = yield from _json_call(p, ends)
    while found == _WHOLE:
        yield from s.spaces()
        if separators and not (yield from s.accept(*separators)):
            return _WHOLE
        s.mark(0)
        yield from s.accept(";")
        yield from s.spaces()
        if (yield from s.peek()) != "{" or (found := (yield from _json_call(p, ends))) == _NO:
            s.back(0)
            return _WHOLE
    return found


def _mistral_call(p: ToolParser) -> Reading[int]:
    s = p.scanner
    name, marker = yield from s.text_until(("[CALL_ID]", "[ARGS]", "{"), _MOST_HEADER)
    name, call_id = name.strip(), None
    if name not in p.tools:
        return _NO
    if marker == "[CALL_ID]":
        call_id, marker = yield from s.text_until(("[ARGS]",), _MOST_HEADER)
    if marker == "{":
        s.at -= 1
    yield from s.spaces()
    return (yield from _arguments(p, name, (), call_id and call_id.strip()))


def deepseek(p: ToolParser) -> Reading[None]:
    """Reads <｜tool▁calls▁begin｜>, then for each call <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>.

    V3 and R1 write `function` in place of the name. They write the name after the separator, and then a Markdown block
    with the arguments.
    """
    marks = (f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "call▁end", "calls▁end"))
    return _sections(p, _deepseek_call, *marks)


def _deepseek_call(p: ToolParser, end: str) -> Reading[int]:
    s = p.scanner
    name, marker = yield from s.text_until(("<｜tool▁sep｜>",), _MOST_HEADER)
    if not marker:
        return _NO
    if name == "function" and name not in p.tools:
        name, marker = yield from s.text_until(("```json", "{"), _MOST_HEADER)
        s.at -= marker == "{"
    yield from s.spaces()
    found = yield from _arguments(p, name.strip(), (end,))
    if found == _WHOLE:
        yield from s.spaces()
        yield from s.accept("```")
    return found


def kimi(p: ToolParser) -> Reading[None]:
    """Reads <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|> in a section."""
    marks = (f"<|tool_{each}|>" for each in ("calls_section_begin", "call_begin", "call_end", "calls_section_end"))
    return _sections(p, _kimi_call, *marks)


def _kimi_call(p: ToolParser, end: str) -> Reading[int]:
    header, _ = yield from p.scanner.text_until(("<|tool_call_argument_begin|>",), _MOST_HEADER)
    call_id = header.strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0]
    yield from p.scanner.spaces()
    return (yield from _arguments(p, name, (end,), call_id))


def _sections(
    p: ToolParser, read: Callable[[ToolParser, str], Reading[int]], section: str, begin: str, end: str, last: str
) -> Reading[None]:
    """Reads sections of calls: the marker `section`, then `begin`, a call and `end` for each call, then `last`.

    Args:
        read: (parser, `end`) -> result; reads a call up to the marker `end`.
    """
    s = p.scanner
    while marker := (yield from s.until((section, begin), p.text)):
        s.mark(len(marker))
        if marker == section:
            yield from s.spaces()
            yield from s.accept(begin)
        found = yield from read(p, end)
        if found == _NO:
            p.not_a_call(marker)
            continue
        if found == _WHOLE:
            yield from s.spaces()
            yield from s.accept(end)
        yield from s.spaces()
        yield from s.accept(last)


def qwen3_coder(p: ToolParser) -> Reading[None]:
    """Reads <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, with line breaks."""
    return _function_tags(p, "<tool_call>", "</tool_call>", "\n")


def seed_oss(p: ToolParser) -> Reading[None]:
    """Reads calls as qwen3_coder does, but with other tags and without line breaks around values."""
    return _function_tags(p, "<seed:tool_call>", "</seed:tool_call>", "")


def _function_tags(p: ToolParser, begin: str, end: str, around: str) -> Reading[None]:
    """Reads <function=name><parameter=key>value</parameter></function>, between the tags `begin` and `end`.

    Args:
        around: text before and after a value, which is not part of the value.
    """
    s = p.scanner
    closing = (f"{around}</parameter>", "</parameter>") if around else ("</parameter>",)
    while marker := (yield from s.until((begin, "<function="), p.text)):
        s.mark(len(marker))
        if marker == begin:
            yield from s.spaces()
            if not (yield from s.accept("<function=")):
                p.not_a_call(marker)
                continue
        name, _ = yield from s.text_until((">",), _MOST_HEADER)
        if name not in p.tools:
            p.not_a_call(marker)
            continue
        arguments = _Arguments(p, name)
        while tag := (yield from s.until(("<parameter=", "</function>", end), arguments.between)):
            if tag != "<parameter=":
                arguments.end()
                if tag != end:
                    yield from s.spaces()
                    yield from s.accept(end)
                break
            key, marker = yield from s.text_until((">",), _MOST_HEADER)
            if not marker:
                break
            if around:
                yield from s.accept(around)
            yield from arguments.value(key, *closing)


def glm(p: ToolParser) -> Reading[None]:
    """Reads <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, with line breaks."""
    s, begin, end = p.scanner, "<tool_call>", "</tool_call>"
    while marker := (yield from s.until((begin,), p.text)):
        s.mark(len(marker))
        yield from s.spaces()
        name, tag = yield from s.text_until(("\n", "<arg_key>", end), _MOST_HEADER)
        if name.strip() not in p.tools:
            p.not_a_call(marker)
            continue
        arguments = _Arguments(p, name.strip())
        while tag and tag != end:
            if tag == "\n" or tag == "<arg_value>":
                tag = yield from s.until(("<arg_key>", end), arguments.between)
                continue
            key, _ = yield from s.text_until(("</arg_key>",), _MOST_HEADER)
            tag = yield from s.until(("<arg_value>", end), arguments.between)
            if tag == "<arg_value>":
                yield from arguments.value(key.strip(), "</arg_value>")
        if tag:
            arguments.end()


_HARMONY_ENDS = ("<|call|>", "<|end|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def harmony(p: ToolParser) -> Reading[None]:
    """Reads <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>.

    The recipient may be anywhere before <|message|>. OutputParser removes the marks of other messages.
    """
    s = p.scanner
    while marker := (yield from s.until(("<|start|>", "<|channel|>", " to=functions."), p.text)):
        s.mark(len(marker))
        header, _ = yield from s.text_until(("<|message|>",), _MOST_HEADER)
        recipient = _RECIPIENT.search(marker + header)
        yield from s.spaces()
        found = (yield from _arguments(p, recipient[1], _HARMONY_ENDS)) if recipient else _NO
        if found == _NO:
            p.not_a_call(marker)
        elif found == _WHOLE:
            yield from s.spaces()
            yield from s.accept(*_HARMONY_ENDS[:3])


_NESTED = {"[": "array", "{": "object"}


class _Arguments:
    """The arguments of a call that writes each value between tags. The arguments are emitted as JSON."""

    def __init__(self, p: ToolParser, name: str) -> None:
        self._p = p
        self._schema = p.tools[name]
        self._types_of = TypesOf(self._schema)
        self._n = 0
        p.begin(name)
        p.arguments("{")

    def between(self, text: str) -> None:
        """Emits text between tags as ordinary text, unless it is whitespace."""
        if not text.isspace():
            self._p.text(text)

    def value(self, key: str, *closing: str) -> Reading[None]:
        """Reads one value up to its closing tag, and emits the value as JSON of an allowed type."""
        p = self._p
        p.arguments((", " if self._n else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._n += 1
        found = self._types_of(of_argument(self._schema, key))
        types = None if found == TYPES else found
        if types == STRING:
            p.arguments('"')
            if (yield from p.scanner.until(closing, lambda text: p.arguments(_escaped(text)))):
                p.arguments('"')
            return
        brackets = [bracket for bracket, kind in _NESTED.items() if types is None or kind in types]
        if brackets:
            nested = yield from self._nested(brackets, closing[-1])
            if nested is not None:
                p.arguments(nested)
                return
        parts: list[str] = []
        if (yield from p.scanner.until(closing, parts.append)):
            p.arguments(to_json("".join(parts), types))
        else:
            p.arguments("".join(parts))

    def _nested(self, brackets: Sequence[str], closing: str) -> Reading[str | None]:
        """Reads a list or an object, and the closing tag. Returns None if something else comes. Strings may contain the
        tag."""
        s = self._p.scanner
        s.mark(0)
        yield from s.spaces()
        value = (yield from _value(s)) if (yield from s.peek()) in brackets else None
        if value is not None:
            yield from s.spaces()
            if (yield from s.accept(closing)):
                s.unmark()
                return value
        s.back(0)
        return None

    def end(self) -> None:
        self._p.arguments("}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def to_json(text: str, types: frozenset[str] | None) -> str:
    """Returns a value between tags as JSON.

    A text that is not JSON becomes a string. A value whose type is not in `types` also becomes a string, if "string" is
    in `types`.

    Args:
        types: type names of JSON schema; None: any type.
    """
    stripped = text.strip()
    candidate = stripped
    if types is not None and "string" not in types:
        lower = stripped.lower()  # models may write True, False and None, as Python does
        if ("boolean" in types and lower in ("true", "false")) or ("null" in types and lower in ("none", "null")):
            candidate = "null" if lower == "none" else lower
    try:
        value = json.loads(candidate, parse_constant=_refuse, parse_int=_whole)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types is not None and not (types_of_value(value) & types) and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    return candidate


def _whole(digits: str) -> int:
    """Returns 0 for any whole number. Only the type matters here, and int() refuses more than 4,300 digits."""
    return 0


def _refuse(constant: str) -> None:
    raise ValueError(constant)


_NAME_KEYS, _ARGUMENTS_KEYS, _OTHER_KEYS = ("name",), ("arguments", "parameters"), ("id", "type", "call_id")


def _json_call(p: ToolParser, ends: tuple[str, ...]) -> Reading[int]:
    """Reads a call: one object with a name and arguments, in any order.

    Args:
        ends: markers that end the arguments if these are not JSON.
    """
    s = p.scanner
    if not (yield from s.accept("{")):
        return _NO
    name, held, begun = None, None, False
    while True:
        yield from s.spaces()
        key = yield from _string(s)
        yield from s.spaces()
        if key not in (*_NAME_KEYS, *_ARGUMENTS_KEYS, *_OTHER_KEYS) or not (yield from s.accept(":")):
            break
        yield from s.spaces()
        if key in _NAME_KEYS and name is None:
            name = yield from _string(s)
            if name not in p.tools:
                return _NO
        elif key in _ARGUMENTS_KEYS and name is not None and held is None and not begun:
            found = yield from _arguments(p, name, ends)
            if found != _WHOLE:
                return found
            begun = True
        else:
            value = yield from _value(s)
            if value is None:
                break
            held = value if key in _ARGUMENTS_KEYS and not begun and held is None else held
        yield from s.spaces()
        separator = yield from s.accept(",", "}")
        if separator == "}" and name is not None and not begun:
            text = "{}" if held is None else _object(held)
            if text is None:
                return _NO
            p.begin(name)
            p.arguments(text)
            begun = True
        if separator != ",":
            break
    return _WHOLE if begun else _NO


def _arguments(p: ToolParser, name: str, ends: tuple[str, ...], call_id: str | None = None) -> Reading[int]:
    """Begins a call and emits its arguments as they come: an object, an object within a string, or null."""
    s = p.scanner
    if name not in p.tools:
        return _NO
    if (yield from s.peek()) != "{":
        value = yield from _value(s)
        text = None if value is None else _object(value)
        if text is None:
            return _NO
        p.begin(name, call_id)
        p.arguments(text)
        return _WHOLE
    p.begin(name, call_id)
    scan = JsonScan()
    while True:
        s.at, text = scan.read(s.buffer, s.at)
        p.arguments(text)
        if scan.done:
            return _WHOLE
        if scan.bad:
            yield from s.until(ends or _NEVER, p.arguments)
            return _BROKEN
        if not (yield from s.more()):
            return _BROKEN


_SURROGATES = re.compile("[\ud800-\udfff]")


def _object(value: str) -> str | None:
    """Returns the JSON text of an object; "{}" for null; None for other values. A string may contain the object or
    null."""
    value = value.strip()
    if value.startswith('"'):
        value = _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", json.loads(value)).strip()
    if value == "null":
        return "{}"
    scan = JsonScan()  # json.loads refuses numbers of many digits
    end, text = scan.read(value, 0)
    return text if value.startswith("{") and scan.done and end == len(value) else None


def _string(s: Scanner) -> Reading[str | None]:
    """Reads a JSON string and decodes it; None: no string comes."""
    if (yield from s.peek()) != '"':
        return None
    value = yield from _value(s)
    return None if value is None else str(json.loads(value))


def _value(s: Scanner) -> Reading[str | None]:
    """Reads one JSON value and returns its text, or None if the answer ends or breaks before the value is complete."""
    scan, parts = JsonScan(), []
    while True:
        s.at, text = scan.read(s.buffer, s.at)
        parts.append(text)
        if scan.done:
            return "".join(parts)
        if scan.bad or not (yield from s.more()):
            return None
