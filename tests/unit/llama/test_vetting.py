"""Trial loads: which files need one, which results are stored, and what a dead child means. The child is a fake."""

import hashlib
import json
import logging
import signal
import subprocess
from types import SimpleNamespace

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, ModelFileError
from llamabatch.gguf.header import read_parts
from llamabatch.llama import vetting
from llamabatch.llama.vetting import BUNDLED, FileIdentity, content_hash, ensure_loadable
from llamabatch.utils import disk_cache, paths


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Replaces the program that loads the model. `runs` counts its runs."""
    child = SimpleNamespace(runs=0, code=0, says="")

    def run_program(module, path, n_bytes, *changes, timeout_s, without_gpus, environment):
        assert (module, without_gpus) == ("llamabatch.llama.trial_load", True)
        assert timeout_s > 60
        child.runs += 1
        child.changes = changes
        if isinstance(child.code, Exception):
            raise child.code
        return SimpleNamespace(returncode=child.code, stdout=child.says.encode())

    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vetting, "run_program", run_program)
    monkeypatch.setattr(vetting, "_loadable", set())
    monkeypatch.setattr(vetting, "_seen", {})
    return child


@pytest.fixture
def model(tmp_path):
    """Returns a copy of the bundled model that counts as another model: one byte of its name differs."""
    path = tmp_path / "model.gguf"
    data = bytearray(paths.bundled_model().read_bytes())
    at = data.index(b"llamabatch")
    data[at] = ord("L")
    path.write_bytes(data)
    return path


def test_what_is_behind_the_tensors_is_neither_loaded_nor_waited_for(child, model):
    with model.open("r+b") as hole:
        hole.truncate(2**40)
    with pytest.raises(ModelFileError, match="bytes behind the data of its last tensor"):
        ensure_loadable(model)
    assert child.runs == 0


def new_process():
    vetting._loadable.clear()
    vetting._seen.clear()


def test_the_bundled_model_is_known_by_its_hash(child):
    assert content_hash(read_parts(paths.bundled_model())) == BUNDLED
    ensure_loadable(paths.bundled_model())
    assert child.runs == 0
    ensure_loadable(paths.bundled_model(), "on")
    assert child.runs == 1


def test_an_unknown_file_is_tried_once(child, model, tmp_path):
    for _ in range(3):
        ensure_loadable(model)
    new_process()
    ensure_loadable(model)
    assert child.runs == 1
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    ensure_loadable(copy)  # the copy has a known hash
    assert child.runs == 1
    ensure_loadable(model, "on")
    assert child.runs == 2
    assert (len(disk_cache.all_of(vetting.FILES)), len(disk_cache.all_of(vetting.MODELS))) == (2, 1)


def test_other_values_and_patterns_are_tried_with_the_file(child, model):
    values, rules = (("llama.context_length", 512),), (("ffn", "CUDA0"),)
    for _ in range(2):
        ensure_loadable(model)
        ensure_loadable(model, kv_overrides=values)
        ensure_loadable(model, kv_overrides=values, override_tensor=rules)
        new_process()
    assert child.runs == 3
    assert json.loads(*child.changes) == [[["llama.context_length", 512]], ["ffn"]]
    ensure_loadable(paths.bundled_model(), kv_overrides=values)  # with values, its known hash does not count
    assert child.runs == 4
    with pytest.raises(ModelFileError, match=r"llama.block_count is 0"):
        ensure_loadable(model, "off", kv_overrides=(("llama.block_count", 0),))


def test_off_tries_nothing_and_still_checks(child, model):
    ensure_loadable(model, "off")
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="truncated"):
        ensure_loadable(model, "off")
    assert child.runs == 0


def test_a_known_file_is_not_walked_again(child, model, monkeypatch):
    ensure_loadable(model)
    new_process()
    monkeypatch.setattr(vetting, "check_model", None)
    ensure_loadable(model)


@pytest.mark.parametrize("change", ["content", "library", "version"])
def test_what_changes_is_tried_again(child, model, monkeypatch, change):
    ensure_loadable(model)
    new_process()
    if change == "content":
        data = model.read_bytes()
        model.write_bytes(data.replace(b"Llamabatch", b"LLamabatch", 1))
    elif change == "library":
        monkeypatch.setattr(vetting, "library_id", lambda: "another build")
    else:
        monkeypatch.setattr(vetting, "VERSION", 99)
    ensure_loadable(model)
    assert child.runs == 2


def test_a_crash_is_refused_with_its_words_and_kept(child, model):
    child.code, child.says = -signal.SIGABRT, "loading\n/src/llama-model.cpp:1328: GGML_ASSERT(n > 0) failed\nAborted"
    for _ in range(2):
        words = r"model.gguf crashes the process .*: llama-model.cpp:1328: GGML_ASSERT\(n > 0\) failed; trial="
        with pytest.raises(ModelFileError, match=words):
            ensure_loadable(model)
        new_process()
    assert child.runs == 1
    ensure_loadable(model, "off")
    child.code, child.says = -signal.SIGSEGV, ""
    with pytest.raises(ModelFileError, match="SIGSEGV"):
        ensure_loadable(model, "on")


@pytest.mark.parametrize(
    ("code", "says", "words"),
    [
        (-signal.SIGKILL, "", "SIGKILL"),
        (3, 'noise\n{"refused": "unknown model architecture"}\n', "cannot be loaded: unknown model architecture"),
        (subprocess.TimeoutExpired("x", 1), "", "could not be loaded by a child process within 60 s; trial='off'"),
    ],
)
def test_what_the_file_may_not_have_caused_is_not_kept(child, model, code, says, words):
    child.code, child.says = code, says
    with pytest.raises(ModelFileError, match=words):
        ensure_loadable(model)
    child.code = 0
    ensure_loadable(model)
    assert child.runs == 2


def test_a_crash_under_memory_limits_is_not_kept(child, model, monkeypatch):
    child.code = -signal.SIGABRT
    monkeypatch.setattr("resource.getrlimit", lambda which: (2**32, 2**32))
    with pytest.raises(ModelFileError, match="SIGABRT"):
        ensure_loadable(model)
    assert disk_cache.all_of(vetting.MODELS) == []


@pytest.mark.parametrize("code", [1, OSError("no fork")])
def test_where_no_child_can_run_the_file_is_loaded_and_the_log_says_so(child, model, code, caplog):
    child.code, child.says = code, "Traceback"
    with caplog.at_level(logging.WARNING):
        ensure_loadable(model)
    assert "without a trial" in caplog.text
    assert len(disk_cache.all_of(vetting.MODELS)) == 0


def test_a_cache_that_cannot_be_written_costs_a_trial_a_process(child, model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "file" / "cache"))
    checks = []
    check = vetting.check_model
    monkeypatch.setattr(vetting, "check_model", lambda path: checks.append(path) or check(path))
    for _ in range(2):
        ensure_loadable(model)
        ensure_loadable(model)
        new_process()
    assert child.runs == len(checks) == 2


def test_notes_that_are_damaged_are_no_notes(child, model):
    ensure_loadable(model)
    for text in ("", "[]", "{", '{"loads": "yes", "version": 1, "identity": 7, "content": 3}', "[" * 100_000):
        new_process()
        for file in disk_cache.folder().iterdir():
            file.write_text(text)
        before = child.runs
        ensure_loadable(model)
        assert child.runs == before + 1


def test_the_digest_is_compared_before_the_load_and_kept(child, model, monkeypatch):
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    ensure_loadable(model, sha256=digest.upper())
    with pytest.raises(ModelFileError, match=f"has the SHA-256 {digest}, not {'0' * 64}"):
        ensure_loadable(model, sha256="0" * 64)
    new_process()
    with monkeypatch.context() as patch:
        patch.setattr(vetting, "_CHUNK", None)  # reading the file would fail
        ensure_loadable(model, sha256=digest)
    data = bytearray(model.read_bytes())
    data[-1] ^= 1  # a byte of the weights, which the trial does not read
    model.write_bytes(data)
    with pytest.raises(ModelFileError, match=digest):
        ensure_loadable(model, sha256=digest)


def test_a_digest_is_compared_even_without_a_trial(child, model):
    with pytest.raises(ModelFileError, match="SHA-256"):
        ensure_loadable(model, "off", "0" * 64)


@pytest.mark.parametrize("bad", ["", "abc", "g" * 64, "0" * 63, "0" * 65, 7, b"0" * 64, "0" * 63 + "\n"])
def test_a_bad_digest_is_refused(bad):
    with pytest.raises(ConfigError, match=r"sha256 is .*give 64 hexadecimal digits"):
        EngineConfig("tiny", sha256=bad)
    assert EngineConfig("tiny", sha256="aB" * 32).sha256 == "aB" * 32


def test_options_of_children_and_draft_models():
    config = EngineConfig("tiny", trial="on", sha256="0" * 64)
    assert (config.for_child().trial, config.for_child().sha256) == ("off", None)
    assert (config.for_draft_model().trial, config.for_draft_model().sha256) == ("on", None)
    with pytest.raises(ConfigError, match="trial"):
        EngineConfig("tiny", trial="maybe")


def test_the_newest_of_a_kind_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(disk_cache, "MOST_OF_A_KIND", 5)
    disk_cache.keep("other", "a", {"x": 0})
    for n in range(9):
        disk_cache.keep("kind", str(n), {"x": n})
    assert len(disk_cache.all_of("kind")) <= 5
    assert disk_cache.read("kind", "8") == {"x": 8}
    assert disk_cache.read("other", "a") == {"x": 0}
    assert {file.suffix for file in disk_cache.folder().iterdir()} == {".json"}


def test_identity_is_the_file_itself_not_its_name(child, model, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert FileIdentity.of(link).identity == FileIdentity.of(model).identity
    ensure_loadable(link)
    [note] = disk_cache.folder().glob("file-*.json")
    assert json.loads(note.read_text())["identity"][0][0] == str(model)
