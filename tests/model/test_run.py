"""`llamabatch run`, end to end on the bundled model: inputs, outputs, and ends of a run."""

import gzip
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llamabatch import SamplingParams
from llamabatch.jobs import ReadOptions, Settings, run
from tests.long import kill_resume
from tests.model.conftest import questions
from tests.waiting import PATIENCE_S, until

GREEDY = ("-t", "0", "-n", "8")


def command(*arguments):
    return [sys.executable, "-m", "llamabatch", "run", *map(str, arguments)]


def llamabatch_run(*arguments, given=None):
    return subprocess.run(command(*arguments), input=given, capture_output=True, text=True, timeout=300, check=False)


def jsonl(path: Path, items) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def records(text) -> list:
    return [json.loads(line) for line in text.splitlines()]


def asked(n):
    every = questions()
    return [{"messages": [{"role": "user", "content": every[i % len(every)]}], "id": f"q{i}"} for i in range(n)]


def test_every_kind_of_input_in_one_job(tmp_path, reference):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    jsonl(tmp_path / "a.jsonl", [{"prompt": "Once upon", "id": "own"}, *asked(1)])
    body = {"model": "any", "messages": asked(1)[0]["messages"]}
    line = {"custom_id": "batch", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(line).encode()))
    (tmp_path / "c.csv").write_text("animal\ncat\ndog\n")
    parquet.write_table(pyarrow.table({"animal": ["cow"]}), tmp_path / "d.parquet")
    jsonl(tmp_path / "e.jsonl", [{"input": "a text"}])
    out = tmp_path / "out.jsonl"
    template = "The baby of a {animal} is a"
    settings = Settings(
        tuple(str(tmp_path / f"{name}*") for name in "abcde"),
        str(out),
        reading=ReadOptions(SamplingParams(temperature=0, max_tokens=8), template=template),
    )
    summary = run(settings)
    assert (summary.counts.ok, summary.counts.failed, summary.exit_code) == (7, 0, 0), summary.describe()
    got = records(out.read_text())
    greedy = SamplingParams(temperature=0, max_tokens=8)
    prompts = ["Once upon", *(template.format(animal=animal) for animal in ("cat", "dog", "cow"))]
    wanted = [output.text for output in reference.generate(prompts, greedy)]
    [answer] = reference.chat([body["messages"]], greedy)
    assert [got[i]["text"] for i in (0, 3, 4, 5)] == wanted
    assert got[1] == {"row": 1, "id": "q0", "text": answer.text, "finish_reason": "stop", "error": None}
    assert got[2]["custom_id"] == "batch"
    assert got[2]["response"]["body"]["choices"][0]["message"]["content"] == answer.text
    assert len(got[6]["embedding"]) == 192


def test_stdin_to_stdout_and_what_goes_where(tmp_path):
    lines = "".join(json.dumps(item) + "\n" for item in [*asked(5), {"prompt": "x" * 100_000}])
    done = llamabatch_run("-", "-", *GREEDY, "--json", tmp_path / "sum.json", given=lines)
    assert done.returncode == 1
    assert [record["id"] for record in records(done.stdout)] == ["q0", "q1", "q2", "q3", "q4", "5"]
    assert "n_ctx allows 1 to 2048" in records(done.stdout)[5]["error"]
    assert "5 ok, 1 failed" in done.stderr
    assert "stdin, line 6" in done.stderr
    summary = json.loads((tmp_path / "sum.json").read_text())
    assert summary["rows"]["ok"] == 5
    assert summary["tokens"]["generated"] > 0
    assert summary["ttft_s"]["p99"] > 0


def test_a_program_gets_its_answer_before_it_writes_the_next_row(tmp_path):
    arguments = command("-", "-", *GREEDY)
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        for i, item in enumerate([*asked(3), {"prompt": 7}, *asked(1)]):
            process.stdin.write(json.dumps({**item, "id": f"row {i}"}).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], 60)
            assert ready, f"no answer to row {i}"
            assert json.loads(process.stdout.readline())["id"] == f"row {i}"
        assert process.communicate(timeout=60)[0] == b""
        assert process.returncode == 1
    finally:
        process.kill()
        process.wait()


def test_a_dry_run_checks_every_line_and_writes_nothing(tmp_path):
    items = [
        *asked(3),
        {"prompt": "x" * 100_000},
        {"prompt": "y", "structured_outputs": {"regex": "("}},
        {"prompt": "z", "logit_bias": {"99999": 1}},
        {"prompt": "odd", "overflow": "wrap"},
    ]
    source = jsonl(tmp_path / "in.jsonl", items)
    with source.open("a") as file:
        file.write("not json\n")
    done = llamabatch_run(source, tmp_path / "out.jsonl", "--dry-run", "--json", "-")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == {"by_task": {"chat": 3}, "bad": 5}
    assert [error.split(": ")[0] for error in found["errors"]] == [f"{source}, line {n}" for n in (4, 5, 6, 7, 8)]
    assert found["plan"]["engine"]["strategy"] == "batched"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_dry_run_refuses_the_shift_that_the_run_refuses(tmp_path):
    """One function makes this check for the dry run, the run and the engine."""
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": "x", "overflow": "shift", "max_tokens": 8}])
    engine = ("--type-k", "q8_0", "--flash-attn", "on")  # a quantised K cache cannot shift
    dry = llamabatch_run(source, tmp_path / "out.jsonl", *engine, "--dry-run", "--json", "-")
    assert dry.returncode == 1, dry.stderr
    [refused] = json.loads(dry.stdout)["errors"]
    done = llamabatch_run(source, tmp_path / "out.jsonl", *engine)
    assert done.returncode == 1, done.stderr
    [record] = records((tmp_path / "out.jsonl").read_text())
    assert refused.endswith(f": {record['error']}")
    assert "overflow is 'shift'" in refused


@pytest.mark.parametrize("number", range(kill_resume.QUICK))
def test_killed_at_random_moments(number, tmp_path):
    kill_resume.case(number, tmp_path)


@pytest.mark.guard
def test_killed_once_it_goes_on(tmp_path):
    kill_resume.case(0, tmp_path, kills=1, n_rows=200)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_in_good_order(signum, code, tmp_path, steps):
    source, out = jsonl(tmp_path / "in.jsonl", asked(5000)), tmp_path / "out.jsonl"
    with steps.each_takes(0.02):
        process = subprocess.Popen(command(source, out, *GREEDY), stderr=subprocess.PIPE, text=True)
        until(lambda: out.exists() and out.stat().st_size > 0)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        process.send_signal(signum)  # a second signal of an impatient user must lose nothing
        told = process.communicate(timeout=200)[1]
    assert process.returncode == code, told
    assert "the same command continues from there" in told
    assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
    got = records(out.read_text())
    assert [record["row"] for record in got] == list(range(len(got)))
    assert 0 < len(got) < 5000


def test_a_signal_while_the_model_loads(tmp_path, steps):
    source = jsonl(tmp_path / "in.jsonl", asked(2))
    with steps.held():  # the model may be loaded before the signal comes
        process = subprocess.Popen(command(source, tmp_path / "out.jsonl"), stderr=subprocess.PIPE, text=True)
        until((tmp_path / "out.jsonl.job.json").exists)
        process.terminate()
    process.communicate(timeout=200)
    assert process.returncode == 143


def test_a_bar_on_a_terminal(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", asked(200))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command(source, tmp_path / "out.jsonl", *GREEDY), stderr=theirs)
    os.close(theirs)
    told = b""
    while True:
        ready, _, _ = select.select([ours], [], [], 60)
        try:
            piece = os.read(ours, 65536) if ready else b""
        except OSError:  # Linux raises it when the other side has closed the terminal
            piece = b""
        if not piece:
            break
        told += piece
    assert process.wait(200) == 0
    text = told.decode()
    assert "/200 rows" in text
    assert "slots" in text
    assert "200 ok, 0 failed" in text


def test_errors_are_retried_on_request(tmp_path):
    source, out = (
        jsonl(tmp_path / "in.jsonl", [*asked(2), {"prompt": "x" * 5000, "id": "long"}]),
        tmp_path / "out.jsonl",
    )
    assert llamabatch_run(source, out, *GREEDY, "--n-ctx", "128").returncode == 1
    again = llamabatch_run(source, out, *GREEDY, "--n-ctx", "128")
    assert again.returncode == 1
    assert "complete" in again.stderr
    retried = llamabatch_run(source, out, *GREEDY, "--n-ctx", "2048", "--retry-errors", "--force")
    assert retried.returncode == 1  # the prompt is too long even for this n_ctx
    assert "0 ok, 1 failed, 2 done before" in retried.stderr
    assert [record["id"] for record in records(out.read_text())] == ["q0", "q1", "long"]


def test_a_report_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    source = jsonl(tmp_path / "in.jsonl", asked(50))
    done = llamabatch_run(source, tmp_path / "out.jsonl", *GREEDY, "--plot", tmp_path / "report.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_an_engine_that_dies_is_replaced_and_every_row_comes_once(tmp_path, steps):
    source, out = jsonl(tmp_path / "in.jsonl", asked(200)), tmp_path / "out.jsonl"
    arguments = command(source, out, *GREEDY, "--json", tmp_path / "sum.json")
    with steps.held(30):  # so few that no engine finishes its rows
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
        until(lambda: out.exists() and out.stat().st_size > 0)
        for child in psutil.Process(process.pid).children():
            child.kill()
    told = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 0, told
    assert [record["row"] for record in records(out.read_text())] == list(range(200))
    assert json.loads((tmp_path / "sum.json").read_text())["restarts"] == 1


def test_a_dry_run_runs_a_sample_and_says_what_the_job_takes(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"Once upon a time {i}"}) + "\n" for i in range(200)))
    options = ["-n", "8", "--price-per-hour", "3600", "--json", "-"]
    dry = llamabatch_run(source, out, *options, "--dry-run", "--sample", "40")
    assert dry.returncode == 0, dry.stderr
    found = json.loads(dry.stdout)
    low, high = found["estimate"]["seconds"]
    assert 0 < low <= high
    assert found["estimate"]["cost"] == pytest.approx([low, high])
    assert found["sample"]["rows"] == 40
    assert found["estimate"]["output_tokens"][1] <= 200 * 8
    assert not out.exists()
    assert "time: " in dry.stderr
    without = llamabatch_run(source, out, *options, "--dry-run")
    assert "time: " in without.stderr
    assert llamabatch_run(source, out, "--sample", "5").returncode == 2
    assert "sample is -1" in llamabatch_run(source, out, "--dry-run", "--sample", "-1").stderr
