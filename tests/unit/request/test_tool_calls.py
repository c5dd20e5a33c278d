"""ToolCall and ToolCallDelta: their parsed arguments and OpenAI's shapes."""

import pytest

from llamabatch.request.tool_calls import ToolCall, ToolCallDelta


def test_arguments_are_parsed():
    assert ToolCall("call_1", "weather", '{"city": "Oslo"}').parsed == {"city": "Oslo"}


@pytest.mark.parametrize("arguments", ["", '{"city": "Os', "[1]", "null", "[" * 100_000])
def test_arguments_that_are_no_object_parse_to_nothing(arguments):
    assert ToolCall("call_1", "weather", arguments).parsed is None


def test_a_call_has_openais_shape():
    assert ToolCall("call_1", "weather", "{}").to_openai() == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": "{}"},
    }


def test_only_the_first_delta_names_the_call():
    first, later = ToolCallDelta(1, "call_1", "weather", "{"), ToolCallDelta(1, arguments="}")
    assert first.to_openai() == {
        "index": 1,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": "{"},
    }
    assert later.to_openai() == {"index": 1, "function": {"arguments": "}"}}
