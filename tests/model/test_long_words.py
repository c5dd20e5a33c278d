"""Long words and long runs of a character are tokenized, although std::regex, which some pre-tokenizers use, would
overflow the stack."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import gguf
import pytest

from llamabatch import LLM
from llamabatch.errors import PromptError
from llamabatch.llama import build_info, library, long_words
from llamabatch.llama.model import Model
from llamabatch.native_build import source
from llamabatch.native_build.tools import cache_dir
from llamabatch.utils import paths

DEADLY = (
    *("tekken", "gpt-4o", "deepseek-v3", "deepseek-llm", "deepseek-coder", "minimax-m2"),
    *("seed-coder", "bloom", "superbpe", "afmoe", "default", "falcon"),
)
RUNS = ("a", "A", " ", "1", "!", "\n", "é", "中", "\u0301", "😀", "\u3000", "aA")
CHECK = source.KERNEL_FOLDER / "tests" / "tokenizer_check.cpp"
COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)

patched = pytest.mark.skipif(
    not library.splits_without_recursion(), reason="llama.cpp is not the build with this patch"
)


def with_pre(path: Path, pre: str) -> Path:
    """Writes the bundled model with another pre-tokenizer. Returns the path."""
    original = paths.bundled_model()
    data, reader = original.read_bytes(), gguf.GGUFReader(original)
    end = max(tensor.field.offset + sum(part.nbytes for part in tensor.field.parts) for tensor in reader.tensors)
    old = reader.fields["tokenizer.ggml.pre"].contents()
    before, after = (len(name).to_bytes(8, "little") + name.encode() for name in (old, pre))
    key = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little")
    assert data[:end].count(key + before) == 1
    header = data[:end].replace(key + before, key + after)
    path.write_bytes(header + bytes(-len(header) % reader.alignment) + data[reader.data_offset :])
    return path


def run_program(*arguments, folder):
    """Runs Python in a process of its own, which may crash."""
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("pre", ["tekken", "default"])  # test_long_runs_are_tokenized_in_time has more
def test_a_long_word_is_its_own_error(pre, tmp_path):
    """llama.cpp tokenizes in the caller's process even with isolate=True, so a crash would end the caller."""
    with_pre(tmp_path / "m.gguf", pre)
    program = """
import os, warnings
from llamabatch import LLM, SamplingParams
warnings.simplefilter("ignore")
texts = [c * 40_000 for c in ("a", " ", "1", "!")]
with LLM(os.path.abspath("m.gguf"), isolate=True) as llm:
    outputs = llm.generate([*texts, "hello"], SamplingParams(max_tokens=2, temperature=0))
errors = [str(output.error) for output in outputs[:-1]]
assert all("tokens" in error or "in a row" in error for error in errors), errors  # the latter from a stock build
assert outputs[-1].error is None and outputs[-1].text
"""
    done = run_program("-c", program, folder=tmp_path)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"


def test_a_job_gets_past_a_long_word(tmp_path):
    with_pre(tmp_path / "m.gguf", "tekken")
    rows = [{"id": "word", "prompt": "a" * 40_000}, {"id": "hello", "prompt": "hello"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ("-m", "llamabatch", "run", "in.jsonl", "out.jsonl", "-m", tmp_path / "m.gguf", "--max-tokens", 2)
    done = run_program(*command, "--dry-run", folder=tmp_path)
    assert done.returncode >= 0, done.stderr[-2000:]
    assert "1 bad" in done.stdout, done.stdout
    done = run_program(*command, folder=tmp_path)
    assert done.returncode >= 0, done.stderr[-2000:]
    written = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text("utf-8").splitlines())}
    assert set(written) == {"word", "hello"}
    assert not written["hello"].get("error")


@patched
@pytest.mark.parametrize("pre", [*DEADLY, "smollm", "llama-bpe", "jais-2", "exaone-moe"])
def test_long_runs_are_tokenized_in_time(pre, tmp_path):
    """Each run takes some 0.1 s. If the time grew with the square of the length, it would take minutes."""
    model = Model(with_pre(tmp_path / "m.gguf", pre))
    try:
        start = time.process_time()
        for piece in RUNS:
            text = piece * (50_000 // len(piece))
            assert model.detokenize(model.tokenize(text, add_special=False)) == text
            assert model.detokenize(model.tokenize(text + "x", add_special=False)) == text + "x"
        assert time.process_time() - start < 30
    finally:
        model.close()


@patched
def test_spaces_are_no_danger_where_they_are_no_tokens(tmp_path):
    """Unpatched llama.cpp aborts at the first space of this pre-tokenizer."""
    with_pre(tmp_path / "m.gguf", "whitespace")
    program = "from pathlib import Path; from llamabatch.llama.model import Model; " + (
        "model = Model(Path('m.gguf').absolute()); print(model.tokenize('a' + ' ' * 9 + 'b') == model.tokenize('a b'))"
    )
    done = run_program("-c", program, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


@patched
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_words_are_those_of_std_regex(tmp_path):
    package = cache_dir() / "sources" / source.FILE_NAME
    if not package.is_file():
        pytest.skip("the source of llama.cpp is not in the cache")
    assert COMPILER is not None
    with tarfile.open(package) as archive:
        top = f"{source.FILE_NAME.removesuffix('.tar.gz')}/vendor/llama.cpp"
        wanted = tuple(f"{top}/{name}" for name in ("src/unicode", "src/llama-vocab.cpp", "include/", "ggml/include/"))
        for member in archive:
            if member.name.startswith(wanted) and member.isfile():
                archive.extract(member, tmp_path)
    source.apply(source.PATCH_FOLDER / library.SPLITTING_PATCH, tmp_path / source.FILE_NAME.removesuffix(".tar.gz"))
    shutil.copy(source.KERNEL_FOLDER / "unicode-regex.h", tmp_path / top / "src")
    libraries, tree, program = build_info.library_dir(library.load()), tmp_path / top, tmp_path / "check"
    include = [f"-I{tree / folder}" for folder in ("include", "ggml/include", "src")]
    command = [COMPILER, "-O2", "-std=c++17", "-pthread", *include, str(CHECK), "-o", str(program), f"-L{libraries}"]
    subprocess.run([*command, "-lllama", "-lggml", "-lggml-base"], check=True, timeout=300)
    command = [str(program), str(tree / "src" / "llama-vocab.cpp"), "10"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, errors="replace", timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "0 of" in done.stdout


@pytest.fixture
def stock(monkeypatch, tmp_path):
    """A function that loads a model with a given pre-tokenizer, as if llama.cpp were a stock build."""
    monkeypatch.setattr(library, "splits_without_recursion", lambda: False)
    opened: list[Model] = []

    def load(pre: str) -> Model:
        opened.append(Model(with_pre(tmp_path / f"{pre}.gguf", pre)))
        return opened[-1]

    yield load
    for model in opened:
        model.close()


def test_a_stock_build_refuses_what_it_would_not_survive(stock):
    model = stock("tekken")
    for text in ("a" * 260_001, " " * 260_001 + "x", "hi " + "!" * 300_000):
        with pytest.raises(PromptError, match=r"up to 260,000 .*'tekken'.*make setup"):
            model.tokenize(text)
    with pytest.raises(PromptError, match="up to 4,000"):
        stock("superbpe").tokenize("1" * 4_001)
    with pytest.raises(PromptError, match="260,000"):
        stock("exaone-moe").tokenize("two words " * 30_000)
    with pytest.raises(PromptError, match="260,000"):
        stock("exaone-moe").tokenize("!" * 300_000)
    assert len(model.tokenize("two words\n" * 30_000)) > 30_000
    assert stock("llama-bpe").tokenize("a" * 300_000)


def test_a_stock_build_gets_the_stack_that_a_word_needs(stock, monkeypatch):
    model, sizes = stock("tekken"), []
    start = threading.Thread.start

    def noted(thread):
        sizes.append((thread.name, threading.stack_size()))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    before = threading.stack_size()
    words = model.tokenize("hello world " * 1000)
    assert sizes == []
    long = model.tokenize("b" * 9_000)
    largest = 260_000 * long_words._STACK_PER_CHARACTER
    assert sizes == [("llamabatch-tokenize", 10 * 2**20)]
    assert largest + 2**21 <= 256 * 2**20
    assert threading.stack_size() == before
    monkeypatch.setattr(model, "_recursive_pre", None)
    assert (words, long) == (model.tokenize("hello world " * 1000), model.tokenize("b" * 9_000))


def test_a_thread_that_cannot_start_is_the_texts_error(stock, monkeypatch):
    model = stock("tekken")

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(PromptError, match="a stack of 10 MiB"):
        model.tokenize("b" * 9_000)
    assert model.tokenize("hello")


def test_what_llama_cpp_cannot_tokenize_is_an_error(monkeypatch):
    with LLM("tiny") as llm:
        assert llm.tokenize("hi")
    model = Model(paths.bundled_model())
    monkeypatch.setattr(model._lib, "llama_tokenize", lambda *_: -(2**31))
    with pytest.raises(PromptError, match="cannot tokenize this text of 2 bytes"):
        model.tokenize("hi")
    monkeypatch.undo()
    model.close()
