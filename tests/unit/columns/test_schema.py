"""Types of columns from JSON schemas, and values from answers."""

import enum
from typing import Literal

import pytest

from llamabatch.columns.generate import Generate
from llamabatch.columns.schema import BOOLEAN, INTEGER, JSON, NUMBER, STRING, Kind, Schema

pydantic = pytest.importorskip("pydantic")


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Inner(pydantic.BaseModel):
    x: int


class Review(pydantic.BaseModel):
    mood: Mood
    grade: Literal[1, 2, 3]
    why: str | None = None
    share: int | float = 0
    tags: list[str] = pydantic.Field(default_factory=list)
    numbers: list[int] | None = None
    inner: Inner | None = None
    inners: list[Inner] = pydantic.Field(default_factory=list)
    either: int | str = 0


def test_types_of_a_pydantic_class():
    assert {field.name: field.kind for field in Schema.of(Review).fields} == {
        "mood": Kind(STRING),
        "grade": Kind(INTEGER),
        "why": Kind(STRING),
        "share": Kind(NUMBER),
        "tags": Kind(STRING, is_list=True),
        "numbers": Kind(INTEGER, is_list=True),
        "inner": Kind(JSON),
        "inners": Kind(JSON),
        "either": Kind(JSON),
    }


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "boolean"}, Kind(BOOLEAN)),
        ({"type": ["integer", "null"]}, Kind(INTEGER)),
        ({"type": ["integer", "string"]}, Kind(JSON)),
        ({"enum": ["a", None]}, Kind(STRING)),
        ({"enum": ["a", 1]}, Kind(JSON)),
        ({"const": 1.5}, Kind(NUMBER)),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, Kind(NUMBER)),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, Kind(STRING)),
        ({"$ref": "#/$defs/loop"}, Kind(JSON)),
        ({"$ref": "#/$defs/tree"}, Kind(JSON)),
        ({"$ref": "https://example.org/schema"}, Kind(JSON)),
        ({"type": "array"}, Kind(JSON)),
        ({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}, Kind(JSON)),
        (True, Kind(JSON)),
        ({}, Kind(JSON)),
    ],
)
def test_types(schema, kind):
    defs = {
        "a/b": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "string"}]},
    }
    [field] = Schema.of({"type": "object", "properties": {"f": schema}, "$defs": defs}).fields
    assert field.kind == kind


def test_values_of_an_answer():
    values = Schema.of(Review).values(
        '{"mood": "good", "grade": 2.0, "share": 1, "tags": ["a", null], "inner": {"x": 1}}'
    )
    assert values["grade"] == 2
    assert type(values["grade"]) is int
    assert type(values["share"]) is float
    assert (values["tags"], values["inner"], values["why"], values["numbers"]) == (["a", None], '{"x": 1}', None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the answer is no JSON"),
        ("[" * 100_000, "nested too deeply|no JSON"),
        ("[1]", "and no object"),
        ('{"mood": 3}', "mood of the answer is 3, and not a string"),
        ('{"grade": true}', "grade of the answer is True, and not a whole number"),
        ('{"grade": 1e300}', "not a whole number of 64 bits"),
        ('{"share": NaN}', "not a number"),
        ('{"share": "1"}', "not a number"),
        ('{"tags": "a"}', "and not a list"),
        ('{"tags": [1]}', "and not a string"),
    ],
)
def test_an_answer_that_does_not_fit(text, message):
    with pytest.raises(ValueError, match=message):
        Schema.of(Review).values(text)


def test_parts_that_the_outputs_need_not_follow_are_told(caplog):
    schema = {"type": "object", "properties": {"where": {"type": "string", "format": "path"}}}
    Generate("tiny", prompt="{{ text }}", schema=schema).close()
    assert caplog.messages == ["the outputs need not follow these parts of the schema: format 'path'"]
