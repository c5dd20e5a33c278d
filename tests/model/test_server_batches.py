"""Batches of a server on the bundled model run beside other requests, and survive kills of the server and engine."""

import json
import os
import signal

import pytest
from starlette.testclient import TestClient

from llamabatch.server import app
from tests.long import killed_server
from tests.unit.server.test_application import ready
from tests.unit.server.test_batch_routes import content, create, lines, upload, wait
from tests.waiting import until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("data") / "data"
    with TestClient(
        app("tiny", n_slots=4, n_ctx=512, n_threads=1, data_dir=str(folder)), raise_server_exceptions=False
    ) as client:
        yield ready(client)


@pytest.mark.parametrize("number", range(killed_server.QUICK))
def test_a_killed_server_goes_on_with_its_batches(number, tmp_path, monkeypatch):
    monkeypatch.setattr(killed_server, "N_LINES", 250)  # `make test-long` has the full counts
    monkeypatch.setattr(killed_server, "KILLS", 3)
    killed_server.case(number, tmp_path)


def test_every_kind_of_line(client):
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 4, "temperature": 0},
        "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "logprobs": 1},
        "/v1/embeddings": {"input": "Once upon a time", "encoding_format": "base64"},
    }
    for url, body in bodies.items():
        asked = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i in range(3)]
        batch = wait(client, create(client, asked, endpoint=url).json()["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}, batch
        direct = client.post(url, json=body).json()
        part = "data" if "data" in direct else "choices"
        for line in content(client, batch["output_file_id"]):
            assert line["response"]["body"][part] == direct[part]


def test_a_batch_waits_for_others_and_its_rows_are_background(client, steps):
    with steps.each_takes(0.02):
        batch_id = create(client, lines(8, max_tokens=200, ignore_eos=True)).json()["id"]
        until(lambda: client.get(f"/v1/batches/{batch_id}").json()["status"] != "validating")
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        for _ in range(5):
            assert client.post(CHAT, json=body).status_code == 200
        batch = client.get(f"/v1/batches/{batch_id}").json()
        assert batch["status"] == "in_progress", "five short chats took as long as the batch"
    assert wait(client, batch_id)["request_counts"]["completed"] == 8


def test_a_cancelled_batch_frees_its_slots_at_once(client, steps):
    serving = client.app.state.serving
    with steps.each_takes(0.02):
        batch_id = create(client, lines(100, max_tokens=400, ignore_eos=True)).json()["id"]
        until(lambda: serving.client.stats().running)
        assert client.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
        batch = wait(client, batch_id)
    assert batch["status"] == "cancelled"
    until(lambda: not serving.client.stats().running)
    counts = batch["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == 100


def test_a_killed_engine_costs_a_batch_nothing(client, steps):
    with steps.each_takes(0.02):
        batch_id = create(client, lines(24, max_tokens=20, ignore_eos=True, temperature=0)).json()["id"]
        until(lambda: client.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"] >= 5)
        [pid] = client.app.state.serving.client.pids
        os.kill(pid, signal.SIGKILL)
    assert wait(client, batch_id)["request_counts"] == {"total": 24, "completed": 24, "failed": 0}


def test_a_server_that_is_told_to_end_stops_its_batches_at_once_and_the_next_one_goes_on(tmp_path, monkeypatch, steps):
    monkeypatch.setattr(killed_server, "N_LINES", 60)
    data = tmp_path / "data"
    with steps.each_takes(0.02), killed_server.Server(data) as server:
        batch_id = server.create(server.upload(killed_server._lines()))
        until(lambda: server.batch(batch_id)["request_counts"]["completed"])
        server._process.terminate()
        assert server._process.wait(30) == 0
    with killed_server.Server(data) as server:
        results = server.results(batch_id)
    assert len({each["custom_id"] for each in results}) == len(results) == killed_server.N_LINES
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_an_upload_streams(client):
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines(20_000))
    assert upload(client, data).json()["bytes"] == len(data)
