"""structural_tag: free text, with parts in a form that begins with a trigger."""

import json
import random
import re

import pytest

from llamabatch.errors import SamplingError
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.structured_outputs import Structure, structure
from llamabatch.sampling.grammar_compiler import Grammars
from tests.unit.sampling.test_grammars import Bytes, compiled, patient, walk  # noqa: F401

INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
BOOLEAN = {"type": "boolean"}
OLDER = {
    "structures": [
        {"begin": "<f=a>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=b>", "schema": BOOLEAN, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAG_A = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": "</f>"}
TAG_B = {"type": "tag", "begin": "<f=b>", "content": {"type": "json_schema", "json_schema": BOOLEAN}, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG_A, TAG_B]}
SPECIAL = {"begin": "<tool>", "content": {"type": "regex", "pattern": "[0-9/]+"}, "end": "[TOOL CALL]"}
ANY = {"type": "any_text"}


def const(text):
    return {"type": "const_string", "value": text}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def thought(content=ANY):
    return {"type": "tag", "begin": "<t>", "content": content, "end": "</t>"}


def separated(**options):
    return {"type": "tags_with_separator", "tags": [TAG_A], "separator": ", ", **options}


# name -> (format, texts of this format, texts that are not even the beginning of such a text)
FORMS = {
    "the older form": (
        OLDER,
        ["", "hi", "x<f=a>7</f>y<f=b>true</f>", "a <f b"],
        ["<f=c>", "<f=a>true", "<f=b>true</g"],
    ),
    "triggered": (TRIGGERED, ["", "hi", "x<f=a>7</f>y<f=b>true</f>z"], ["<f=c>", "<f=a>x", "<f=a>100"]),
    "at least one": (
        {**TRIGGERED, "at_least_one": True},
        ["<f=a>7</f>", "<f=a>7</f> x<f=b>false</f>"],
        ["x", " <f=a>"],
    ),
    "one": ({**TRIGGERED, "stop_after_first": True}, ["", "x", "x<f=a>7</f>"], ["<f=a>7</f>x", "<f=c"]),
    "exactly one": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["<f=b>true</f>"],
        ["x", "<f=b>true</f> "],
    ),
    "text": (const('a"/\n'), ['a"/\n'], ["b", 'a"/\nx']),
    "a schema": ({"type": "json_schema", "json_schema": INTEGER}, ["0", "99"], ["x", "100"]),
    "an expression": ({"type": "regex", "pattern": "a/[b\\/]{2}\n?"}, ["a/b/", "a///\n"], ["a/bc", "ab"]),
    "any text": (ANY, ["", "x\n</t>"], []),
    "a thought": (sequence(thought(), const("!")), ["<t></t>!", "<t>a<b</t>!"], ["<t>a</t>x", "x"]),
    "a thought, then calls": (sequence(thought(), TRIGGERED), ["<t>a <f=c></t>x<f=a>1</f>"], ["<t></t><f=c>"]),
    "calls in a tag": (thought(TRIGGERED), ["<t></t>", "<t>x<f=a>1</f>y</t>"], ["<t>x<f=c>", "<t>x</t>y"]),
    "either": ({"type": "or", "elements": [const("yes"), TAG_A]}, ["yes", "<f=a>1</f>"], ["no", "yes<"]),
    "separated": (separated(), ["", "<f=a>1</f>", "<f=a>1</f>, <f=a>2</f>"], ["x", "<f=a>1</f><", "<f=a>1</f>, x"]),
    "separated, at least one": (separated(at_least_one=True), ["<f=a>1</f>"], ["x"]),
    "separated, one": (separated(stop_after_first=True), ["", "<f=a>1</f>"], ["<f=a>1</f>,"]),
    "repeated": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["aba!", "x"]),
    "optional": (sequence({"type": "optional", "content": const("ab")}, const("c")), ["c", "abc"], ["x", "abx"]),
    "special tokens": (
        {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [SPECIAL]},
        ["hi", ["x", 301, "1/2", 299, "y"], [301, "1", 299, 301, "2", 299], "spelled out: <tool>x"],
        [[301, "x"], ["a", 301, 299]],
    ),
    "a special token that ends a text": (
        sequence({"type": "tag", "begin": "", "content": ANY, "end": "<tool>"}, const("x")),
        [["abc", 301, "x"], [301, "x"]],
        [["abc", 301, "y"]],
    ),
}


def ids_of(text):
    pieces = text if isinstance(text, list) else [text]
    return [token for piece in pieces for token in ([piece] if isinstance(piece, int) else piece.encode())]


@pytest.fixture(scope="module")
def compiler():
    compiler = Grammars(Bytes())
    yield compiler
    compiler.close()


def asked(given):
    return given if "structures" in given else {"type": "structural_tag", "format": given}


@pytest.mark.parametrize("name", FORMS)
def test_texts_of_the_form_and_no_others(compiler, name):
    given, right, wrong = FORMS[name]
    found = compiled(compiler, structural_tag=asked(given))
    for text in right:
        matcher, ids = found.first.deep_copy(), ids_of(text)
        assert matcher.validate_tokens(ids) == len(ids), text
        matcher.consume_tokens(ids)
        assert matcher.is_accepting(), text
    for text in wrong:
        matcher, ids = found.first.deep_copy(), ids_of(text)
        assert matcher.validate_tokens(ids) < len(ids), text


CALL = re.compile(r"<f=(?:a>([0-9]{1,2})|b>(true|false))</f>")


@pytest.mark.parametrize("given", [OLDER, TRIGGERED, {**TRIGGERED, "at_least_one": True}])
def test_whatever_is_drawn_each_trigger_begins_a_whole_part(compiler, given):
    rng, n_calls = random.Random(7), 0
    for _ in range(30):
        text = walk(compiler, rng, 60, structural_tag=asked(given))
        if text is not None:
            assert text.count("<f=") == len(CALL.findall(text))
            n_calls += text.count("<f=")
    assert n_calls > 0 or not given.get("at_least_one")


def test_both_notations_and_where_they_may_stand():
    form = structure({"structural_tag": asked(TRIGGERED)})
    assert form == Structure("structural_tag", json.dumps(asked(TRIGGERED)))
    assert structure({"structural_tag": json.dumps(asked(TRIGGERED))}) == form
    assert structure(form) == form
    params = SamplingParams.from_options(response_format=asked(TRIGGERED))
    assert json.loads(params.structure.text)["format"] == TRIGGERED
    older = SamplingParams.from_options(response_format={"type": "structural_tag", **OLDER})
    assert json.loads(older.structure.text) == OLDER
    assert structure({"structural_tag": OLDER, "enable_in_reasoning": True}).in_reasoning


DEEP = ANY
for _ in range(40):
    DEEP = sequence(DEEP)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "give a mapping"),
        ("{", "is no JSON"),
        ({}, "format of structural_tag is None"),
        ({"format": {"type": "tags"}}, "a format of type 'tags'.*'tag'"),
        ({"format": {"type": "qwen_xml_parameter"}}, "a format of type 'qwen_xml_parameter'"),
        ({"format": {**TRIGGERED, "triggers": ["<g="]}}, "begins with '<f=a>', which 0 of its triggers match"),
        ({"format": {**TRIGGERED, "triggers": ["<f", "<f="]}}, "which 2 of its triggers"),
        ({"format": {**TRIGGERED, "triggers": []}}, "triggers of structural_tag is 0 items; give a list of 1 to 256"),
        ({"format": {**TRIGGERED, "at_least_one": 1}}, "at_least_one of structural_tag is 1; give True or False"),
        ({"format": {**ANY, "excludes": ["x"]}}, "excludes of structural_tag is .*not supported"),
        ({"format": sequence(ANY, const("x"))}, "any_text without an end"),
        ({"format": sequence(TRIGGERED, const("x"))}, "triggered_tags without an end"),
        ({"format": {"type": "star", "content": ANY}}, "any_text without an end"),
        ({"format": {**TRIGGERED, "tags": [{"begin": "<f=a>", "content": ANY, "end": ""}]}}, "without an end"),
        ({"format": const(3)}, "value of structural_tag is 3; give a text"),
        ({"format": {"type": "json_schema"}}, "json_schema of structural_tag is None"),
        ({"format": {"type": "regex", "pattern": ""}}, "pattern of structural_tag is ''"),
        ({"format": DEEP}, "more than 32 deep"),
        ({"structures": [{"schema": {}}], "triggers": ["a"]}, "begins with 'None'|which 0"),
    ],
)
def test_what_is_no_structural_tag_is_refused_by_name(given, message):
    with pytest.raises(SamplingError, match=message):
        SamplingParams(structured_outputs={"structural_tag": given})


def test_a_bad_schema_within_is_refused_when_it_is_compiled(compiler):
    bad = {"type": "json_schema", "json_schema": {"type": "string", "pattern": "("}}
    with pytest.raises(SamplingError, match="structural_tag of structured_outputs is refused"):
        compiled(compiler, structural_tag={"format": bad})
