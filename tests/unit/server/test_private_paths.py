"""No message to a caller names a folder of the server's machine."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from llamabatch.errors import ConfigError, EngineError, ModelFileError
from llamabatch.gguf.resolve import resolve
from llamabatch.server.http import private_paths
from llamabatch.server.http.private_paths import remember, without_paths
from llamabatch.server.serving.serving import _plain_name
from tests.unit.server.serving_clients import fake_app, ready_client
from tests.waiting import until

PATH = "/v1/completions"


@dataclass
class Options:
    model: str = "/odd place/my models/x.gguf"
    adapters: tuple = (("a", "/loras/red.gguf"),)
    alone: str = "/weights.gguf"
    root_path: str = "/llm/api"
    lora_dir: str | None = "/mounted/loras"


@pytest.fixture
def remembered(monkeypatch):
    monkeypatch.setattr(private_paths, "_remembered", set())
    remember(Options())
    yield
    private_paths._pattern.cache_clear()


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/odd place/my models/x.gguf cannot be loaded: no", "…/x.gguf cannot be loaded: no"),
        ("adapter /loras/red.gguf: /loras/blue.gguf", "adapter …/red.gguf: …/blue.gguf"),
        ("/weights.gguf does not exist", "…/weights.gguf does not exist"),
        ("in /mounted/loras/sub/x.gguf", "in …/x.gguf"),
        ("lora_dir is /mounted/loras, a folder", "lora_dir is …/loras, a folder"),
        ("/mounted/else/where", "…/where"),
        ("[Errno 2] No such file: '/usr/lib/x/y.so'", "[Errno 2] No such file: '…/y.so'"),
        ("PATH=/usr/bin:/opt/bin/x, ~/models/y", "PATH=…/bin:…/x, …/y"),
        ("file:///home/me/x.gguf", "file://…/x.gguf"),
        (r"C:\Users\me\x.gguf and 'D:\\y\\z'", "…/x.gguf and '…/z'"),
    ],
)
def test_of_a_path_the_last_name_is_left(remembered, message, told):
    assert without_paths(message) == told


def test_other_models_of_a_folder_are_not_named(tmp_path):
    for name in ("model-b.gguf", "it's.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    for missing, told in (
        ("model-a.gguf", "…/model-a.gguf does not exist"),
        ("its.gguf", "…/its.gguf does not exist"),
        (".", f"…/{tmp_path.name} is a directory; give"),
    ):
        with pytest.raises(ModelFileError, match=r"model-b|it's") as refusal:
            resolve(str(tmp_path / missing))
        assert without_paths(str(refusal.value)).startswith(told)
    meant = "there is no field 'max_tokn'; did you mean 'max_tokens'?"
    assert without_paths(meant) == meant


@pytest.mark.parametrize(
    "message",
    [
        "there is no '/foo/bar'; /openapi.json names the endpoints",
        "give /v1/chat/completions, https://huggingface.co/home/x or application/json",
        "#/$defs/tmp/x and #/home/y, a/tmp/b and ./var/z, /llm/api/v1/models",
        "and/or, 3/4, a / b, n\\a",
    ],
)
def test_addresses_and_pointers_stay(remembered, message):
    assert without_paths(message) == message


def served(tmp_path, **more):
    folder = tmp_path / "a secret"
    folder.mkdir(exist_ok=True)
    app = fake_app(server={"data_dir": str(folder / "data"), "lora_dir": str(folder), **more})
    return TestClient(app, raise_server_exceptions=False), folder


def load_of(error):
    def connect(config):
        raise error

    return connect


def test_a_load_that_failed_names_no_folder_and_the_log_does(tmp_path, caplog):
    path = tmp_path / "deep er" / "x.gguf"
    error = ModelFileError(f"{path} cannot be loaded: {tmp_path}/other.gguf is gone")
    app = fake_app(connect=load_of(error), server={"lora_dir": str(path.parent)})
    caplog.set_level(logging.INFO)
    with TestClient(app, raise_server_exceptions=False) as client:
        until(lambda: app.state.serving.state != "loading")
        answers = [client.get("/readyz"), client.post(PATH, json={"prompt": "x"})]
        answers += [client.get("/props"), client.post("/v1/messages", json={}), client.get("/slots?stream=1")]
    for answer in answers:
        assert "x.gguf cannot be loaded" in answer.text or answer.status_code == 400, answer.text
        assert str(tmp_path) not in answer.text
        assert "deep er" not in answer.text
    assert f"the engine has ended: {path} cannot be loaded" in caplog.text


def raising(error):
    def answer(request):
        raise error

    return answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "model": "x"}),
        ("/completion", {"prompt": "x"}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_error_of_a_request_names_no_folder(tmp_path, path, body, stream):
    error = EngineError(f"llama_decode failed: {tmp_path}/model.gguf, [Errno 2] '/usr/lib/libx/y.so'")
    with ready_client(raising(error)) as client:
        if path == "/v1/messages":
            body = body | {"model": client.app.state.serving.names[0]}
        text = client.post(path, json=body | {"stream": stream}).text
    assert "model.gguf" in text
    assert "y.so" in text
    assert str(tmp_path) not in text
    assert "/usr" not in text


def test_documents_name_files_without_folders(tmp_path):
    client, folder = served(tmp_path)
    (folder / "sub").mkdir()
    for name in ("red.gguf", "sub/green.gguf"):
        (folder / name).write_bytes(b"x")
    with client:
        client.app.state.serving.start().result()
        for name in ("red.gguf", "sub/green.gguf"):
            load = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder / name)})
            assert load.status_code == 200, load.text
        paths = {each["name"]: each["path"] for each in client.get("/lora-adapters").json()}
        assert paths == {"red.gguf": "red.gguf", "sub/green.gguf": str(Path("sub/green.gguf"))}
        for path in ("/props", "/v1/models", "/lora-adapters", "/slots", "/metrics", "/openapi.json", "/version"):
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert str(tmp_path) not in answer.text, path
        assert "/" not in client.get("/props").json()["model_path"]


def test_an_adapter_that_is_refused_and_a_folder_in_use_name_no_folder(tmp_path, monkeypatch, caplog):
    client, folder = served(tmp_path)
    (folder / "red.gguf").write_bytes(b"x")
    with client:
        serving = client.app.state.serving
        serving.start().result()

        def refuse(*arguments):
            raise ModelFileError(f"adapter {folder / 'red.gguf'} cannot be read: no")

        monkeypatch.setattr(type(serving.client), "call", refuse)
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "red.gguf"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_adapter")
        assert "adapter …/red.gguf cannot be read" in answer.json()["error"]["message"]
        assert str(folder / "red.gguf") in caplog.text
        other, _ = served(tmp_path)
        with other:
            with pytest.raises(ConfigError, match=str(folder)):
                other.app.state.serving.start().result()
            answer = other.get("/v1/batches")
    assert answer.status_code == 503
    assert "--data-dir" in answer.text
    assert str(tmp_path) not in answer.text


def test_a_model_whose_path_has_a_colon_is_called_by_its_name():
    assert _plain_name("/home/me/a:b") == "a:b"
    assert _plain_name("hf:owner/repo:Q4_K_M") == "hf:owner/repo:Q4_K_M"
