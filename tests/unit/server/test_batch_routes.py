"""/v1/files and /v1/batches over HTTP, without a model."""

import asyncio
import errno
import io
import json
import threading
import time
from pathlib import Path

import pytest
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from llamabatch.jobs import OutputOptions, RecordOptions, Settings
from llamabatch.server.batches import runner, service
from llamabatch.server.batches.store import Store
from llamabatch.server.batches.upload import receive_file
from llamabatch.server.http.errors import CLIENT_CLOSED, ApiError
from llamabatch.server.openai import batch_lines as lines_module
from llamabatch.server.pool import model_pool
from tests.unit.server.serving_clients import fake_app, ready_client
from tests.unit.server.test_application import CHAT
from tests.unit.server.test_pool_routes import pool_client
from tests.waiting import until

URL = "/v1/chat/completions"


class Host(service.ServingHost):
    """A host that has the name of a model file for its jobs."""

    def model_identity(self):
        return {"name": "fake"}

    def settings(self, source, journal):
        writing = OutputOptions(order="finished", force=True, records=RecordOptions(shape="openai"))
        return Settings((str(source),), str(journal), writing=writing, max_start_errors=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(service, "ServingHost", Host)
    monkeypatch.setattr(runner, "_LOOK_S", 0.02)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def client(folder):
    server = {"data_dir": str(folder), "max_file_bytes": 20_000, "max_disk_bytes": 100_000}
    with ready_client(server=server) as client:
        yield client


def lines(count, url=URL, **body):
    return [{"custom_id": f"id {i}", "method": "POST", "url": url, "body": {**CHAT, **body}} for i in range(count)]


def data_of(asked):
    return "".join(json.dumps(each) + "\n" for each in asked).encode()


def upload(client, data, name="in.jsonl", **fields):
    return client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "batch"} | fields)


def create(client, asked, **more):
    file_id = upload(client, data_of(asked)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"} | more
    return client.post("/v1/batches", json=body)


def wait(client, batch_id):
    def ended():
        found = client.get(f"/v1/batches/{batch_id}").json()
        return found["status"] in ("completed", "failed", "cancelled") and found

    return until(ended)


def content(client, file_id):
    return [json.loads(line) for line in client.get(f"/v1/files/{file_id}/content").text.splitlines()]


def test_a_batch_answers_as_the_endpoint_does(client):
    asked = lines(4, model="mine", n=2, unheard_of=1)
    asked[2]["body"] = {"messages": []}
    made = create(client, asked, metadata={"for": "me"}, what=1)
    assert made.headers["x-llamabatch-ignored"] == "what"
    assert made.json()["status"] == "validating"
    batch = wait(client, made.json()["id"])
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert batch["metadata"] == {"for": "me"}
    direct = client.post(URL, json=asked[0]["body"]).json()
    for line in content(client, batch["output_file_id"]):
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        body = line["response"]["body"]
        own = ("id", "created", "usage")
        assert {name: body[name] for name in body if name not in own} == {
            name: direct[name] for name in direct if name not in own
        }
    [failed] = content(client, batch["error_file_id"])
    assert failed["custom_id"] == "id 2"
    assert failed["error"] is None
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"] == client.post(URL, json={"messages": []}).json()


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "a b", "echo": True}),
        ("/v1/completions", {"prompt": [1, 2, 300], "echo": True}),
        ("/v1/completions", {"prompt": ["a b"], "logprobs": 2}),
        (URL, {**CHAT, "logprobs": True}),
    ],
)
def test_choices_are_those_of_the_endpoint(client, url, body):
    asked = [{"custom_id": "x", "method": "POST", "url": url, "body": body}]
    batch = wait(client, create(client, asked, endpoint=url).json()["id"])
    [line] = content(client, batch["output_file_id"])
    direct = client.post(url, json=body).json()
    assert line["response"]["body"]["choices"] == direct["choices"]


def test_what_a_line_cannot_have_is_its_own_error(client):
    asked = lines(4, url="/v1/completions")
    for line, body in zip(
        asked, ({"prompt": ["a", "b"]}, {"prompt": "a", "n": 0}, {"prompt": "a", "suffix": "b"}, {}), strict=True
    ):
        line["body"] = body
    batch = wait(client, create(client, asked, endpoint="/v1/completions").json()["id"])
    found = {each["custom_id"]: each["response"] for each in content(client, batch["error_file_id"])}
    messages = {name: each["body"]["error"]["message"] for name, each in found.items()}
    assert {each["status_code"] for each in found.values()} == {400}
    assert found["id 2"]["body"]["error"]["param"] == "suffix"
    assert batch["output_file_id"] is None
    assert "a list of 2; a line has one result" in messages["id 0"]
    assert "n is 0" in messages["id 1"]
    assert "suffix" in messages["id 2"]
    assert "no prompt" in messages["id 3"]


@pytest.mark.parametrize("place", ["read_chat", "_answer", "adapter_ids"])
def test_an_error_that_nothing_foresees_is_that_of_its_line_alone(client, monkeypatch, place):
    real, calls = getattr(lines_module, place), []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("a secret")
        return real(*args)

    monkeypatch.setattr(lines_module, place, failing)
    batch = wait(client, create(client, lines(5)).json()["id"])
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 5, "completed": 4, "failed": 1})
    [failed] = content(client, batch["error_file_id"])
    assert failed["response"]["status_code"] == 500
    assert "internal error" in failed["response"]["body"]["error"]["message"]
    assert "secret" not in str(failed)


def test_files_are_described_listed_sent_and_deleted(client):
    data = data_of(lines(3))
    first = upload(client, data, "../a\\b.jsonl").json()
    second = upload(client, data, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}).json()
    shown = [first[name] for name in ("object", "bytes", "filename", "purpose")]
    assert shown == ["file", len(data), "b.jsonl", "batch"]
    assert first["expires_at"] is None
    assert second["expires_at"] == second["created_at"] + 3600
    assert client.get(f"/v1/files/{first['id']}").json() == first
    sent = client.get(f"/v1/files/{first['id']}/content")
    assert sent.content == data
    assert sent.headers["content-type"] == "application/octet-stream"
    pages = []
    after = ""
    while True:
        page = client.get(f"/v1/files?limit=1&after={after}&purpose=batch").json()
        pages += [each["id"] for each in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert sorted(pages) == sorted([first["id"], second["id"]])
    assert client.get("/v1/files?order=asc").json()["data"][::-1] == client.get("/v1/files").json()["data"]
    assert client.get("/v1/files?purpose=batch_output").json()["data"] == []
    assert client.delete(f"/v1/files/{first['id']}").json() == {"id": first["id"], "object": "file", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert client.request(method, f"/v1/files/{first['id']}{path}").status_code == 404


@pytest.mark.parametrize(
    "path", ["files?limit=0", "files?limit=x", "files?after=x", "files?order=up", "files?purpose=x"]
)
def test_a_wrong_page_is_refused(client, path):
    response = client.get(f"/v1/{path}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == path.split("?")[1].split("=")[0]


def test_forms_that_are_none(client, folder):
    def post(body, kind="multipart/form-data; boundary=x"):
        return client.post("/v1/files", content=body, headers={"content-type": kind})

    part = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    purpose, file = part % (b"purpose", b"", b"batch"), part % (b"file", b'; filename="a"', b"{}")
    assert post(purpose + file + b"--x--\r\n").status_code == 200
    assert post(file + purpose + b"--x--\r\n").status_code == 200
    for body, status, what in (
        (purpose + file, 400, "last boundary"),
        (purpose + b"--x--\r\n", 400, "no file"),
        (file + b"--x--\r\n", 400, "purpose is not given"),
        (part % (b"purpose", b"", b"assistants") + file + b"--x--\r\n", 400, "'assistants'"),
        (purpose + file + file + b"--x--\r\n", 400, "second file"),
        (purpose + purpose + file + b"--x--\r\n", 400, "twice"),
        (purpose + part % (b"other", b"", b"1") + file + b"--x--\r\n", 400, "no field 'other'"),
        (part % (b"purpose", b"", b"b" * 5000) + file + b"--x--\r\n", 400, "4096 bytes"),
        (purpose + part % (b"file", b'; filename="a"; x="%s"' % (b"y" * 9000), b"") + b"--x--\r\n", 400, "eader"),
        (b"no form at all" * 10, 400, "multipart"),
        (b"".join(part % (b"a%d" % i, b"", b"1") for i in range(30)), 400, "16 parts"),
    ):
        response = post(body)
        assert response.status_code == status, (body[:80], response.text)
        assert what in response.json()["error"]["message"], response.text
    assert post(b"{}", "application/json").status_code == 415
    assert post(b"{}", "multipart/form-data").status_code == 400
    assert sorted(path.suffix for path in (folder / "files").iterdir()) == [".json", ".json", ".jsonl", ".jsonl"]


def test_files_are_bounded_one_by_one_and_together(client, folder):
    response = upload(client, b"x" * 20_001)
    assert response.status_code == 413
    assert "--max-file-bytes" in response.json()["error"]["message"]
    assert upload(client, b"x" * 100_000).status_code == 413  # refused by its length, before the body is read
    found = [upload(client, b"x" * 20_000).status_code for _ in range(6)]
    assert found == [200] * 4 + [507] * 2
    assert sum(path.stat().st_size for path in (folder / "files").iterdir()) <= 100_000
    assert not list((folder / "files").glob("*.new"))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"endpoint": "/v1/chat"}, "endpoint is '/v1/chat'"),
        ({"endpoint": None}, "no endpoint"),
        ({"completion_window": "1w"}, "completion_window is '1w'"),
        ({"input_file_id": 3}, "input_file_id is 3"),
        ({"metadata": {"a": 1}}, "metadata.a is 1"),
        ({"output_expires_after": {"seconds": 1}}, "output_expires_after is"),
    ],
)
def test_a_wrong_batch_is_refused(client, changed, what):
    response = create(client, lines(1), **changed)
    assert response.status_code == 400
    assert what in response.json()["error"]["message"]


def test_batches_are_listed_cancelled_and_not_found(client):
    ids = [create(client, lines(1)).json()["id"] for _ in range(3)]
    for each in ids:
        assert wait(client, each)["status"] == "completed"
    first = client.get("/v1/batches?limit=2").json()
    rest = client.get(f"/v1/batches?limit=2&after={first['last_id']}").json()
    assert sorted(each["id"] for each in first["data"] + rest["data"]) == sorted(ids)
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert client.post(f"/v1/batches/{ids[0]}/cancel").status_code == 409
    assert client.post("/v1/batches/batch_x/cancel").status_code == 404
    assert client.get("/v1/batches/batch_x").status_code == 404
    missing = client.post("/v1/batches", json={"input_file_id": "file-x", "endpoint": URL, "completion_window": "24h"})
    assert missing.status_code == 404
    results = client.get(f"/v1/batches/{ids[0]}").json()["output_file_id"]
    again = client.post("/v1/batches", json={"input_file_id": results, "endpoint": URL, "completion_window": "1h"})
    assert again.status_code == 400


def test_a_server_without_batches_says_so(tmp_path):
    with ready_client(server={"batches": False}) as client:
        response = client.get("/v1/files")
    assert response.status_code == 501
    assert "--no-batches" in response.json()["error"]["message"]


def test_a_named_folder_of_another_server_is_an_error_of_the_load_and_the_usual_one_a_503(folder, monkeypatch):
    other = Store(folder, 10**9)
    with TestClient(fake_app(server={"data_dir": str(folder)}), raise_server_exceptions=False) as client:
        until(lambda: client.get("/livez").status_code != 200)
        assert "--data-dir" in client.get("/readyz").json()["error"]["message"]
    monkeypatch.setattr(service.BatchService, "_folder", lambda self: folder)
    with ready_client() as client:
        assert client.post(URL, json=lines(1)[0]["body"]).status_code == 200
        assert client.get("/v1/files").status_code == 503
        other.close()
        assert client.get("/v1/files").status_code == 200
    Store(folder, 10**9).close()  # the server no longer uses the folder


def test_a_server_that_gets_no_file_writes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(service.BatchService, "_folder", lambda self: tmp_path / "usual")
    with ready_client() as client:
        for path in ("files", "batches"):
            assert client.get(f"/v1/{path}").json()["data"] == []
        for method, path in (
            *(("GET", "files/x"), ("GET", "files/x/content"), ("DELETE", "files/x")),
            *(("GET", "batches/x"), ("POST", "batches/x/cancel")),
        ):
            assert client.request(method, f"/v1/{path}").status_code == 404
        assert not (tmp_path / "usual").exists()
        assert upload(client, b"{}").status_code == 200
        assert len(client.get("/v1/files").json()["data"]) == 1


def test_thinking_is_counted_in_the_usage_of_a_line(tmp_path):
    text, tags, server = "<think>one two</think>three", ("<think>", "</think>"), {"data_dir": str(tmp_path / "data")}
    with ready_client(text, reasoning_tags=tags, server=server) as client:
        batch = wait(client, create(client, lines(1)).json()["id"])
        [line] = content(client, batch["output_file_id"])
        direct = client.post(URL, json=lines(1)[0]["body"]).json()
    details = direct["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] > 0
    assert line["response"]["body"]["usage"]["completion_tokens_details"] == details


def test_a_disk_that_is_full_in_the_middle_of_an_upload_is_a_507_and_leaves_nothing(client, folder, monkeypatch):
    class Full(io.BufferedWriter):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(io.FileIO(path, "wb")))
    response = upload(client, data_of(lines(3)))
    monkeypatch.undo()
    assert (response.status_code, response.json()["error"]["code"]) == (507, "disk_full")
    assert list((folder / "files").iterdir()) == []


def test_an_upload_that_is_cut_off_leaves_nothing(client, folder):
    async def cut_off():
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 2_000_000
        assert len(list((folder / "files").glob("*.new"))) == 1
        raise ClientDisconnect

    store = client.app.state.batches.batches().store
    with pytest.raises(ClientDisconnect):
        asyncio.run(receive_file({"content-type": "multipart/form-data; boundary=x"}, cut_off(), roomy(store), 10**9))
    assert list((folder / "files").iterdir()) == []
    assert ApiError.of(ClientDisconnect()).status == CLIENT_CLOSED


def roomy(store):
    store.max_bytes = 10**9
    return store


def test_a_content_that_is_gone_is_a_404(client, folder):
    file_id = upload(client, b"{}").json()["id"]
    (folder / "files" / f"{file_id}.jsonl").unlink()
    assert client.get(f"/v1/files/{file_id}/content").status_code == 404


def test_a_key_with_limits_creates_no_batch(folder):
    server = {"data_dir": str(folder), "api_keys": ["a name=ada tpm=900", "b"]}
    with ready_client(server=server) as client:
        statuses = []
        for key in "ab":
            client.headers["x-api-key"] = key
            statuses.append((answer := create(client, lines(1))).status_code)
            if key == "a":
                assert "'ada' has limits" in answer.json()["error"]["message"]
        assert statuses == [403, 200]


def test_a_model_that_sleeps_is_kept_awake_by_its_batches_and_woken_for_their_files(folder, monkeypatch):
    monkeypatch.setattr(model_pool, "_WORK_S", 0.01)
    begins, run = threading.Event(), runner.run
    monkeypatch.setattr(runner, "run", lambda *given, **more: begins.wait() and run(*given, **more))
    options = {"data_dir": str(folder)}
    with pool_client("red", options=options, sleep_idle_s=0.0) as client:
        [model] = client.app.state.serving.models
        made = create(client, lines(3))
        assert made.status_code == 200, made.text
        until(lambda: client.get("/v1/batches").json()["data"][0]["status"] == "in_progress")
        time.sleep(0.1)
        assert model.state == "loaded"
        begins.set()
        until(lambda: model.state == "sleeping")
        found = wait(client, made.json()["id"])  # a question about the batch loads the model again
        assert found["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert model.n_loads > 2
    with pool_client("red", "blue", options=options) as client:
        refused = client.get("/v1/batches")
        assert refused.status_code == 501
        assert "start one of a single model" in refused.json()["error"]["message"]
