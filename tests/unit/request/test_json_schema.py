"""Parts of a JSON schema that a grammar cannot enforce are left out and named, or refused. Unique items may work."""

import json

import pytest

from llamabatch import SamplingParams
from llamabatch.errors import SamplingError
from llamabatch.request.json_schema import UNHELD, read


def form(schema, **more):
    found = SamplingParams(structured_outputs={"json": schema, **more}).structure
    return json.loads(found.text), found.not_held


def test_a_schema_that_is_held_stays():
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "date"}, "not": {"enum": [{"if": 1, "format": "x"}]}},
        "required": ["not"],
        "default": {"contains": 1},
        "additionalProperties": False,
    }
    assert form(schema) == (schema, ())


@pytest.mark.parametrize("name", ["path", "password", "json-string", "binary", "int32", "regex"])
def test_an_unknown_format_is_an_annotation(name):
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "format": name}]}}}
    found, not_held = form(schema)
    assert found["properties"] == {"a": {"anyOf": [{"type": "string"}]}}
    assert not_held == (f"format {name!r}",)


@pytest.mark.parametrize("key", UNHELD)
def test_a_keyword_that_no_grammar_holds_is_refused_or_named(key):
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {key: {"maxLength": 3}}}}}
    with pytest.raises(SamplingError, match=f"^{key} of a JSON schema is .*lenient"):
        form(schema)
    found, not_held = form(schema, lenient=True)
    assert found["items"]["properties"] == {"a": {}}
    assert not_held == (key,)


def test_a_null_is_no_keyword_and_is_named():
    schema = {"type": "object", "required": None, "properties": {"a": {"enum": None, "const": None}}}
    found, not_held = form(schema)
    assert (found["properties"], not_held) == ({"a": {"const": None}}, ("required null", "enum null"))


def test_property_names_that_are_strings_say_nothing():
    schema = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}
    assert form(schema) == ({"type": "object", "additionalProperties": {"type": "number"}}, ())


def test_a_set_of_an_enumeration_holds():
    color = {"enum": ["red", "blue", "red"]}
    for items in (color, {"$ref": "#/$defs/Color"}):
        schema = {"type": "array", "items": items, "uniqueItems": True, "title": "Colors", "$defs": {"Color": color}}
        found, not_held = form(schema)
        lists = [[each["const"] for each in one["prefixItems"]] for one in found["anyOf"]]
        assert sorted(lists) == [[], ["blue"], ["blue", "red"], ["red"], ["red", "blue"]]
        assert (found["title"], not_held) == ("Colors", ())
    found, _ = form({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2})
    assert len(found["anyOf"]) == 2


@pytest.mark.parametrize(
    ("items", "values"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 3}, {1, 2, 3}),
        ({"anyOf": [{"const": 1}, {"enum": [1, 2]}, {"type": "null"}]}, {1, 2, None}),
        ({"type": "integer", "minimum": 1, "maximum": 3, "multipleOf": 2}, None),
        ({"type": "integer", "minimum": 1, "maximum": 1e9}, None),
        ({"anyOf": [{"const": 1}, {"type": "string"}]}, None),
    ],
)
def test_a_set_of_a_few_values_holds(items, values):
    schema = {"type": "array", "items": items, "uniqueItems": True, "maxItems": 2}
    found, not_held = form(schema, lenient=True)
    if values is None:
        assert not_held == ("uniqueItems",)
    else:
        assert {each["const"] for one in found["anyOf"] for each in one["prefixItems"]} == values


A = {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    ("schema", "n_closed"),
    [
        ({"type": "object", "properties": {"x": A, "y": {"type": "array", "items": A}}}, 3),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, 1),
        ({"anyOf": [A, {"properties": {"b": {}}}]}, 2),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]}, 1),
        ({"type": ["object", "null"], "properties": {}}, 1),
        ({"type": "object"}, 0),
        ({**A, "additionalProperties": {"type": "integer"}}, 0),
        ({**A, "required": ["a", "b"]}, 0),
        ({**A, "minProperties": 2}, 0),
        ({"allOf": [A, {"properties": {"b": {}}}]}, 0),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]}, 0),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A", "properties": {"b": {}}}, 0),
        ({**A, "oneOf": [{"properties": {"b": {}}}, {"properties": {"c": A}}]}, 1),
        ({"const": {"properties": {"a": 1}}}, 0),
    ],
)
def test_an_object_has_only_the_properties_that_the_schema_names(schema, n_closed):
    """It may have others if the schema allows or needs others, or joins several schemas in one object."""
    found, _ = form(schema)
    assert json.dumps(found).count('"additionalProperties": false') == n_closed


def test_of_many_values_the_lists_are_in_order():
    found, _ = read({"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True}, lenient=False)
    lists = [[each["const"] for each in one["prefixItems"]] for one in found["anyOf"]]
    assert len(lists) == 2**9
    assert all(one == sorted(one) for one in lists)


def test_unique_items_of_any_kind_are_refused_or_named():
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(SamplingError, match="uniqueItems of a JSON schema works where items has few values"):
        form(schema)
    assert form(schema, lenient=True) == ({"type": "array", "items": {"type": "string"}}, ("uniqueItems",))
    assert form({**schema, "maxItems": 1}) == ({"type": "array", "items": {"type": "string"}, "maxItems": 1}, ())
    assert form({**schema, "uniqueItems": False})[1] == ()


def test_the_names_cross_to_another_process_and_lenient_is_for_json():
    params = SamplingParams(structured_outputs={"json": {"not": {}}, "lenient": True, "enable_in_reasoning": True})
    again = SamplingParams(structured_outputs=params.structure)
    assert again == params
    assert (again.structure.not_held, again.structure.in_reasoning) == (("not",), True)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}, "lenient": True}
    assert SamplingParams(response_format=wanted).structure.not_held == ("not",)
    with pytest.raises(SamplingError, match="lenient is True with regex"):
        SamplingParams(structured_outputs={"regex": "a", "lenient": True})
    with pytest.raises(SamplingError, match="lenient is 3"):
        SamplingParams(structured_outputs={"json": {}, "lenient": 3})


def test_schemas_in_another_place_to_which_references_lead_are_read_too():
    parts = {"schemas": {"P": {"type": "string", "format": "password", "maxLength": None}, "not": {"if": 1}}}
    schema = {"properties": {"a": {"$ref": "#/components/schemas/P"}}, "components": parts}
    found, not_held = form(schema)
    assert found["components"]["schemas"] == {"P": {"type": "string"}, "not": {"if": 1}}
    assert not_held == ("format 'password'", "maxLength null")
    parts["schemas"]["P"] = {"not": {}}
    with pytest.raises(SamplingError, match="not of a JSON schema"):
        form(schema)
