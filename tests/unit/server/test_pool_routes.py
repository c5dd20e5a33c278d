"""HTTP with several models: which model answers, lists of models, and loads by request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from llamabatch.client.connect import with_front_client
from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, ModelFileError
from llamabatch.gguf.resolve import resolve
from llamabatch.server.application import make_pool_app
from llamabatch.server.options import ServerOptions
from llamabatch.server.pool.model_pool import ModelPool
from llamabatch.server.pool.options import Found, ModelSpec, PoolOptions
from llamabatch.server.pool.waiting_stream import WaitingStream
from llamabatch.testing.answers import Script
from llamabatch.testing.fake_client import FakeClient
from tests.waiting import until

HELLO = [{"role": "user", "content": "Hello"}]
PLAN = SimpleNamespace(config=SimpleNamespace(n_ctx=2048, mmproj=None), reasoning=None)


@contextlib.contextmanager
def pool_client(
    *names: str,
    options: dict[str, Any] | None = None,
    headers: Any = None,
    before_load: Callable[[], None] = lambda: None,
    look_again: Callable[[list[ModelSpec], Any], Found] | None = None,
    **pool: Any,
) -> Iterator[TestClient]:
    """Yields a client of an application whose models answer with their own names.

    Args:
        before_load: called when a model is loaded; it may wait, or raise.
        look_again: as for make_pool_app, but it gets the specs of all names first. With it, only the first model is
            served at the start.
    """
    given = options or {}
    path = str(resolve("tiny"))
    configs = {name: EngineConfig.from_options(path, {"seed": i}) for i, name in enumerate(names)}

    def connected(config: EngineConfig) -> Any:
        before_load()
        name = next(name for name, each in configs.items() if each is config)
        return with_front_client(FakeClient(config, Script(name, None, None, None, None)), config.max_queue)

    specs = [
        ModelSpec(config, ServerOptions(**given, served_model_names=f"{name},{name}-alias"), PLAN, (10,))
        for name, config in configs.items()
    ]
    first = specs if look_again is None else specs[:1]
    again = None if look_again is None else functools.partial(look_again, specs)
    app = make_pool_app(first, ServerOptions(**given), PoolOptions((100,), **pool), connected, again)
    with TestClient(app, raise_server_exceptions=False, headers=headers) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with pool_client("red", "blue", "green") as client:
        yield client


def states(client: TestClient) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in client.get("/v1/models").json()["data"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("named", "answers"),
    [("red", "red"), ("blue", "blue"), ("blue-alias", "blue"), (None, "red")],
)
def test_chats_are_answered_by_the_model_that_they_name(client, named, answers, stream):
    body = {"messages": HELLO, "stream": stream} | ({"model": named} if named else {})
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert answers in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/completion", {"prompt": "x"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
        ("/api/chat", {"messages": HELLO, "stream": False}),
        ("/api/generate", {"prompt": "x", "stream": False}),
        ("/api/generate", {"model": "green:latest", "prompt": "x", "stream": False}),
    ],
)
def test_all_dialects_reach_the_named_model(client, path, body):
    response = client.post(path, json={"model": "green", **body})
    assert response.status_code == 200
    assert "green" in response.text


def test_lists_of_models_need_no_load():
    with pool_client("red", "blue") as client:
        assert states(client) == {"red": "unloaded", "blue": "unloaded"}
        for entry in client.get("/v1/models").json()["models"]:
            assert entry["capabilities"] == ["completion", "tools"]
        tags = client.get("/api/tags").json()["models"]
        assert [each["name"] for each in tags] == ["red", "red-alias", "blue", "blue-alias"]
        assert tags[0]["details"]["family"] == "llama"
        assert client.get("/v1/models/blue").json()["id"] == "blue"
        assert client.get("/v1/models/blue-alias").json()["root"] == "blue"
        shown = client.post("/api/show", json={"model": "blue"}).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["general.architecture"] == "llama"
        assert client.get("/api/ps").json() == {"models": []}
        assert client.get("/props").json()["role"] == "router"
        for path in ("/", "/version", "/api/version", "/openapi.json", "/health", "/livez", "/readyz", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/nowhere").status_code == 404
        assert client.get("/v1/chat/completions").status_code == 405
        assert client.get("/v1/files").status_code == 501
        assert client.get("/slots?model=red").status_code == 400
        assert client.get("/v1/responses/resp_1").status_code == 404
        assert client.post("/v1/completions", json={"model": "", "prompt": "x"}).status_code == 404
        assert states(client) == {"red": "unloaded", "blue": "unloaded"}


def test_the_server_is_ready_once_the_models_of_the_start_are_loaded():
    with pool_client("red") as client:
        pool = client.app.state.serving
        for state, status in (("ready", 200), ("loading", 503), ("draining", 503)):
            pool._starting = [pool.models[0]] if state == "loading" else []
            pool._is_draining = state == "draining"
            for path in ("/health", "/readyz", "/v1/health", "/ping"):
                assert client.get(path).status_code == status
            assert client.get("/livez").json() == {"status": "ok", "state": state}
        assert client.get("/readyz").json()["error"]["code"] == "model_draining"


def test_an_unknown_model_is_named_in_the_shape_of_its_dialect(client):
    assert client.get("/v1/models/black").status_code == 404
    for path, body in (("/v1/chat/completions", {}), ("/api/chat", {}), ("/v1/messages", {"max_tokens": 4})):
        response = client.post(path, json={"model": "black", "messages": HELLO, **body})
        assert response.status_code == 404
        assert "served are red, blue, green" in response.text
        assert ("type" in response.json()) == (path == "/v1/messages")


def test_any_model_takes_the_first():
    with pool_client("red", "blue", options={"any_model": True}) as client:
        assert "red" in client.post("/v1/chat/completions", json={"model": "gpt-5", "messages": HELLO}).text


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"model": "red", ', 400),
        (b'"red"', 400),
        (b'{"model": "red", "model": "blue"}', 400),
        (b"", 400),
        (b"[]", 400),
    ],
)
def test_bodies_that_cannot_be_read_are_errors_of_the_client(client, content, status):
    headers = {"content-type": "application/json"}
    assert client.post("/v1/chat/completions", content=content, headers=headers).status_code == status


def test_a_large_body_reaches_its_model(client):
    text = "word " * 60_000
    body = {"model": "blue", "prompt": text, "max_tokens": 1}
    assert client.post("/v1/completions", json=body).status_code in (200, 400)  # 400: too long for the model
    assert client.post("/tokenize", json={"model": "blue", "prompt": text}).json()["count"] > 60_000


def test_load_and_unload():
    with pool_client("red", "blue", autoload=False) as client:
        refused = client.post("/v1/chat/completions", json={"model": "blue", "messages": HELLO})
        assert refused.status_code == 400
        assert "POST /models/load" in refused.json()["error"]["message"]
        assert client.post("/models/load", json={"model": "blue"}).json() == {"success": True}
        until(lambda: states(client)["blue"] == "loaded")
        assert "blue" in client.post("/v1/chat/completions", json={"model": "blue", "messages": HELLO}).text
        assert [each["name"] for each in client.get("/api/ps").json()["models"]] == ["blue", "blue-alias"]
        assert client.post("/models/unload", json={"model": "blue"}).json() == {"success": True}
        assert states(client) == {"red": "unloaded", "blue": "unloaded"}
        assert client.post("/v1/completions?autoload=true", json={"model": "red", "prompt": "x"}).status_code == 200
        for body in ({}, {"model": 5}, {"model": "black"}):
            assert client.post("/models/load", json=body).status_code in (400, 404)


@pytest.mark.parametrize(
    ("keep_alive", "state"),
    [(0, "sleeping"), ("0s", "sleeping"), (-1, "loaded"), ("1h30m", "loaded"), ("soon", "loaded"), (None, "loaded")],
)
def test_keep_alive_of_ollamas_clients(keep_alive, state):
    with pool_client("red") as client:
        body = {"model": "red", "messages": HELLO, "stream": False, "keep_alive": keep_alive}
        assert client.post("/api/chat", json=body).status_code == 200
        until(lambda: states(client)["red"] == state)
        listed = client.get("/api/ps").json()["models"]
        assert [each["expires_at"] < "2100" for each in listed] == (
            [] if state == "sleeping" else [keep_alive == "1h30m"] * 2
        )


def test_a_wish_of_one_client_ends_with_the_next_request():
    with pool_client("red") as client:
        body = {"model": "red", "messages": HELLO, "stream": False}
        for keep_alive in (1e308, "1e400", float(10**12)):
            client.post("/api/chat", json=body | {"keep_alive": keep_alive})
            assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
        client.post("/api/chat", json=body | {"keep_alive": 300})
        assert client.get("/api/ps").json()["models"][0]["expires_at"] < "9999"
        client.post("/v1/chat/completions", json=body)
        assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")


def test_two_models_of_one_name_are_refused():
    with (
        pytest.raises(ConfigError, match="'red-alias' is a name of 'red' and of 'red-alias'"),
        pool_client("red", "red-alias"),
    ):
        pass


def test_metrics_of_the_pool_and_of_an_engine(client):
    client.post("/v1/completions", json={"model": "red", "prompt": "x"})
    text = client.get("/metrics").text
    assert 'llamabatch:model_loaded{model_name="red"} 1.0' in text
    assert 'llamabatch:model_loads_total{model_name="red"} 1.0' in text
    assert 'handler="/v1/completions"' in text
    assert 'vllm:num_requests_running{engine="0",model_name="red"}' in client.get("/metrics?model=red").text


def test_keys_hold_for_the_pool():
    with pool_client("red", options={"api_keys": "secret"}) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.post("/models/load", json={"model": "red"}).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert states_with(client, "secret") == {"red": "unloaded"}


def states_with(client: TestClient, key: str) -> dict[str, str]:
    found = client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
    return {each["id"]: each["status"]["value"] for each in found}


def test_one_model_alone_keeps_its_own_answers():
    with pool_client("red", sleep_idle_s=1000.0) as client:
        assert client.get("/props").json()["is_sleeping"] is False
        client.post("/completion", json={"prompt": "x"})
        assert client.get("/props").json()["model_alias"] == "red"
        assert "vllm:" in client.get("/metrics").text


STREAMS = [
    ("/v1/chat/completions", {"messages": HELLO}, b'"content":"red"', b""),
    ("/v1/completions", {"prompt": "x"}, b'"text":"red"', b""),
    ("/completion", {"prompt": "x"}, b'"content":"red"', b""),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, b'"text":"red"', b"event: error\n"),
    ("/v1/responses", {"input": "x"}, b'"delta":"red"', b"event: error\n"),
]


def told(monkeypatch):
    """Returns an event that is set when a client is told of a load."""
    event, words = threading.Event(), ModelPool.wait_in_words

    def wait_in_words(pool, model):
        event.set()
        return words(pool, model)

    monkeypatch.setattr(ModelPool, "wait_in_words", wait_in_words)
    return event


@pytest.mark.parametrize(("path", "body", "says", "named"), STREAMS)
def test_a_stream_is_told_that_its_model_is_being_loaded(path, body, says, named, monkeypatch):
    waits = told(monkeypatch)
    with pool_client("red", "blue", options={"sse_ping_s": 0.01}, before_load=waits.wait) as client:
        response = client.post(path, json={"model": "red", "stream": True, **body})
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        comment, _, rest = response.content.partition(b"\n\n")
        assert re.fullmatch(rb": red has been loading for \d+ s", comment)
        assert says in rest
        client.post("/models/unload", json={"model": "red"})
        waits.clear()
        refused = client.post(path, json={"model": "red", "stream": True, **body, "temperature": "hot"}).content
        client.post("/models/unload", json={"model": "red"})
        waits.clear()
        threading.Timer(0.1, waits.set).start()
        silent = client.post(path, json={"model": "red", "stream": True, **body, "sse_ping_interval": -1}).content
        assert b"loading" not in silent
        assert re.match(rb": red has been loading for \d+ s; its last load took \d+ s\n\n", refused)
        event = refused.split(b"\n\n")[-2]
        assert event.startswith(named + b'data: {"')
        assert b"temperature is 'hot'" in event


@pytest.mark.parametrize(("path", "body", "says", "named"), STREAMS)
def test_a_load_that_fails_ends_a_stream_that_has_begun(path, body, says, named, monkeypatch):
    waits = told(monkeypatch)

    def fails():
        waits.wait()
        raise ModelFileError("it is no model")

    with pool_client("red", "blue", options={"sse_ping_s": 0.01}, before_load=fails) as client:
        content = client.post(path, json={"model": "red", "stream": True, **body}).content
        assert content.startswith(b": red has been loading")
        event = content.split(b"\n\n")[-2]
        assert event.startswith(named + b'data: {"')
        assert b"the model red could not be loaded: it is no model" in event
        document = json.loads(event[len(named) + len(b"data: ") :])
        assert (document.get("type") == "error") == (path == "/v1/messages")
        whole = client.post(path, json={"model": "red", **body})
        assert whole.status_code == 503
    with pool_client("red", "blue", before_load=fails) as client:  # no comment was sent, so the status is free
        assert client.post(path, json={"model": "red", "stream": True, **body}).status_code == 503


def test_a_client_that_leaves_waits_for_no_model():
    async def left():
        sent, entering = [], asyncio.get_running_loop().create_future()

        async def send(message):
            sent.append(message)

        stream = WaitingStream({"path": "/v1/completions"}, send, lambda: "words", 0.001)
        waiting = asyncio.ensure_future(stream.until(entering))
        while len(sent) < 3:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert entering.cancelled()
        return sent

    head, first, second, *_ = asyncio.run(left())
    assert head["status"] == 200
    assert first == second == {"type": "http.response.body", "body": b": words\n\n", "more_body": True}


def test_models_that_have_come_are_found_and_those_that_have_gone_are_left_out():
    there = ["red", "blue"]

    def look_again(specs: list[ModelSpec], known: Any) -> Found:
        if not there:
            raise ConfigError("the folder is gone")
        named = {spec.options.served_model_names[0]: spec for spec in specs}
        return Found(frozenset(there), tuple(named[name] for name in there if name not in known))

    with pool_client("red", "blue", "green", look_again=look_again) as client:
        assert list(states(client)) == ["red"]
        assert client.post("/v1/completions", json={"model": "blue", "prompt": "x"}).status_code == 404
        for path in ("/models?reload=1", "/v1/models?reload=1"):
            assert [each["id"] for each in client.get(path).json()["data"]] == ["red", "blue"]
        answer = client.post("/v1/completions", json={"model": "blue-alias", "prompt": "x"}).json()
        assert answer["choices"][0]["text"] == "blue"
        there[:] = ["green"]
        assert list(states(client)) == ["red", "blue"]
        client.get("/models?reload=1")  # a loaded model stays in the list
        assert list(states(client)) == ["blue", "green"]
        client.post("/models/unload", json={"model": "blue"})
        client.get("/models?reload=true")
        assert list(states(client)) == ["green"]
        answer = client.post("/v1/completions", json={"prompt": "x"}).json()
        assert answer["choices"][0]["text"] == "green"  # without a model, a request goes to the first that is left
        there.clear()
        refused = client.get("/models?reload=1")
        assert refused.status_code == 503
        assert "the folder is gone" in refused.json()["error"]["message"]
        assert list(states(client)) == ["green"]


def test_a_name_that_is_taken_stops_a_second_look():
    def look_again(specs: list[ModelSpec], known: Any) -> Found:
        taken = dataclasses.replace(specs[1].options, served_model_names="blue,red-alias")
        return Found(frozenset(("red", "blue")), (dataclasses.replace(specs[1], options=taken),))

    with pool_client("red", "blue", look_again=look_again) as client:
        refused = client.get("/models?reload=1")
        assert refused.status_code == 503
        assert "'red-alias' is a name of 'red' and of 'blue'" in refused.json()["error"]["message"]
        assert list(states(client)) == ["red"]
