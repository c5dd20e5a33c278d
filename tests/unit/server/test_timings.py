"""llama-server's additions to chats and completions: timings, __verbose, and its path for chats."""

import json

import pytest

from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, Timings
from llamabatch.server.response.timings import timings_of
from tests.unit.server.serving_clients import ready_client
from tests.unit.server.test_application import CHAT, events


def output(times, *, n_prompt=10, cached=4):
    completion = CompletionOutput(0, "", tuple(range(len(times))), FinishReason.LENGTH, None)
    timings = Timings(0.5, times[0] if times else None, 9.0, times)
    return RequestOutput("1", None, (7,) * n_prompt, (completion,), None, timings, num_cached_tokens=cached)


def test_timings_count_the_steps_behind_the_first_token():
    assert timings_of([output((1.5, 2.0, 3.5))]) == {
        "cache_n": 4,
        "prompt_n": 6,
        "prompt_ms": 1000.0,
        "prompt_per_token_ms": pytest.approx(1000 / 6),
        "prompt_per_second": 6.0,
        "predicted_n": 3,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 1000.0,
        "predicted_per_second": 1.0,
    }


@pytest.mark.parametrize("times", [(), (1.5,)])
def test_timings_of_no_step_are_zero(times):
    found = timings_of([output(times)])
    assert (found["predicted_n"], found["predicted_per_second"], found["predicted_per_token_ms"]) == (len(times), 0, 0)
    assert found["prompt_ms"] == (1000.0 if times else 8500.0)


def test_timings_of_several_requests_are_added():
    found = timings_of([output((1.5, 2.0)), output((2.5, 4.5), cached=0)])
    assert (found["prompt_n"], found["cache_n"], found["predicted_n"]) == (16, 4, 4)
    assert (found["prompt_ms"], found["predicted_ms"]) == (3000.0, 2500.0)


@pytest.mark.parametrize(
    ("path", "body"), [("/chat/completions", CHAT), ("/v1/completions", {"prompt": "one two three"})]
)
def test_timings_come_where_they_are_asked_for(client, path, body):
    assert "timings" not in client.post(path, json=body).json()
    whole = client.post(path, json=body | {"timings_per_token": True}).json()
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"] > 0
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["usage"]["prompt_tokens"]
    streamed = {**body, "stream": True, "timings_per_token": True}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *pieces, last = events(client.post(path, json=streamed | options))
        assert not any("timings" in piece for piece in pieces)
        assert last["choices"] == []
        assert last["timings"]["predicted_n"] > 0
        assert ("usage" in last) is bool(options)


def test_a_verbose_server_shows_each_prompt_to_its_sender():
    with ready_client(server={"log_level": "debug"}) as client:
        assert "__verbose" in client.post("/v1/chat/completions", json=CHAT).json()
        assert "__verbose" not in client.post("/v1/chat/completions", json=CHAT | {"verbose": False}).json()


def test_verbose_shows_the_prompt_to_its_sender(client):
    whole = client.post("/v1/chat/completions", json=CHAT | {"verbose": True}).json()
    assert "one two three" in whole["__verbose"]["prompt"]
    assert "__verbose" not in client.post("/v1/chat/completions", json=CHAT | {"verbose": False}).json()
    lists = client.post("/v1/completions", json={"prompt": ["one", "two"], "verbose": True}).json()
    assert lists["__verbose"]["prompt"] == ["one", "two"]
    assert "one two three" not in json.dumps(client.get("/v1/models").json())
