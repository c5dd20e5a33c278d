"""The forms of structured_outputs; trial compilation of grammars; and masks from grammars, for a made-up vocabulary."""

import json
import os
import random
import re
import signal
import time
from concurrent.futures import Future
from types import MappingProxyType

import numpy as np
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamabatch.chat.tool_formats import FORMATS, GENERIC
from llamabatch.chat.tool_grammar import grammar, lazy_grammar
from llamabatch.engine.pending_grammars import PendingGrammars
from llamabatch.errors import EngineClosedError, SamplingError
from llamabatch.request.detokenizer import Vocabulary
from llamabatch.request.lark_rules import quoted
from llamabatch.request.reasoning import Reasoning, ReasoningTags, Thinking
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.request.structured_outputs import MAX_CHARS, TOOLS, Structure, special_name, structure
from llamabatch.sampling import grammar_compiler as grammars_module
from llamabatch.sampling import grammar_matcher as matcher_module
from llamabatch.sampling import grammar_sandbox
from llamabatch.sampling.grammar_compiler import Grammars
from llamabatch.sampling.grammar_matcher import GrammarMasks, GrammarMatcher
from llamabatch.sampling.reasoning import ReasoningTokens, ReasoningTracker
from llamabatch.sampling.sampler import SamplerState
from tests.unit.sampling.test_reasoning import Letters
from tests.waiting import PATIENCE_S, until


class Person(pydantic.BaseModel):
    name: str
    age: int


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps({**SCHEMA, "additionalProperties": False})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        ({"json": SCHEMA}, ("json", TEXT)),
        ({"json": TEXT.replace(" ", "\n")}, ("json", TEXT)),
        ({"json": Person}, ("json", json.dumps({**Person.model_json_schema(), "additionalProperties": False}))),
        ({"json": True}, ("json", "{}")),
        ({"json": MappingProxyType(SCHEMA)}, ("json", TEXT)),
        ({"json_object": True}, ("json", '{"type": "object"}')),
        ({"regex": r"\d+", "json": None, "json_object": False}, ("regex", r"\d+")),
        ({"choice": ("yes", "né")}, ("choice", '["yes", "n\\u00e9"]')),
        ({"choice": np.array(["yes", "né"])}, ("choice", '["yes", "n\\u00e9"]')),
        ({"grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
        ({"type": "text"}, None),
        ({"type": "json_object"}, ("json", '{"type": "object"}')),
        ({"type": "json_object", "schema": SCHEMA}, ("json", TEXT)),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}, ("json", TEXT)),
        (Structure("regex", "a"), ("regex", "a")),
        (Structure("json", SCHEMA), ("json", json.dumps(SCHEMA))),
        (Structure("json", TEXT), ("json", TEXT)),
        (Structure("choice", ["yes", "né"]), ("choice", '["yes", "n\\u00e9"]')),
        (Structure("choice", '["yes", "n\\u00e9"]'), ("choice", '["yes", "n\\u00e9"]')),
    ],
)
def test_everything_becomes_one_form(given, wanted):
    wanted = wanted and Structure(*wanted)
    assert structure(given) == wanted
    params = SamplingParams.from_options(response_format=given)
    assert params.structured_outputs == wanted
    assert hash(params) == hash(SamplingParams(structured_outputs=given))


CYCLE = {}
CYCLE["items"] = CYCLE
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("json", "is 'json'; give a mapping"),
        ({}, "holds nothing; give exactly one of json, regex"),
        ({"json": SCHEMA, "regex": "a"}, "holds json, regex; give exactly one"),
        ({"jsn": SCHEMA}, "no 'jsn'; did you mean 'json'"),
        (Structure("jsn", TEXT), "kind of structured_outputs is 'jsn'; did you mean 'json'"),
        (Structure(["json"], TEXT), "kind of structured_outputs is"),
        (Structure("json", 5), "json of structured_outputs is 5; give a schema"),
        (Structure("json", "{"), "json of structured_outputs is no JSON"),
        (Structure("regex", SCHEMA), "regex of structured_outputs is"),
        (Structure("choice", "yes"), "choice of structured_outputs is no JSON list"),
        (Structure("choice", '"yes"'), "give a list of strings"),
        ({1: SCHEMA}, "no 1"),
        ({10**5000: SCHEMA}, "number of 16610 bits"),
        ({"json": {"const": 10**5000}}, "cannot be written"),
        ({"type": 10**5000}, "number of 16610 bits"),
        ({"json": 3}, "json of structured_outputs is 3"),
        ({"json": False}, "holds nothing"),
        ({"json": "{"}, "is no JSON"),
        ({"json": DEEP}, "is no JSON"),
        ({"json": {"const": float("nan")}}, "cannot be written"),
        ({"json": CYCLE}, "cannot be written"),
        ({"json": {"const": {1, 2}}}, "cannot be written"),
        ({"json": {"enum": ["x" * MAX_CHARS]}}, f"allowed are up to {MAX_CHARS}"),
        ({"json_object": 1}, "give True or False"),
        ({"regex": ""}, "regex of structured_outputs has ''"),
        ({"regex": "a" * (MAX_CHARS + 1)}, "characters; allowed"),
        ({"regex": b"a"}, "give a string"),
        ({"grammar": "a\0"}, "without NUL and surrogates"),
        ({"grammar": "\ud800"}, "without NUL and surrogates"),
        ({"json": {"const": "\ud800"}}, "json of structured_outputs has .*a lone surrogate"),
        ({"json": '{"enum": ["a", "\\udfff"]}'}, "json of structured_outputs has .*a lone surrogate"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "\ud800"}}}, "has .*a lone surrogate"),
        ({"choice": "yes"}, "give a list of strings"),
        ({"choice": []}, "give a list of strings"),
        ({"choice": [1]}, "holds 1; give strings"),
        ({"choice": ["a", ""]}, "choice of structured_outputs has ''"),
        (Structure("regex", "a" * (MAX_CHARS + 1)), "characters; allowed"),
        ({"type": "json"}, "did you mean 'json_object'|json_schema"),
        ({"type": "json_schema"}, "needs"),
    ],
)
def test_everything_else_is_refused_by_name(given, words):
    with pytest.raises(SamplingError, match=words):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize("other", [{"stop_token_ids": [1]}, {"min_tokens": 2}, {"ignore_eos": True}])
def test_tokens_that_would_end_the_text_elsewhere_are_refused(other):
    with pytest.raises(SamplingError, match=f"{next(iter(other))} is .* beside structured_outputs, which say"):
        SamplingParams(structured_outputs={"regex": "a"}, **other)


def test_a_stop_string_goes_beside_a_form():
    params = SamplingParams(structured_outputs={"regex": "a"}, stop="x")
    assert (params.stop_strings, params.structure) == (("x",), Structure("regex", "a"))


# --- compiling ----------------------------------------------------------------------------------------------------

EOGS = (0, 300)


class Bytes:
    """A vocabulary: an end token, 255 bytes, some words, another end token, and a name that is no text."""

    def __init__(self, words=("ab", '{"', '": ', "true", "Paris", "é")):
        self.texts = [b"", *(bytes([i]) for i in range(1, 256)), *(w.encode() for w in words)]
        self.texts += [b""] * (302 - len(self.texts))
        self.n_vocab, self.eog_ids = len(self.texts), EOGS

    def token_bytes(self, token_id):
        return self.texts[token_id]

    def all_bytes(self, token_id):
        return self.texts[token_id] or {0: b"<end>", 299: b"[TOOL CALL]", 300: b"<turn>", 301: b"<tool>"}.get(
            token_id, b""
        )

    def tokenize(self, text, *, add_special=True, parse_special=False):
        return list(text.encode())


@pytest.fixture(scope="module", autouse=True)
def patient():
    """Usual grammars compile in milliseconds, but the machine may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars_module, "MOST_SECONDS", PATIENCE_S)
        patch.setattr(matcher_module, "_MOST_SECONDS", PATIENCE_S)
        yield


@pytest.fixture(scope="module")
def compiler():
    compiler = Grammars(Bytes())
    yield compiler
    compiler.close()


def compiled(compiler, **asked):
    return compiler.compile(structure(asked)).result(timeout=30)


def walk(compiler, rng, limit=400, **asked):
    """Returns a random text of this form, or None if the limit ended it too early."""
    vocabulary = Bytes()
    matcher, state = GrammarMatcher(compiled(compiler, **asked)), SamplerState(SamplingParams(), 0)
    state.constrain(matcher, vocabulary.n_vocab)
    rows, tokens = GrammarMasks(vocabulary.n_vocab, 1), [65, 66]  # after a prompt of two tokens
    for index in range(limit):
        rows.fill([(matcher, index, tokens)])
        words = state.masks.next(index, tokens)
        may_come = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert matcher.error is None
        ends = [token for token in may_come if token in EOGS]
        assert ends in ([], list(EOGS)), "all tokens that end a generation are alike"
        token = int(rng.choice(may_come))
        if token in EOGS:
            return b"".join(map(vocabulary.token_bytes, tokens[2:])).decode()
        tokens.append(token)
    return None


def test_random_walks_end_where_the_form_is_whole(compiler):
    rng = random.Random(1)
    for _ in range(20):
        assert re.fullmatch("(ab|c)+x?", walk(compiler, rng, regex="(ab|c)+x?"))
        assert walk(compiler, rng, choice=["Paris", "Pa", 'say "é\\"', "a\nb"]) in {"Paris", "Pa", 'say "é\\"', "a\nb"}
        text = walk(compiler, rng, json={"type": "array", "items": {"enum": [1, "é", None]}, "maxItems": 5})
        assert all(each in (1, "é", None) for each in json.loads(text))
        assert re.fullmatch("a[xyé]{2,3}", walk(compiler, rng, grammar='start: "a" b~2..3\nb: "x" | "y" | "é"'))
        assert re.fullmatch("(no ){2}[^b-z]", walk(compiler, rng, grammar='root ::= x x [a]\nx ::= "no" " "'))


def _bounds(least, most, *names):
    """Draws two numbers in order, under these names. Each may be missing."""
    pairs = st.tuples(st.integers(least, most), st.integers(least, most)).map(sorted)
    given = pairs.map(lambda pair: dict(zip(names, pair, strict=True)))
    return st.tuples(given, st.sets(st.sampled_from(names))).map(
        lambda both: {name: value for name, value in both[0].items() if name not in both[1]}
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"const": 'a\n"b'}]),
    _bounds(-1000, 1000, "minimum", "maximum").map(lambda bounds: {"type": "integer", **bounds}),
    _bounds(-9, 9, "minimum", "maximum").map(lambda bounds: {"type": "number", **bounds}),
    _bounds(0, 9, "minLength", "maxLength").map(lambda bounds: {"type": "string", **bounds}),
    st.lists(
        st.one_of(
            st.integers(-(2**53), 2**53), st.text(st.characters(exclude_categories=["Cs"]), max_size=3), st.none()
        ),
        min_size=1,
        max_size=4,
    ).map(lambda values: {"enum": values}),
)


def _nested(inner):
    names = st.sampled_from(["a", "b c", "é", '"'])
    objects = st.tuples(st.dictionaries(names, inner, max_size=3), st.sets(names))
    return st.one_of(
        st.tuples(inner, _bounds(0, 3, "minItems", "maxItems")).map(
            lambda both: {"type": "array", "items": both[0], **both[1]}
        ),
        objects.map(
            lambda both: {
                "type": "object",
                "properties": both[0],
                "required": sorted(both[1] & set(both[0])),
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
    )


def _is_valid(value, schema):
    """Returns whether JSON schema allows the value, for the schemas that are drawn above."""
    if "anyOf" in schema:
        return any(_is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known)
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kinds = {"boolean": bool, "null": type(None), "integer": int, "string": str, "array": list, "object": dict}
    right = any(
        isinstance(value, kinds.get(t, (int, float))) and isinstance(value, bool) == (t == "boolean") for t in types
    )
    size = len(value) if isinstance(value, (str, list)) else value
    low = next((schema[name] for name in ("minimum", "minLength", "minItems") if name in schema), None)
    high = next((schema[name] for name in ("maximum", "maxLength", "maxItems") if name in schema), None)
    if not right or (low is not None and size < low) or (high is not None and size > high):
        return False
    if isinstance(value, list):
        return all(_is_valid(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(
            _is_valid(each, known[name]) for name, each in value.items()
        )
    return True


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(schema=st.recursive(LEAVES, _nested, max_leaves=5), seed=st.integers(0, 2**32))
def test_random_walks_through_random_schemas_are_valid(compiler, schema, seed):
    text = walk(compiler, random.Random(seed), json=schema)
    if text is not None:
        assert _is_valid(json.loads(text), schema), text


def test_a_choice_may_hold_every_character_of_ascii(compiler):
    """Lark's lexer accepts U+007F only as an escape."""
    text = "".join(map(chr, range(1, 128)))
    assert walk(compiler, random.Random(0), choice=[text]) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "".join(map(chr, range(128)))},
        *({"const": f"a{character}b"} for character in "\0\7\b\t\n\v\f\r\x0e\x1f\x7f"),  # kinds of control characters
        {"enum": ["a\1b"]},
        {"const": {"a\n\x1f": ["\0\x7f"]}},
        {"type": "string", "pattern": "^a\x7fb$"},
        {"type": "string", "pattern": r"^a\x01\x{1f}\u000B\u{0}\U00000002\a\vb$"},
    ],
    ids=ascii,
)
@pytest.mark.parametrize("inner", [False, True], ids=["json", "lark"])
def test_every_character_that_a_schema_names_is_written(compiler, schema, inner):
    """llguidance drops characters that the schema gives no escape for."""
    guidance = {"json_allowed_escapes": grammar_sandbox.ESCAPES, "whitespace_flexible": False}
    asked = {"grammar": f"start: %json {json.dumps({**schema, 'x-guidance': guidance})}"} if inner else {"json": schema}
    text = walk(compiler, random.Random(0), **asked)
    assert json.loads(text) in (schema.get("const"), *schema.get("enum", ()), "a\x7fb", "a\1\x1f\x0b\0\2\a\vb")


def test_every_character_that_names_must_have_is_written(compiler):
    schema = {"patternProperties": {"^a\1b$": {"const": 1}}, "minProperties": 1, "additionalProperties": False}
    matcher = compiled(compiler, json={"type": "object", **schema}).first.deep_copy()
    assert matcher.validate_tokens(list(b'{"ab":1}')) < 7
    assert matcher.validate_tokens(list(b'{"a\\u0001b":1}')) == 14


def test_escapes_that_a_schema_cannot_do_without_are_not_taken_away(compiler):
    with pytest.raises(SamplingError, match="json_allowed_escapes lacks"):
        compiled(compiler, json={"const": "a\tb", "x-guidance": {"json_allowed_escapes": "n"}})


def test_a_name_that_two_spellings_would_have_is_refused(compiler):
    schema = {"type": "object", "properties": {"a\n": {"const": "\1"}}, "required": ["a\n"]}
    with pytest.raises(SamplingError, match=r'it has the name "a\\n" and a text that only'):
        compiled(compiler, json={**schema, "additionalProperties": True})
    text = walk(compiler, random.Random(0), json=schema)
    assert json.loads(text) == {"a\n": "\1"}


def test_whitespace_between_the_parts_is_bounded(compiler):
    """Otherwise an unsure model would write blanks until max_tokens."""
    matcher = compiled(compiler, json={"type": "array", "items": {"const": 1}}).first.deep_copy()
    assert matcher.validate_tokens(list(b"[\n\n  1 , 1]")) == 11
    assert matcher.validate_tokens(list(b"[  1]")) == 2
    assert matcher.validate_tokens(list(b"[\n" + b" " * 21)) == 22


@pytest.mark.parametrize("again", ['"a":"x"', '"\\u0061":"x"', '"b":"x","a":"x"'])
def test_a_name_that_the_schema_knows_cannot_come_again_as_another(compiler, again):
    """A reader of the text would use the last value."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    matcher = compiled(compiler, json={**schema, "additionalProperties": {"type": "string"}}).first.deep_copy()
    text = list(f'{{"a":1,{again}}}'.encode())
    assert matcher.validate_tokens(text) < len(text)
    assert matcher.validate_tokens(list(b'{"a":1,"c":"x"}')) == 15


@pytest.mark.parametrize("schema", [{"enum": ["a", 2**53 + 1]}, {"type": "integer", "minimum": -(2**60)}])
def test_numbers_that_are_not_exact_are_refused(compiler, schema):
    with pytest.raises(SamplingError, match="is too large; whole numbers up to"):
        compiled(compiler, json={"type": "array", "items": schema})


def test_names_that_must_be_many_must_be_required(compiler):
    names = {"type": "object", "additionalProperties": {"type": "integer"}}
    with pytest.raises(SamplingError, match="minProperties is 2; required must then name all but one"):
        compiled(compiler, json={"type": "array", "items": {**names, "minProperties": 2}})
    properties = {"minProperties": {"type": "integer"}}
    compiled(compiler, json={**names, "properties": properties, "required": ["minProperties"], "minProperties": 2})


def test_a_grammar_is_compiled_once_until_too_many_others_came(compiler, monkeypatch):
    asked = structure({"regex": "once"})
    future = compiler.compile(asked)
    assert compiler.compile(structure({"regex": "once"})) is future
    monkeypatch.setattr(grammars_module, "KEPT", 2)
    for regex in ("x", "y"):
        compiled(compiler, regex=regex)
    assert compiler.compile(asked) is not future


def test_a_verdict_is_kept_for_a_while(compiler, monkeypatch):
    future = compiler.compile(structure({"regex": "(bad"}))
    with pytest.raises(SamplingError, match=r"regex of structured_outputs is refused: .*unclosed group"):
        future.result()
    assert compiler.compile(structure({"regex": "(bad"})) is future
    monkeypatch.setattr(grammars_module, "_REMEMBER_BAD_S", 0.0)
    assert compiler.compile(structure({"regex": "(bad"})) is not future


def _chain(n, line):
    return "".join(line.format(i, i + 1) for i in range(n))


HOSTILE = {
    "groups": ({"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000}, "nested"),
    "groups in GBNF": ({"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000}, "recursion"),
    "groups in a regex": ({"regex": "(" * 60_000 + "a" + ")" * 60_000}, "nest"),
    "a chain of rules": (
        {"grammar": "start: r0\n" + _chain(9000, 'r{}: "a" r{}\n') + 'r9000: "b"'},
        "nested too deeply",
    ),
    "rules in GBNF": ({"grammar": "root ::= r0\n" + _chain(6000, 'r{} ::= "a" r{}\n') + 'r6000 ::= "b"'}, "1.5 s"),
    "doubling rules": ({"grammar": "start: A0\n" + _chain(40, "A{0}: A{1} A{1}\n") + 'A40: "b"'}, "too big|1.5 s"),
    "nested schemas": ({"json": '{"items":' * 900 + "{}" + "}" * 900}, "nested too deeply|recursion"),
    "a schema of itself": ({"json": {"$ref": "#"}}, "no text can match"),
    "a chain of schemas": (
        {"json": {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}, "$ref": "#/$defs/d0"}},
        "nested too deeply",
    ),
    "products of alternatives": (
        {"json": {"allOf": [{"anyOf": [{"pattern": f"a{i}.*b{j}"} for i in range(20)]} for j in range(12)]}},
        "too large",
    ),
    "a remainder": ({"json": {"type": "integer", "multipleOf": 1_234_577}}, "1.5 s"),
    "what is not supported": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "a look-ahead": ({"regex": "(?=a)b"}, "look-around|regex parse error"),
    "another file": ({"json": {"$ref": "http://example.com/x.json"}}, "example.com"),
    "nothing": ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "Unsatisfiable"),
    "no rule": ({"grammar": "hello"}, "grammar of structured_outputs is refused"),
    "a special token that is none": ({"grammar": "start: <nix>"}, "special token"),
}
HARMLESS = (
    {"json": {"enum": [f"v{i}" for i in range(20_000)]}},
    {"choice": [f"v{i}" for i in range(20_000)]},
    {"regex": "a{1,100000}"},
    {"grammar": 'start: "a"{1,100000}'},
)


@pytest.fixture
def hostile(case, monkeypatch):
    """Returns what is asked, and words of the error. An error other than that of the time limit may take longer."""
    asked, words = HOSTILE[case]
    monkeypatch.setattr(grammars_module, "MOST_SECONDS", 1.5 if "1.5 s" in words else PATIENCE_S)
    return asked, words


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_grammar_is_an_error_of_its_own(compiler, hostile, monkeypatch):
    compiled(compiler, regex="[a-c]+")  # the process runs
    asked, words = hostile
    with pytest.raises(SamplingError, match=words):
        compiled(compiler, **asked)
    monkeypatch.undo()
    assert walk(compiler, random.Random(0), regex="[a-c]x")


@pytest.mark.parametrize("case", ["a chain of rules", "a remainder", "what is not supported", "nothing"])
def test_a_check_refuses_what_a_compilation_would_and_compiles_nothing(hostile, monkeypatch):
    def compile_here(*args, **options):
        raise AssertionError("a matcher in this process")

    monkeypatch.setattr(grammars_module.llguidance, "LLMatcher", compile_here)
    compiler = Grammars(Bytes())
    try:
        asked, words = hostile
        with pytest.raises(SamplingError, match=words):
            compiler.check(structure(asked)).result()
        future = compiler.check(structure({"regex": "[a-c]+"}))
        assert "[a-c]+" in future.result()
        assert compiler.check(structure({"regex": "[a-c]+"})) is future
    finally:
        compiler.close()
    with pytest.raises(EngineClosedError):
        compiler.check(structure({"regex": "[a-c]+"}))


@pytest.mark.parametrize("asked", HARMLESS)
def test_large_counts_are_no_danger(compiler, asked):
    assert compiled(compiler, **asked) is not None


def test_escapes_of_gbnf_stand_for_their_characters(compiler):
    grammar = r'root ::= "\u0041\x42\\u0043\u00e9\U0001F600" [\u4e00-\u4e05] [\u0061]'
    matcher = compiled(compiler, grammar=grammar).first.deep_copy()
    text = list("AB\\u0043é\U0001f600\u4e01a".encode())
    assert matcher.consume_tokens(text)
    assert matcher.is_accepting()


@pytest.mark.parametrize(("name", "token_id"), [("<tool>", 301), ("<TOOLCALL>", 299)])
def test_names_of_special_tokens_stand_for_the_tokens(compiler, name, token_id):
    matcher = compiled(compiler, grammar=f'start: {name} "x"').first.deep_copy()
    assert matcher.consume_token(token_id)
    assert matcher.consume_token(ord("x"))
    assert matcher.is_stopped()


def test_names_of_special_tokens_in_other_brackets_stand_in_angle_brackets():
    assert [special_name(name) for name in ("<|eot|>", "[INST]", "<[a b]>")] == ["<|eot|>", "<INST>", "<ab>"]


def test_schemas_within_a_grammar_are_sound(compiler):
    lark = 'start: "x" a\na: %json {"type": "integer", "minimum": '
    with pytest.raises(SamplingError, match=r"^grammar of structured_outputs is refused: at 2\(1\): the number "):
        compiled(compiler, grammar=f"{lark}{2**60}}}\n")
    with pytest.raises(SamplingError, match=r"^tools are refused: the number .* is too large"):
        compiler.compile(structure(Structure(TOOLS, f"{lark}{2**60}}}\n"))).result(timeout=30)
    compiled(compiler, grammar=f"{lark}7}}\n")


def test_a_function_whose_schema_is_no_grammar_is_left_out_and_named(compiler):
    """The function is left out only beside other functions. Each rule says what it is for."""
    good, bad = (
        {"properties": {"a": {"type": "integer"}}},
        {"properties": {"b": {"type": "string", "pattern": "(?=a)"}}},
    )
    for family in (GENERIC, *FORMATS):
        made = grammar(family, {"f": bad, "g": good, "h": bad}, quoted, parallel=False)
        found = compiler.compile(Structure(TOOLS, made.lark)).result(timeout=30)
        assert found.left_out == ("function 'f'", "function 'h'")
        made = grammar(family, {"f": bad}, quoted, parallel=False)
        with pytest.raises(SamplingError, match=r"^tools are refused: argument 'b' of 'f': look-around, "):
            compiler.compile(Structure(TOOLS, made.lark)).result(timeout=30)
        lazy = lazy_grammar(family, {"f": bad, "g": good}, quoted, parallel=False)
        if lazy is not None:  # a strict function is enforced or refused
            with pytest.raises(SamplingError, match=r"^tools are refused: argument 'b' of 'f': look-around, "):
                compiler.compile(Structure(TOOLS, lazy.lark)).result(timeout=30)


def test_a_form_may_have_its_name_as_its_type():
    grammar = 'root ::= "a"'
    assert structure({"type": "grammar", "grammar": grammar}) == structure({"grammar": grammar})
    with pytest.raises(SamplingError, match="structured_outputs has no 'type'"):
        structure({"type": "grammar", "regex": "a"})


def test_no_caller_asks_for_the_grammar_of_tools():
    with pytest.raises(SamplingError, match="structured_outputs has no 'tools'"):
        structure({"tools": 'start: "a"'})


def test_a_grammar_that_grows_too_costly_is_an_error_of_its_own(compiler):
    doubling = "start: a0\n" + _chain(40, "a{0}: a{1} a{1}\n") + 'a40: "b"'
    matcher, state = GrammarMatcher(compiled(compiler, grammar=doubling)), SamplerState(SamplingParams(), 0)
    state.constrain(matcher, 302)
    other = GrammarMatcher(compiled(compiler, regex="b+"))
    rows = GrammarMasks(302, 1)
    for index in range(4):
        rows.fill([(matcher, index, [98] * (index + 1)), (other, index, [98] * (index + 1))])
    assert "Too many items" in matcher.error
    assert matcher.why_no_token == matcher.error
    assert not state.masks.next(3, []).any()
    assert other.error is None
    assert other.mask(3, []).any()


def test_what_many_texts_have_cost_is_no_error_of_the_next(monkeypatch):
    """The texts share a lexer, and one limit counts the states of all of them."""
    compiler = Grammars(Bytes())
    monkeypatch.setattr(grammar_sandbox, "MAX_LEXER_STATES", 80)
    asked = {"regex": "([a-f]{1,100}[0-9]){1,500}"}
    rng = random.Random(0)
    states = [SamplerState(SamplingParams(), i) for i in range(40)]
    matchers = [GrammarMatcher(compiled(compiler, **asked)) for _ in states]
    for state, matcher in zip(states, matchers, strict=True):
        state.constrain(matcher, 302)
    rows, texts = GrammarMasks(302, 2), [[1] for _ in matchers]
    for index in range(20):
        rows.fill([(matcher, index, text) for matcher, text in zip(matchers, texts, strict=True)])
        for matcher, state, text in zip(matchers, states, texts, strict=True):
            assert matcher.error is None
            words = state.masks.next(index, text)
            may_come = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            text.append(rng.choice([int(token) for token in may_come if token not in EOGS]))
    assert not any(matcher._source for matcher in matchers), "the limit was never met"
    compiler.close()


def test_what_takes_long_to_compile_is_not_compiled_again_within_a_step(monkeypatch):
    compiler = Grammars(Bytes())
    monkeypatch.setattr(grammar_sandbox, "MAX_LEXER_STATES", 20)
    monkeypatch.setattr(matcher_module, "_MOST_SECONDS", 0.0)
    asked = {"regex": "[a-z]{1,100}"}
    matcher, rows = GrammarMatcher(compiled(compiler, **asked)), GrammarMasks(302, 1)
    for index in range(40):
        rows.fill([(matcher, index, [1, *b"x" * index])])
    assert "too many states" in matcher.error
    again = GrammarMatcher(compiled(compiler, **asked))
    rows.fill([(again, 0, [1])])
    assert again.error is None
    compiler.close()


def test_a_matcher_follows_a_text_that_was_cut_back(compiler):
    matcher = GrammarMatcher(compiled(compiler, regex="abc"))
    rows = GrammarMasks(302, 1)
    for tokens in ([1], [1, 97], [1, 97, 98], [1, 97], [1, 97, 98]):
        rows.fill([(matcher, len(tokens) - 1, tokens)])
    assert matcher.error is None
    assert np.flatnonzero(np.unpackbits(matcher.mask(2, []).view(np.uint8), bitorder="little")).tolist() == [ord("c")]


def test_masks_of_many_rows_by_several_threads_are_those_of_one(compiler):
    grammars = [compiled(compiler, regex=f"[a-{letter}]{{3}}") for letter in "bcdefghij"]
    masks = []
    for threads in (1, 2):
        matchers = [GrammarMatcher(grammar) for grammar in grammars]
        rows = GrammarMasks(302, threads)
        for index in range(2):
            rows.fill([(matcher, index, [5, 97][: index + 1]) for matcher in matchers])
        masks.append([matcher.mask(1, []).copy() for matcher in matchers])
    assert np.array_equal(*masks)
    assert len({row.tobytes() for row in masks[0]}) == len(grammars)


def test_a_model_without_an_end_is_refused():
    vocabulary = Bytes()
    vocabulary.eog_ids = ()
    compiler = Grammars(vocabulary)
    with pytest.raises(SamplingError, match="end-of-generation"):
        compiled(compiler, choice=["a"])
    compiler.close()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no signals for a whole service")
def test_signals_for_the_whole_service_leave_the_trial_to_its_engine(compiler):
    """systemd signals every process of a service, but an engine that drains may still compile a request's grammar."""
    compiled(compiler, regex="x")
    process = compiler._trial._process
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
    assert compiled(compiler, regex="y") is not None
    assert compiler._trial._process is process


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows cannot stop a process")
def test_a_trial_that_another_process_holds_up_is_no_grammar_that_costs_much(compiler, monkeypatch):
    monkeypatch.setattr(grammars_module, "MOST_SECONDS", 0.3)
    compiled(compiler, regex="x")
    process = compiler._trial._process
    process.send_signal(signal.SIGSTOP)
    future = compiler.compile(structure({"regex": "y"}))
    time.sleep(0.5)  # longer than the limit on computing
    process.send_signal(signal.SIGCONT)
    assert future.result(timeout=PATIENCE_S) is not None
    assert compiler._trial._process is process


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no zombies")
def test_a_trial_that_was_killed_from_outside_is_no_zombie(compiler):
    compiled(compiler, regex="x")
    process = compiler._trial._process
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: process.returncode is not None)  # without a call of `poll`, which would collect the zombie
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert compiled(compiler, regex="y") is not None


def test_closing_ends_a_trial_that_is_under_way(monkeypatch):
    monkeypatch.setattr(grammars_module, "MOST_SECONDS", 600.0)
    compiler = Grammars(Bytes())
    compiled(compiler, regex="x")
    future = compiler.compile(structure({"json": {"type": "integer", "multipleOf": 1_234_577}}))
    process = compiler._trial._process
    until(future.running)
    compiler.close()
    assert future.exception(timeout=PATIENCE_S) is not None
    assert process.wait(PATIENCE_S) in (-9, 1)  # killed; 1 on Windows


# --- waiting for a grammar ----------------------------------------------------------------------------------------


def test_sequences_enter_when_their_grammar_is_ready_and_fail_with_it(compiler, monkeypatch):
    monkeypatch.setattr(grammars_module, "MOST_SECONDS", 0.1)
    entered = []
    unready = PendingGrammars()

    def enter(sequence, compiled):
        entered.append(sequence.request.request_id)

    vocabulary = Vocabulary(256, lambda token: token == 0, lambda token: b"a", lambda token: b"a")
    ready = compiler.compile(structure({"regex": "ready"}))
    ready.result()
    slow = Future()
    for name, future in (("ready", ready), ("slow", slow), ("aborted", slow)):
        unready.add(Sequence(Request(name, (1,)), vocabulary, 64), future, enter)
    late = Request("late", (1,), SamplingParams(deadline_s=600))
    unready.add(Sequence(late, vocabulary, 64), slow, enter)
    assert entered == ["ready"]
    assert unready.step(0.0, enter) == []
    monkeypatch.setattr("time.perf_counter", lambda: late.arrival_s + 601)
    [missed] = unready.step(0.0, enter)
    assert "deadline_s is 600" in missed.finished.error
    assert unready.num_missed == 1
    assert "slow" in unready
    assert unready.abort("aborted", None).finished.finish_reason == "abort"
    hostile = compiler.compile(structure({"json": {"type": "integer", "multipleOf": 1_234_579}}))
    slow.set_exception(hostile.exception())
    [failed] = unready.step(PATIENCE_S, enter)
    assert failed.request_id == "slow"
    assert failed.finished.finish_reason == "error"
    assert "0.1 s" in failed.finished.error
    assert entered == ["ready"]


def test_a_token_that_ends_the_thinking_may_begin_the_form(compiler):
    model = Letters()
    tokens = ReasoningTokens(ReasoningTags("qwen3", "<think>", "</think>", "</think>"), model)
    following = ReasoningTracker(tokens, Reasoning(tokens.tags, Thinking.INSIDE))
    matcher = GrammarMatcher(compiled(compiler, regex="[{]a+"), following)
    ids = [*b"Hm</think", model.ids[">{"]]
    GrammarMasks(302, 1).fill([(matcher, len(ids), ids)])
    words = matcher.mask(len(ids), ids)
    assert [at for at in range(256) if words[at // 32] >> (at % 32) & 1] == [ord("a")]
