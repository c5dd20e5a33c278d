"""Names on the hub: the files that they mean, and the error if they mean none. Nothing here uses the network."""

import socket
import sys
from pathlib import Path

import pytest

from llamabatch.errors import ModelFileError, SetupError
from llamabatch.gguf import resolve
from llamabatch.gguf.header import part_names
from llamabatch.gguf.resolve import fetch, fetch_reference

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")

NAMES = [
    "README.md",
    "mmproj-model-f16.gguf",
    "model-IQ4_K.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model.Q8_0.gguf",
    "BF16/model-BF16-00001-of-00003.gguf",
    "BF16/model-BF16-00002-of-00003.gguf",
    "BF16/model-BF16-00003-of-00003.gguf",
]


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Makes the hub answer. Returns a list to which each download is added."""
    fetched = []

    def download(repo_id, name, *, revision, cache_dir):
        fetched.append((repo_id, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(resolve, "reachable", lambda url, budget_s: True)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo_id, revision=None: NAMES)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return fetched


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q8_0", "model.Q8_0.gguf"),
        ("*Q4_K_M.gguf", "model-Q4_K_M.gguf"),
        ("*q4_k_s*", "model-Q4_K_S.gguf"),
        ("model-IQ4_K.gguf", "model-IQ4_K.gguf"),
        ("mmproj*", "mmproj-model-f16.gguf"),
    ],
)
def test_which_file(online, wanted, name):
    assert fetch("some/model", wanted).name == name
    assert online == [("some/model", name, None)]


@pytest.mark.parametrize("wanted", ["BF16", "*BF16*", "BF16/*.gguf", "model-BF16-00002-of-00003.gguf"])
def test_all_parts_are_fetched_and_the_first_is_opened(online, wanted):
    assert fetch("some/model", wanted, revision="v1").name == "model-BF16-00001-of-00003.gguf"
    assert online == [("some/model", f"BF16/model-BF16-0000{n}-of-00003.gguf", "v1") for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("Q4_K", "no file of some/model matches 'Q4_K'; there is BF16/model-BF16-00001-of-00003.gguf, mmproj"),
        ("*Q4_K_?.gguf", "more than one file .* matches .*: model-Q4_K_M.gguf, model-Q4_K_S.gguf; say which"),
        (None, "more than one file of some/model is a model: BF16/"),
        ("F16", "no file of some/model matches 'F16'"),
        (5, "filename is 5; give a text"),
    ],
)
def test_none_or_several(online, wanted, message):
    with pytest.raises(ModelFileError, match=message):
        fetch("some/model", wanted)
    assert online == []


def test_references(online):
    assert fetch_reference("hf:some/model:Q8_0").name == "model.Q8_0.gguf"
    assert fetch_reference("hf:some/model@v1:*Q4_K_M.gguf").name == "model-Q4_K_M.gguf"
    assert online[-1][2] == "v1"
    for bad in ("hf:", "hf:model:Q8_0", "hf:a/b/c", "hf:some/model:"):
        with pytest.raises(ModelFileError, match="give hf:owner/repo:Q4_K_M"):
            fetch_reference(bad)


def test_refusals_of_the_hub(online, monkeypatch):
    def refuse(self, repo_id, revision=None):
        raise errors.HFValidationError("Repo id must be in the form\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    with pytest.raises(ModelFileError, match=r"^some/model cannot be read: Repo id must be in the form$"):
        fetch("some/model", "Q8_0")


def test_a_part_that_cannot_be_fetched(online, monkeypatch):
    def fail(repo_id, name, **options):
        raise OSError("the disk is full")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelFileError, match=r"model.Q8_0.gguf of some/model cannot be fetched: the disk is full"):
        fetch("some/model", "Q8_0")


def in_cache(folder: Path, *names: str) -> Path:
    repo = folder / "models--some--model"
    snapshot = repo / "snapshots" / ("a1" * 20)
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(snapshot.name)
    for name in names:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(b"GGUF")
    return snapshot


@pytest.mark.parametrize("why", ["offline", "local", "out of reach"])
def test_from_the_cache_where_the_hub_is_not_asked_or_out_of_reach(online, monkeypatch, tmp_path, why):
    def unreachable(self, repo_id, revision=None):
        assert why == "out of reach"
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", why == "offline")
    snapshot = in_cache(tmp_path, "model-Q8_0.gguf", *NAMES[-3:-1])

    def cached(*args, **more):
        return fetch(*args, cache_dir=tmp_path, local_files_only=why == "local", **more)

    assert cached("some/model", "Q8_0") == snapshot / "model-Q8_0.gguf"
    assert cached("some/model", revision="a1a1a1a1", filename="Q8_0") == snapshot / "model-Q8_0.gguf"
    with pytest.raises(ModelFileError, match=r"lacks BF16/model-BF16-00003-of-00003\.gguf; fetch it"):
        cached("some/model", "BF16")
    with pytest.raises(ModelFileError, match=r"other/model cannot be fetched: .* nothing of main in the cache"):
        cached("other/model", "Q8_0")
    with pytest.raises(ModelFileError, match="nothing of v2 in the cache"):
        cached("some/model", "Q8_0", revision="v2")
    with pytest.raises(ModelFileError, match="nothing of main in the cache"):
        fetch("some/model", "Q8_0", cache_dir=tmp_path / "none", local_files_only=True)
    assert online == []


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SetupError, match=r'pip install "llamabatch\[hub\]"'):
        fetch_reference("hf:some/model:Q8_0")
    with pytest.raises(SetupError, match=r"'some/model' is no file here, and models from the hub need"):
        resolve.resolve("some/model:Q8_0")


def test_names_of_parts():
    assert part_names("a-00001-of-00002.gguf") == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    assert part_names("a-00002-of-00002.gguf") == part_names("a-00001-of-00002.gguf")
    for one in ("a.gguf", "a-1-of-2.gguf", "a-00001-of-00000.gguf", "a-00001-of-99999.gguf", "a-00001-of-00002.bin"):
        assert part_names(one) == [one]


def test_a_hub_out_of_reach_is_told_without_a_wait(monkeypatch, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(resolve, "_names_online", lambda *_: pytest.fail("its tries take long"))
        with pytest.raises(ModelFileError, match=r"the hub is out of reach .* no file here has this name either"):
            fetch("some/model", "Q8_0", cache_dir=tmp_path)
