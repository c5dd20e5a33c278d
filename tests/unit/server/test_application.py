"""The application: its states, its two main endpoints, and its errors."""

import asyncio
import json
import threading

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from llamabatch.errors import MemoryPlanError
from llamabatch.request.logprobs import Logprob
from llamabatch.server.http.middleware import EndsWithItsClient
from llamabatch.server.openai.completion_response import LogprobsRecord
from tests.unit.server.serving_clients import fake_app, ready_client
from tests.unit.server.serving_clients import ready as ready  # tests in other folders import it from this module
from tests.waiting import PATIENCE_S, until

CHAT = {"messages": [{"role": "user", "content": "one two three"}]}


def events(response):
    parts = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]


def test_a_chat_whole(client):
    answer = client.post("/v1/chat/completions", json=CHAT).json()
    [choice] = answer["choices"]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", "one two three")
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["model"] == "fake"


def test_a_chat_streamed_has_the_same_text(client):
    response = client.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 2})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert len({(c["id"], c["created"], c["system_fingerprint"]) for c in chunks}) == 1
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": None}
        assert "".join(each["delta"].get("content") or "" for each in mine) == "one two three"
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_usage_comes_last_where_it_is_asked_for(client):
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post("/v1/chat/completions", json=body))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == client.post("/v1/chat/completions", json=CHAT).json()["usage"]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": ["a b", "c"]})]
)
def test_each_piece_has_the_tokens_of_the_prompts_where_usage_is_continuous(client, path, body):
    whole = client.post(path, json=body).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.post(path, json=body | {"stream": True, "stream_options": options}))
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["prompt_tokens"]}
    assert chunks[-1]["usage"] == whole


def test_completions_of_a_list(client):
    body = {"prompt": ["a b", "c d"], "n": 2, "max_tokens": 8}
    whole = client.post("/v1/completions", json=body).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "a b"), (1, "a b"), (2, "c d"), (3, "c d")]
    texts = ["", "", "", ""]
    for chunk in events(client.post("/v1/completions", json=body | {"stream": True})):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["a b", "a b", "c d", "c d"]


def test_a_text_that_is_too_long_is_refused_before_its_tokens_are_looked_at(client, monkeypatch):
    def look(*_):
        raise AssertionError("a look at each of a million tokens holds up all other requests")

    monkeypatch.setattr("llamabatch.entrypoints.prompts.is_token_ids", look)
    monkeypatch.setattr("llamabatch.entrypoints.input_processor.is_token_ids", look)
    long = "a " * 6000
    response = client.post("/v1/completions", json={"prompt": long})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 4096)
    assert f"the prompt has {error['n_prompt_tokens']} tokens; n_ctx allows 1 to 4096" in error["message"]
    monkeypatch.undo()
    error = client.post("/v1/completions", json={"prompt": ["a", long]}).json()["error"]
    assert "prompts[1]: the prompt has" in error["message"]
    assert client.post("/v1/completions", json={"prompt": long, "overflow": "truncate"}).status_code == 200


@pytest.mark.parametrize("path", ["/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"])
def test_the_tokens_of_a_chat_are_counted_without_an_answer(client, path):
    asked = client.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]
    assert client.post(path, json=CHAT).json() == {"object": "response.input_tokens", "input_tokens": asked}
    assert client.post(path, json={"messages": [1]}).status_code == 400


def test_another_model_is_refused_where_names_are_given_unless_any_is_served():
    for any_model, status in ((False, 404), (True, 200)):
        options = {"served_model_names": ("a", "b"), "any_model": any_model}
        with ready_client(server=options) as client:
            assert client.post("/v1/chat/completions", json=CHAT | {"model": "b"}).status_code == 200
            assert client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-4o"}).status_code == status


def test_a_failed_request_is_an_error_and_not_a_text():
    def answers(asked):
        raise ValueError("broken")

    with ready_client(answers) as client:
        for stream in (False, True):  # no chunk was sent before the error
            response = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert response.status_code == 500
            assert "broken" in response.json()["error"]["message"]


def test_it_answers_while_it_loads():
    go = threading.Event()

    def connect(config):
        go.wait()
        raise MemoryPlanError("too large: the sum")

    with TestClient(fake_app(connect=connect), raise_server_exceptions=False) as client:
        assert client.get("/livez").status_code == 200
        for response in (client.get("/readyz"), client.get("/health"), client.post("/v1/completions", json={})):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
        go.set()
        until(lambda: client.get("/livez").status_code != 200)
        assert "the sum" in client.get("/readyz").json()["error"]["message"]


def test_one_who_waits_for_a_load_and_leaves_cancels_nothing():
    go = threading.Event()

    def connect(config):
        go.wait()
        raise MemoryPlanError("too large: the sum")

    loading = fake_app(connect=connect).state.serving.start()
    assert not loading.cancel()
    go.set()
    with pytest.raises(MemoryPlanError):
        loading.result(PATIENCE_S)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_cancelled_request_is_cancelled_unless_its_client_has_left(leaves):
    """A server that ends cancels tasks and waits. A task that hid its cancellation would seem to have answered."""
    messages = [{"type": "http.request", "body": b"", "more_body": False}]
    begun, never, ended = asyncio.Event(), asyncio.Event(), []

    async def waits(scope, receive, send):
        try:
            await receive()
            begun.set()
            await never.wait()
        finally:
            ended.append(True)

    async def receive():
        if messages:
            return messages.pop()
        await (begun if leaves else never).wait()
        return {"type": "http.disconnect"}

    async def run():
        task = asyncio.create_task(EndsWithItsClient(waits)({"type": "http", "method": "POST"}, receive, None))
        await begun.wait()
        if not leaves:
            task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        return task

    task = asyncio.run(run())
    assert ended == [True]
    assert task.done()
    assert task.cancelled() is not leaves


def test_mounted_in_another_application_it_loads_at_its_first_request():
    inner = fake_app()
    with TestClient(Starlette(routes=[Mount("/llm", inner), Mount("/other", fake_app())])) as client:
        assert client.get("/llm/readyz").status_code in (200, 503)
        until(lambda: client.get("/llm/readyz").status_code == 200)
        assert client.post("/llm/v1/chat/completions", json=CHAT).status_code == 200
    inner.state.serving.close()


def joined(chunks, index=0):
    """Returns the text and the logprobs of a choice, joined from its chunks."""
    mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
    logprobs = {}
    for each in mine:
        for name, values in (each["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    return "".join(each["text"] for each in mine), logprobs


@pytest.mark.parametrize("prompt", ["a b c", [5, 6, 7]])
def test_echo_brings_the_prompt_with_its_logprobs(client, prompt):
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    whole = client.post("/v1/completions", json=body).json()
    [choice] = whole["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert logprobs["token_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert len(logprobs["tokens"]) == whole["usage"]["prompt_tokens"] + 1
    as_ids = client.post("/v1/completions", json=body | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    assert all(name.startswith("token_id:") for name in as_ids["logprobs"]["tokens"])
    assert as_ids["logprobs"]["text_offset"] == logprobs["text_offset"]
    text, streamed = joined(events(client.post("/v1/completions", json=body | {"stream": True})))
    assert (text, streamed) == (choice["text"], logprobs)


def test_offsets_of_a_prompt_are_places_in_its_text():
    pieces = {1: b" D", 2: b"\xc3", 3: b"\xbc", 4: b" the"}  # this vocabulary puts a space before every text
    logprobs = [None, *({token_id: Logprob(-1.0, 1, "?")} for token_id in (2, 3, 4))]
    record = LogprobsRecord(pieces.__getitem__)
    assert record.add([1, 2, 3, 4], logprobs, 0, "Dü the")["text_offset"] == [0, 1, 1, 2]
    assert record.add([4], [{4: Logprob(-1.0, 1, " the")}], 0)["text_offset"] == [6]
    record = LogprobsRecord(pieces.__getitem__)
    found = record.add([2, 3, 4], [None, *logprobs[2:]], 0, "ü the")
    assert (found["text_offset"], found["tokens"][0]) == ([0, 0, 1], "ü")


def test_echo_with_no_tokens_is_the_prompt_alone(client):
    body = {"prompt": "a b c", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "a b c"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_streamed_without_logprobs(client):
    chunks = events(client.post("/v1/completions", json={"prompt": "a b", "echo": True, "stream": True, "n": 2}))
    assert [joined(chunks, index)[0] for index in (0, 1)] == ["a ba b", "a ba b"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_counts_the_thinking(stream):
    text, tags = "<think>one two three</think>four", ("<think>", "</think>")
    with ready_client(text, reasoning_tags=tags) as client:
        body = CHAT | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
        response = client.post("/v1/chat/completions", json=body)
        usage = events(response)[-1]["usage"] if stream else response.json()["usage"]
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 3 <= counted < usage["completion_tokens"]
