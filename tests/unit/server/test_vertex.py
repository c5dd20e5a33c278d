"""Vertex AI's /predict."""

import pytest

from tests.unit.server.serving_clients import ready_client
from tests.unit.server.test_application import CHAT


@pytest.fixture
def client(monkeypatch):
    for name, value in {"MODE": "PREDICTION", "PREDICT_ROUTE": "/ask", "HEALTH_ROUTE": "alive"}.items():
        monkeypatch.setenv(f"AIP_{name}", value)
    with ready_client(server={"api_keys": ("key",), "root_path": "/llm"}, headers={"x-api-key": "key"}) as client:
        yield client


def test_instances_are_answered_in_their_order(client):
    chat = {"@requestFormat": "chatCompletions", **CHAT}
    text = {"@requestFormat": "/v1/completions", "prompt": "one two", "stream": True}
    tokens = {"@requestFormat": "tokenize", "content": "one two"}
    asked = {"instances": [chat, text, tokens, {"@requestFormat": "rm"}, 5, chat | {"messages": 1}]}
    for path in ("/ask", "/llm/ask"):
        first, second, third, *wrong = client.post(path, json=asked).json()["predictions"]
        assert first["choices"][0]["message"]["content"] == "one two three"
        assert second["object"] == "text_completion"
        assert len(third["tokens"]) == 2
        assert ["rm" in wrong[0]["error"]["message"], "messages" in wrong[2]["error"]["message"]] == [True, True]
        assert "instances[4]" in wrong[1]["error"]["message"]


def test_what_is_no_list_is_refused(client):
    for given in ({}, {"instances": 5}, {"instances": [5] * 129}, {"instances": {"a": 1}}):
        assert client.post("/ask", json=given).json()["error"]["param"] == "instances"
    assert client.get("/alive").json() == {"status": "ok"}


def test_it_needs_the_key(client):
    assert client.post("/ask", json={"instances": []}, headers={"x-api-key": "no"}).status_code == 401


def test_the_routes_can_be_paths_that_have_endpoints(monkeypatch):
    for name, value in {"MODE": "PREDICTION", "HEALTH_ROUTE": "/", "PREDICT_ROUTE": "/v1/chat/completions"}.items():
        monkeypatch.setenv(f"AIP_{name}", value)
    with ready_client(server={"page": False}) as client:
        assert client.get("/").json() == {"status": "ok"}
        assert client.post("/v1/chat/completions", json=CHAT).json()["object"] == "chat.completion"


def test_elsewhere_there_is_none():
    with ready_client() as client:
        assert client.post("/predict", json={"instances": []}).status_code == 404


def test_an_endpoint_that_streams_unless_told_gives_one_document(client):
    asked = {"@requestFormat": "/api/chat", "messages": CHAT["messages"]}
    [answer] = client.post("/ask", json={"instances": [asked]}).json()["predictions"]
    assert (answer["message"]["content"], answer["done"]) == ("one two three", True)
