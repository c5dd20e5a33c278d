"""A whole job against an engine without a model: what it leaves behind however it ends, and what the command says."""

import contextlib
import csv
import errno
import functools
import gzip
import io
import json
import os
import random
import signal
import sys
import threading
from dataclasses import replace

import pytest
from click.testing import CliRunner

from llamabatch.cli import cli
from llamabatch.errors import (
    ConfigError,
    EngineClosedError,
    InputError,
    JobStoppedError,
    ModelFileError,
)
from llamabatch.jobs import JobInterrupted, OutputOptions, ReadOptions, Settings, job, run
from llamabatch.jobs.input.reader import read
from llamabatch.jobs.input.sources import find
from llamabatch.jobs.input.total import Rows, Seen, Total, wanted
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.output import Output
from llamabatch.jobs.output.records import RecordOptions
from llamabatch.jobs.progress import Silent
from llamabatch.jobs.rows import ReadOptions as Reading
from llamabatch.request.sampling_params import SamplingParams
from tests.long import million_rows
from tests.unit.jobs_fakes import FakeClient, finished


@pytest.fixture
def engines(monkeypatch):
    """Returns (engines that the next runs get before sound ones, all engines that runs got)."""
    waiting, made = [], []

    def connect(config):
        made.append(waiting.pop(0) if waiting else FakeClient(held=7, seed=len(made)))
        return made[-1]

    monkeypatch.setattr(job, "connect", connect)
    return waiting, made


def source(folder, n=300):
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}", "id": f"row {i}"}) + "\n" for i in range(n)))
    return str(path)


def numbers(out):
    return [json.loads(line)["row"] for line in out.read_text().splitlines()]


@pytest.mark.parametrize("order", ["input", "finished"])
def test_an_engine_that_is_gone_leaves_what_had_finished_and_the_next_run_does_the_rest(order, tmp_path, engines):
    waiting, made = engines
    out = tmp_path / "out.jsonl"
    settings = Settings(source(tmp_path), str(out), writing=OutputOptions(order=order))
    waiting += [FakeClient(held=7, dies_after=100), FakeClient(held=7, dies_after=100)]
    for _ in range(2):
        with pytest.raises(EngineClosedError):
            run(settings)
    summary = run(settings)
    assert (summary.counts.done_before, summary.counts.ok, summary.exit_code) == (200, 100, 0)
    assert sorted(numbers(out)) == list(range(300))
    assert order == "finished" or numbers(out) == list(range(300))
    assert all(engine.closed for engine in made)


@pytest.mark.parametrize("order", ["input", "finished"])
@pytest.mark.parametrize(
    ("content", "n_bad"), [(b"", 0), (b"\n\n", 0), (b"no JSON\n[]\n{}\n", 3)], ids=["empty", "blank", "bad"]
)
def test_without_a_row_to_run_no_engine_starts(content, n_bad, order, tmp_path, engines):
    pipe = (order == "input") == bool(content)  # each pair of values of the three variables occurs
    given, out = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
    if pipe:
        os.mkfifo(given)
        writer = threading.Thread(target=given.write_bytes, args=(content,))
        writer.start()
    else:
        given.write_bytes(content)
    settings = Settings(str(given), str(out), writing=OutputOptions(order=order))
    summary = run(settings)
    assert (engines[1], summary.slots, summary.counts.failed, summary.counts.ok) == ([], 0, n_bad, 0)
    assert summary.exit_code == (1 if n_bad else 0)
    assert numbers(out) == list(range(n_bad))
    if pipe:
        writer.join()
    else:
        assert (run(settings).counts.failed_before, engines[1]) == (n_bad, [])


def test_an_engine_starts_for_the_first_row_that_is_good(tmp_path, engines):
    given, out = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
    given.write_text('no JSON\n{}\n{"prompt": "a"}\n[]\n{"prompt": "b"}\n')
    counts = run(Settings(str(given), str(out))).counts
    assert (counts.ok, counts.failed, numbers(out), len(engines[1])) == (2, 3, [0, 1, 2, 3, 4], 1)


def test_answers_that_end_before_their_form_are_named(tmp_path):
    class Said(Silent):
        def __init__(self):
            self.texts = []

        def say(self, text):
            self.texts.append(text)

    def told(**params):
        progress = Said()
        params = SamplingParams(structured_outputs={"choice": ["blue, blue, blue, blue"]}, **params)
        given, out = source(tmp_path, 3), str(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl")
        run(Settings(given, out, "tiny", reading=ReadOptions(params=params), engine={"n_ctx": 64}), progress)
        return [text for text in progress.texts if "structure" in text]

    assert told(max_tokens=2) == ["3 answers reached max_tokens or n_ctx before the structure was complete"]
    assert told(max_tokens=40) == []


def test_rows_that_were_done_need_no_engine(tmp_path, engines, monkeypatch):
    """The job is killed after the last row is written, but before the manifest says that the job has ended."""
    out = tmp_path / "out.jsonl"
    settings = Settings(source(tmp_path, 10), str(out))
    manifest = tmp_path / "out.jsonl.job.json"
    with monkeypatch.context() as patch:
        patch.setattr(Output, "_sums_of_lines", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(settings)
    assert json.loads(manifest.read_text())["ending"] is None
    summary = run(settings)
    assert (summary.counts.done_before, summary.exit_code, len(engines[1])) == (10, 0, 1)
    assert json.loads(manifest.read_text())["ending"]["rows"] == 10


def test_what_an_engine_would_refuse_is_refused_without_a_row(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    out = str(tmp_path / "out.jsonl")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    for options, error in (
        ({"engine": {"n_ctx": 100_000}}, ConfigError),
        ({"model": str(broken)}, ModelFileError),
        ({"model": str(tmp_path / "none.gguf")}, ModelFileError),
    ):
        with pytest.raises(error):
            run(Settings(str(tmp_path / "empty.jsonl"), out, **options))


def test_a_signal_among_bad_rows(tmp_path, engines, monkeypatch):
    given, out = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
    given.write_text("no JSON\n" * 5)
    settings = Settings(str(given), str(out), max_start_errors=0)
    written = Output.refused

    def interrupted(self, row, error):
        written(self, row, error)
        if row.number == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Output, "refused", interrupted)
    with pytest.raises(JobInterrupted) as raised:
        run(settings)
    assert (raised.value.summary.exit_code, numbers(out)) == (143, [0, 1])
    monkeypatch.undo()
    assert (run(settings).counts.failed_before, numbers(out)) == (2, [0, 1, 2, 3, 4])


def test_a_larger_limit_goes_on_and_a_smaller_one_is_refused(tmp_path, engines):
    _, made = engines
    out = tmp_path / "out.jsonl"

    def limited(limit):
        return run(Settings(source(tmp_path), str(out), reading=ReadOptions(limit=limit))).counts

    assert limited(100).ok == 100
    assert (limited(150).done_before, numbers(out)) == (100, list(range(150)))
    assert (limited(None).done_before, numbers(out)) == (150, list(range(300)))
    again = run(Settings(source(tmp_path), str(out)))
    assert (again.counts.done_before, again.counts.ok, again.exit_code, len(made)) == (300, 0, 0, 3)
    assert json.loads((tmp_path / "out.jsonl.job.json").read_text())["earlier"] == []
    with pytest.raises(ConfigError, match="limit: nothing, now 150"):
        limited(150)


@pytest.mark.parametrize("glob", [True, False])
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_job_does_not_read_what_it_writes(glob, name, tmp_path, engines, monkeypatch):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    waiting, _ = engines
    waiting.append(FakeClient(held=7, dies_after=100))
    monkeypatch.chdir(tmp_path)
    given, out = source(tmp_path), tmp_path / name
    (tmp_path / "link").symlink_to(out)

    def inputs():
        return "*" if glob else tuple(sorted(os.listdir()))

    with pytest.raises(EngineClosedError):
        run(Settings(inputs() if glob else given, name))
    summary = run(Settings(inputs(), str(out)))
    assert (summary.counts.done_before, summary.counts.ok, summary.counts.failed) == (100, 200, 0)
    assert run(Settings(inputs(), name)).counts.done_before == 300


@pytest.mark.parametrize("pattern", ["*", "one.jsonl", "one.jsonl.job.json", "one.jsonl.lock"])
def test_the_output_of_another_shard_is_no_input(pattern, tmp_path, engines):
    given = source(tmp_path)
    assert run(Settings(given, str(tmp_path / "one.jsonl"), reading=Reading(shard=(1, 2)))).counts.ok == 150
    two = Settings((given, str(tmp_path / pattern)), str(tmp_path / "two.jsonl"), reading=Reading(shard=(2, 2)))
    if pattern.startswith("*"):
        two = replace(two, inputs=two.inputs[1:])
    with pytest.raises(InputError, match=r"the input .*one\.jsonl.* of another job \(see one\.jsonl\.job\.json\)"):
        run(two)
    assert not (tmp_path / "two.jsonl").exists()
    assert run(replace(two, inputs=(given,))).counts.ok == 150


def test_a_table_of_results_that_is_named_is_an_input(tmp_path, engines):
    pytest.importorskip("pyarrow")
    table = str(tmp_path / "one.parquet")
    assert run(Settings(source(tmp_path, 3), table)).counts.ok == 3
    reading = Reading(template="{text}")
    assert run(Settings(table, str(tmp_path / "two.jsonl"), reading=reading)).counts.ok == 3
    with pytest.raises(InputError, match=r"one\.parquet belongs to the output of another job"):
        run(Settings(str(tmp_path / "*.parquet"), str(tmp_path / "three.jsonl"), reading=reading))


def test_a_file_beside_an_input_that_is_no_manifest_means_nothing(tmp_path, engines):
    (tmp_path / "in.jsonl.job.json").write_text('{"mine": 1}')
    (tmp_path / ".job.json").write_text("")
    inputs = (source(tmp_path, 3), str(tmp_path / ".job.json"))
    assert run(Settings(inputs, str(tmp_path / "out.jsonl"))).counts.ok == 3


def test_an_input_cannot_be_the_output(tmp_path, engines):
    given = source(tmp_path)
    for force in (False, True):
        with pytest.raises(InputError, match="is a file of the output"):
            run(Settings(given, given, writing=OutputOptions(force=force)))
    assert len((tmp_path / "in.jsonl").read_text().splitlines()) == 300


@pytest.mark.parametrize("why", [errno.EACCES, errno.EROFS])
def test_a_folder_that_takes_no_file_is_usage(why, tmp_path, engines, monkeypatch):
    def refuse(self, what, function, *args):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(Files, "_system", refuse)
    result = CliRunner().invoke(cli, ["run", source(tmp_path), str(tmp_path / "out.jsonl")])
    assert result.exit_code == 2, result.output
    assert f"out.jsonl.lock cannot be made beside it: {os.strerror(why)}" in result.output


def test_errors_of_an_earlier_run_count_in_the_exit_code(tmp_path, engines):
    waiting, _ = engines
    waiting.append(FakeClient(failing={"prompt 5"}))
    settings = Settings(source(tmp_path, 10), str(tmp_path / "out.jsonl"))
    assert run(settings).exit_code == 1
    assert run(settings).exit_code == 1
    retried = run(Settings(settings.inputs, settings.output, writing=OutputOptions(retry_errors=True)))
    assert (retried.exit_code, retried.counts.ok, retried.counts.done_before) == (0, 1, 9)


def test_a_signal_while_the_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "connect", lambda config: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(JobInterrupted) as raised:
        run(Settings(source(tmp_path), str(tmp_path / "out.jsonl")))
    assert raised.value.summary.exit_code == 143


@pytest.mark.parametrize(
    ("why", "order"),
    [(errno.EIO, "input"), (errno.ENOSPC, "finished"), (errno.EFBIG, "input")],
)
def test_a_disk_that_fails_ends_the_job_and_the_next_run_does_the_rest(why, order, tmp_path, engines, monkeypatch):
    _, made = engines
    written = 0

    def failing(self, what, function, *args):
        nonlocal written
        written += what == "write"
        if written >= 100:
            raise OSError(why, os.strerror(why))
        return function(*args)

    out = tmp_path / "out.jsonl"
    command = ["run", source(tmp_path), str(out), "--order", order]
    monkeypatch.setattr(job, "Files", functools.partial(Files, patience_s=0))  # without a wait for free disk space
    with monkeypatch.context() as patch:
        patch.setattr(Files, "_system", failing)
        stopped = CliRunner().invoke(cli, command)
    assert stopped.exit_code == 3, stopped.output
    assert os.strerror(why) in stopped.output
    assert "run the same command again" in " ".join(stopped.output.split())
    assert made[0].closed
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert len(made[1].requests) < 300  # rows on the disk are not computed again
    assert sorted(numbers(out)) == list(range(300))


def test_the_seed_is_the_jobs_and_each_row_has_its_own(tmp_path, engines):
    _, made = engines
    for name in ("a", "b"):
        run(Settings(source(tmp_path, 20), str(tmp_path / name), seed=3))
    one, other = ({request.prompt: request.seed for request in engine.requests} for engine in made)
    assert one == other
    assert len(set(one.values())) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ()}, "inputs is empty"),
        ({"output": ""}, "output is ''"),
        ({"price_per_hour": -1}, "price_per_hour is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"max_start_errors": -1}, "max_start_errors is -1"),
        ({"engine": {"max_queue": 3}}, "keeps its own queue"),
        ({"engine": {"slots": 3}}, "there is no option 'slots'"),
    ],
)
def test_settings_are_checked_when_they_are_made(options, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**{"inputs": "in.jsonl", "output": "out.jsonl"} | options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "IN and OUT are missing; for example: llamabatch run prompts.csv results.jsonl"),
        (["in.jsonl"], "OUT is missing; for example: llamabatch run in.jsonl results.jsonl"),
        (["none.jsonl", "out.jsonl"], "does not exist"),
        (["in.jsonl", "no/such/out.jsonl"], "no directory"),
        (["in.jsonl", "out.jsonl", "--shard", "one"], "such as 1/4"),
        (["in.jsonl", "out.jsonl", "--limit", "0"], "limit is 0"),
        (["in.jsonl", "out.jsonl", "--chat", "--embed"], "not both"),
        (["in.jsonl", "out.jsonl", "--system", "s"], "task='chat'"),
        (["in.jsonl", "-", "--json", "-"], "both go to stdout"),
        (["in.jsonl", "out.jsonl", "--plot", "report.txt"], "no ending of a picture"),
        (["in.jsonl", "out.jsonl", "--metrics-file", "no/such/x.prom"], "no folder"),
        (["in.jsonl", "out.jsonl", "-P", "temprature=1"], "did you mean 'temperature'"),
        (["in.jsonl", "out.jsonl", "-m", "none.gguf"], "none.gguf"),
    ],
)
def test_bad_usage_ends_with_2_and_a_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source(tmp_path, 1)
    result = CliRunner().invoke(cli, ["run", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_says_what_ended_it(tmp_path, engines):
    waiting, _ = engines
    waiting.append(FakeClient(dies_after=10))
    arguments = ["run", source(tmp_path), str(tmp_path / "out.jsonl"), "--json", str(tmp_path / "sum.json")]
    died = CliRunner().invoke(cli, arguments)
    assert (died.exit_code, "SIGKILL" in died.output) == (3, True)
    assert "10 ok, 0 failed" in died.output
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert "10 done before" in done.output
    assert json.loads((tmp_path / "sum.json").read_text())["rows"]["done_before"] == 10


def test_a_reader_of_stdout_that_leaves_ends_it_quietly(tmp_path, engines, monkeypatch):
    def leave(self, what, function, *args):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(Files, "_system", leave)
    result = CliRunner().invoke(cli, ["run", source(tmp_path), "-"])
    assert (result.exit_code, "rror" in result.output) == (141, False)


@pytest.mark.parametrize("number", range(million_rows.QUICK))
def test_memory_does_not_grow_with_the_rows(number, tmp_path):
    million_rows.case(number, tmp_path)


@pytest.mark.parametrize(
    ("content", "n"), [(b"", 0), (b"{}\n{}\n", 2), (b"{}\n{}", 2), (b"{}\n\n{}\n\n \n", 3), (b"\n\n", 0)]
)
def test_rows_are_counted_as_they_are_read(content, n, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(content)
    total = Total(find([tmp_path / "in.jsonl"]), ReadOptions())
    assert total.rows(Seen()) == Rows(n)


def test_no_more_rows_are_counted_than_the_limit_wants(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"{}\n" * 2_000_000)
    (tmp_path / "more.csv").write_text("prompt\n" + "a\n" * 10)
    found = find([tmp_path / "in.jsonl", tmp_path / "more.csv"])
    assert Total(found[:1], ReadOptions(limit=9)).rows(Seen()) == Rows(9)
    assert Total(found, ReadOptions(limit=9, shard=(1, 3))).rows(Seen()) == Rows(3)
    assert Total(found, ReadOptions(limit=2_000_005)).rows(Seen()) == Rows(2_000_005, estimated=True)


def texts(n, rng=None):
    words = [f"{random.Random(i).getrandbits(32):x}" for i in range(5000)]
    return [
        f"{i} " + " ".join(words[(i * 7 + j) % 5000] for j in range(rng.randrange(1, 40) if rng else 20))
        for i in range(n)
    ]


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt",), *((row,) for row in rows)])


def write_gz(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps({"prompt": row}) + "\n" for row in rows).encode()))


WRITERS = {"in.csv": write_csv, "in.jsonl.gz": write_gz}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("n", [300, 20_000])  # fewer rows than one buffer holds, and more than all buffers hold
def test_rows_that_cannot_be_counted_are_estimated_from_those_that_were_read(name, n, tmp_path):
    random_lengths = (name == "in.csv") == (n == 300)  # each pair of values of the three variables occurs
    WRITERS[name](tmp_path / name, texts(n, random.Random(0) if random_lengths else None))
    found = find([tmp_path / name])
    reader, total = read(found), Total(found, ReadOptions())
    assert total.rows(reader.seen) is None
    for i, _ in enumerate(reader):
        if i >= 100 and i % 50 == 0:
            known = total.rows(reader.seen)
            assert known.estimated
            assert known.n == pytest.approx(n, rel=0.2), i
    assert total.rows(reader.seen) == Rows(n)


def test_inputs_that_were_not_begun_count_by_their_size(tmp_path):
    for i, n in enumerate((500, 1000, 2500)):
        write_csv(tmp_path / f"{i}.csv", texts(n))
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n' * 600)
    found = find([*sorted(tmp_path.glob("*.csv")), tmp_path / "x.jsonl"])
    total, reader = Total(found, ReadOptions()), read(found)
    for _ in range(100):
        next(reader)
    assert total.rows(reader.seen).n == pytest.approx(4600, rel=0.05)
    for _ in range(700):
        next(reader)
    assert total.rows(reader.seen).n == pytest.approx(4600, rel=0.05)
    list(reader)
    assert total.rows(reader.seen) == Rows(4600)


def test_a_stream_has_the_limit_as_its_total_and_none_without(tmp_path):
    content = b'{"prompt": "a"}\n' * 50
    for limit, before, after in ((None, None, 50), (20, 20, 20), (90, 90, 50)):
        options = ReadOptions(limit=limit)
        found = find(["-"], io.BytesIO(content))
        reader, total = read(found, options), Total(found, options)
        next(reader)
        known = total.rows(reader.seen)
        assert (None if known is None else known.n) == before
        list(reader)
        assert total.rows(reader.seen) == Rows(after)


class Listener(Silent):
    """A Progress that stores each standing."""

    def __init__(self):
        self.seen = []

    def show(self, standing):
        self.seen.append(standing())


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("limit", [None, 2000])
def test_the_time_left_is_that_of_the_rows_that_are_not_done(name, limit, tmp_path, engines, monkeypatch):
    WRITERS[name](tmp_path / name, [f"row {i:06}" for i in range(3000)])
    monkeypatch.setattr("llamabatch.jobs.progress._POINT_S", 0.0)
    waiting, _ = engines
    waiting.append(FakeClient(held=100))
    listener, n = Listener(), limit or 3000
    run(Settings(str(tmp_path / name), str(tmp_path / "out.jsonl"), reading=ReadOptions(limit=limit)), listener)
    among = [standing for standing in listener.seen if 200 <= standing.rows <= n - 500]
    assert among
    for standing in among:
        assert standing.total == pytest.approx(n, rel=0.1)
        assert "%" in str(standing)
    timed = [standing for standing in among if standing.left_s is not None]
    assert timed
    assert all(standing.left_s > 0 for standing in timed)


@pytest.mark.parametrize("limit", [None, 1, 7, 100])
@pytest.mark.parametrize("n_shards", [1, 2, 3, 9])
def test_how_many_rows_are_wanted(limit, n_shards):
    for i in range(1, n_shards + 1):
        options = Reading(SamplingParams(), shard=(i, n_shards), limit=limit)
        assert wanted(20, options) == sum(map(options.wants, range(20)))


@pytest.mark.parametrize("order", ["input", "finished"])
def test_kept_columns_and_ids_come_back_also_where_a_job_is_resumed(order, tmp_path, engines):
    waiting, _ = engines
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    records = [{"id": i if i % 2 else f"row {i}", "text": f"{i}", "tags": [i]} for i in range(100)]
    given.write_text("".join(json.dumps(record) + "\n" for record in records))
    reading = ReadOptions(prompt="Say {{ text }}", keep="all")
    writing = OutputOptions(order=order, records=RecordOptions(answer="said"))
    settings = Settings(str(given), str(out), reading=reading, writing=writing)
    waiting.append(FakeClient(held=7, dies_after=60))
    with pytest.raises(EngineClosedError):
        run(settings)
    assert run(settings).counts.done_before == 60
    found = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda row: row["row"])
    assert [{"id": row["id"], "text": row["text"], "tags": row["tags"]} for row in found] == records
    assert [row["said"] for row in found] == [f"of Say {i}" for i in range(100)]
    with pytest.raises(ConfigError, match="keep: 'all', now"):
        run(replace(settings, reading=ReadOptions(prompt="Say {{ text }}", keep=("tags",))))


def test_the_command_reads_jinja2_and_columns(tmp_path, engines):
    (tmp_path / "in.csv").write_text('id,text,"a,b"\n1,bon,x\n')
    options = ["--prompt", "Say {{ text }}", "--keep", 'text,"a,b"', "--answer", "said", "--id-column", "id"]
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl"), *options])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.jsonl").read_text())
    assert (found["id"], found["text"], found["a,b"], found["said"]) == ("1", "bon", "x", "of Say bon")


SCHEMA = {"type": "object", "properties": {"label": {"type": "string"}, "score": {"type": "integer"}}}


class JsonClient(FakeClient):
    """Cuts every third answer, and fails every fifth row."""

    def _finish(self, held):
        with self._lock:
            self._pending, ending = self._pending[:held], self._pending[held:]
        for request, sink in ending:
            n = int(request.prompt.split()[-1])
            text = '{"label": "a' if n % 3 == 0 else json.dumps({"label": f"l{n}", "score": n, "more": 1})
            sink([finished(request, text=text, error="no" if n % 5 == 0 else None)])


def test_fields_of_a_schema_are_columns(tmp_path, engines, monkeypatch):
    engines[0].append(JsonClient())
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    out = tmp_path / "out.jsonl"
    command = ["run", source(tmp_path, 20), str(out), "--json-schema", str(tmp_path / "schema.json"), "--parse"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 1, done.output
    for n, line in enumerate(out.read_text().splitlines()):
        row = json.loads(line)
        assert list(row) == ["row", "id", "text", "finish_reason", "label", "score", "error"]
        is_whole = n % 3 and n % 5
        assert (row["label"], row["score"]) == ((f"l{n}", n) if is_whole else (None, None)), n
    manifest = json.loads((tmp_path / "out.jsonl.job.json").read_text())["settings"]
    assert manifest["output"]["parse"] == ["label", "score"]
    assert json.loads(manifest["params"]["structured_outputs"][1]) == {**SCHEMA, "additionalProperties": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parse"], "parse needs a JSON schema of an object"),
        (["--parse", "--choice", "a,b"], "parse needs a JSON schema of an object"),
        (["--parse", "--json-schema", '{"properties": {"error": {}}}'], "the schema has the field 'error'"),
        (["--parse", "--json-schema", '{"properties": {"text": {}}}'], "give the answer another name (--answer NAME)"),
        (
            ["--parse", "--shape", "openai", "--json-schema", '{"properties": {"a": {}}}'],
            "rows of shape='openai' have none",
        ),
        (["--parse", "--keep", "a", "--json-schema", '{"properties": {"a": {}}}'], "the column 'a' cannot be kept"),
        (["--json-schema", "{}", "--regex", "a"], "give one of --json-schema, --choice and --regex"),
        (["--json-schema", "missing.json"], "no file that can be read: No such file"),
        (["--json-schema", "{no"], "is no JSON"),
        (["--regex", "a", "-P", "guided_regex=b"], "given twice"),
        (["--choice", ","], "holds no text"),
        (["--keep", ","], "names no column"),
    ],
)
def test_forms_of_answers_that_are_refused(options, message, tmp_path, engines):
    command = ["run", source(tmp_path, 2), str(tmp_path / "out.jsonl"), *options]
    done = CliRunner().invoke(cli, command, env={"COLUMNS": "10000"})
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_choices_and_regular_expressions_reach_the_engine_and_a_row_s_own_form_wins(tmp_path, engines):
    given = tmp_path / "in.jsonl"
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    given.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "b", "response_format": form}) + "\n")
    for name, option in (("choice", ["--choice", 'yes,"no, never"']), ("regex", ["--regex", "a+"])):
        out = tmp_path / f"{name}.jsonl"
        assert CliRunner().invoke(cli, ["run", str(given), str(out), *option]).exit_code == 0
        first, second = (request.params.structure for request in engines[1][-1].requests)
        assert first.kind == name
        assert name == "regex" or json.loads(first.text) == ["yes", "no, never"]
        assert json.loads(second.text) == {**SCHEMA, "additionalProperties": False}


@pytest.mark.parametrize("out", ["out.jsonl", "out.csv", "-"])
@pytest.mark.parametrize("where", ["line", "engine"])
def test_a_job_whose_first_rows_all_fail_alike_stops_and_runs_them_again(where, out, tmp_path, engines):
    given, out = tmp_path / "in.jsonl", out if out == "-" else str(tmp_path / out)
    if where == "line":
        given.write_text("".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(300)))
    else:
        source(tmp_path)
        engines[0].append(FakeClient(held=7, failing={f"prompt {i}" for i in range(300)}))
    done = CliRunner().invoke(cli, ["run", str(given), out], env={"COLUMNS": "10000"})
    assert done.exit_code == 2
    message = " ".join(done.output.split())
    assert "its first 20 rows all end with the same error" in message
    assert ("this one has none of them" if where == "line" else "it cannot be run") in message
    assert '"row"' not in done.stdout
    template = ["--prompt", "{{ text }}"] if where == "line" else []
    done = CliRunner().invoke(cli, ["run", str(given), out, *template])
    assert done.exit_code == 0, done.output
    if out.endswith("l"):
        assert numbers(tmp_path / "out.jsonl") == list(range(300))


@pytest.mark.parametrize(
    ("bad", "most", "stops"),
    [
        (range(20), 20, True), (range(19), 20, False), (range(1, 300), 20, False), (range(300), 0, False),
        (range(5), 5, True), (range(300), 300, True), (range(300), 301, False),
    ],
)  # fmt: skip
def test_the_number_of_equal_errors_at_the_start(bad, most, stops, tmp_path, engines):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"prompt": i if i in bad else f"prompt {i}"}) + "\n" for i in range(300)))
    settings = Settings(str(given), str(out), max_start_errors=most)
    if stops:
        with pytest.raises(JobStoppedError, match=rf"its first {most} rows all end with the same error. .*prompt is 0"):
            run(settings)
        assert numbers(out) == []
        settings = replace(settings, max_start_errors=0)
    assert run(settings).counts.failed == len(bad)
    assert numbers(out) == list(range(300))


def test_errors_that_differ_and_streams_do_not_stop_a_job(tmp_path, engines):
    given = tmp_path / "in.jsonl"
    given.write_text('{"prompt": 5}\n{"prompt": ""}\n' * 50)
    assert run(Settings(str(given), str(tmp_path / "out.jsonl"))).counts.failed == 100
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b'{"prompt": 5}\n' * 50,))
    writer.start()
    assert run(Settings(str(pipe), str(tmp_path / "two.jsonl"))).counts.failed == 50
    writer.join()


def test_a_job_that_has_a_good_row_already_does_not_stop(tmp_path, engines):
    given, out = source(tmp_path, 60), tmp_path / "out.jsonl"
    engines[0].append(FakeClient(dies_after=10))
    with pytest.raises(EngineClosedError):
        run(Settings(given, str(out)))
    engines[0].append(FakeClient(held=7, failing={f"prompt {i}" for i in range(60)}))
    assert run(Settings(given, str(out))).counts.failed == 50


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_fields_beside_a_template_are_data_and_the_id_is_the_tables_own(kind, tmp_path, engines):
    """The columns `n`, `seed` and `stop` of a data set are columns like others, unless --params-from names them."""
    _, made = engines
    given, out = tmp_path / f"in.{kind}", tmp_path / "out.jsonl"
    records = [
        {"id": f"q{i}", "question": f"q {i}", "n": i, "seed": -1, "stop": i / 2, "limit": i + 1} for i in range(30)
    ]
    if kind == "jsonl":
        given.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        with given.open("w", newline="") as file:
            table = csv.DictWriter(file, list(records[0]))
            table.writeheader()
            table.writerows(records)
    command = ["run", str(given), str(out), "--prompt", "Say {{ question }}", "-m", "tiny"]
    told = CliRunner().invoke(cli, [*command, "--keep", "all"])
    assert told.exit_code == 0, told.output
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found] == [record["id"] for record in records]
    for name in ("question", "n", "seed", "stop", "limit"):
        assert [str(row[name]) for row in found] == [str(record[name]) for record in records]
    assert {request.params.n for request in made[-1].requests} == {1}
    told = CliRunner().invoke(cli, [*command, "--keep", "all", "--params-from", "n"])
    assert told.exit_code == 2
    assert "params_from: " in told.output  # other options make another job
    out = tmp_path / "other.jsonl"
    command[2] = str(out)
    told = CliRunner().invoke(cli, [*command, "--params-from", "n"])
    assert told.exit_code == 1
    errors = [json.loads(line)["error"] for line in out.read_text().splitlines()]
    assert [error is None for error in errors] == [i >= 1 for i in range(30)]
    assert "n is 0; give a whole number from 1" in errors[0]


def test_a_table_whose_ids_come_twice_is_refused_before_anything_runs(tmp_path, engines):
    _, made = engines
    given, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    given.write_text("id,prompt\n1,a\n2,b\n1,c\n")
    told = CliRunner().invoke(cli, ["run", str(given), str(out), "-m", "tiny"])
    assert told.exit_code == 2
    assert "row 3: column 'id' holds '1', the id of" in " ".join(told.output.split())
    assert os.listdir(tmp_path) == ["in.csv"]
    assert not made
    told = CliRunner().invoke(cli, ["run", str(given), str(out), "-m", "tiny", "--id-column", ""])
    assert told.exit_code == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["0", "1", "2"]


class _FileEvents:
    """Records opens and changes of files by an audit hook. The hook stays for the life of the process."""

    CHANGES = ("os.link", "os.rename", "os.remove", "os.truncate")

    def __init__(self):
        self.folder, self.seen = None, []
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if self.folder is None or (event != "open" and event not in self.CHANGES):
            return
        path = str(arguments[0])
        if path.startswith(self.folder) or event == "os.truncate":
            self.seen.append((event, os.path.basename(path)))

    def of(self, event, suffix=""):
        return [name for what, name in self.seen if what == event and name.endswith(suffix)]


@pytest.fixture(scope="module")
def file_events():
    return _FileEvents()


def test_before_the_first_row_each_file_is_read_and_made_once(tmp_path, engines, file_events):
    waiting, _ = engines
    out, before = tmp_path / "out.jsonl", []

    class First(FakeClient):
        def submit(self, *args, **kwargs):
            if file_events.folder is not None:
                before.append((len(file_events.of("open", ".job.json")), list(file_events.seen)))
                file_events.folder = None
            super().submit(*args, **kwargs)

    for client in (First(held=7, dies_after=100), First(held=7)):
        waiting.append(client)
        file_events.seen.clear()
        file_events.folder = str(tmp_path)
        dies = pytest.raises(EngineClosedError) if not before else contextlib.nullcontext()
        with dies:
            run(Settings(source(tmp_path), str(out)))
    (new_reads, new), (resumed_reads, resumed) = before
    assert (new_reads, resumed_reads) == (0, 1)
    # manifest, sums and ahead are each made under a temporary name, linked and unlinked
    assert [event for event, _ in new].count("os.link") == [event for event, _ in new].count("os.remove") == 3
    assert not [event for event, _ in new + resumed if event == "os.rename"]
    assert [name for event, name in new if event == "open" and name.endswith(".ahead")] == ["out.jsonl.ahead"]
    assert numbers(out) == list(range(300))


@pytest.mark.parametrize("order", ["input", "finished"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_rows_in_other_places_are_refused_by_force_too(order, name, tmp_path, engines):
    given, out = tmp_path / "given.jsonl", tmp_path / name
    rows = [{"id": f"r{i}", "prompt": "a"} for i in range(8)]

    def go_on(rows, **options):
        given.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run(Settings(str(given), str(out), writing=OutputOptions(order=order, **options))).counts

    go_on(rows[:5])
    for other in ([*rows[1:3], rows[0], *rows[3:]], rows[1:], [rows[0], {"id": "new", "prompt": "b"}, *rows[1:]]):
        before = out.read_bytes()
        for _ in range(2):  # the second try fails, too
            with pytest.raises(
                ConfigError, match=r"row [01] of the inputs has the id '\w+', but row [01] of .* has the id 'r[01]'"
            ):
                go_on(other, force=True)
        assert out.read_bytes() == before
    counts = go_on([rows[0] | {"prompt": "other"}, *rows[1:]], force=True)
    assert (counts.done_before, counts.ok) == (5, 3)
