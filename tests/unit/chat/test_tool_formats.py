"""Notations of tool calls: a chat template shows which one it has, and grammars allow only well-formed calls."""

import functools
import json
import random
import re

import llguidance
import numpy as np
import pytest

from llamabatch.chat.formats import ChatFormat
from llamabatch.chat.output_parser import OutputParser
from llamabatch.chat.tagged_values import LARK
from llamabatch.chat.tool_formats import (
    FORMATS,
    GENERIC,
    TaggedNotation,
    ToolFormat,
    call_id,
    example,
    written,
)
from llamabatch.chat.tool_grammar import answer_grammar, grammar, lazy_grammar
from llamabatch.chat.tool_parsers import ToolParser
from llamabatch.errors import SamplingError
from llamabatch.request.lark_rules import form_of, quoted
from llamabatch.request.structured_outputs import special_name
from llamabatch.sampling import grammar_sandbox

FAMILIES = [*FORMATS, GENERIC]
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 10},
            "unit": {"enum": ["C", "F"]},
            "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 2},
            "mood": {"type": ["string", "null"], "maxLength": 3},
        },
        "required": ["city", "unit"],
        "$defs": {"size": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100}},
    },
    "clock": {},
    'say "it"': {"type": "object", "properties": {"it": {"const": "hi"}}, "required": ["it"]},
}
XML_TOOLS = {name: schema for name, schema in TOOLS.items() if '"' not in name}

# Lines of chat templates that tell the families apart.
EXCERPTS = {
    "gpt-oss": '{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name + "<|channel|>commentary " }}',
    "kimi-k2": "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}",
    "deepseek-v3": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}```json",
    "deepseek-v3.1": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'}}",
    "glm-4.5": "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "glm-4.7": "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "seed-oss": "{{'<seed:tool_call>\n<function='}}{{'<parameter='}}",
    "qwen3-coder": "{{- '<tool_call>\\n<function=' }}{{- '<parameter=' + args_name + '>\\n' }}",
    "mistral-v11": "{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}",
    "mistral-v13": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "mistral": '{{- "[TOOL_CALLS][" }}{{- tool_call.function|tojson }}',
    "hermes": '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
    "llama-3": "<|start_header_id|>{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
    "generic": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize(("name", "template"), EXCERPTS.items())
def test_the_family_is_found_from_the_template(name, template):
    assert ToolFormat.of(template).name == name


def test_each_family_has_an_excerpt():
    assert set(EXCERPTS) == {each.name for each in (*FORMATS, GENERIC)}
    assert ToolFormat.of(None) is GENERIC


class Walk:
    """Random texts of a grammar, made a token at a time. Tokens are bytes and the family's marks as special tokens."""

    def __init__(self, tool_format, tools, *, special, parallel, made_by=grammar):
        self.names = list(tool_format.marks) if special else []
        names = [special_name(mark) for mark in self.names]
        vocabulary = grammar_sandbox.Bytes(names)
        self.eos = vocabulary.eos_token_id
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        lark = made_by(tool_format, tools, special_name if special else quoted, parallel=parallel)
        made = grammar_sandbox.to_llguidance("grammar", lark.lark)
        self.matcher = llguidance.LLMatcher(tokenizer, made, log_level=0, limits=grammar_sandbox.limits())
        assert not self.matcher.is_error(), self.matcher.get_error() + lark.lark

    def text(self, rng, most=3000):
        matcher = self.matcher.deep_copy()
        made = bytearray()
        for _ in range(most):
            packed = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            allowed = np.flatnonzero(np.unpackbits(packed.view(np.uint8), bitorder="little"))
            allowed = [token for token in allowed.tolist() if token < 128 or token > 255] or allowed.tolist()
            token = self.eos if self.eos in allowed and rng.random() < 0.3 else rng.choice(allowed)
            if token == self.eos:
                return made.decode()
            assert matcher.consume_token(token)
            made += self.names[token - 256].encode() if token > 255 else bytes([token])
            assert not matcher.is_error(), matcher.get_error()
        return None

    def allows(self, text):
        matcher = self.matcher.deep_copy()
        tokens, at = [], 0
        while at < len(text):
            mark = next((mark for mark in self.names if text.startswith(mark, at)), None)
            tokens += [256 + self.names.index(mark)] if mark else text[at].encode()
            at += len(mark or "x")
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def calls_of(tool_format, tools, text):
    tags = None
    if tool_format.thought is not None:
        tags = ChatFormat.of("".join(tool_format.thought) + EXCERPTS[tool_format.name]).reasoning
    parser = OutputParser(
        ChatFormat(tags), make_tool_parser=lambda: ToolParser(tool_format.reader, tools, lambda index, name: "id")
    )
    delta = parser.finish(text)
    return delta.text, [(call.name, call.arguments) for call in delta.tool_calls]


def check(name, arguments):
    """Checks that the arguments fit the schema of TOOLS."""
    if name == "clock":
        assert arguments == {}
    elif name == 'say "it"':
        assert arguments == {"it": "hi"}
    else:
        assert name == "weather"
        assert {"city", "unit"} <= set(arguments) <= {"city", "days", "unit", "sizes", "mood"}
        assert isinstance(arguments["city"], str)
        assert len(arguments["city"]) <= 12
        assert arguments["unit"] in ("C", "F")
        assert 0 <= arguments.get("days", 0) <= 10
        assert all(0 <= size <= 100 and size * 2 % 1 == 0 for size in arguments.get("sizes", []))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tool_format", FAMILIES, ids=lambda each: each.name)
def test_whatever_the_grammar_allows_is_a_well_formed_call(tool_format, special):
    parallel = special == (FAMILIES.index(tool_format) % 2 == 0)  # each pair of values of the three variables occurs
    tools = TOOLS if getattr(tool_format.notation, "quoted", False) else XML_TOOLS
    walk = Walk(tool_format, tools, special=special, parallel=parallel)
    rng = random.Random(15)
    texts = [text for text in (walk.text(rng) for _ in range(12)) if text is not None]
    assert len(texts) > 3
    for text in texts:
        rest, calls = calls_of(tool_format, tools, text)
        assert rest == "", text
        assert len(calls) >= 1 if parallel else len(calls) == 1
        for name, arguments in calls:
            check(name, json.loads(arguments))


WRITTEN = {
    "gpt-oss": "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm-4.5": "<tool_call>clock\n</tool_call>",
    "glm-4.7": "<tool_call>clock</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
    "qwen3-coder": "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "mistral-v11": "[TOOL_CALLS]clock[CALL_ID]a1B2c3D4e[ARGS]{}",
    "mistral-v13": "[TOOL_CALLS]clock[ARGS]{}",
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama-3": '{"name": "clock", "parameters": {}}',
    "generic": '{"name": "clock", "arguments": {}}',
}


@pytest.mark.parametrize("tool_format", FAMILIES, ids=lambda each: each.name)
def test_the_grammar_has_the_notation_that_the_model_was_trained_on(tool_format):
    walk = Walk(tool_format, XML_TOOLS, special=True, parallel=False)
    text = WRITTEN[tool_format.name]
    assert walk.allows(text)
    assert not walk.allows(text.replace("clock", "volcano"))
    if tool_format.thought is not None:
        begin, end = tool_format.thought
        for special in (True, False):
            walk = Walk(tool_format, XML_TOOLS, special=special, parallel=False)
            assert walk.allows(f"{begin}Hm. <|en{end}{text}")
            assert not walk.allows(f"{begin}Hm. {text}")
    assert not walk.allows(text[:-1])
    assert calls_of(tool_format, XML_TOOLS, text) == ("", [("clock", "{}")])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tool_format", FAMILIES, ids=lambda each: each.name)
def test_a_lazy_grammar_holds_calls_and_leaves_text_free(tool_format, special):
    spell = special_name if special else quoted
    if tool_format.name in ("gpt-oss", "llama-3", "generic"):
        assert lazy_grammar(tool_format, XML_TOOLS, spell, parallel=True) is None
        return
    for parallel in (False, True):
        walk = Walk(tool_format, XML_TOOLS, special=special, parallel=parallel, made_by=lazy_grammar)
        text = WRITTEN[tool_format.name]
        assert walk.allows("No call: <1> [2].")
        assert walk.allows(f"Well.\n{text}")
        assert walk.allows(f"{text}\nDone.")
        assert not walk.allows(text.replace("clock", "volcano"))
        if special:
            assert walk.allows(f"{text}\n{text}") == parallel


FORMS = {
    "json": (
        '{"properties": {"n": {"type": "integer"}}, "required": ["n"], "type": "object"}',
        '{"n": 7}',
        '{"n": .5}',
    ),
    "regex": (r"[ab]/\d+\.?", "a/12", "c/12"),
    "choice": ('["yes", "\\"no\\""]', '"no"', "no"),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tool_format", FAMILIES, ids=lambda each: each.name)
def test_an_answer_is_in_its_form_or_calls(tool_format, special):
    for kind, (text, good, bad) in FORMS.items():
        made_by = functools.partial(_answers, form_of(kind, text))
        walk = Walk(tool_format, XML_TOOLS, special=special, parallel=True, made_by=made_by)
        thoughts = [""] if tool_format.thought is None else ["", "Hm.".join(tool_format.thought)]
        for thought in thoughts:
            answer = f"{thought}{tool_format.answer}{good}"
            assert walk.allows(answer)
            assert calls_of(tool_format, XML_TOOLS, answer) == (good, [])
            assert walk.allows(thought + WRITTEN[tool_format.name])
            assert not walk.allows(f"{thought}{tool_format.answer}{bad}")
        assert not walk.allows(WRITTEN[tool_format.name].replace("clock", "volcano"))
        for size in 0.5, 0.3:  # the schema allows 0.5 by a $ref
            call = written(tool_format, [("weather", {"city": "Oslo", "unit": "C", "sizes": [size]})])
            assert walk.allows(call) == (size == 0.5)
        assert not walk.allows(f"{good}{WRITTEN[tool_format.name]}")


def _answers(form, tool_format, tools, spell, *, parallel):
    return answer_grammar(tool_format, tools, form, spell, parallel=parallel)


PATCH = """start: begin change+ end
begin: "*** Begin" LF
change: ("+" | "-") /(.*)/ LF -> line
end: "*** End" LF?
%import common.LF
"""


@pytest.mark.parametrize("made_by", [grammar, lazy_grammar])
@pytest.mark.parametrize("tool_format", FAMILIES, ids=lambda each: each.name)
def test_a_text_follows_its_grammar_where_a_notation_holds_texts_as_they_are(tool_format, made_by):
    text = {"type": "string", LARK: PATCH}
    tools = {"patch": {"type": "object", "properties": {"input": text}, "required": ["input"]}}
    if made_by is lazy_grammar and lazy_grammar(tool_format, tools, quoted, parallel=False) is None:
        return
    walk = Walk(tool_format, tools, special=False, parallel=False, made_by=made_by)
    for good in ('*** Begin\n+a <b> "c"\n*** End', "*** Begin\n-\n+}\n*** End\n"):
        call = written(tool_format, [("patch", {"input": good})])
        assert walk.allows(call)
        assert json.loads(calls_of(tool_format, tools, call)[1][0][1]) == {"input": good}
    is_held = isinstance(tool_format.notation, TaggedNotation)
    assert walk.allows(written(tool_format, [("patch", {"input": "*** Begin\n*** End"})])) != is_held


@pytest.mark.parametrize("tool_format", FAMILIES, ids=lambda each: each.name)
def test_a_call_can_be_written_in_each_notation(tool_format):
    arguments = {"city": "Oslo", "unit": "C", "days": 3}
    given = [("weather", arguments), ("clock", {})][: 1 if getattr(tool_format.notation, "between", "") is None else 2]
    rest, calls = calls_of(tool_format, XML_TOOLS, written(tool_format, given))
    assert (rest, [(name, json.loads(text)) for name, text in calls]) == ("", given)
    assert "<function>" in example(tool_format)


def test_ids_are_made_of_seed_prompt_and_place():
    def made(name="hermes", seed=7, prompt=(1, 2), continuation=0, index=0):
        return call_id(next(each for each in FORMATS if each.name == name), seed, prompt, continuation, index)

    assert made() == made()
    others = [made(seed=8), made(prompt=(1, 3)), made(prompt=(1,)), made(continuation=1), made(index=1)]
    assert len({made(), *others}) == 6
    assert len(made()) == 29
    assert made().startswith("call_")
    assert len(made("mistral")) == 9
    assert made("mistral").isalnum()


QWEN3_CODER = next(each for each in FORMATS if each.name == "qwen3-coder")
GPT_OSS = next(each for each in FORMATS if each.name == "gpt-oss")


def of_properties(properties, **schema):
    return {"f": {"type": "object", "properties": properties, **schema}}


@pytest.mark.parametrize(
    ("tool_format", "tools", "says"),
    [
        (QWEN3_CODER, {"<|f|>": {}}, "a function has the name '<|f|>', which calls of qwen3-coder cannot express"),
        (GPT_OSS, {"a b": {}}, "a function has the name 'a b', which calls of gpt-oss"),
        (GENERIC, {"n" * 600: {}}, None),
        (QWEN3_CODER, {"n" * 600: {}}, "64 of them at most"),
        (QWEN3_CODER, of_properties({"a>b": {}}), "an argument of 'f' has the name 'a>b'"),
        (GPT_OSS, of_properties({"a>b": {}}), None),
        (QWEN3_CODER, of_properties({"a": {"enum": ["x", "y</parameter>"]}}), "'a' of 'f' may be 'y</parameter>'"),
        (QWEN3_CODER, of_properties({"a": {"enum": ["", "1 e5", 1, None, " x\n"]}}), None),
        (QWEN3_CODER, of_properties({"a": {"enum": ["1e5", 1]}}), "'a' of 'f' may be '1e5'"),
        (
            QWEN3_CODER,
            of_properties({"a": {"type": "string", "minLength": "0}"}}),
            "argument 'a' of 'f': minLength is",
        ),
        (QWEN3_CODER, of_properties({"a": {"type": "string", "maxLength": None}}), None),
    ],
)
def test_what_a_notation_cannot_hold_is_refused(tool_format, tools, says):
    """The grammar would demand a call that no reader reads as one."""
    if says is None:
        assert grammar(tool_format, tools, quoted, parallel=True)
    else:
        with pytest.raises(SamplingError, match=re.escape(says)):
            grammar(tool_format, tools, quoted, parallel=True)
        if tool_format is QWEN3_CODER:
            with pytest.raises(SamplingError, match=re.escape(says)):
                lazy_grammar(tool_format, tools, quoted, parallel=True)


@pytest.mark.parametrize("tool_format", [QWEN3_CODER, GPT_OSS])
def test_an_argument_that_is_required_and_not_described_may_have_any_value(tool_format):
    tools = of_properties({"a": {"type": "integer"}}, required=["a", "b"])
    made = grammar(tool_format, tools, quoted, parallel=False).lark
    assert ("parameter=b>" if tool_format is QWEN3_CODER else '"b": {}') in made
