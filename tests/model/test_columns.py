"""Tables on the bundled model give the same texts from every kind of frame, beside other requests, and after a kill."""

import json
import os
import pickle
import signal
import subprocess
import sys

import pytest

from llamabatch import LLM, columns
from tests.model.conftest import questions
from tests.waiting import until

N_ROWS = 200
PARAMS = {"max_tokens": 6, "temperature": 0.8, "seed": 11}
PROMPT = "{{ question }}"
LABEL = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "digit": {"enum": ["one", "two"]}},
    "required": ["sure", "digit"],
}
DATA = {"question": questions()[:N_ROWS], "key": list(range(N_ROWS))}


def texts(batch, name="generated_text"):
    column = batch[name]
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=8, n_ctx=256, cache_prefix=False) as llm:
        yield llm


@pytest.mark.parametrize("path", [None, "out.jsonl"])
def test_a_call_that_fails_aborts_its_rows(llm, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)

    def fails(done, total):
        if done == 1:
            raise KeyError("mine")

    params = {"max_tokens": 200, "ignore_eos": True}
    with pytest.raises(KeyError, match="mine") as raised:
        columns.map(DATA, PROMPT, model=llm, params=params, path=path, progress=fails)
    until(lambda: not llm.stats().in_flight, raised)  # aborted requests end with the current step


FORKED = """
import os
from llamabatch import columns
generate = columns.Generate("tiny", {"max_tokens": 6, "seed": 1}, prompt="{{ question }}", n_slots=2, n_ctx=256)
ours = generate({"question": ["Hello", "Who are you?"]})
pid = os.fork()
if pid == 0:
    theirs = generate({"question": ["Hello", "Who are you?"]})
    generate.close()
    os._exit(0 if theirs == ours else 1)
assert os.waitpid(pid, 0)[1] == 0
assert generate({"question": ["Hello", "Who are you?"]}) == ours
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_makes_an_engine_of_its_own(tmp_path):
    """Spark forks its workers like this."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_schema_gives_columns_with_types(llm):
    polars = pytest.importorskip("polars")
    made = columns.map(polars.DataFrame(DATA).head(20), PROMPT, model=llm, params={"max_tokens": 40}, schema=LABEL)
    assert [str(made.schema[name]) for name in ("sure", "digit", "error")] == ["Boolean", "String", "String"]
    assert made["error"].to_list() == [None] * 20
    assert set(made["digit"]) <= {"one", "two"}
    assert set(made["sure"]) <= {True, False}


def test_a_copy_in_another_process_gives_the_same_texts(tmp_path):
    """The workers of a framework unpickle such a copy. It makes an engine of its own, in a child process."""
    batch = {"question": DATA["question"][:12]}
    with columns.Generate("tiny", PARAMS, prompt=PROMPT, n_slots=4, n_ctx=256) as generate:
        pickled = pickle.dumps(generate)
        ours = generate(batch)
        assert generate._engine._llm._client.pids, "isolate=True"
    (tmp_path / "generate.pickle").write_bytes(pickled)
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    code = (
        "import json, pickle\n"
        "generate = pickle.load(open('generate.pickle', 'rb'))\n"
        "print(json.dumps(generate(json.load(open('batch.json')))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == ours


def test_an_engine_that_is_killed_is_replaced_in_the_instance(steps):
    with columns.Generate("tiny", {"max_tokens": 8}, prompt=PROMPT, n_slots=4, n_ctx=256) as generate:
        generate({"question": ["Hello"]})
        [pid] = generate._engine._llm._client.pids

        def kills(done, total):
            if done == 5:
                os.kill(pid, signal.SIGKILL)
                steps.let_go()

        with steps.held(20):
            made = generate({"question": DATA["question"][:60]}, progress=kills)
        assert generate._engine._llm._client.pids != [pid]
    assert made["error"] == [None] * 60


PROGRAM = """
import json, sys
from llamabatch import columns
frame = json.load(open("frame.json"))
made = columns.map(frame, "{{ question }}", model="tiny", params={"max_tokens": 12, "seed": 3}, path="out.jsonl",
                   n_slots=4, n_ctx=256)
json.dump(made, open(sys.argv[1], "w"))
"""


def test_a_call_that_was_killed_goes_on(tmp_path):
    def start(name):
        return subprocess.Popen([sys.executable, "-c", PROGRAM, name], cwd=tmp_path)

    def written():
        return path.stat().st_size if path.exists() else 0

    def cut_short():
        program, before = start("cut.json"), written()
        until(lambda: program.poll() is not None or written() > before)
        program.kill()
        program.wait()

    path = tmp_path / "out.jsonl"
    (tmp_path / "frame.json").write_text(json.dumps({"question": DATA["question"][:120]}))
    assert start("whole.json").wait(120) == 0
    for own in tmp_path.glob("out.jsonl*"):
        own.rename(tmp_path / own.name.replace("out", "whole"))
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for _ in range(2):
        cut_short()
    assert written()
    assert start("cut.json").wait(120) == 0
    rows, before = ([json.loads(line) for line in content.splitlines()] for content in (path.read_bytes(), whole))
    assert [row["row"] for row in rows] == list(range(120))
    assert sum(ours == theirs for ours, theirs in zip(rows, before, strict=True)) >= 0.97 * 120
    made = json.loads((tmp_path / "cut.json").read_text())
    assert made["generated_text"] == [row["text"] for row in rows]
