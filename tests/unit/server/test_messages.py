"""/v1/messages: its bodies become chats, and its messages are written whole and as events."""

import json
import random
from dataclasses import replace

import pytest

from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.tool_calls import ToolCall, ToolCallDelta
from llamabatch.server.anthropic.messages_body import read_messages
from llamabatch.server.anthropic.messages_response import MessageEvents, MessageHead, message_response
from llamabatch.server.http.errors import ApiError
from llamabatch.server.request.body import Rules
from tests.unit.server.serving_clients import ready_client

HELLO = [{"role": "user", "content": "one two three"}]
TOOL = {"name": "f", "description": "It does.", "input_schema": {"type": "object", "properties": {"x": {}}}}
HEAD = MessageHead("msg_1", "tiny")


CALL = {"type": "tool_use", "id": "c", "name": "f"}


def user(*blocks):
    return {"role": "user", "content": [*blocks]}


def read(rules=None, **fields):
    return read_messages({"messages": HELLO, "max_tokens": 9, **fields}, rules or Rules())


def test_a_conversation_with_tools_is_that_of_a_chat():
    body = read(
        system=[{"type": "text", "text": "Be", "cache_control": {}}, {"type": "text", "text": "short."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    {"type": "text", "text": "So:"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "ü"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "it says"},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "tool_result", "tool_use_id": "t2"},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        tools=[TOOL],
    )  # fmt: skip
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ü"}'}}
    assert [dict(message) for message in body.conversation] == [
        {"role": "system", "content": "Be\nshort."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "So:", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "user", "content": "it says"},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "f", "parameters": TOOL["input_schema"], "description": "It does."}
    assert body.options.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ],
)
def test_the_choice_of_tools(given, choice, parallel):
    options = read(tools=[TOOL], tool_choice=given).options
    assert (options.tool_choice, options.parallel_tool_calls) == (choice, parallel)


def test_parameters():
    body = read(stop_sequences=["a", "b"], temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, service_tier="auto")
    assert (body.params.max_tokens, body.params.stop, body.params.temperature) == (9, ("a", "b"), 0.5)
    assert (body.params.top_k, body.params.top_p, body.params.min_p) == (3, 0.9, 0.1)
    thinking = read(thinking={"type": "enabled", "budget_tokens": 50})
    assert thinking.params.thinking_token_budget == 50
    assert thinking.options.kwargs == {"enable_thinking": True}
    assert read(thinking={"type": "disabled"}).options.kwargs == {"enable_thinking": False}
    assert read(thinking={"type": "adaptive"}).options.kwargs == {}
    assert read(output_config={"effort": "high"}).options.kwargs == {"reasoning_effort": "high"}
    formed = read(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert (
        formed.params.structure
        == read(output_format={"type": "json_schema", "schema": {"type": "object"}}).params.structure
    )
    assert formed.params.structure is not None
    assert read(metadata={"user_id": "u"}, cache_control={"type": "ephemeral"}).ignored == ()
    assert read(betas=["x"]).ignored == ("betas",)


def test_a_line_for_a_service_is_no_part_of_the_prompt():
    line = "x-anthropic-billing-header: cc_version=2.1.1; cch=00000;"
    for system in (f"{line}\nBe brief.", [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]):
        body = read(system=system)
        assert body.conversation[0] == {"role": "system", "content": "Be brief."}
        assert body.ignored == ("system[0]:x-anthropic-billing-header",)
    assert read(system=[{"type": "text", "text": line}]).conversation[0]["role"] == "user"
    assert read(system="x-request-header: is a name").conversation[0]["content"] == "x-request-header: is a name"


def test_documents_of_text_are_text_and_media_of_a_history_say_what_they_are():
    text = {"type": "text", "media_type": "text/plain", "data": "Once."}
    tale = {"type": "document", "title": "Tale", "source": text}
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Twice."}]}}
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    answer = {"role": "assistant", "content": "A cat."}
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\] is a block of type 'image'"):
        read(messages=[user(image), user(tale)])
    body = read(messages=[user(image), answer, user(tale, parts), user(result)])
    assert [message["content"] for message in body.conversation] == [
        "[image: not shown, as this model reads text alone]",
        "A cat.",
        "Tale\nOnce.\nTwice.",
        "[image: not shown, as this model reads text alone]",
    ]
    assert body.ignored == ("messages[0].content[0]:image", "messages[3].content[0].content[0]:image")
    with pytest.raises(ApiError, match="a block of type 'document'"):
        read(messages=[user({"type": "document", "source": {"type": "base64", "data": "x"}})])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": None}, "the body has no messages"),
        ({"messages": "Hi"}, "messages is 'Hi'; give a list"),
        ({"messages": [{"role": "robot", "content": ""}]}, r"messages\[0\]\.role is 'robot'"),
        ({"messages": [user({"type": "image"})]}, r"messages\[0\]\.content\[0\] is a block of type 'image'"),
        ({"messages": [user({"type": "tool_result"})]}, "tool_use_id is null"),
        ({"messages": [{"role": "assistant", "content": [CALL | {"input": 5}]}]}, "input is 5; give an object"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\]\.input_schema is null"),
        ({"tool_choice": {"type": "some"}}, r"tool_choice\.type is 'some'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, r"thinking\.budget_tokens is 0"),
        ({"output_format": {"type": "xml"}}, "output_format is"),
        ({"stop_sequences": "x"}, "stop_sequences is 'x'"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_400_that_names_it(fields, words):
    with pytest.raises(ApiError, match=words) as caught:
        read(**fields)
    assert caught.value.status == 400


SILENT = Rules(variables=frozenset(), thinks=False)


@pytest.mark.parametrize(
    ("rules", "fields", "kwargs", "budget", "ignored"),
    [
        (SILENT, {"thinking": {"type": "enabled", "budget_tokens": 50}}, {}, None, ("thinking",)),
        (
            SILENT, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {}, None, ("output_config.effort",),
        ),
        (SILENT, {"thinking": {"type": "disabled"}}, {}, None, ()),
        (
            Rules(variables=frozenset({"enable_thinking"}), thinks=False),
            {"thinking": {"type": "enabled", "budget_tokens": 50}},
            {"enable_thinking": True}, None, ("thinking.budget_tokens",),
        ),
        (Rules(variables=frozenset()), {"thinking": {"type": "enabled", "budget_tokens": 50}}, {}, 50, ()),
        (Rules(variables=frozenset()), {"thinking": {"type": "disabled"}}, {}, None, ("thinking",)),
        (
            SILENT, {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"x": 1}},
            {"x": 1}, None, (),
        ),
    ],
)  # fmt: skip
def test_thinking_is_a_wish_that_a_model_may_have_no_use_for(rules, fields, kwargs, budget, ignored):
    body = read(rules, **fields)
    assert (dict(body.options.kwargs), body.params.thinking_token_budget, body.ignored) == (kwargs, budget, ignored)
    if ignored:
        with pytest.raises(ApiError, match=f"{ignored[0]} is .*, which has no effect") as caught:
            read(replace(rules, strict=True), **fields)
        assert (caught.value.status, caught.value.param) == (400, ignored[0].partition(".")[0])


def test_programs_that_always_ask_for_thinking_are_answered_by_a_model_without():
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 4000, "messages": HELLO}
    asked = {
        "/v1/messages": (thinking, "thinking"),
        "/v1/messages/count_tokens": (thinking, "thinking"),
        "/v1/responses": ({"input": "one", "reasoning": {"effort": "medium"}}, "reasoning.effort"),
        "/v1/chat/completions": ({"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort"),
        "/tokenize": ({"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort"),
    }
    for strict in (False, True):
        with ready_client(server={"chat_template": "chatml", "strict": strict}) as client:
            for path, (body, name) in asked.items():
                response = client.post(path, json=body)
                assert response.status_code == (400 if strict else 200), (path, response.text)
                assert strict or response.headers["x-llamabatch-ignored"] == name
                assert not strict or name in response.json()["error"]["message"]
                assert strict or path != "/v1/responses" or response.json()["reasoning"]["effort"] is None


def whole(text="", thinking=None, calls=(), reason=FinishReason.STOP, stop=None, n_tokens=7):
    completion = CompletionOutput(0, text, tuple(range(n_tokens)), reason, stop, None, None, thinking, tuple(calls))
    return RequestOutput("r", "p", (1, 2, 3, 4), (completion,), num_cached_tokens=3)


CALLS = (ToolCall("t1", "f", '{"x": 1}'), ToolCall("t2", "g", "{}"))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (whole("Hi"), "end_turn"),
        (whole("Hi", stop="\n"), "stop_sequence"),
        (whole("Hi", stop=5), "end_turn"),
        (whole("Hi", reason=FinishReason.LENGTH), "max_tokens"),
        (whole("", "hm", CALLS), "tool_use"),
        (whole("", "hm"), "end_turn"),
        (whole("So", calls=CALLS[:1]), "tool_use"),
    ],
)
def test_a_stream_of_any_cuts_is_the_whole_message(output, reason):
    expected = message_response(HEAD, [output], read())
    assert expected["stop_reason"] == reason
    assert expected["stop_sequence"] == ("\n" if reason == "stop_sequence" else None)
    assert expected["usage"] == {
        "input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3, "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 0}, "cache_creation": None, "inference_geo": None,
        "server_tool_use": None, "service_tier": "standard",
    }  # fmt: skip
    for seed in range(50):
        events = MessageEvents(HEAD, read(), 4)
        data = b"".join(events.feed(part) for part in pieces(output, random.Random(seed))) + b"".join(events.end())
        assert rebuilt(data.decode()) == expected


def pieces(output, rng):
    """Returns the outputs of steps that together make this output, cut at random."""
    [one] = output.outputs
    parts = [{"reasoning": part} for part in cut(one.reasoning or "", rng)] + [{"text": p} for p in cut(one.text, rng)]
    for number, call in enumerate(one.tool_calls):
        arguments = cut(call.arguments, rng)
        parts.append({"tool_calls": (ToolCallDelta(number, call.id, call.name),)})
        parts += [{"tool_calls": (ToolCallDelta(number, arguments=part),)} for part in arguments]
    parts.append({"finished": output, "called_tools": bool(one.tool_calls)})
    outputs = [SequenceOutput("r", (1,), **{"text": "", **part}) for part in parts]
    while outputs:
        n = rng.randrange(1, 4)
        yield outputs[:n]
        del outputs[:n]


def cut(text, rng):
    parts = []
    while text:
        n = rng.randrange(1, 4)
        parts.append(text[:n])
        text = text[n:]
    return parts


def rebuilt(data):
    """Returns the message that a client makes from the events. Checks the order of the events."""
    message, is_open = None, False
    for event in data.strip().split("\n\n"):
        name, body = event.split("\n")
        body = json.loads(body.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        if body["type"] == "message_start":
            assert message is None
            message = body["message"]
        elif body["type"] == "content_block_start":
            assert not is_open
            assert body["index"] == len(message["content"])
            message["content"].append({**body["content_block"], "json": ""})
            is_open = True
        elif body["type"] == "content_block_delta":
            assert is_open
            block, delta = message["content"][body["index"]], body["delta"]
            name = {"input_json_delta": "json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            block[name] += delta.get(name, delta.get("partial_json"))
        elif body["type"] == "content_block_stop":
            block = message["content"][body["index"]]
            if (text := block.pop("json")) or block["type"] == "tool_use":
                block["input"] = json.loads(text)
            is_open = False
        elif body["type"] == "message_delta":
            message |= body["delta"] | {"usage": body["usage"]}
    assert not is_open
    assert body["type"] == "message_stop"
    return message


def test_arguments_that_are_no_object_are_kept():
    [block] = message_response(HEAD, [whole(calls=[ToolCall("t", "f", '{"x": ')])], read())["content"]
    assert block["input"] == {"INVALID_JSON": '{"x": '}


def test_the_endpoint(client):
    body = {"messages": HELLO, "max_tokens": 20}
    message = client.post("/v1/messages", json=body).json()
    assert message["content"] == [{"type": "text", "text": "one two three", "citations": []}]
    streamed = client.post("/v1/messages", json=body | {"stream": True})
    assert rebuilt(streamed.text)["content"] == message["content"]
    count = client.post("/v1/messages/count_tokens", json={"messages": HELLO}).json()
    assert count == {"input_tokens": message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]}


def test_errors_have_anthropics_shape(client):
    response = client.post("/v1/messages", json={"messages": HELLO, "temperature": -1})
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    with ready_client(server={"api_keys": ("secret",)}) as guarded:
        refused = guarded.post("/v1/messages", json={"messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        body = {"messages": HELLO, "max_tokens": 4}
        assert guarded.post("/v1/messages", json=body, headers={"x-api-key": "secret"}).status_code == 200


def test_blocks_of_searches_and_unknown_ones_do_not_lock_a_history():
    found = {"type": "search_result", "title": "T", "source": "http://x", "content": [{"type": "text", "text": "body"}]}
    result = [{"type": "tool_reference", "tool_name": "WebFetch"}, found, {"type": "hologram"}]
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    history = [
        *HELLO,
        {"role": "assistant", "content": [use]},
        user({"type": "tool_result", "tool_use_id": "t1", "content": result}),
    ]
    body = read(messages=history)
    texts = ["WebFetch", "T", "http://x", "body", "[hologram: not shown, as this model reads text alone]"]
    assert body.conversation[-1] == {"role": "tool", "tool_call_id": "t1", "content": "\n".join(texts)}
    assert body.ignored == ("messages[2].content[0].content[2]:hologram",)
    with pytest.raises(ApiError, match="hologram"):
        read(messages=[*HELLO, user({"type": "hologram"})])  # the last message asks about it


def test_an_answer_goes_on_with_its_beginning():
    assert read(messages=[*HELLO, {"role": "assistant", "content": "The answer"}]).options.continue_final_message
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    for last in ({"role": "assistant", "content": [use]}, *HELLO):
        assert not read(messages=[*HELLO, last]).options.continue_final_message


def test_no_tokens_are_an_empty_message():
    with ready_client("one two three") as client:
        body = {"messages": HELLO, "max_tokens": 0}
        made = client.post("/v1/messages", json=body).json()
        assert (made["content"][0]["text"], made["usage"]["output_tokens"]) == ("", 0)
        assert made["stop_reason"] == "max_tokens"
        events = client.post("/v1/messages", json=body | {"stream": True}).text
        assert "text_delta" not in events
        assert '"output_tokens":0' in events


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop_sequences": [3]}, r"^stop_sequences is \[3\]"),
        ({"messages": []}, "^messages is an empty list"),
    ],
)
def test_errors_have_the_names_of_this_dialect(fields, says):
    with pytest.raises(ApiError, match=says):
        read(**fields)


@pytest.mark.parametrize(("given", "arguments"), [(None, ""), ("", ""), ('{"path" : ",', '{"path" : ",'), ({}, "{}")])
def test_the_input_of_a_call_may_be_what_a_client_has_of_it(given, arguments):
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [CALL | {"input": given}]}]
    [_, answer] = read(messages=messages).conversation
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
