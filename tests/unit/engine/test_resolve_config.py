"""What the headers of files say is stored, and trusted only while the files are the same."""

import json

import pytest

from llamabatch.engine import resolve_config
from llamabatch.engine.resolve_config import HEADERS, facts_of
from llamabatch.llama import vetting
from llamabatch.llama.vetting import ensure_sound
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.utils import disk_cache, paths


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vetting, "_seen", {})
    path = tmp_path / "model.gguf"
    path.write_bytes(paths.bundled_model().read_bytes())
    return path


def read(path):
    return facts_of(path, ensure_sound(path))


def test_a_known_file_is_planned_without_a_walk(model, monkeypatch):
    first = read(model)
    assert first == ModelFacts.read(model)
    monkeypatch.setattr(resolve_config, "read_parts", None)
    monkeypatch.setattr(vetting, "_seen", {})
    assert read(model) == first


def test_a_changed_file_is_walked_again(model):
    first = read(model)
    with model.open("ab") as file:
        file.write(b"\0" * 64)
    assert read(model).file_bytes == first.file_bytes + 64


@pytest.mark.parametrize("damage", ["", "[]", '{"version": 1}', None])
def test_a_damaged_note_is_no_harm(model, damage):
    first = read(model)
    [note] = disk_cache.folder().glob(f"{HEADERS}-*.json")
    if damage is None:
        damage = json.dumps({**json.loads(note.read_text()), "tensors": [["only", 1]]})
    note.write_text(damage)
    assert read(model) == first


def test_a_cache_that_cannot_be_written_costs_the_walk(model, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "file"))
    assert read(model) == ModelFacts.read(model)
