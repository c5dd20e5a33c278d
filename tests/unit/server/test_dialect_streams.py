"""Answers of a scripted model to /v1/responses and /v1/messages over HTTP: a stream has what the whole answer has."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llamabatch.chat.output_parser import joined_calls
from llamabatch.chat.tool_parsers import ToolParser, hermes
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.server.anthropic.messages_response import MessageEvents
from llamabatch.server.openai.responses_response import ResponseEvents
from tests.unit.entrypoints.test_tools import HERMES
from tests.unit.server import test_messages, test_responses
from tests.unit.server.serving_clients import ready_client

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
EMPTY_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
PIECES = (
    *("So", "<b>", " and ", "\n", "\n\n", "STOP here", "<think>hm</think>", "<think>", "</think>", "<think></think>"),
    *("<think>\n\n</think>", CALL, EMPTY_CALL, "<tool_call>", '{"name"', "\u00e9\U0001f600", "  "),
    '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>',
)
TOOL = {"name": "f", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def model():
    """A model that answers with its attribute `text`."""
    model = SimpleNamespace(text="")
    options = {"reasoning_tags": ("<think>", "</think>"), "server": {"chat_template": HERMES}}
    with ready_client(lambda request: model.text, **options) as model.client:
        yield model


def both(model, path, body):
    """Returns the whole answer, and the answer that a client makes from a stream's events."""
    made = model.client.post(path, json=body)
    assert made.status_code == 200, made.text
    streamed = model.client.post(path, json=body | {"stream": True})
    return made.json(), (test_responses if path == "/v1/responses" else test_messages).rebuilt(streamed.text)


def response_parts(document):
    """Returns the thinking, the texts and calls in order, the kinds of items, the status and the usage."""
    thinking, parts = "", []
    for item in document["output"]:
        if item["type"] == "function_call":
            parts.append((item["name"], item["arguments"]))
        else:
            joined = "".join(part["text"] for part in item["content"])
            if item["type"] == "reasoning":
                thinking += joined
            else:
                add_text(parts, joined)
    kinds = {item["type"] for item in document["output"]}
    return thinking, parts, kinds, document["status"], document["usage"]


def add_text(parts, text):
    """Adds a text. Texts before and after thinking become one text."""
    if parts and isinstance(parts[-1], str):
        parts[-1] += text
    else:
        parts.append(text)


def message_parts(document):
    blocks = document["content"]
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    parts = []
    for block in blocks:
        if block["type"] == "tool_use":
            parts.append((block["name"], block["input"]))
        elif block["type"] == "text":
            add_text(parts, block["text"])
    kinds = {block["type"] for block in blocks}
    return thinking, parts, kinds, document["stop_reason"], document["stop_sequence"], document["usage"]


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


CALLS_WITHIN = f"First.{CALL}\nThen.\n{EMPTY_CALL}{EMPTY_CALL} Last."
ORDER = ["First.", ("f", {"x": 1}), "\nThen.\n", ("f", {}), ("f", {}), " Last."]


def test_text_behind_calls_keeps_its_place(model):
    model.text = CALLS_WITHIN
    body = {"input": "q", "max_output_tokens": 500, "tools": [{"type": "function", **TOOL}]}
    for document in both(model, "/v1/responses", body):
        parts = response_parts(document)[1]
        assert [part if isinstance(part, str) else (part[0], json.loads(part[1])) for part in parts] == ORDER
        assert len({item["id"] for item in document["output"]}) == len(ORDER)
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 500}
    for document in both(model, "/v1/messages", body | {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]}):
        assert message_parts(document)[1] == ORDER
    # the message of a chat stores no order of text and calls
    body = {"messages": body["messages"], "tools": [{"type": "function", "function": TOOL}]}
    message = model.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    streamed = model.client.post("/v1/chat/completions", json=body | {"stream": True}).text
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in streamed.split("\n\n")[:-2]]
    texts, arguments = "".join(delta.get("content") or "" for delta in deltas), {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    assert message["content"] == texts == "".join(part for part in ORDER if isinstance(part, str))
    assert calls == [part for part in ORDER if not isinstance(part, str)]
    assert [json.loads(arguments[index]) for index in range(3)] == [{"x": 1}, {}, {}]


@pytest.mark.parametrize("seed", range(8))
def test_a_step_may_end_a_call_and_go_on_with_text(seed):
    """A step may bring several tokens: the parser then returns the end of a call and the text after it together."""
    rng, at, outputs = random.Random(seed), 0, []
    parser = ToolParser(hermes, {"f": TOOL["parameters"]}, lambda index, name: f"call_{index}")
    while at < len(CALLS_WITHIN):
        piece = CALLS_WITHIN[at : (at := at + rng.randrange(1, 80))]
        delta = parser.feed(piece) if at < len(CALLS_WITHIN) else parser.finish(piece)
        outputs.append(SequenceOutput("r", (1,), delta.text, tool_calls=delta.tool_calls))
    text = "".join(output.text for output in outputs)
    calls = joined_calls(call for output in outputs for call in output.tool_calls)
    whole = CompletionOutput(0, text, (1,), FinishReason.STOP, tool_calls=calls)
    outputs[-1] = replace(outputs[-1], finished=RequestOutput("r", "p", (1,), (whole,)), called_tools=True)
    body = test_messages.read(tools=[{"name": "f", "input_schema": TOOL["parameters"]}])
    events = MessageEvents(test_messages.HEAD, body, 1)
    document = test_messages.rebuilt((events.feed(outputs) + b"".join(events.end())).decode())
    assert message_parts(document)[1] == ORDER
    head = test_responses.head()
    streamed = ResponseEvents(head)
    document = test_responses.rebuilt((streamed.feed(outputs) + b"".join(streamed.end())).decode())
    parts = response_parts(document)[1]
    assert [part if isinstance(part, str) else (part[0], json.loads(part[1])) for part in parts] == ORDER


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
        assert whole["container"] is whole["stop_details"] is None
        assert whole["content"][0]["citations"] == []
