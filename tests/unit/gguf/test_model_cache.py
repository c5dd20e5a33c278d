"""Models in huggingface_hub's cache: their names, what removing one leaves, and that a name finds its file again."""

import json
import os
import re

import pytest
from click.testing import CliRunner

from llamabatch.cli import cli
from llamabatch.errors import ModelFileError
from llamabatch.gguf.model_cache import cached_models, find, quantisation, remove
from llamabatch.gguf.resolve import fetch_reference
from llamabatch.utils.paths import model_name

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("llamabatch.gguf.model_cache.cache_dir", lambda: tmp_path / "ours")
    add(tmp_path, "Qwen/Qwen-GGUF", NEW, {"q-Q4_K_M.gguf": b"GGUF1", "q-Q8_0.gguf": b"GGUF22", "README.md": b"x"})
    add(tmp_path, "Qwen/Qwen-GGUF", OLD, {"q-Q4_K_M.gguf": b"GGUF1", "q-Q8_0.gguf": b"GGUFold"})
    add(tmp_path, "big/model", NEW, {f"BF16/m-BF16-0000{n}-of-00002.gguf": b"GGUF%d" % n for n in (1, 2)})
    add(tmp_path, "half/model", NEW, {"m-Q4_0-00001-of-00002.gguf": b"GGUFhalf"})
    add(tmp_path, "plain/model", NEW, {"model.gguf": b"GGUFplain"})
    (tmp_path / "models--Qwen--Qwen-GGUF" / "refs" / "main").write_text(NEW)
    return tmp_path


def add(folder, repo_id, commit, files):
    repo = folder / f"models--{repo_id.replace('/', '--')}"
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    for name, data in files.items():
        link, blob = repo / "snapshots" / commit / name, repo / "blobs" / data.hex()
        blob.write_bytes(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def test_names_sizes_and_quantisations(cache):
    assert [(model.name, model.quantisation, model.n_bytes) for model in cached_models()] == [
        ("big/model:BF16", "BF16", 10),
        ("plain/model:model.gguf", None, 9),
        ("Qwen/Qwen-GGUF:Q4_K_M", "Q4_K_M", 5),
        ("Qwen/Qwen-GGUF:Q8_0", "Q8_0", 6),
        (f"Qwen/Qwen-GGUF@{OLD[:8]}:Q8_0", "Q8_0", 7),
    ]


def test_each_name_finds_its_file_without_the_network(cache, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for model in cached_models():
        assert fetch_reference(model_name(model.name)).resolve() == model.path.resolve()


def test_removing_one_leaves_the_others(cache):
    models = cached_models()
    repo = cache / "models--Qwen--Qwen-GGUF"
    assert remove(find("hf:Qwen/Qwen-GGUF:Q4_K_M", models)) == 5
    assert not list(repo.rglob("*Q4_K_M*"))  # gone from both snapshots
    assert {blob.read_bytes() for blob in (repo / "blobs").iterdir()} == {b"GGUF22", b"GGUFold", b"x"}
    assert [model.name for model in cached_models()] == [m.name for m in models if "Q4_K_M" not in m.name]
    remove(find("big/model", models))
    assert not (cache / "models--big--model").exists()


def test_unknown_and_ambiguous_names(cache):
    models = cached_models()
    with pytest.raises(ModelFileError, match="is the name of 3 models in the cache; give one of Qwen/Qwen-GGUF:Q4_K_M"):
        find("Qwen/Qwen-GGUF", models)
    with pytest.raises(ModelFileError, match="did you mean 'Qwen/Qwen-GGUF:Q4_K_M'"):
        find("Qwen/Qwen-GGUF:Q4_K_S", models)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("m-Q4_K_M.gguf", "Q4_K_M"), ("d/m.IQ2_XXS.gguf", "IQ2_XXS"), ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-f16.gguf", "F16"), ("m-BF16-00001-of-00002.gguf", "BF16"), ("qwen2.5-0.5b-q8_0.gguf", "Q8_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("model.gguf", None), ("Q4_0/model.gguf", None),
    ],
)  # fmt: skip
def test_quantisations_in_names(name, found):
    assert quantisation(name) == found


def test_the_commands(cache):
    runner = CliRunner()
    listed = json.loads(runner.invoke(cli, ["models", "--json"]).stdout)
    assert [model["name"] for model in listed] == [model.name for model in cached_models()]
    assert set(listed[0]) == {"name", "quantisation", "bytes", "modified", "path", "files"}
    table = runner.invoke(cli, ["models"], env={"COLUMNS": "80"}).stdout
    assert re.search(r"Qwen/Qwen-GGUF:Q4_K_M +Q4_K_M +5 B +\d{4}-\d\d-\d\d", table)
    assert max(map(len, table.splitlines())) <= 80
    refused = runner.invoke(cli, ["rm", "big/model:BF16"])
    assert (refused.exit_code, "give --yes" in refused.output) == (2, True)
    removed = runner.invoke(cli, ["rm", "--yes", "big/model:BF16", "hf:Qwen/Qwen-GGUF:Q8_0"])
    assert removed.exit_code == 0, removed.output
    assert removed.stderr.splitlines() == ["removed big/model:BF16 (10 B)", "removed Qwen/Qwen-GGUF:Q8_0 (6 B)"]
    assert len(cached_models()) == 3
    missing = runner.invoke(cli, ["rm", "--yes", "big/model"])
    assert (missing.exit_code, "there is no model 'big/model' in the cache" in missing.output) == (2, True)
    assert "names nothing on the hub" in runner.invoke(cli, ["pull", "tiny"]).output


def test_a_name_of_owner_and_repo_is_one_on_the_hub_unless_it_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_name("Qwen/Qwen-GGUF:Q4_K_M") == "hf:Qwen/Qwen-GGUF:Q4_K_M"
    assert model_name("Qwen/Qwen-GGUF@v1:*Q8*.gguf") == "hf:Qwen/Qwen-GGUF@v1:*Q8*.gguf"
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen-GGUF").write_bytes(b"GGUF")
    assert model_name("Qwen/Qwen-GGUF") == str(tmp_path / "Qwen" / "Qwen-GGUF")
    for path in ("models/a.gguf", "./a/b", "a/b/c", "../a", "a", "/a/b"):
        assert os.path.isabs(model_name(path)), path
    for name in ("tiny", "hf:a/b", "https://a.b/c.gguf"):
        assert model_name(name) == name
