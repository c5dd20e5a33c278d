"""Adapters over HTTP: vLLM's endpoints load and unload them, llama-server's set their scales."""

import os

import pytest

from tests.unit.server.serving_clients import fake_client, ready_client


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "adapters"
    (folder / "sub").mkdir(parents=True)
    for name in ("red.gguf", "blue.gguf", "sub/green.gguf"):
        (folder / name).write_bytes(b"GGUF")
    (tmp_path / "outside.gguf").write_bytes(b"GGUF")
    (folder / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    (folder / "inner.gguf").symlink_to(folder / "red.gguf")
    os.mkfifo(folder / "pipe.gguf")
    return folder


@pytest.fixture
def client(folder):
    server = {"lora_dir": str(folder), "served_model_names": ("base",)}
    with ready_client(server=server, adapters={"first": "f.gguf"}) as client:
        yield client


def load(client, name, path, **more):
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def names(client):
    return [each["id"] for each in client.get("/v1/models").json()["data"]]


def test_an_adapter_is_a_model_until_it_is_unloaded(client):
    answer = load(client, "red", "red.gguf")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'red' added successfully.")
    assert names(client) == ["base", "first", "red"]
    [card] = [each for each in client.get("/v1/models").json()["data"] if each["id"] == "red"]
    assert card["parent"] == "base"
    answer = client.post("/v1/completions", json={"model": "red", "prompt": "x"})
    assert (answer.status_code, answer.json()["model"]) == (200, "red")
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "red", "lora_int_id": 1})
    assert answer.text == "Success: LoRA adapter 'red' removed successfully."
    assert names(client) == ["base", "first"]
    assert client.post("/v1/completions", json={"model": "red", "prompt": "x"}).status_code == 404


def test_files_within_the_folder_are_found(client, folder):
    for path in ("sub/green.gguf", "sub/../blue.gguf", "inner.gguf", str(folder / "red.gguf")):
        assert load(client, path, path).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("../outside.gguf", 403),
        ("link.gguf", 403),
        ("/etc/passwd", 403),
        (".", 403),
        ("missing.gguf", 404),
        ("sub", 400),
        ("pipe.gguf", 400),
        ("", 400),
        ("a\0b", 400),
        ("x" * 5000, 400),
    ],
)
def test_other_files_are_refused(client, path, status):
    answer = load(client, "one", path)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "lora_path"
    assert "one" not in names(client)


@pytest.mark.parametrize(
    "body",
    [
        {"lora_name": "x"},
        {"lora_path": "red.gguf"},
        {"lora_name": 5, "lora_path": "red.gguf"},
        {"lora_name": "", "lora_path": "red.gguf"},
        {"lora_name": "a\nb", "lora_path": "red.gguf"},
        {"lora_name": " a", "lora_path": "red.gguf"},
        {"lora_name": "x" * 257, "lora_path": "red.gguf"},
        {"lora_name": "base", "lora_path": "red.gguf"},
        {"lora_name": "first", "lora_path": "red.gguf"},
        {"lora_name": "x", "lora_path": "red.gguf", "load_inplace": "yes"},
    ],
)
def test_other_bodies_are_refused(client, body):
    answer = client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400, answer.text
    assert names(client) == ["base", "first"]


def test_one_of_the_same_name_is_replaced_where_that_is_asked(client):
    assert load(client, "red", "red.gguf").status_code == 200
    assert load(client, "red", "blue.gguf").json()["error"]["code"] == "adapter_exists"
    assert load(client, "red", "blue.gguf", load_inplace=True).status_code == 200
    paths = {each["name"]: each["path"] for each in client.get("/lora-adapters").json()}
    assert paths["red"] == "blue.gguf"


def test_an_unknown_one_is_not_found(client):
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "nope"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")


def test_without_a_folder_nothing_is_loaded():
    with ready_client() as client:
        answer = load(client, "x", "/etc/passwd")
    assert answer.status_code == 403
    assert "--lora-dir" in answer.json()["error"]["message"]


def test_ids_are_places_and_scales_hold_for_later_requests(client):
    load(client, "red", "red.gguf")
    found = client.get("/lora-adapters").json()
    assert [(each["id"], each["name"], each["scale"]) for each in found] == [(0, "first", 0.0), (1, "red", 0.0)]
    assert found[0]["path"].endswith("f.gguf")
    seen = fake_client(client)
    assert client.post("/lora-adapters", json=[{"id": 1, "scale": 0.5}]).json() == {"success": True}
    assert [each["scale"] for each in client.get("/lora-adapters").json()] == [0.0, 0.5]
    client.post("/v1/completions", json={"prompt": "x"})
    assert seen.requests[-1].adapters == (("red", 0.5),)
    client.post("/v1/completions", json={"prompt": "x", "lora": [{"id": 0, "scale": 2.0}]})
    assert seen.requests[-1].adapters == (("first", 2.0),)
    client.post("/lora-adapters", json=[])
    client.post("/v1/completions", json={"prompt": "x"})
    assert seen.requests[-1].adapters == ()


def test_scales_are_set_also_once_the_file_of_keys_is_gone(tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("secret")
    server = {"api_key_file": str(keys)}
    with ready_client(server=server, adapters={"first": "f.gguf"}, headers={"x-api-key": "secret"}) as client:
        keys.unlink()
        assert client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}]).status_code == 200
        assert client.get("/lora-adapters").json()[0]["scale"] == 0.5
        assert client.get("/lora-adapters", headers={"x-api-key": "other"}).status_code == 401


def test_scales_of_an_unloaded_adapter_are_dropped(client):
    load(client, "red", "red.gguf")
    client.post("/lora-adapters", json=[{"id": 1, "scale": 0.5}])
    client.post("/v1/unload_lora_adapter", json={"lora_name": "red"})
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        [5],
        [{"id": 0}],
        [{"id": 9, "scale": 1}],
        [{"id": -1, "scale": 1}],
        [{"id": True, "scale": 1}],
        [{"id": 0, "scale": "1"}],
        [{"id": 0, "scale": 1e9}],
    ],
)
def test_other_scales_are_refused_and_change_nothing(client, body):
    answer = client.post("/lora-adapters", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == 400
    assert client.get("/lora-adapters").json()[0]["scale"] == 0.0
