"""The application behind its security checks, and mounted below a path."""

import pytest
from starlette.testclient import TestClient

from tests.unit.server.serving_clients import fake_app, ready_client


def client_of(**options):
    return TestClient(fake_app(server=options))


def test_calls_that_carry_data_need_the_key():
    with client_of(api_keys="secret") as client:
        for path in ("/v1/chat/completions", "/nothing"):
            assert client.post(path, json={}).status_code == 401
            assert client.post(path, json={}, headers={"Authorization": "Bearer secret"}).status_code != 401
        assert client.get("/livez").status_code == 200


def test_a_body_that_is_too_large_is_a_413_in_the_shape_of_errors():
    with ready_client(server={"max_body_bytes": 1024}) as client:
        reply = client.post("/v1/completions", content=b'{"prompt": "' + b"x" * 2000 + b'"}')
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"
        chunks = iter([b'{"prompt": "', b"x" * 600, b"x" * 600, b'"}'])
        reply = client.post("/v1/completions", content=chunks)
        assert reply.status_code == 413


@pytest.mark.parametrize("mounted", ["", "/llm"])
def test_paths_may_begin_with_the_root_path(mounted):
    with client_of(root_path="/llm", api_keys="secret") as client:
        assert client.get(f"{mounted}/livez").status_code == 200
        assert client.get(f"{mounted}/v1/nothing").status_code == 401
        assert client.get(f"{mounted}/v1/nothing", headers={"x-api-key": "secret"}).status_code == 404
        assert client.get("/llmlivez", headers={"x-api-key": "secret"}).status_code == 404


@pytest.mark.parametrize("mounted", ["", "/api/llm"])
def test_an_error_has_the_shape_of_the_path_below_the_root_path(mounted):
    with client_of(root_path="/api/llm", api_keys="secret") as client:
        for path in ("/api/pull", "/api/chat", "/api/embeddings"):
            assert isinstance(client.post(f"{mounted}{path}").json()["error"], str), path  # ollama's form of errors
        for path in ("/v1/models", "/v1/apis/chat", "/apis"):
            assert isinstance(client.get(f"{mounted}{path}").json()["error"], dict), path  # OpenAI's form of errors
        assert client.post(f"{mounted}/v1/messages/count_tokens").json()["type"] == "error"  # Anthropic's form


def test_a_look_whether_a_server_is_there_is_no_failure(caplog):
    with client_of(page=False) as client, caplog.at_level("DEBUG", "llamabatch"):
        assert client.head("/").status_code == 200
    assert " failed: " not in caplog.text


def test_a_page_of_elsewhere_gets_no_leave_to_read():
    with client_of() as client:
        reply = client.get("/livez", headers={"Origin": "https://evil.example"})
        assert reply.status_code == 403
        assert client.get("/livez", headers={"Origin": "http://localhost:3000"}).status_code == 200
