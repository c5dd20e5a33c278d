"""Texts with tool calls, a few for each family, with the calls and the text that a reader finds in them."""

from dataclasses import dataclass
from typing import Any

from llamabatch.chat import tool_parsers
from llamabatch.chat.tool_parsers import Reader

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "detail": {"type": ["boolean", "null"]},
        },
        "required": ["city"],
    },
    "clock": {},
}


@dataclass(frozen=True)
class Case:
    reader: Reader
    given: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    text: str = ""
    ids: tuple[str, ...] = ()


OSLO: tuple[str, dict[str, Any]] = ("weather", {"city": "Oslo", "days": 3})
CLOCK: tuple[str, dict[str, Any]] = ("clock", {})
_DS = {"a": "<｜tool▁calls▁begin｜>", "b": "<｜tool▁call▁begin｜>", "c": "<｜tool▁sep｜>", "d": "<｜tool▁call▁end｜>"}
_DS["e"] = "<｜tool▁calls▁end｜>"
_SECTION, _END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

CASES = (
    Case(tool_parsers.hermes, "No call, but 1 < 2 and <tool.", text="No call, but 1 < 2 and <tool."),
    Case(tool_parsers.hermes, "  \n ", text="  \n "),
    Case(
        tool_parsers.hermes,
        'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "clock"}\n</tool_call>',
        (OSLO, CLOCK),
        "Sure.\n",
    ),
    Case(
        tool_parsers.hermes,
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\", \\"days\\": 3}"}'
        '{"name": "clock"}</tool_call> Done.',
        (OSLO, CLOCK),
        " Done.",
    ),
    Case(tool_parsers.hermes, '<tool_call>[{"name": "clock", "arguments": null}]</tool_call>', (CLOCK,)),
    Case(
        tool_parsers.hermes,
        '<tool_call>{"name": "weather", "arguments": {"city": "<tool_call>\\u00e9\\"}\n🌧"}}</tool_call>',
        (("weather", {"city": '<tool_call>é"}\n🌧'}),),
    ),
    Case(
        tool_parsers.qwen3_coder,
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        (OSLO, CLOCK),
        "Let me see.\n",
    ),
    Case(
        tool_parsers.qwen3_coder,
        "<function=weather><parameter=city>\nif a < b:\n\n  </p>\n\n</parameter><parameter=unit>\nF\n</parameter>"
        "<parameter=detail>\nTrue\n</parameter></function>",
        (("weather", {"city": "if a < b:\n\n  </p>\n", "unit": "F", "detail": True}),),
    ),
    Case(
        tool_parsers.seed_oss,
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        (OSLO,),
    ),
    Case(
        tool_parsers.glm,
        "Hm.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
        (OSLO, CLOCK),
        "Hm.",
    ),
    Case(
        tool_parsers.glm,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>clock</tool_call>",
        (OSLO, CLOCK),
    ),
    Case(
        tool_parsers.bare_json,
        '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}; {"name": "clock", "parameters": {}}',
        (OSLO, CLOCK),
    ),
    Case(
        tool_parsers.bare_json,
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
        (OSLO,),
    ),
    Case(
        tool_parsers.bare_json,
        '\n[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, {"name": "clock", "arguments": {}}]',
        (OSLO, CLOCK),
    ),
    Case(tool_parsers.bare_json, '{"name": "Kate", "age": 3}', text='{"name": "Kate", "age": 3}'),
    Case(tool_parsers.bare_json, "[1, 2]", text="[1, 2]"),
    Case(tool_parsers.bare_json, 'So: {"name": "clock"}', text='So: {"name": "clock"}'),
    Case(
        tool_parsers.mistral,
        'Ok[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}, "id": "123456789"}, '
        '{"name": "clock", "arguments": {}}]',
        (OSLO, CLOCK),
        "Ok",
    ),
    Case(
        tool_parsers.mistral,
        '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]clock[ARGS]{}',
        (OSLO, CLOCK),
        ids=("123456789", "id 1"),
    ),
    Case(tool_parsers.mistral, '[TOOL_CALLS]weather{"city": "Oslo", "days": 3}', (OSLO,)),
    Case(
        tool_parsers.deepseek,
        "Ok{a}{b}weather{c}{{'city': 'Oslo', 'days': 3}}{d}{b}clock{c}{{}}{d}{e}".format(**_DS).replace("'", '"'),
        (OSLO, CLOCK),
        "Ok",
    ),
    Case(
        tool_parsers.deepseek,
        "{a}{b}function{c}weather\n```json\n{{'city': 'Oslo', 'days': 3}}\n```{d}\n{b}function{c}clock\n```json\n{{}}\n"
        "```{d}{e}".format(**_DS).replace("'", '"'),
        (OSLO, CLOCK),
    ),
    Case(
        tool_parsers.kimi,
        f"Ok{_SECTION}<|tool_call_begin|>functions.weather:4<|tool_call_argument_begin|>"
        '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.clock:5<|tool_call_argument_begin|>{}'
        f"<|tool_call_end|>{_END_SECTION}",
        (OSLO, CLOCK),
        "Ok",
        ("functions.weather:4", "functions.clock:5"),
    ),
    Case(
        tool_parsers.harmony,
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>',
        (OSLO,),
    ),
    Case(
        tool_parsers.harmony,
        'Ok<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": "Oslo", "days": 3}<|end|>'
        " to=functions.clock<|channel|>analysis json<|message|>{}",
        (OSLO, CLOCK),
        "Ok",
    ),
)

# Texts that look like calls, but are only text.
NO_CALLS = (
    (tool_parsers.hermes, '<tool_call>\n{"name": "volcano", "arguments": {}}\n</tool_call>'),
    (tool_parsers.hermes, "<tool_call> and </tool_call> are tags."),
    (tool_parsers.hermes, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    (tool_parsers.hermes, '<tool_call>{"name": "weather", "arg'),
    (tool_parsers.hermes, '<tool_call>{"name": "weather", "arguments": ' + "1" * 5000 + "}</tool_call>"),
    (tool_parsers.hermes, '<tool_call>{"arguments": {"city": "Oslo"}}</tool_call>'),
    (tool_parsers.qwen3_coder, "<tool_call>\n<function=volcano>\n</function>\n</tool_call>"),
    (tool_parsers.qwen3_coder, "<function=weather"),
    (tool_parsers.seed_oss, "<seed:tool_call>weather</seed:tool_call>"),
    (tool_parsers.glm, "<tool_call>volcano\n</tool_call>"),
    (tool_parsers.glm, "<tool_call>" + "x" * 600),
    (tool_parsers.bare_json, '<|python_tag|>weather.call(city="Oslo")'),
    (tool_parsers.bare_json, '{"name": "volcano", "parameters": {}}'),
    (tool_parsers.mistral, "[TOOL_CALLS]volcano[ARGS]{}"),
    (tool_parsers.mistral, "[TOOL_CALLS][]"),
    (tool_parsers.deepseek, "{a}{b}volcano{c}{{}}{d}{e}".format(**_DS)),
    (tool_parsers.deepseek, "{a}{e}".format(**_DS)),
    (tool_parsers.kimi, "<|tool_call_begin|>functions.volcano:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    (tool_parsers.harmony, "<|channel|>commentary to=python <|constrain|>code<|message|>print(1)<|call|>"),
)

# Calls with arguments that are no JSON, or are cut: (reader, text, arguments, rest of the text).
BROKEN = (
    (
        tool_parsers.hermes,
        '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call> x',
        '{"city": Oslo}}',
        " x",
    ),
    (tool_parsers.hermes, '<tool_call>{"name": "weather", "arguments": {"city": "Os', '{"city": "Os', ""),
    (tool_parsers.hermes, '<tool_call>{"name": "weather", "arguments": {"city": "O"</tool_', '{"city": "O"</tool_', ""),
    (tool_parsers.qwen3_coder, "<function=weather>\n<parameter=city>\nOs", '{"city": "Os', ""),
    (tool_parsers.qwen3_coder, "<function=weather>\n<parameter=days>\n1", '{"days": 1', ""),
    (tool_parsers.glm, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os\n", '{"city": "Os\\n', ""),
    (tool_parsers.mistral, '[TOOL_CALLS]weather[ARGS]{"city"', '{"city"', ""),
    (tool_parsers.deepseek, '{b}weather{c}{{"city" "Oslo"}}{d}'.format(**_DS), '{"city" "Oslo"}', ""),
    (
        tool_parsers.kimi,
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{]<|tool_call_end|>",
        "{]",
        "",
    ),
    (tool_parsers.harmony, "<|channel|>commentary to=functions.weather<|message|>{'city'}<|call|>", "{'city'}", ""),
)

MARKS = (
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *_DS.values(),
    *(_SECTION, _END_SECTION, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|call|>"),
)
