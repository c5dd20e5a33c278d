"""Models in several files, and models by their name on the hub."""

import os
import shutil
import subprocess
import sys

import pytest
from architectures import write

from llamabatch import LLM, EngineConfig, ModelFileError, SamplingParams, profile_store
from llamabatch.model_file import file_bytes, resolve

SHORT = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 128, "n_slots": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model in one file, and what it writes."""
    path = write("llama", tmp_path_factory.mktemp("whole") / "model.gguf")
    with LLM(path, **ONE_THREAD) as llm:
        return path, llm.generate("Once", SHORT)[0].text


@pytest.fixture
def parts(tmp_path):
    """The same model in three files or more: the first of them."""
    return write("llama", tmp_path / "model.gguf", part_tensors=8)


@pytest.mark.parametrize("options", [{}, {"isolate": True}])
def test_a_model_in_parts_is_opened_by_its_first(whole, parts, options):
    assert len(list(parts.parent.glob("*.gguf"))) >= 3
    with LLM(parts, **ONE_THREAD, **options) as llm:
        assert llm.generate("Once", SHORT)[0].text == whole[1]
        assert llm.plan.memory.weights == sum(p.stat().st_size for p in parts.parent.iterdir())
    assert abs(file_bytes(parts) - file_bytes(whole[0])) < 4096


def test_what_a_profile_is_for_counts_all_parts(parts):
    first = profile_store.key_of(parts, "f16", "f16")
    assert first.shape.file_bytes == file_bytes(parts)
    assert profile_store.key_of(parts, "f16", "f16") == first
    longest = max(parts.parent.iterdir())
    longest.write_bytes(longest.read_bytes() + bytes(32))
    assert profile_store.key_of(parts, "f16", "f16") != first


def test_parts_that_are_missing_or_damaged_are_named_before_the_load(parts):
    last = max(parts.parent.iterdir())
    with pytest.raises(ModelFileError, match=f"{last.name} is one of . parts of a model; give the first, {parts.name}"):
        LLM(last)
    content = last.read_bytes()
    last.write_bytes(b"none of it")
    with pytest.raises(ModelFileError, match=f"{last.name} is not a GGUF file"):
        LLM(parts)
    last.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError):
        LLM(parts)
    last.unlink()
    with pytest.raises(ModelFileError, match=f"{last.name} is missing: {parts.name} is the first of . parts"):
        LLM(parts)


@pytest.fixture
def hub(whole, parts, tmp_path, monkeypatch):
    """huggingface_hub's cache with one repository in it, in its own layout, and nobody to ask."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "cache"
    repo = cache / "models--some--model"
    snapshot = repo / "snapshots" / ("a1" * 20)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    blobs = repo / "blobs"
    blobs.mkdir()
    names = {"model-Q8_0.gguf": whole[0], "README.md": whole[0]}
    names |= {f"split/{part.name.replace('model', 'model-F32')}": part for part in parts.parent.glob("model-*.gguf")}
    for number, (name, source) in enumerate(names.items()):
        shutil.copy(source, blobs / f"{number:040}")
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(blobs / f"{number:040}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return snapshot


def test_from_pretrained(hub, whole):
    for repo, name in (("some/model", "*Q8_0.gguf"), ("some/model", "Q8_0"), ("some/model", "*f32*")):
        with LLM.from_pretrained(repo, name, **ONE_THREAD) as llm:
            assert llm.plan.config.n_slots == 2
            assert llm.generate("Once", SHORT)[0].text == whole[1]


@pytest.mark.parametrize("options", [{}, {"isolate": True}])
def test_a_name_on_the_hub(hub, whole, options):
    with LLM("hf:some/model:Q8_0", **ONE_THREAD, **options) as llm:
        assert llm.generate("Once", SHORT)[0].text == whole[1]
        assert llm.plan.config.model == str(hub / "model-Q8_0.gguf")
    assert resolve("hf:some/model@main:F32").name.startswith("model-F32-00001-of-")


def test_the_command_takes_a_name_on_the_hub(hub, whole):
    command = [sys.executable, "-m", "llamabatch", "generate", "-m", "hf:some/model:Q8_0", "--n-ctx", "128", "-t", "0"]
    cache = {"HF_HUB_CACHE": str(hub.parents[2]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--max-tokens", "16", "--ignore-eos", "Once"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **cache},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == whole[1].strip()
    command[5] = "hf:some/model:Q2_K"
    done = subprocess.run([*command, "Once"], capture_output=True, text=True, env={**os.environ, **cache})
    assert done.returncode == 2
    assert "no file of the cache of some/model matches 'Q2_K'; there is model-Q8_0.gguf" in done.stderr


def test_a_config_keeps_the_name(hub):
    assert EngineConfig("hf:some/model:Q8_0").model == "hf:some/model:Q8_0"
