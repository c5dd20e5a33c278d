"""Models that are split into several files, and models by their name on the Hugging Face hub."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamabatch import LLM, AsyncLLM, EngineConfig, InputError, ModelFileError, SamplingParams
from llamabatch.gguf.resolve import file_bytes, resolve
from llamabatch.planning import profile_store
from tests.model.adapter_files import write_lora
from tests.model.architectures import write

SHORT = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 128, "n_slots": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model in one file, and the text that it writes."""
    path = write("llama", tmp_path_factory.mktemp("whole") / "model.gguf")
    with LLM(path, **ONE_THREAD) as llm:
        return path, llm.generate("Once", SHORT)[0].text


@pytest.fixture
def parts(tmp_path):
    """The first of several files of the same model."""
    return write("llama", tmp_path / "model.gguf", part_tensors=8)


def test_a_model_in_parts_is_opened_by_its_first(whole, parts):
    assert len(list(parts.parent.glob("*.gguf"))) >= 3
    with LLM(parts, **ONE_THREAD) as llm:
        assert llm.generate("Once", SHORT)[0].text == whole[1]
        assert llm.plan.memory.file == sum(p.stat().st_size for p in parts.parent.iterdir())
    assert abs(file_bytes(parts) - file_bytes(whole[0])) < 4096


def test_what_a_profile_is_for_counts_all_parts(parts):
    first = profile_store.key_of(parts, EngineConfig("m"))
    assert first.shape.file_bytes == file_bytes(parts)
    assert profile_store.key_of(parts, EngineConfig("m")) == first
    longest = max(parts.parent.iterdir())
    longest.write_bytes(longest.read_bytes() + bytes(32))
    assert profile_store.key_of(parts, EngineConfig("m")) != first


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
    """A cache in huggingface_hub's own layout with one repository. There is no connection to the hub."""
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
    for name in ("*Q8_0.gguf", "*f32*"):
        with LLM.from_pretrained("some/model", name, **ONE_THREAD) as llm:
            assert llm.plan.config.n_slots == 2
            assert llm.generate("Once", SHORT)[0].text == whole[1]


def test_from_pretrained_on_an_event_loop(hub, whole):
    async def run():
        async with AsyncLLM.from_pretrained("some/model", "Q8_0", **ONE_THREAD) as llm:
            return (await llm.generate("Once", SHORT))[0].text

    assert asyncio.run(run()) == whole[1]


def test_a_name_on_the_hub(hub, whole):
    with LLM("hf:some/model:Q8_0", isolate=True, **ONE_THREAD) as llm:
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


@pytest.fixture
def beside_the_shell(tmp_path, monkeypatch):
    """Makes a folder with new files, which no cache knows, the working directory."""
    folder = tmp_path / "a b é"
    (folder / "sub").mkdir(parents=True)
    (folder / "elsewhere").mkdir()
    write("llama", folder / "model.gguf")
    write("llama", folder / "draft.gguf", seed=1)
    write("llama", folder / "sub" / "split.gguf", part_tensors=8)
    write_lora(folder / "lora.gguf")
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "new cache"))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def split_name(folder):
    return min((folder / "sub").glob("*.gguf")).name


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("~/model.gguf", {"strategy": "multi-instance", "instances": 2, "n_slots": 1}),
        ("sub/split", {"isolate": True}),
        ("model.gguf", {"speculate": "draft", "draft_model": "./draft.gguf", "isolate": True}),
    ],
)
def test_relative_paths_hold_after_the_program_has_gone_elsewhere(beside_the_shell, monkeypatch, model, options):
    if model == "sub/split":
        model = f"sub/{split_name(beside_the_shell)}"
    with LLM(model, **{**ONE_THREAD, **options}) as llm:
        text = llm.generate("Once", SHORT)[0].text
        assert text
        monkeypatch.chdir("elsewhere")
        for child in llm.heartbeats:
            os.kill(child.pid, signal.SIGKILL)
            assert llm.generate(["Once", "Once"], SHORT)[0].text == text


def test_an_engine_of_asyncio_loads_what_was_named_before_the_program_went_elsewhere(beside_the_shell, monkeypatch):
    async def main():
        llm = AsyncLLM("model.gguf", **ONE_THREAD)
        monkeypatch.chdir("elsewhere")
        async with llm:
            return (await llm.generate("Once", SHORT))[0]

    assert asyncio.run(main()).error is None


@pytest.mark.parametrize("options", [{}, {"isolate": True}])
def test_adapters_and_prefixes_by_relative_paths(beside_the_shell, monkeypatch, options):
    text = "The capital of France is Paris and the capital of Italy is Rome, of Spain Madrid, of Japan Tokyo. " * 2
    with LLM("tiny", adapters={"first": "lora.gguf"}, n_slots=2, n_ctx=512, **options) as llm:
        llm.load_adapter("second", "./lora.gguf")
        llm.save_prefix(text, "prefix.kv")
        assert (beside_the_shell / "prefix.kv").exists()
        llm.load_prefix("prefix.kv")
        plain = llm.generate(text, SHORT)[0].text
        bent = llm.generate(text, SHORT, adapters={"first": 1.0})[0].text
        monkeypatch.chdir("elsewhere")
        for child in llm.heartbeats:
            os.kill(child.pid, signal.SIGKILL)
        assert llm.generate(text, SHORT)[0].text == plain
        assert llm.generate(text, SHORT, adapters={"second": 1.0})[0].text == bent
        with pytest.raises(InputError, match="is loaded"):
            llm.unload_prefix("prefix.kv")  # here, the relative path names another file
        llm.unload_prefix("../prefix.kv")
        llm.load_adapter("third", "~/lora.gguf")


@pytest.mark.parametrize("model", ["model.gguf", "../a b é/model.gguf", "~/model.gguf"])
def test_the_commands_take_relative_paths(beside_the_shell, model):
    command = [sys.executable, "-m", "llamabatch"]
    done = subprocess.run(
        [*command, "generate", "-m", model, "--n-ctx", "128", "-n", "4", "Once"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    Path("in.jsonl").write_text('{"prompt": "Once"}\n')
    run = ["run", "in.jsonl", "out.jsonl", "-m", model, "--n-ctx", "128", "-n", "4"]
    if model.startswith("~"):
        run = [each.replace("in.jsonl", "~/in.jsonl").replace("out.jsonl", "~/out.jsonl") for each in run]
    done = subprocess.run([*command, *run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("out.jsonl").read_text())["error"] is None
    again = subprocess.run([*command, *run], capture_output=True, text=True)
    assert "out.jsonl is complete: 1 row\n" in again.stderr
    assert str(beside_the_shell) not in again.stderr
