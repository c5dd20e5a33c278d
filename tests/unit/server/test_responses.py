"""/v1/responses: its bodies become chats, and its responses are written whole and as events."""

import json
import random

import pytest

from llamabatch.request.outputs import FinishReason
from llamabatch.server.http.errors import ApiError
from llamabatch.server.openai.kept_responses import KeptResponses
from llamabatch.server.openai.responses_body import read_responses
from llamabatch.server.openai.responses_response import (
    ResponseEvents,
    ResponseHead,
    message_item,
    response_document,
    text_part,
)
from llamabatch.server.request.body import Rules
from tests.unit.server.test_messages import CALLS, pieces, whole

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def read(rules=None, **fields):
    return read_responses({"input": "one two three", **fields}, rules or Rules())


def test_items_are_the_messages_of_a_chat():
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in ("c1", "c2")]
    body = read(
        instructions="Be short.",
        input=[
            {"role": "user", "content": "go"},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]},
            *calls,
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "dark"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "ah"}]},
            {"type": "function_call", "call_id": "c3", "name": "g", "arguments": "{}"},
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": "second"},
            {"role": "developer", "content": [{"type": "input_text", "text": "and?"}]},
            {"role": "user", "content": None},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
    ).chat
    made = [
        {"id": name, "type": "function", "function": {"name": f, "arguments": "{}"}}
        for name, f in (("c1", "f"), ("c2", "f"), ("c3", "g"))
    ]
    assert [dict(message) for message in body.conversation] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "So:", "reasoning_content": "hm", "tool_calls": made[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "dark"},
        {"role": "assistant", "content": None, "reasoning_content": "ah", "tool_calls": made[2:]},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"role": "developer", "content": "and?"},
        {"role": "user", "content": ""},
    ]
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert body.options.tools == [{"type": "function", "function": function}]
    assert body.options.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert body.options.parallel_tool_calls is False


def test_parameters():
    body = read(max_output_tokens=7, temperature=0.5, top_p=0.9, top_logprobs=3, truncation="auto", store=True)
    assert (body.chat.params.max_tokens, body.chat.params.logprobs, body.chat.params.overflow) == (7, 3, "truncate")
    assert (body.repeated["temperature"], body.repeated["top_p"], body.repeated["truncation"]) == (0.5, 0.9, "auto")
    assert body.logprobs
    assert read(include=["message.output_text.logprobs"]).chat.params.logprobs == 0
    assert read(reasoning={"effort": "low"}).chat.options.kwargs == {"reasoning_effort": "low"}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert read(text={"format": form}).chat.params.structure is not None
    assert read(text={"format": {"type": "text"}}).chat.params.structure is None
    assert read(text={"format": form}).repeated["text"] == {"format": form}
    assert read(nonsense=1, text={"x": 1}).chat.ignored == ("nonsense", "text.x")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "the body has no input"),
        ({"input": 3}, "input is 3; give a text, or a list"),
        ({"input": [{"role": "robot", "content": ""}]}, r"input\[0\]\.role is 'robot'"),
        ({"input": [{"type": "item_reference", "id": 5}]}, r"input\[0\]\.id is 5; give a text"),
        ({"input": [{"role": "user", "content": [{"type": "image"}]}]}, r"input\[0\]\.content\[0\] is 'image'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}, {"role": "user", "content": "What?"}]},
            r"input\[0\]\.content\[0\] is 'input_image'",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, r"input\[0\]\.call_id is null"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice is"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is 'resp_1', which is not stored"),
        ({"conversation": "conv_1"}, "there are no stored conversations"),
        ({"background": True}, "background is True"),
        ({"include": "all"}, "include is 'all'"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"truncation": "some"}, "truncation is 'some'"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_400_that_names_it(fields, words):
    with pytest.raises(ApiError, match=words) as caught:
        read(**fields)
    assert caught.value.status == 400


def head(**fields):
    return ResponseHead("1", "tiny", 5, read(**fields))


@pytest.mark.parametrize(
    ("output", "kinds"),
    [
        (whole("Hi you"), ["message"]),
        (whole("Hi", reason=FinishReason.LENGTH), ["message"]),
        (whole("", reason=FinishReason.LENGTH), ["message"]),
        (whole("Hi", "hm"), ["reasoning", "message"]),
        (whole("", "hm", CALLS), ["reasoning", "function_call", "function_call"]),
        (whole("So", calls=CALLS[:1]), ["message", "function_call"]),
    ],
)
def test_a_stream_of_any_cuts_is_the_whole_response(output, kinds):
    expected = response_document(head(), [output])
    assert [item["type"] for item in expected["output"]] == kinds
    is_cut = output.finish_reason is FinishReason.LENGTH
    assert expected["status"] == ("incomplete" if is_cut else "completed")
    assert expected["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    for seed in range(50):
        events = ResponseEvents(head())
        data = b"".join(events.feed(part) for part in pieces(output, random.Random(seed))) + b"".join(events.end())
        made = rebuilt(data.decode())
        made["usage"]["output_tokens_details"] = expected["usage"]["output_tokens_details"]
        made["completed_at"] = expected["completed_at"]
        assert made == expected


def rebuilt(data):
    """Returns the response of the last event. Compares its items with those of the other events."""
    items, texts = [], {}
    *events, last = data.strip().split("\n\n")
    assert last == "data: [DONE]"
    for number, event in enumerate(events):
        name, body = event.split("\n")
        body = json.loads(body.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        assert body["sequence_number"] == number
        kind = body["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert body["output_index"] == len(items)
            assert body["item"]["status"] == "in_progress"
            texts[body["item"]["id"]] = ""
        elif kind.endswith(".delta"):
            texts[body["item_id"]] += body["delta"]
        elif kind.endswith(".done") and kind not in ("content_part.done", "output_item.done"):
            assert texts[body["item_id"]] == body.get("text", body.get("arguments"))
        elif kind == "output_item.done":
            items.append(body["item"])
    assert body["response"]["output"] == items
    assert len(texts) == len(items)
    return body["response"]


def test_an_error_within_a_stream_keeps_what_there_is():
    events = ResponseEvents(head())
    [first, *_] = pieces(whole("Hi you there"), random.Random(1))
    events.feed(first)
    last = events.error(ApiError(504, "too late")).decode().split("data: ")[1]
    document = json.loads(last)["response"]
    assert (document["status"], document["error"]["message"]) == ("failed", "too late")
    assert document["output"][0]["status"] == "incomplete"


def test_the_endpoint(client):
    body = {"input": "one two three"}
    document = client.post("/v1/responses", json=body).json()
    assert document["output"][0]["content"][0]["text"] == "one two three"
    streamed = rebuilt(client.post("/v1/responses", json=body | {"stream": True}).text)
    assert streamed["output"][0]["content"] == document["output"][0]["content"]
    count = client.post("/v1/responses/input_tokens", json=body).json()
    assert count == {"object": "response.input_tokens", "input_tokens": document["usage"]["input_tokens"]}
    assert client.post("/v1/responses", json={"input": 5}).json()["error"]["param"] == "input"


def test_some_of_the_tools_may_be_allowed():
    tools = [TOOL, TOOL | {"name": "g"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    options = read(tools=tools, tool_choice=allowed).chat.options
    assert options.forced_tools == {"g": {"type": "object"}}
    assert read(tools=tools, tool_choice=allowed | {"mode": "auto"}).chat.options.forced_tools is None
    with pytest.raises(ApiError, match=r"tool_choice.tools\[0\] is 'g'"):
        read(tools=tools, tool_choice=allowed | {"tools": ["g"]})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "^input is an empty list"),
        ({"text": {"format": {"type": "foo"}}}, r"^the type of text\.format is 'foo'"),
        ({"input": [{"type": "item_reference", "id": "fc_1"}]}, "store: false"),
    ],
)
def test_errors_have_the_names_of_this_dialect(fields, says):
    with pytest.raises(ApiError, match=says):
        read(**fields)


def test_a_response_goes_on_from_one_that_is_kept(client):
    first = client.post("/v1/responses", json={"input": "one two", "instructions": "Be short."}).json()
    assert first["store"] is True
    assert client.get(f"/v1/responses/{first['id']}").json() == first
    second = {"input": "three", "previous_response_id": first["id"]}
    whole_input = [{"role": "user", "content": "one two"}, *first["output"], {"role": "user", "content": "three"}]
    count = "/v1/responses/input_tokens"
    assert client.post(count, json=second).json() == client.post(count, json={"input": whole_input}).json()
    streamed = rebuilt(client.post("/v1/responses", json=second | {"stream": True}).text)
    assert streamed["previous_response_id"] == first["id"]
    third = {"input": [{"role": "user", "content": "four"}], "previous_response_id": streamed["id"]}
    whole_input += [*streamed["output"], *third["input"]]
    assert client.post(count, json=third).json() == client.post(count, json={"input": whole_input}).json()
    gone = client.delete(f"/v1/responses/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert client.get(f"/v1/responses/{first['id']}").status_code == 404
    assert client.delete(f"/v1/responses/{first['id']}").status_code == 404
    assert client.post(count, json=third).status_code == 200  # it has all items itself
    error = client.post("/v1/responses", json=second)
    assert (error.status_code, error.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_the_input_items_of_a_response_are_listed(client):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "5", "id": "mine"}
    said = {"role": "user", "content": "one", "id": None}
    first = client.post("/v1/responses", json={"input": [said, call, result]}).json()
    second = client.post("/v1/responses", json={"input": "two", "previous_response_id": first["id"]}).json()
    path = f"/v1/responses/{first['id']}/input_items"
    listed = client.get(path, params={"order": "asc"}).json()
    [said, called, given] = listed["data"]
    assert said["id"].startswith("in_resp_")
    assert (said["type"], said["content"]) == ("message", [{"type": "input_text", "text": "one"}])
    assert called == call | {"id": called["id"]}
    assert given == result
    assert (listed["object"], listed["has_more"], listed["last_id"]) == ("list", False, "mine")
    assert client.get(path).json()["data"] == listed["data"][::-1]
    page = client.get(path, params={"limit": 1, "after": "mine"}).json()
    assert (page["data"], page["has_more"]) == ([called], True)
    whole = client.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [each["type"] for each in whole[::-1]] == [
        *("message", "function_call", "function_call_output"),
        *(item["type"] for item in first["output"]),
        "message",
    ]
    for wrong in ({"order": "up"}, {"limit": 0}, {"after": "x"}):
        assert client.get(path, params=wrong).status_code == 400, wrong
    assert client.get("/v1/responses/resp_x/input_items").status_code == 404


def test_items_may_be_named_by_their_ids(client):
    first = client.post("/v1/responses", json={"input": "one two", "request_id": "a_b.c_1"}).json()
    asked = [{"role": "user", "content": "one two"}]
    names = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    more = [{"role": "user", "content": "three"}]
    count = "/v1/responses/input_tokens"
    [named, given] = (
        client.post(count, json={"input": [*asked, *each, *more]}).json() for each in (names, first["output"])
    )
    assert named == given
    assert named["input_tokens"] > client.post(count, json={"input": [*asked, *more]}).json()["input_tokens"]
    for wrong in ("msg_5_0", "msg_a_b.c_1_7", "x", ""):
        answer = client.post("/v1/responses", json={"input": [{"type": "item_reference", "id": wrong}]})
        assert answer.status_code == 404
        assert f"input[0] refers to item '{wrong}', which is not stored" in answer.json()["error"]["message"]
    not_kept = client.post("/v1/responses", json={"input": "one two", "store": False}).json()
    assert not_kept["store"] is False
    assert client.get(f"/v1/responses/{not_kept['id']}").status_code == 404


def response(number, text):
    item = message_item(f"msg_{number}_0", [text_part(text, [{"token": text}])])
    return {"id": f"resp_{number}", "output": [item]}


def test_the_oldest_responses_make_room():
    kept = KeptResponses(100_000)
    assert not kept.can_keep(["a" * 20_000])
    assert not KeptResponses(0).can_keep([])
    for number in range(100):
        kept.keep(None, ({"role": "user", "content": "a" * 5_000},), response(number, "b" * 1000))
        assert kept.find(None, "resp_0") is not None  # used most recently
        assert kept.n_bytes <= 100_000
    assert kept.find(None, "resp_99").document["output"][0]["content"][0]["logprobs"] == []
    assert kept.find(None, "resp_50") is None
    for _ in range(100):  # the same response again and again
        kept.keep(None, (), response(5, "c"))
    assert kept.find(None, "resp_0") is not None
    while any(kept.forget(None, f"resp_{number}") for number in range(100)):
        pass
    assert kept.n_bytes == 0


def test_a_key_finds_its_own_responses_alone():
    kept = KeptResponses(100_000)
    kept.keep("ann", (), response(1, "of ann"))
    kept.keep("bob", (), response(1, "of bob"))
    assert kept.find("ann", "resp_1").item("msg_1_0")["content"][0]["text"] == "of ann"
    assert kept.find("bob", "resp_1").item("msg_1_0")["content"][0]["text"] == "of bob"
    assert kept.find(None, "resp_1") is None
    assert not kept.forget("carl", "resp_1")


def test_arguments_of_a_call_may_be_an_object():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": "é"}}
    [_, answer] = read(input=[{"role": "user", "content": "go"}, call]).chat.conversation
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "é"}'}


def test_no_compaction_is_a_path_that_is_not_there(client):
    assert client.post("/v1/responses/compact", json={"input": "a"}).status_code == 404
    assert client.post("/v1/responses/resp_1", json={}).status_code == 405
