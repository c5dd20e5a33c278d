"""ToolCall and ToolCallDelta: their parsed arguments and OpenAI's shapes."""

import pytest

from llamabatch.request.tool_calls import ToolCall, ToolCallDelta, in_order


@pytest.mark.parametrize("arguments", ["", '{"city": "Os', "[1]", "null", "[" * 100_000])
def test_arguments_that_are_no_object_parse_to_nothing(arguments):
    assert ToolCall("call_1", "weather", arguments).parsed is None


def test_only_the_first_delta_names_the_call():
    first, later = ToolCallDelta(1, "call_1", "weather", "{"), ToolCallDelta(1, arguments="}")
    assert first.to_openai() == {
        "index": 1,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": "{"},
    }
    assert later.to_openai() == {"index": 1, "function": {"arguments": "}"}}


def test_text_and_calls_come_in_the_order_of_the_model():
    first, second = ToolCall("a", "f", "{}", 2), ToolCall("b", "f", "{}", 5)
    assert list(in_order("12345", [first, second])) == ["12", first, "345", second]
    assert list(in_order("1234567", [first, second])) == ["12", first, "345", second, "67"]
    unknown = ToolCall("c", "f", "{}")
    assert list(in_order("text", [unknown, unknown])) == ["text", unknown, unknown]
    assert list(in_order("", [])) == []


def test_a_piece_has_the_rest_of_a_call_before_the_text_behind_it():
    rest, begun = ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "b", "f", "{", 13)
    assert list(in_order("345678", [rest, begun], 10)) == [rest, "345", begun, "678"]
    assert list(in_order("345", [ToolCallDelta(0, "a", "f", "{}", 10)], 10))[1] == "345"
