"""A program that tries grammars out. A crash or an endless grammar then ends only this process.

llguidance limits most costs of a grammar, but not all: a chain of some thousand `$ref`s overflows the stack, and
`multipleOf: 1234577` takes many seconds. This file runs as a script and imports nothing else of llamabatch, so it
starts in 0.1 s.

The first line of stdin is a JSON list with the names of the model's special tokens. Each further line is [kind, text,
seconds of CPU time that the grammar may take]. The answer on stdout is {"grammar": text}, or {"error": text, "line":
number of the faulty line of a Lark grammar, from 1 on, "property": the faulty property of its JSON schema}. Line 0 and
property "" mean unknown.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import is_lark_syntax

MOST_MEMORY = 512 * 2**20  # bytes of address space; Python and the libraries need about 100 MiB
STACK = 2 * 2**20  # bytes of stack; later threads that compile and use the grammar have more

HAS_ALARM = sys.platform != "win32"

MAX_LEXER_STATES = 25_000  # each state takes 0.3 to 2 kB
_SCHEMA = re.compile(r"%json\s*")
_ESCAPE = re.compile(r"\\(?:u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|.)", re.DOTALL)
_PLACE = re.compile(r"at (\d+)\(\d+\): ")
_TEXT_OF_TOOLS = re.compile(r"(TEXT\w+): ")  # chat/tagged_values.py writes such lines, for the texts of arguments
_LARGEST_EXACT = 2**53
_MOST_SHOWN = 300  # maximum number of characters in a message

# WHITESPACE, ESCAPES and _quoted must equal GUIDANCE and quoted() in request/lark_rules.py. This program cannot import
# them, because it starts without the rest of llamabatch.

# White space in JSON, as in llama.cpp (json-schema-to-grammar). Its length is limited, because a model may write space
# forever.
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"

# Characters that may follow a backslash. \uXXXX is normally not allowed, because the same property name could then come
# twice in different spellings. So a string cannot contain the control characters that need \uXXXX. Exception: schemas
# that contain such a character; see _with_escapes.
ESCAPES = 'nrbtf\\"'
# matches control characters that JSON can write only as \uXXXX, and their escapes in regular expressions
_ONLY_BY_NUMBER = re.compile(
    r"[\0-\x07\x0b\x0e-\x1f\x7f]|\\(?:[av]|(?:x|u00|U000000)(?:[01]|7[fF])|[xuU]\{0*(?:1?[0-9a-fA-F]|7[fF])\})"
)
_ALL_ESCAPES = ESCAPES + "u"  # llguidance's own default
_BY_ESCAPE = re.compile(r"[\0-\x1f\x7f]")


def limits() -> Any:
    """Returns the cost limits of one grammar. They are llguidance's defaults, except for the number of lexer states."""
    return llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def to_llguidance(kind: str, text: str) -> str:
    """Converts a Structure to llguidance's own form. Raises ValueError for a bad grammar."""
    matcher = llguidance.LLMatcher
    if kind == "json":
        schema = json.loads(text)
        _check_sound(schema)
        return matcher.grammar_from_json_schema(
            json.dumps(_with_escapes(schema, ESCAPES)),
            defaults={"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES},
        )
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    if kind == "choice":
        # one terminal for all words, because a rule for each word makes steps slow or exceeds the limit of rules
        words = " | ".join(_quoted(each) for each in json.loads(text))
        return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}\n")
    text = _with_sound_schemas(text)
    if not is_lark_syntax(text):
        text = _ESCAPE.sub(_plain, text)
    return llguidance.grammar_from("gbnf", text)  # returns Lark unchanged


def _with_sound_schemas(lark: str) -> str:
    """Returns the grammar with changed JSON schemas: each schema allows the escapes that are needed for its texts.

    Skips a schema that is not JSON, because llguidance refuses it with its own message.

    Raises ValueError as _check_sound and _with_escapes do.
    """
    decoder = json.JSONDecoder()
    pieces, at = [], 0
    for found in _SCHEMA.finditer(lark):
        try:
            schema, end = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue
        try:
            _check_sound(schema)
            able = _with_escapes(schema, _ALL_ESCAPES)
        except ValueError as error:
            raise ValueError(f"at {lark.count(chr(10), 0, found.start()) + 1}(1): {error}") from error
        if able is not schema and found.end() >= at:
            pieces += [lark[at : found.end()], json.dumps(able)]
            at = end
    return "".join([*pieces, lark[at:]])


def _quoted(text: str) -> str:
    """Returns a text as a string of Lark. This is a JSON string, but Lark's lexer accepts U+007F only as an escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(escape: re.Match[str]) -> str:
    """Returns an escape of GBNF in a form that llguidance's converter reads correctly. The converter drops the zeros
    of \\u0041."""
    code = int(escape["four"] or escape["eight"] or "0", 16)
    if not code or code > sys.maxunicode or 0xD800 <= code < 0xE000:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _check_sound(schema: Any) -> None:
    """Raises ValueError for a schema that llguidance would not enforce exactly.

    llguidance reads whole numbers as floats, so above 2**53 it would allow a neighbouring number. If optional names are
    needed for minProperties, llguidance counts a repeated name as two properties, but a JSON parser counts it as one.
    """
    for part, is_schema in _parts(schema):
        if isinstance(part, int) and abs(part) > _LARGEST_EXACT:
            raise ValueError(f"the number {part} is too large; whole numbers up to {_LARGEST_EXACT} are allowed")
        if isinstance(part, dict):
            least = part.get("minProperties")
            if is_schema and isinstance(least, int) and least > len(part.get("required") or ()) + 1:
                raise ValueError(f"minProperties is {least}; required must then name all but one")


def _with_escapes(schema: Any, default: str) -> Any:
    """Returns the schema. If its texts need the escape \\uXXXX, the returned schema allows this escape, because
    llguidance would drop these texts without it.

    Args:
        default: the allowed escapes if the schema names none.

    Raises:
        ValueError: the schema forbids one of ESCAPES, or \\uXXXX could write a name of the schema a second time.
    """
    if not isinstance(schema, dict) or not isinstance(guidance := schema.get("x-guidance", {}), dict):
        return schema
    escapes = guidance.get("json_allowed_escapes", default)
    if not isinstance(escapes, str):
        return schema
    if missing := set(ESCAPES) - set(escapes):
        raise ValueError(f"json_allowed_escapes lacks {''.join(sorted(missing))}; all of {ESCAPES} must be allowed")
    if "u" in escapes or not any(_ONLY_BY_NUMBER.search(text) for part, _ in _parts(schema) for text in _texts(part)):
        return schema
    for part, is_schema in _parts(schema):
        if is_schema and isinstance(part, dict) and isinstance(names := part.get("properties"), dict):
            is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
            for name in () if is_closed else filter(_BY_ESCAPE.search, names):
                raise ValueError(
                    f"it has the name {json.dumps(name)} and a text that only \\u can write, so that the name could "
                    "come twice; additionalProperties must be false"
                )
    return {**schema, "x-guidance": {**guidance, "json_allowed_escapes": escapes + "u"}}


def _texts(part: Any) -> Iterable[str]:
    """Returns the texts and patterns of a part of a schema. Leaves out names, because llguidance always escapes
    them."""
    if isinstance(part, str):
        return (part,)
    patterns = part.get("patternProperties") if isinstance(part, dict) else None
    return patterns if isinstance(patterns, dict) else ()


def _parts(schema: Any) -> Iterator[tuple[Any, bool]]:
    """Yields the values of a schema at any depth, except those of default and examples. Each value comes with a bool:
    False within const or enum, True elsewhere."""
    left = [(schema, True)]
    while left:
        part, is_schema = left.pop()
        yield part, is_schema
        if isinstance(part, dict):
            left += [
                (value, is_schema and key not in ("const", "enum"))
                for key, value in part.items()
                if key not in ("default", "examples")
            ]
        elif isinstance(part, list):
            left += [(each, is_schema) for each in part]


def reason(error: str) -> str:
    """Shortens an error message of llguidance to the part that is useful to the grammar's author."""
    lines = [line.strip() for line in error.strip().split("\n")]
    if lines[0].startswith("NoExtensionBias"):
        return "no text can match it"
    if "lookarounds not supported" in error:
        return "a pattern has ^, $ or \\b in its middle, which grammars do not support"
    for line in lines[1:]:
        if line.startswith("error: "):  # from the parser of regular expressions
            return line[:_MOST_SHOWN]
    lines[0], _, _ = lines[0].partition(". Enable 'coerce_one_of'")
    return lines[0] if len(lines[0]) <= _MOST_SHOWN else lines[0][:_MOST_SHOWN] + "…"


class Bytes:
    """A vocabulary of single bytes, a model's special tokens, and one token that ends a generation."""

    bos_token_id = None

    def __init__(self, names: list[str]) -> None:
        self.tokens = [*(bytes([i]) for i in range(256)), *(name.encode() for name in names), b"<end>"]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def check(tokenizer: Any, kind: str, text: str) -> dict[str, Any]:
    """Compiles a grammar and makes the mask of its first token. Returns the grammar in llguidance's form, or an
    error."""
    try:
        grammar = to_llguidance(kind, text)
    except (ValueError, RecursionError) as error:
        return _error(tokenizer, str(error), text)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if kind == "tools" and not matcher.is_error():
        if line := _line_without_text(tokenizer, text):
            return {"error": "no text can match it", "line": line, "property": ""}
        matcher.consume_tokens(matcher.compute_ff_tokens())  # every call begins with these tokens
        matcher.compute_bitmask()
    if matcher.is_error():
        return _error(tokenizer, matcher.get_error(), text)
    return {"grammar": grammar}


def _line_without_text(tokenizer: Any, lark: str) -> int:
    """Returns the line (from 1) of the first argument whose terminal matches no text; 0 if there is no such
    argument."""
    lines = lark.split("\n")
    for at, line in enumerate(lines):
        found = _TEXT_OF_TOOLS.match(line)
        if found is None or line.count(" & ") < 2:
            continue
        matcher = llguidance.LLMatcher(tokenizer, f"start: {found[1]}\n{line}\n", log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return at + 1
    return 0


def _error(tokenizer: Any, message: str, text: str) -> dict[str, Any]:
    place = _PLACE.match(message)
    line = int(place[1]) if place else 0
    return {"error": reason(message), "line": line, "property": _faulty_property(tokenizer, text, line) if line else ""}


def _faulty_property(tokenizer: Any, lark: str, line: int) -> str:
    """Tries each property of a line's JSON schema alone. Returns the name of the first refused property; "" if none is
    refused."""
    found = _SCHEMA.search(lark.split("\n")[line - 1])
    if found is None:
        return ""
    try:
        schema, _ = json.JSONDecoder().raw_decode(found.string, found.end())
    except (ValueError, RecursionError):
        return ""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or "#/properties/" in found.string:
        return ""
    rest = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    for name, part in properties.items():
        alone = {"type": "object", "properties": {name: part}, "required": [name], **rest}
        try:
            grammar = to_llguidance("tools", f"start: %json {json.dumps(alone)}\n")
        except (ValueError, RecursionError):
            return str(name)
        if llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits()).is_error():
            return str(name)
    return ""


def _alarm(seconds: float) -> None:
    """Makes the system end this process after `seconds` of CPU time, even if the parent has died. 0: no limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def ended_by_alarm(code: int) -> bool:
    """Returns True if an exit code means that a subprocess was ended by its own alarm."""
    return sys.platform != "win32" and code == -signal.SIGPROF


def main() -> None:
    if sys.platform != "win32":  # Windows has no such limits: there, only the time limit bounds the memory
        import resource

        with contextlib.suppress(ValueError, OSError):  # the system may not allow these limits
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if tokenizer is None:
            tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(request)))
            answer = {"grammar": ""}
        else:
            kind, text, seconds = request
            _alarm(seconds)
            answer = check(tokenizer, kind, text)
            _alarm(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # systemd signals both processes, and only the engine's should react
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.stack_size(STACK)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
