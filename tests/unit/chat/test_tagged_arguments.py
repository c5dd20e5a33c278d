"""Schemas of tools: each notation enforces them, or the refusal names what it cannot enforce."""

import contextlib
import json
import random
import time

import jsonschema
import pytest

from llamabatch.chat.tagged_values import LARK
from llamabatch.chat.tool_formats import FORMATS, TaggedNotation, written
from llamabatch.chat.tool_grammar import grammar
from llamabatch.errors import SamplingError
from llamabatch.request.lark_rules import quoted
from llamabatch.request.structured_outputs import TOOLS, Structure
from llamabatch.sampling.grammar_compiler import Grammars
from tests.unit.chat.test_tool_formats import Walk, calls_of
from tests.unit.sampling.test_grammars import Bytes

TAGGED = [each for each in FORMATS if isinstance(each.notation, TaggedNotation)]
HERMES = next(each for each in FORMATS if each.name == "hermes")
S, INT, N, B = ({"type": name} for name in ("string", "integer", "null", "boolean"))
DATE = {"type": "string", "format": "date"}

# Schemas of one argument: (schema, values that fit it, values that do not).
VALUES = {
    "any": ({}, ["a", "", 1, None, [1], {"a": 2}, "x\n</param"], []),
    "true": (True, ["a", 1.5, True], []),
    "described": ({"description": "x", "title": "y", "default": 3}, ["a", 1], []),
    "string": (S, ["", "a", "1", "null", "[1]", '"q"', "two\nlines", " spaces ", "<p>ä€😀"], []),
    "integer": (INT, [0, -5, 12345], ["a", "", "1x"]),
    "number": ({"type": "number"}, [0, -5, 1.5, 1e3], ["a"]),
    "boolean": (B, [True, False], ["yes"]),
    "null": (N, [None], ["nothing"]),
    "length": ({**S, "minLength": 2, "maxLength": 3}, ["ab", "äöü", "12"], ["a", "abcd", ""]),
    "length of any": ({"minLength": 2}, ["ab", 5, None, [1]], ["a"]),
    "optional with a length": ({"anyOf": [{**S, "maxLength": 3}, N]}, ["abc", None], ["abcd", "nulls"]),
    "types with a length": ({"type": ["string", "null"], "minLength": 5}, ["hello", None], ["abcd"]),
    "pattern": ({**S, "pattern": "^[a-c]+$"}, ["abc", "a"], ["abd", "", "xa"]),
    "pattern inside": ({**S, "pattern": "[0-9]{2}"}, ["a12b", "12", "\n34"], ["1", "a1b2"]),
    "pattern at a start": ({**S, "pattern": "^ab"}, ["ab", "abc"], ["cab", "a"]),
    "pattern at an end": ({**S, "pattern": "ab$"}, ["ab", "cab"], ["abc"]),
    "pattern of branches": ({**S, "pattern": "^a|b$"}, ["ax", "xb", "a"], ["xa", "bx"]),
    "pattern of a group": ({**S, "pattern": "^(a|b/c)$"}, ["a", "b/c"], ["ab", "xa"]),
    "pattern of anchors in a group": ({**S, "pattern": "(^a$|^b)"}, ["a", "bx"], ["ax", "xb"]),
    "pattern with classes": ({**S, "pattern": r"^[\d|)]\w\.$"}, ["1a.", "|b.", ")_."], ["1ä.", "a1.", "1ab"]),
    "pattern with an escaped dollar": ({**S, "pattern": r"a\$"}, ["a$", "xa$y"], ["a"]),
    "pattern and length": ({**S, "pattern": "^a*$", "maxLength": 2}, ["", "aa"], ["aaa", "b"]),
    "date": (DATE, ["2024-02-29"], ["2024-13-01", "2024-2-1", "today"]),
    "time": ({**S, "format": "time"}, ["12:30:00Z", "01:02:03.5+02:00"], ["12:30", "25:00:00Z"]),
    "date-time": ({**S, "format": "date-time"}, ["2024-01-01T12:30:00Z"], ["2024-01-01", "2024-01-01 12:30:00"]),
    "duration": ({**S, "format": "duration"}, ["P1Y2M3DT4H", "PT5M", "P3W"], ["P", "1Y", "P1D2M"]),
    "email": ({**S, "format": "email"}, ["a.b@c.de", "x@[1.2.3.4]"], ["a", "a@", "@b", "a b@c"]),
    "hostname": ({**S, "format": "hostname"}, ["a", "a-1.example"], ["-a", "a..b", "a_b"]),
    "ipv4": ({**S, "format": "ipv4"}, ["1.2.3.4", "255.255.255.0"], ["256.1.1.1", "1.2.3"]),
    "ipv6": (
        {**S, "format": "ipv6"},
        ["::1", "1:2:3:4:5:6:7:8", "fe80::1:2", "1::", "::"],
        ["1", ":::", "1::2::3", "1:2"],
    ),
    "uuid": (
        {**S, "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567", "x23e4567-e89b-12d3-a456-426614174000"],
    ),
    "uri": (
        {**S, "format": "uri"},
        ["https://a.b:80/c?d#e", "mailto:a@b.c", "x:", "http://[::1]/"],
        ["a b", "/c", "http://a b"],
    ),
    "optional date": ({"anyOf": [DATE, N]}, ["2024-01-31", None], ["soon"]),
    "unknown format": ({**S, "format": "password"}, ["x"], []),
    "enum": ({"enum": ["red", "dark blue"]}, ["red", "dark blue"], ["green", "re", "redd"]),
    "enum of two types": ({"enum": ["a", 1]}, ["a", 1], ["b", 2, "a1"]),
    "enum of all types": (
        {"enum": ["", 1.5, None, True, [1], {"b": "c"}]},
        ["", 1.5, None, True, [1], {"b": "c"}],
        ["a", 2],
    ),
    "enum and type": ({**S, "enum": ["a", "b", 1]}, ["a", "b"], [1, "c"]),
    "const": ({"const": "a/b"}, ["a/b"], ["a", "a/bc"]),
    "const of a number": ({"const": 7}, [7], [8, "a"]),
    "bounds": ({**INT, "minimum": 3, "exclusiveMaximum": 6}, [3, 5], [2, 6]),
    "string or integer": ({"type": ["string", "integer"]}, ["a", 5, "5a", "2024-01-01"], []),
    "string or a bounded integer": ({"type": ["string", "integer"], "maximum": 5}, ["a", 5, -1], [7, 77]),
    "string or number": ({"type": ["string", "number"]}, ["a", 5, 5.5, -1e-7, "1."], []),
    "string or some words": (
        {"anyOf": [{**S, "minLength": 5}, {"enum": [True, 2, 2.5]}]},
        [True, 2, 2.5, "hello"],
        [False, 3],
    ),
    "string or list": ({"anyOf": [S, {"type": "array", "items": S}]}, ["ls -l", ["ls", "-l"]], [[1]]),
    "string or object": ({"anyOf": [S, {"type": "object", "required": ["b"]}]}, ["a", {"b": 1}], [{}]),
    "object or a text like a list": ({"enum": ["[1]", {"a": 1}]}, ["[1]", {"a": 1}], [{"a": 2}]),
    "list": ({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2}, [[], ["a", 1]], [["b"], ["a", "a", "a"]]),
    "object": ({"type": "object", "properties": {"b": INT}, "required": ["b"]}, [{"b": 1}], [{}, {"b": "x"}]),
    "allOf": ({"allOf": [{**S, "minLength": 2}, {"maxLength": 3}]}, ["ab", "abc"], ["a", "abcd"]),
    "allOf of patterns": ({**S, "allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["ab", "bxa"], ["a", "b"]),
    "anyOf of patterns": ({**S, "anyOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ax", "xb"], ["xa", "bx"]),
    "oneOf of texts": ({"oneOf": [{**S, "pattern": "^a"}, {**S, "pattern": "b$"}]}, ["ax", "xb"], ["ab", "axb", "x"]),
    "oneOf with null": ({"oneOf": [{**S, "maxLength": 2}, N]}, ["ab", None], ["abc"]),
    "ref": ({"$ref": "#/$defs/word"}, ["ab"], ["abc", "a"]),
    "ref of an old kind": ({"$ref": "#/definitions/few"}, [1, 3], [4]),
    "ref to an argument": ({"$ref": "#/properties/other"}, [0, 9], [10, "a"]),
    "ref and more": ({"$ref": "#/$defs/word", "pattern": "^a"}, ["ab"], ["bb"]),
    "ref with null": ({"anyOf": [{"$ref": "#/$defs/word"}, N]}, ["ab", None], ["abc"]),
    "ref to itself": ({"$ref": "#/$defs/tree"}, ["leaf", ["leaf", ["leaf"]]], ["a", [1]]),
    "empty ref": ({"$ref": "#/$defs/nothing"}, ["a", 1], []),
    "list of texts with tags": (
        {"type": "array", "items": S},
        [["x</parameter>y", "x</arg_value>y"], ['a"b\n']],
        [],
    ),
    "object with tags": ({"type": "object"}, [{"x</parameter>": {"</arg_value>": 1}}], []),
    "list that is listed": ({"enum": [["</parameter>", "</arg_value>"]]}, [["</parameter>", "</arg_value>"]], [[]]),
    "any list with tags": ({"minLength": 1}, [["</parameter>"], {"</arg_value>": []}], []),
    "no quotation mark": ({**S, "pattern": '^[^"]+$'}, ["a\\n", "\n"], ['"', 'a"', ""]),
    "no backslash": ({**S, "pattern": r"^[^\\]+$"}, ['"', "a"], ["\\", "a\\"]),
    "name of a file": ({**S, "pattern": r'^[^\\/:*?"<>|]+$'}, ["a b.txt"], ["a\\b", 'a"b', "a/b", "<"]),
    "brackets in a class": ({**S, "pattern": "^[[a]+$"}, ["[", "a["], ["]"]),
    "no sets in a class": ({**S, "pattern": "^[a&&b~]$"}, ["a", "&", "b"], ["c"]),
    "unique": ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [["a", "b"], []], [["a", "a"]]),
}
DEFINITIONS = {
    "$defs": {
        "word": {**S, "minLength": 2, "maxLength": 2},
        "tree": {"anyOf": [{"const": "leaf"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
        "nothing": {},
    },
    "definitions": {"few": {**INT, "minimum": 1, "maximum": 3}},
}

# Schemas of all arguments: (schema, arguments that fit it, arguments that do not).
WHOLE = {
    "none": ({}, [{}], [{"a": 1}]),
    "one that is required, and any": ({"required": ["a"]}, [{"a": 1}, {"a": "x", "b": 2}], [{"b": 2}]),
    "no names": ({"properties": {}}, [{}], [{"a": 1}]),
    "none of two": ({"allOf": [{"properties": {}}, {"required": []}]}, [{}], [{"a": 1}]),
    "names that begin as others do": (
        {"properties": {"abc": INT, "b": S}, "additionalProperties": INT},
        [{"abc": 1, "ab": 2, "abcd": 3, "c": 4}, {"a": 1, "bc": 2}],
        [{"ab": "x"}],
    ),
    "patterns within bounds": (
        {"patternProperties": {"^n": {"minimum": 3}}, "allOf": [{"additionalProperties": INT}]},
        [{"n1": 3, "x": 1}],
        [{"n1": "x"}, {"n1": 2}, {"x": "y"}],
    ),
    "any object": ({"type": "object"}, [{}, {"x": "y"}, {"x": 1, "z-1": [2]}], []),
    "closed": ({"properties": {"a": S}}, [{}, {"a": "x"}], [{"b": "x"}, {"a": "x", "b": 1}]),
    "required": (
        {"properties": {"a": S, "b": INT}, "required": ["b"]},
        [{"b": 1}, {"a": "", "b": 1}],
        [{}, {"a": "x"}],
    ),
    "required elsewhere": ({"properties": {"a": S}, "required": ["b"]}, [{"b": [1]}, {"a": "x", "b": "y"}], [{}]),
    "no values": ({"additionalProperties": False, "type": "object"}, [{}], [{"a": 1}]),
    "others too": (
        {"properties": {"a": INT}, "additionalProperties": {"type": "string", "maxLength": 2}},
        [{}, {"a": 1}, {"b": "xy"}, {"a": 1, "b": "5", "c": "z"}],
        [{"a": "x"}, {"b": "xyz"}],
    ),
    "numbers by name": ({"additionalProperties": INT}, [{}, {"x": 1, "y": 2}], [{"x": "y"}]),
    "patterns": (
        {"patternProperties": {"^n": INT, "^s_": {**S, "pattern": "^x"}}, "additionalProperties": False},
        [{}, {"n1": 1}, {"s_1": "x1", "n": 2}],
        [{"n1": "x"}, {"s_1": "y"}, {"z": 1}],
    ),
    "patterns and others": (
        {"patternProperties": {"^n": INT}, "additionalProperties": {"enum": ["y"]}},
        [{"n1": 1}, {"z": "y"}],
        [{"n1": "y"}, {"z": 1}],
    ),
    "allOf": (
        {"allOf": [{"properties": {"a": S}, "required": ["a"]}, {"properties": {"a": {"maxLength": 2}, "b": INT}}]},
        [{"a": "xy"}, {"a": "x", "b": 1}],
        [{"a": "xyz"}, {"b": 1}, {"a": "x", "c": 1}],
    ),
    "allOf beside properties": (
        {"properties": {"a": S}, "allOf": [{"properties": {"b": INT}, "required": ["b"]}]},
        [{"b": 1}, {"a": "x", "b": 1}],
        [{"a": "x"}, {"b": "x"}],
    ),
    "allOf of values that Python takes for one": (
        {"allOf": [{"properties": {"a": {"const": 0}}}, {"properties": {"a": {"const": False}}}]},
        [{}],
        [{"a": 0}, {"a": False}],
    ),
    "anyOf of which one part does not speak of it": (
        {"properties": {"a": {"enum": [None, "x"]}}, "anyOf": [{"required": ["a"]}, {"properties": {"a": S}}]},
        [{"a": None}, {"a": "x"}, {}],
        [{"a": "y"}],
    ),
    "anyOf of required": (
        {"properties": {"a": S, "b": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": 1}, {"a": "x", "b": 1}],
        [{}],
    ),
    "oneOf by a kind": (
        {
            "oneOf": [
                {"properties": {"kind": {"const": "text"}, "x": {**S, "maxLength": 3}}, "required": ["kind", "x"]},
                {"properties": {"kind": {"const": "count"}, "x": INT}, "required": ["kind", "x"]},
            ]
        },
        [{"kind": "text", "x": "abc"}, {"kind": "count", "x": 5}],
        [{"kind": "text", "x": "abcd"}, {"kind": "count", "x": "a"}, {"kind": "other", "x": 1}, {"x": 1}],
    ),
    "ref": (
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": INT}, "required": ["a"]}}},
        [{"a": 1}],
        [{}, {"a": "x"}],
    ),
    "const": ({"const": {"a": "x", "b": 1}}, [{"a": "x", "b": 1}], [{}, {"a": "x"}, {"a": "y", "b": 1}]),
    "at least one": (
        {"properties": {"a": S, "b": INT}, "minProperties": 1},
        [{"a": "x"}, {"b": 1}, {"a": "x", "b": 1}],
        [{}],
    ),
    "at most one": (
        {"properties": {"a": S, "b": INT}, "maxProperties": 1},
        [{}, {"a": "x"}, {"b": 1}],
        [{"a": "x", "b": 1}],
    ),
    "one of free names": ({"additionalProperties": INT, "minProperties": 1}, [{"x": 1}, {"x": 1, "y": 2}], [{}]),
    "two free names": (
        {"additionalProperties": INT, "maxProperties": 2},
        [{}, {"x": 1, "y": 2}],
        [{"x": 1, "y": 2, "z": 3}],
    ),
    "of two types": ({"type": ["object", "null"], "properties": {"a": INT}}, [{}, {"a": 1}], []),
    "one that never comes": ({"properties": {"a": False, "b": INT}}, [{}, {"b": 1}], [{"a": 1}]),
    "one without a text that fits": (
        {"properties": {"a": {**S, "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, "b": INT}},
        [{}, {"b": 1}],
        [{"a": "a"}, {"a": "b"}],
    ),
}

DEEP = {}
for _ in range(400):
    DEEP = {"items": DEEP}

# Schemas that are refused, and what the message names.
REFUSED = {
    "not": ({"properties": {"a": {"not": S}}}, "not of a JSON schema"),
    "not of all": ({"properties": {"a": S}, "not": {"required": ["a"]}}, "not of a JSON schema"),
    "if": ({"properties": {"a": S}, "if": {"required": ["a"]}}, "if of a JSON schema"),
    "look-ahead": ({"properties": {"a": {**S, "pattern": "(?=a)b"}}}, "look-around"),
    "no expression": ({"properties": {"a": {**S, "pattern": "(a"}}}, "unclosed group"),
    "nothing to repeat": ({"properties": {"a": {**S, "pattern": "*"}}}, "repetition operator"),
    "closed too often": ({"properties": {"a": {**S, "pattern": "a)(b"}}}, "unopened group"),
    "no target": ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$defs/b"),
    "elsewhere": ({"properties": {"a": {"$ref": "https://example.com/a"}}}, "example.com/a"),
    "no value": ({"properties": {"a": {**INT, "minimum": 3, "maximum": 2}}, "required": ["a"]}, "'a'"),
    "no list": ({"properties": {"a": {**S, "anyOf": {}}}}, "anyOf"),
    "no length": ({"properties": {"a": {**S, "maxLength": "x"}}}, "maxLength"),
    "patterns that are required": ({"patternProperties": {"^n": INT}, "required": ["n1"]}, "patternProperties"),
    "no names to require": ({"properties": {"a": S}, "required": "a"}, "required"),
    "no properties": ({"properties": [5]}, "properties"),
    "no type": ({"properties": {"a": {"type": "int"}}, "required": ["a"]}, "int"),
    "no text": ({"properties": {"a": {**S, "enum": ["a"], "minLength": 3}}, "required": ["a"]}, ""),
    "no end of a class": ({"properties": {"a": {**S, "pattern": "[a"}}}, "without its ]"),
    "no end of an escape": ({"properties": {"a": {**S, "pattern": "a\\"}}}, "backslash"),
    "lone surrogate": ({"properties": {"a": {"enum": ["\ud800"]}}}, "lone surrogate"),
    "very deep": ({"properties": {"a": DEEP}}, "nested too deeply"),
    "number of two kinds": ({"properties": {"a": {"oneOf": [{"type": "number"}, {"enum": [5]}, S]}}}, "oneOf"),
    "two at once": ({"oneOf": [{"properties": {"a": S}}, {"properties": {"b": S}}]}, "oneOf"),
}


def parameters(schema):
    other = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "object", "properties": {"a": schema, "other": other}, "required": ["a"], **DEFINITIONS}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from Python's re, which jsonschema uses
@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("tool_format", [*TAGGED, HERMES], ids=lambda each: each.name)
def test_a_value_fits_its_schema(tool_format, case):
    schema, good, bad = VALUES[case]
    if tool_format is HERMES and case == "oneOf of texts":
        pytest.skip("llguidance holds no such oneOf; it is refused")
    check(tool_format, parameters(schema), [{"a": value} for value in good], [{"a": value} for value in bad])


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("tool_format", [*TAGGED, HERMES], ids=lambda each: each.name)
def test_arguments_fit_their_schema(tool_format, case):
    check(tool_format, *WHOLE[case])


def check(tool_format, schema, good, bad):
    """Checks that the grammar allows only the good arguments, and that its random texts are read and fit the schema."""
    tools = {"f": schema}
    walk = Walk(tool_format, tools, special=False, parallel=False)
    for arguments in good:
        text = written(tool_format, [("f", arguments)])
        assert walk.allows(text), text
        [(_, read)] = calls_of(tool_format, tools, text)[1]
        assert json.loads(read) == arguments
    for arguments in bad:
        assert not walk.allows(written(tool_format, [("f", arguments)])), arguments
    rng = random.Random(3)
    validator = jsonschema.Draft202012Validator({"type": "object", **schema})
    for text in filter(None, (walk.text(rng, 400) for _ in range(6))):
        rest, [(_, read)] = calls_of(tool_format, tools, text)
        assert rest == ""
        validator.validate(json.loads(read))


def test_a_lark_grammar_of_an_argument_is_held_between_tags_and_named_in_json():
    schema = {"type": "object", "properties": {"input": {"type": "string", LARK: 'start: "yes"'}}}
    tagged, in_json = (grammar(each, {"f": schema}, quoted, parallel=False) for each in (TAGGED[0], HERMES))
    assert tagged.left_out == ()
    assert "%lark" in tagged.lark
    assert in_json.left_out == ("grammar 'f.input'",)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("tool_format", [*TAGGED, HERMES], ids=lambda each: each.name)
def test_what_cannot_be_held_is_refused_by_name(tool_format, case, trial):
    """Beside another function, the refused function is left out."""
    schema, says = REFUSED[case]
    if tool_format is HERMES and case in ("patterns that are required",):
        pytest.skip("JSON holds it")

    def compiled(tools):
        return trial.compile(Structure(TOOLS, grammar(tool_format, tools, quoted, parallel=False).lark)).result(30)

    with pytest.raises(SamplingError, match=r"^tools are refused: .*'f'") as refused:
        compiled({"f": schema})
    assert says in str(refused.value)
    made = grammar(tool_format, {"f": schema, "g": {}}, quoted, parallel=False)
    assert (*made.left_out, *trial.compile(Structure(TOOLS, made.lark)).result(30).left_out) == ("function 'f'",)


@pytest.fixture(scope="module")
def trial():
    grammars = Grammars(Bytes())
    yield grammars
    grammars.close()


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {f"d{k}": {"oneOf": [*({"$ref": f"#/$defs/d{n}"} for n in range(k + 1, 20)), S]} for k in range(20)},
         "properties": {"a": {"$ref": "#/$defs/d0"}}},
        {"patternProperties": {f"^p{k}": {} for k in range(3000)}},
        {"properties": {f"p{k}": {"$ref": f"#/properties/p{k + 1}"} for k in range(1000)}},
        {"$defs": {f"d{k}": {"anyOf": [{"$ref": f"#/$defs/d{n}"} for n in range(100)]} for k in range(100)},
         "properties": {f"p{k}": {"$ref": "#/$defs/d0"} for k in range(100)}},
        {"properties": {"a": {"enum": [*map(str, range(10_000)), *range(10_000)]}}},
        {"allOf": [{"properties": {f"p{k}": S}} for k in range(3000)]},
        {"oneOf": [{"properties": {f"p{k}": S}} for k in range(3000)]},
        {"properties": {"a": {**S, "pattern": "(^a$|" * 5000 + ")" * 5000}}},
        {"properties": {"a": {**S, "pattern": "(" * 5000}}},
        {"properties": {"a": {**S, "pattern": "[" * 20_000}}},
        {"properties": {f"p{k}": {"properties": {"a": {"properties": {}}}} for k in range(3000)}},
    ],
    ids=["oneOf", "patterns", "chain", "dense", "values", "allOf", "ways", "branches", "groups", "classes", "objects"],
)  # fmt: skip
def test_no_schema_takes_all_time_or_memory(schema):
    """The server's own process makes the grammar, so time and memory must be bounded."""
    start = time.process_time()
    with contextlib.suppress(SamplingError):
        assert len(grammar(TAGGED[-1], {"f": schema}, quoted, parallel=False).lark) < 2**19
    assert time.process_time() - start < 3


def test_a_value_does_not_hold_what_ends_it():
    """A reader would end the value there, and take the rest for text."""
    for tool_format in TAGGED:
        walk = Walk(tool_format, {"f": parameters(S)}, special=False, parallel=False)
        closing = tool_format.notation.end.strip()
        assert walk.allows(written(tool_format, [("f", {"a": f"x{closing[:-1]}"})]))
        assert not walk.allows(written(tool_format, [("f", {"a": f"x{closing}y"})]))


def test_each_rule_says_what_it_is_for():
    made = grammar(TAGGED[0], {"say": parameters(S)}, quoted, parallel=False).lark
    assert "argument 'a' of 'say'" in made
