"""Answers of a scripted model to /v1/responses and /v1/messages over HTTP: a stream has what the whole answer has."""

import random

import pytest
from starlette.testclient import TestClient

from tests.unit.entrypoints.test_tools import HERMES
from tests.unit.server import test_messages, test_responses
from tests.unit.server.serving_clients import fake_app
from tests.unit.server.test_application import ready

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
EMPTY_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
PIECES = (
    *("So", "<b>", " and ", "\n", "\n\n", "STOP here", "<think>hm</think>", "<think>", "</think>", "<think></think>"),
    *("<think>\n\n</think>", CALL, EMPTY_CALL, "<tool_call>", '{"name"', "\u00e9\U0001f600", "  "),
    '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>',
)
TOOL = {"name": "f", "parameters": {"type": "object"}}


class Model:
    def __init__(self):
        self.text = ""
        app = fake_app(
            lambda request: self.text, reasoning_tags=("<think>", "</think>"), server={"chat_template": HERMES}
        )
        self.client = TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def model():
    model = Model()
    with model.client:
        ready(model.client)
        yield model


def both(model, path, body):
    """The whole answer, and the one that its events make."""
    made = model.client.post(path, json=body)
    assert made.status_code == 200, made.text
    streamed = model.client.post(path, json=body | {"stream": True})
    return made.json(), (test_responses if path == "/v1/responses" else test_messages).rebuilt(streamed.text)


def response_parts(document):
    """Thinking, text and calls; text behind a call is another message of a stream, and joined in a whole response."""
    thinking, text, calls = "", "", []
    for item in document["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            joined = "".join(part["text"] for part in item["content"])
            thinking, text = (thinking + joined, text) if item["type"] == "reasoning" else (thinking, text + joined)
    kinds = {item["type"] for item in document["output"]}
    return thinking, text, calls, kinds, document["status"], document["usage"]


def message_parts(document):
    blocks = document["content"]
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    kinds = {block["type"] for block in blocks}
    return thinking, text, calls, kinds, document["stop_reason"], document["stop_sequence"], document["usage"]


@pytest.mark.parametrize("seed", range(8))
def test_thinking_tools_and_stop_strings(model, seed):
    rng = random.Random(seed)
    for _ in range(12):
        model.text = ("<think>muse STOP " if rng.random() < 0.4 else "") + "".join(
            rng.choice(PIECES) for _ in range(rng.randrange(1, 6))
        )
        limit, stops = (rng.randrange(1, 20) if rng.random() < 0.4 else 500), rng.random() < 0.4
        response = {"input": "q", "seed": 1, "max_output_tokens": limit}
        message = {"messages": [{"role": "user", "content": "q"}], "seed": 1, "max_tokens": limit}
        if stops:
            response["stop"] = message["stop_sequences"] = ["STOP"]
        if rng.random() < 0.7:
            response["tools"] = [{"type": "function", **TOOL}]
            message["tools"] = [{"name": "f", "input_schema": TOOL["parameters"]}]
        whole, streamed = both(model, "/v1/responses", response)
        assert response_parts(whole) == response_parts(streamed), (model.text, response)
        whole, streamed = both(model, "/v1/messages", message)
        assert message_parts(whole) == message_parts(streamed), (model.text, message)


def test_an_empty_thinking_is_no_item(model):
    model.text = "<think>\n\n</think>\n\nHi"
    for whole in both(model, "/v1/responses", {"input": "q"}):
        assert [item["type"] for item in whole["output"]] == ["message"]
    for whole in both(model, "/v1/messages", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 99}):
        assert [block["type"] for block in whole["content"]] == ["text"]


def test_tokens_of_the_thinking_are_counted(model):
    model.text = "<think>one two three</think>four"
    for whole in both(model, "/v1/responses", {"input": "q"}):
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for whole in both(model, "/v1/messages", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 99}):
        assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_a_response_names_all_that_its_type_has(model):
    model.text = "Hi"
    tools = [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "strict": True}]
    for whole in both(model, "/v1/responses", {"input": "q", "tools": tools, "top_p": 0.5}):
        assert (whole["temperature"], whole["top_p"]) == (0.8, 0.5)
        assert [tool["strict"] for tool in whole["tools"]] == [False, True]
        assert whole["tools"][0]["parameters"] is whole["tools"][0]["description"] is None
    for whole in both(model, "/v1/messages", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 99}):
        assert whole["container"] is whole["stop_details"] is whole["content"][0]["citations"] is None
