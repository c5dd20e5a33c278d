"""Model files that would crash the process are refused before the load, or by a child that tries them."""

import json
import subprocess
import sys
import threading

import pytest

from llamabatch import LLM, EngineClosedError, EngineConfig, InputError, ModelFileError, SamplingParams
from llamabatch.gguf.header import read_header
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library, trial_load, vetting
from llamabatch.llama.model import Model
from llamabatch.utils import disk_cache, paths
from llamabatch.utils.cancellation import cancelled_by
from tests.long import mutated_gguf
from tests.model.architectures import write

SMALL = {"n_ctx": 64, "n_slots": 1, "n_threads": 1, "n_threads_batch": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("isolate", [False, True])
def test_an_assertion_that_no_check_foresees_ends_the_child_only(tmp_path, isolate):
    path = write("deepseek2", tmp_path / "m.gguf", attention__key_length_mla=1)
    for _ in range(2):
        with pytest.raises(ModelFileError, match=r"m.gguf crashes the process .*GGML_ASSERT.*trial='off'"):
            LLM(path, isolate=isolate, **SMALL)
    assert len(disk_cache.all_of(vetting.MODELS)) == 1


def test_the_child_computes_several_sequences_in_more_than_one_pass(monkeypatch):
    """The states of a second pass do not begin at the first cell. Some architectures are wrong in this case."""
    real, decoded = library.load(), []

    class Watched:
        def __getattr__(self, name):
            return getattr(real, name)

        def llama_decode(self, context, batch):
            decoded.append([batch.seq_id[i][0] for i in range(batch.n_tokens)])
            assert real.llama_decode(context, batch) == 0
            return 0

    monkeypatch.setattr(trial_load.library, "load", lambda *n_bytes: Watched())
    assert trial_load.run(resolve("tiny"), 0) == 0
    assert decoded == [[0, 1, 1, 2, 2, 3, 3]]


@pytest.mark.parametrize("options", [{}, {"isolate": True}, {"trial": "off"}, {"draft": True}])
def test_a_damaged_header_is_named_before_anything_is_reckoned_with_it(tmp_path, options, monkeypatch):
    monkeypatch.setattr(vetting, "run_program", None)
    path = write("llama", tmp_path / "m.gguf", block_count=100_000)
    if options == {"draft": True}:
        options, path = {"speculate": "draft", "draft_model": str(path)}, "tiny"
    with pytest.raises(ModelFileError, match=r"m.gguf: llama.block_count is 100000; allowed are 1 to 512"):
        LLM(path, **options, **SMALL)


def test_a_tried_file_is_loaded_at_once_the_next_time(tmp_path, monkeypatch):
    path = write("llama", tmp_path / "m.gguf")
    runs = []
    monkeypatch.setattr(
        vetting, "run_program", lambda *a, real=vetting.run_program, **k: runs.append(a) or real(*a, **k)
    )
    texts = []
    for options in ({}, {"isolate": True}, {"trial": "on"}, {"trial": "off"}):
        with LLM(path, **options, **SMALL) as llm:
            texts.append(llm.generate("Once", SamplingParams(max_tokens=4, temperature=0))[0].text)
    assert len(set(texts)) == 1
    assert len(runs) == 2  # for the first load, and for "on"
    assert json.loads(next(disk_cache.folder().glob("model-*.json")).read_text()) == {"loads": True}


def test_what_llama_cpp_refuses_in_the_child_has_its_reason(tmp_path):
    path = write("llama", tmp_path / "m.gguf", tokenizer__ggml__pre="no such thing")
    data = path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"cannot be loaded: .*"):
        LLM(path, **SMALL)


@pytest.mark.parametrize("options", [{}, {"isolate": True}])
def test_the_digest_of_a_model_and_of_one_in_parts(tmp_path, options):
    import hashlib

    path = write("llama", tmp_path / "m.gguf", part_tensors=8)
    digest = hashlib.sha256(b"".join(part.read_bytes() for part in sorted(tmp_path.glob("m-*.gguf")))).hexdigest()
    with LLM(path, sha256=digest, **options, **SMALL) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=2))[0].token_ids
    with pytest.raises(ModelFileError, match=f"has the SHA-256 {digest}, not {'0' * 64}"):
        LLM(path, sha256="0" * 64, **options, **SMALL)


def test_the_command_line_takes_a_digest():
    command = [sys.executable, "-m", "llamabatch", "generate", "--sha256", "0" * 64, "Hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "tiny.gguf has the SHA-256" in done.stderr
    done = subprocess.run([*command[:-2], "12", "Hello"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "give 64 hexadecimal digits" in done.stderr


def test_the_child_reads_no_more_of_the_weights_than_the_header_says(tmp_path):
    """The key of a verdict depends only on the header, so files with other weights share the verdict."""
    path = write("llama", tmp_path / "m.gguf")
    LLM(path, **SMALL).close()
    header = read_header(path)
    data = bytearray(path.read_bytes())
    data[header.data_start + 100] ^= 0xFF
    path.write_bytes(data)
    LLM(path, **SMALL).close()
    assert (len(disk_cache.all_of(vetting.FILES)), len(disk_cache.all_of(vetting.MODELS))) == (1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutated")


@pytest.mark.parametrize("number", range(mutated_gguf.QUICK))
def test_mutated_files(number, folder):
    mutated_gguf.case(number, folder)


def with_template(path, template):
    """Writes the bundled model with another chat template, padded to the same length. Returns the path."""
    with LLM("tiny", **SMALL) as llm:
        own = llm._client.model.chat_template.encode()
        source = llm._client.model.path.read_bytes()
    assert source.count(own) == 1
    assert len(template) <= len(own)
    path.write_bytes(source.replace(own, template.encode().ljust(len(own))))
    return path


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps and bytes"),
        ("{{ 'a' * 10**10 }}", "steps and bytes"),
        ("{% if messages[1] %}{{ 9**(9**9) }}{% endif %}", "16,384 bits"),
    ],
)
def test_a_hostile_chat_template_is_refused_by_the_trial(tmp_path, template, says):
    path = with_template(tmp_path / "m.gguf", template)
    with pytest.raises(ModelFileError, match=f"m.gguf cannot be loaded: its chat template is refused: .*{says}.*'off'"):
        LLM(path, **SMALL)
    with LLM(path, trial="off", **SMALL) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=2))[0].error is None
        conversations = [[{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}]] * 2
        outputs = llm.chat(conversations, errors="return")
        assert all(says in output.error for output in outputs)


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{% if %}"])
def test_a_template_that_refuses_or_is_broken_hinders_no_load(tmp_path, template):
    with LLM(with_template(tmp_path / "m.gguf", template), **SMALL) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=2))[0].error is None
        with pytest.raises(InputError, match=r"never|cannot be compiled"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_a_cancelled_load_ends_with_the_tensor_under_way():
    cancelled = threading.Event()
    cancelled.set()
    path = paths.bundled_model()
    with cancelled_by(cancelled), pytest.raises(EngineClosedError, match=r"the load of .* was cancelled"):
        Model(path, EngineConfig("tiny"))
    with cancelled_by(threading.Event()):
        Model(path, EngineConfig("tiny")).close()
