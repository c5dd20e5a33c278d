"""POST /slots/N?action=save, restore and erase, over a fake engine."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from llamabatch.errors import ConfigError
from tests.unit.server.serving_clients import fake_client, ready_client

TEXT = "one two three " * 20


@pytest.fixture
def client(tmp_path):
    with ready_client(server={"slot_save_path": str(tmp_path / "slots")}) as client:
        yield client


def ask(client, number, **more):
    answer = client.post("/completion", json={"prompt": TEXT, "id_slot": number, "n_predict": 4, **more})
    assert answer.status_code == 200
    assert "id_slot" not in answer.headers.get("X-Llamabatch-Ignored", "")
    return answer


def act(client, number, action, name="a.bin"):
    return client.post(f"/slots/{number}?action={action}", json={"filename": name})


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_saved_restored_and_erased(client, tmp_path, stream):
    ask(client, 1, stream=stream)
    saved = act(client, 1, "save").json()
    file = tmp_path / "slots" / "a.bin"
    tokens = json.loads(file.read_text())
    assert saved == {
        **{"id_slot": 1, "filename": "a.bin", "n_saved": len(tokens), "n_written": file.stat().st_size},
        "timings": saved["timings"],
    }
    n_prompt = len(client.post("/tokenize", json={"content": TEXT, "add_special": True}).json()["tokens"])
    assert len(tokens) == n_prompt + 3  # the last token of the answer is not computed
    restored = act(client, 0, "restore").json()
    assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (0, len(tokens), file.stat().st_size)
    prefixes = fake_client(client)._prefixes
    assert prefixes == {str(file)}
    assert client.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": 0}
    assert not prefixes
    assert client.post("/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": len(tokens)}
    assert act(client, 1, "save").status_code == 400


def test_a_file_is_freed_when_no_number_needs_it(client, tmp_path):
    for name in ("a.bin", "b.bin"):
        ask(client, 0)
        assert act(client, 0, "save", name).status_code == 200
    for number, name in ((0, "a.bin"), (1, "a.bin"), (0, "b.bin")):
        assert act(client, number, "restore", name).status_code == 200
    prefixes = fake_client(client)._prefixes
    assert prefixes == {str(tmp_path / "slots" / name) for name in ("a.bin", "b.bin")}
    act(client, 1, "restore", "b.bin")
    assert prefixes == {str(tmp_path / "slots" / "b.bin")}


@pytest.mark.parametrize(
    ("number", "action", "name", "status", "words"),
    [
        (0, "save", "a.bin", 400, "the last request with id_slot 0 is not finished"),
        (0, "restore", "a.bin", 400, "a.bin"),
        (0, "restore", "b/a.bin", 400, "without a folder"),
        (0, "restore", ".a", 400, "without a dot in front"),
        (0, "save", None, 400, "filename is None"),
        (9999, "save", "a.bin", 400, "id_slot is 9999; give 0 to"),
        (0, "copy", "a.bin", 400, "action is 'copy'; give save, restore or erase"),
    ],
)
def test_what_is_refused(client, number, action, name, status, words):
    answer = act(client, number, action, name)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_a_short_text_is_not_worth_a_file(client):
    client.post("/completion", json={"prompt": "one", "id_slot": 0, "n_predict": 1})
    assert "at least 32 are worth saving" in act(client, 0, "save").json()["error"]["message"]


def test_without_a_folder():
    with ready_client() as client:
        for number in (0, "0", 1.5, -7):
            answer = client.post("/completion", json={"prompt": "one", "id_slot": number, "n_predict": 1})
            assert (answer.status_code, answer.headers["X-Llamabatch-Ignored"]) == (200, "id_slot")
        answer = act(client, 0, "save")
        assert answer.status_code == 501
        assert "slot_save_path" in answer.json()["error"]["message"]


def test_a_request_that_is_not_kept_replaces_the_text(client):
    ask(client, 0)
    for more in ({"cache_salt": "s"}, {"id_slot": 99}):
        answer = client.post("/completion", json={"prompt": TEXT, "id_slot": 0, "n_predict": 4} | more)
        assert answer.headers["X-Llamabatch-Ignored"] == "id_slot"
    assert (
        "the last request with id_slot 0 is not finished, has an adapter"
        in act(client, 0, "save").json()["error"]["message"]
    )


def test_files_are_for_their_user_alone(client, tmp_path):
    ask(client, 0)
    act(client, 0, "save")
    assert (tmp_path / "slots" / "a.bin").stat().st_mode & 0o777 == 0o600


def test_cells_that_others_need_are_a_503(client, monkeypatch):
    ask(client, 0)
    monkeypatch.setattr(fake_client(client), "_save_prefix", lambda token_ids, path: False)
    answer = act(client, 0, "save")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    client.app.state.serving.slot_files._texts[0] = (*range(20), *(-5,) * 20, 7)  # cells of a picture among them
    answer = act(client, 0, "save")
    assert answer.status_code == 400
    assert "send its prompt again with the same id_slot" in answer.json()["error"]["message"]


def test_files_restored_and_erased_at_once_are_all_freed(client):
    for name in ("a.bin", "b.bin", "c.bin"):
        ask(client, 0)
        act(client, 0, "save", name)
    files = client.app.state.serving.slot_files
    wanted = [(number, "restore", name) for number in (0, 1) for name in ("a.bin", "b.bin", "c.bin")]
    with ThreadPoolExecutor(6) as callers:
        for _ in range(10):
            assert all(answer.status_code == 200 for answer in callers.map(lambda one: act(client, *one), wanted))
            assert fake_client(client)._prefixes == {str(path) for path in files._restored.values()}
    for number in (0, 1):
        client.post(f"/slots/{number}?action=erase")
    assert not fake_client(client)._prefixes


def test_a_folder_that_cannot_be_made_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"slot_save_path is .*file, which cannot be used"),
        ready_client(server={"slot_save_path": str(tmp_path / "file")}),
    ):
        pass
