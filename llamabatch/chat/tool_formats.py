"""ToolFormat: the notation in which a family of models calls tools. The chat template identifies the family.

A row of FORMATS contains the reader of the notation, and the notation as data. tool_grammar.py turns the data into the
grammar that forces a model to write valid calls (tool_choice="required").
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.chat import tool_parsers
from llamabatch.chat.tool_parsers import Reader
from llamabatch.request.lark_rules import Part, Raw


@dataclass(frozen=True)
class JsonNotation:
    """The notation of calls with arguments as JSON.

    Attributes:
        head, middle, tail: texts before the name, between the name and the arguments, and after the arguments.
        before, between, after: texts before all calls, between two calls, and after all calls. If `between` is None, an
            answer has at most one call.
        only_if_several: `before` and `after` are written only if there are several calls.
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
    """The notation of calls with each argument between tags.

    Attributes:
        head, middle, tail: texts before the name of the function, after this name, and after the arguments.
        key, value, end: texts before the name of an argument, before the value, and after the value.
        between: text between two calls.
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
    """The format of tool calls in one family of models.

    Attributes:
        name: name of the family.
        signs: texts that identify the family. Each chat template of the family contains all of these texts.
        reader: the reader of the family's calls.
        notation: the notation that the grammar allows; the reader also accepts variants.
        marks: texts of the notation that may be special tokens of a vocabulary.
        ends_thinking: marks that begin a call and thereby end an unclosed thinking part.
        thought: the tags around a thinking part before the calls, if the grammar must allow such a part.
        answer: text that begins an answer without calls, for families with `thought`.
        id_letters: number of letters and digits in a call's id; 0: "call_" and 24 letters and digits, as in OpenAI's
            ids.
    """

    name: str
    signs: tuple[str, ...]
    reader: Reader
    notation: JsonNotation | TaggedNotation
    marks: tuple[str, ...] = ()
    ends_thinking: tuple[str, ...] = ()
    thought: tuple[str, str] | None = None
    answer: str = ""
    id_letters: int = 0

    @classmethod
    def of(cls, template: str | None) -> ToolFormat:
        """Returns the format of a model with this chat template; GENERIC if the template is unknown."""
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

# The first row with all signs in the template is used.
FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        "gpt-oss",
        ("<|channel|>commentary", "functions."),
        tool_parsers.harmony,
        JsonNotation("<|channel|>commentary to=functions.", (" <|constrain|>json<|message|>",), between=None),
        _HARMONY,
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        answer="<|channel|>final<|message|>",
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
# The format for templates without tools, or with an unknown notation.
GENERIC = ToolFormat("generic", (), tool_parsers.bare_json, _BARE)


def written(tool_format: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns the text of calls in the notation of the family. A call is given as name and arguments."""
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


def _as_text(value: object) -> str:
    """Returns the text of a value in a notation with tags."""
    return value if isinstance(value, str) else json.dumps(value)


def example(tool_format: ToolFormat) -> str:
    """Returns an example of a call, for a model that does not know the notation."""
    return written(tool_format, [("<function>", {"<parameter>": "<value>"})])


_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def call_id(tool_format: ToolFormat, seed: int, prompt_token_ids: Sequence[int], continuation: int, index: int) -> str:
    """Returns the id of a call. The id is made from all inputs that decide the text of the call, so a retry or a
    resumed job gets the same id.

    Args:
        seed: the seed of the request.
        continuation: position among the continuations of the prompt (from 0).
        index: position among the calls of the continuation (from 0).
    """
    digest = hashlib.blake2b(struct.pack("<QII", seed & (2**64 - 1), continuation, index), digest_size=24)
    digest.update(b"".join(struct.pack("<i", token_id) for token_id in prompt_token_ids))
    number = int.from_bytes(digest.digest(), "little")
    letters = []
    for _ in range(tool_format.id_letters or 24):
        number, digit = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[digit])
    return ("" if tool_format.id_letters else "call_") + "".join(letters)
