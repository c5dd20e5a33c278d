"""Ids of requests, and log lines of requests that fail."""

import logging
import re
import threading

import pytest
from starlette.testclient import TestClient

from llamabatch.server.http.counts import HttpCounts
from llamabatch.server.http.errors import ApiError, keep_error
from llamabatch.server.http.request_log import RequestLog
from llamabatch.server.openai import completions
from llamabatch.server.response.event_stream import EventStream
from llamabatch.testing.fake_client import FakeClient
from tests.unit.server.serving_clients import ready_client

PATH = "/v1/completions"
SECRET = "zanzibar"
LINE = re.compile(r"request (\S+) failed: POST /v1/completions: (.*)", re.DOTALL)


@pytest.fixture
def client():
    with ready_client(f"{SECRET} " * 5) as client:
        yield client


def lines(caplog):
    return [LINE.fullmatch(record.getMessage()) for record in caplog.records if " failed: " in record.getMessage()]


def test_each_response_has_an_id_of_its_own_or_the_callers(client):
    ids = [client.post(PATH, json={"prompt": "a"}).headers["x-request-id"] for _ in range(3)]
    assert len({*ids}) == 3
    for given, wanted in (("my-1.x_Y", True), ("with blank", False), ("x" * 65, False), ("", False)):
        got = client.post(PATH, json={"prompt": "a"}, headers={"x-request-id": given}).headers["x-request-id"]
        assert (got == given) == wanted
    refused = client.post("/v1/messages", json={"messages": 5})
    assert refused.status_code == 400
    assert refused.json()["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]


def test_what_goes_well_has_no_line(client, caplog):
    with caplog.at_level(logging.DEBUG, "llamabatch"):
        for stream in (False, True):
            assert client.post(PATH, json={"prompt": "a", "stream": stream}).status_code == 200
    assert not lines(caplog)


def test_a_failed_request_has_one_line_without_prompt_and_answer(client, caplog):
    with caplog.at_level(logging.DEBUG, "llamabatch"):
        refused = client.post(f"{PATH}?q={SECRET}", json={"prompt": SECRET, "stop": [SECRET] * 99, "n": -1})
        assert refused.status_code == 400
        late = client.post(PATH, json={"prompt": SECRET, "deadline_s": 1e-9})
        assert late.status_code == 504
        unknown = client.post(PATH, content=f"not json: {SECRET}", headers={"content-type": "application/json"})
        assert unknown.status_code == 400
    found = lines(caplog)
    assert [line[1] for line in found] == [each.headers["x-request-id"] for each in (refused, late, unknown)]
    assert [line[2][:3] for line in found] == ["400", "504", "400"]
    assert re.fullmatch(r"504: deadline_exceeded: deadline_s is 1e-09; it was ended after .*", found[1][2])
    assert SECRET not in caplog.text


def test_a_stream_that_fails_has_both_its_statuses(client, caplog, monkeypatch):
    def failing(self):
        raise RuntimeError(SECRET)

    begun = threading.Event()

    async def start(self, send, start=EventStream._start):
        await start(self, send)
        begun.set()

    def later(self, requests, sink, *, stream=False, submit=FakeClient.submit):
        """Sends the end of a request only after the head of the stream was sent."""

        def waiting(outputs):
            if any(output.finished for output in outputs):
                assert begun.wait(30)
            sink(outputs)

        threading.Thread(target=submit, args=(self, requests, waiting), kwargs={"stream": stream}).start()

    monkeypatch.setattr(EventStream, "_start", start)
    monkeypatch.setattr(FakeClient, "submit", later)
    monkeypatch.setattr(completions.CompletionChunks, "end", failing)
    with caplog.at_level(logging.DEBUG):
        response = client.post(PATH, json={"prompt": "a b c", "stream": True})
    assert response.status_code == 200
    assert '"code":"internal_error"' in response.text
    [line] = lines(caplog)
    assert line[2].startswith("200, then 500: internal_error: an internal error")
    assert "RuntimeError" in caplog.text  # the log also says where it was raised
    assert f": {SECRET}" not in caplog.text


def test_an_exception_of_a_handler_is_a_500_and_no_log_has_its_text(client, caplog, monkeypatch):
    monkeypatch.setattr(completions, "read_body", lambda *args: 1 / len([SECRET, *args][4:]))
    with caplog.at_level(logging.DEBUG):
        response = client.post(PATH, json={"prompt": "a"})
    assert response.status_code == 500
    [line] = lines(caplog)
    assert line[2].startswith("500: internal_error: an internal error")
    assert "ZeroDivisionError" in caplog.text
    assert "division by zero" not in caplog.text


def test_polls_of_a_server_that_is_not_ready_are_told_at_debug_alone(caplog):
    def fails(status, code, method="GET"):
        async def answer(scope, receive, send):
            error = ApiError(status, "not now", code=code)
            keep_error(scope, error)
            await error.response()(scope, receive, send)

        with caplog.at_level(logging.DEBUG, "llamabatch"):
            caplog.clear()
            TestClient(RequestLog(answer, HttpCounts())).request(method, "/readyz")
        [record] = caplog.records
        return record.levelno

    assert fails(503, "model_loading") == fails(503, "model_draining", "HEAD") == logging.DEBUG
    assert fails(503, "model_failed") == fails(503, "model_loading", "POST") == fails(429, None) == logging.INFO


def test_a_path_makes_no_line_of_its_own(client, caplog):
    with caplog.at_level(logging.INFO, "llamabatch"):
        assert client.get("/a%0A2026-01-01 CRITICAL all is lost").status_code == 404
    [line] = [each.getMessage() for each in caplog.records if " failed: " in each.getMessage()]
    assert "\n" not in line
    assert "/a\\n2026" in line
