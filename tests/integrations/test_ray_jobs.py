"""`llamabatch run` as shards on Ray: its output equals that of one process even after kills, and no wait is endless."""

import csv
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("ray", reason="needs ray (make test-scale)")

import ray

from llamabatch import SamplingParams
from llamabatch.errors import ConfigError, EngineClosedError, MemoryPlanError, ModelFileError, OutputError, SetupError
from llamabatch.integrations import ray_cluster, ray_jobs
from llamabatch.integrations.ray_cluster import Node
from llamabatch.integrations.ray_jobs import _Attempts, _Job
from llamabatch.integrations.ray_parts import in_turn, part_bytes, part_of_shard
from llamabatch.integrations.ray_shard import ShardTask, check_storage, run_shard
from llamabatch.jobs import JobInterrupted, OutputOptions, ReadOptions, Settings
from llamabatch.jobs import run as run_alone
from llamabatch.jobs.input.sources import find
from llamabatch.jobs.loop import Stop
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.lock import Lock
from llamabatch.jobs.output.manifest import plain
from llamabatch.jobs.output.own_files import lock_of
from llamabatch.jobs.progress import JobSnapshot, Silent
from llamabatch.jobs.settings import identity
from tests.long import killed_shards

pytestmark = pytest.mark.filterwarnings("default")  # Ray itself warns

ENGINE = {"n_threads": 1, "n_slots": 1, "cache_prefix": False}  # with these, a text depends only on its prompt


@pytest.mark.parametrize("number", range(killed_shards.QUICK))
def test_kills_leave_the_bytes_of_one_process(number, tmp_path):
    killed_shards.case(number, tmp_path)


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # a short path, for sockets
        ray.init(num_cpus=2, object_store_memory=80_000_000, include_dashboard=False, _temp_dir=folder)
        yield
        children = psutil.Process().children(recursive=True)
        ray.shutdown()
        assert not psutil.wait_procs(children, timeout=30)[1]


class Told(Silent):
    def __init__(self):
        self.messages = []

    def say(self, text):
        self.messages.append(text)


def source(folder, n=20, bad=()):
    lines = [{"id": f"row {i}", **({} if i in bad else {"prompt": f"Day {i}:"})} for i in range(n)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "in.jsonl")


def settings_of(folder, name="out.jsonl", n=20, bad=(), max_tokens=8, **options):
    (folder / "shared").mkdir(exist_ok=True)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
    options = {"seed": 7, "engine": ENGINE, "reading": ReadOptions(params), **options}
    return Settings(source(folder, n, bad), str(folder / "shared" / name), **options)


def alone(settings, folder):
    """Runs the job in one process, and returns the bytes of its output."""
    out = folder / ("alone-" + os.path.basename(settings.output))
    run_alone(replace(settings, output=str(out)))
    return out.read_bytes()


def test_a_table_with_bad_rows_is_joined_and_failed_rows_are_tried_again(cluster, tmp_path):
    settings, told = settings_of(tmp_path, "out.csv", bad=(3, 8)), Told()
    summary = ray_jobs.run(settings, None, 3, told)
    assert (summary.counts.ok, summary.counts.failed, summary.exit_code) == (18, 2, 1)
    assert summary.counts.generated_tokens == 18 * 8
    assert (tmp_path / "shared" / "out.csv").read_bytes() == alone(settings, tmp_path)
    assert told.messages[-1].endswith("out.csv.shards")
    again = ray_jobs.run(replace(settings, writing=OutputOptions(retry_errors=True)), None, 3)
    assert (again.counts.ok, again.counts.failed, again.counts.done_before) == (0, 2, 18)
    with open(settings.output, newline="") as file:
        assert [row["row"] for row in csv.DictReader(file)] == [str(n) for n in range(20)]
    complete = ray_jobs.run(settings, "no.such.host:1", 3)  # a complete job is recognised without a cluster
    assert (complete.counts.done_before, complete.exit_code) == (20, 1)


def test_ids_and_parameters_of_a_table_are_those_of_one_process(cluster, tmp_path):
    table = tmp_path / "in.csv"
    table.write_text("id,what,max_tokens,n\n" + "".join(f"i{n},row {n},{n % 3 or ''},0\n" for n in range(12)))
    reading = ReadOptions(
        SamplingParams(max_tokens=5, ignore_eos=True), prompt="Once {{ what }}", keep="all", params_from=("max_tokens",)
    )
    settings = replace(settings_of(tmp_path), inputs=(str(table),), reading=reading)
    assert ray_jobs.run(settings, None, 3).exit_code == 0
    assert (tmp_path / "shared" / "out.jsonl").read_bytes() == alone(settings, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "shared" / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["n"]) for row in rows] == [(f"i{n}", "0") for n in range(12)]
    table.write_text("id,what\n1,a\n1,b\n")
    twice = replace(
        settings, output=str(tmp_path / "shared" / "twice.jsonl"), reading=replace(reading, params_from=None)
    )
    with pytest.raises(ConfigError, match="row 2: column 'id' holds '1', the id of"):
        ray_jobs.run(twice, None, 2)


def test_without_a_seed_the_parts_draw_with_that_of_the_job(cluster, tmp_path):
    settings = settings_of(tmp_path, seed=None)
    ray_jobs.run(settings, None, 2)
    texts = (tmp_path / "shared" / "out.jsonl").read_bytes()
    seed = json.loads((tmp_path / "shared" / "out.jsonl.job.json").read_text())["seed"]
    assert texts == alone(replace(settings, seed=seed), tmp_path)
    (tmp_path / "shared" / "out.jsonl").unlink()
    with pytest.raises(ConfigError, match="has parts of another job with the same output"):
        ray_jobs.run(settings, None, 2)


def test_a_stop_ends_the_tasks_and_the_same_job_goes_on(cluster, tmp_path):
    settings, stop = settings_of(tmp_path, "out-{shard}.jsonl", n=400, max_tokens=48), Stop()

    class Stopping(Told):
        def show(self, snapshot):
            if snapshot().rows:
                stop.request(15)

    with pytest.raises(JobInterrupted) as caught:
        ray_jobs.run(settings, None, 2, Stopping(), stop=stop)
    assert caught.value.summary.exit_code == 143
    told = Told()
    summary = ray_jobs.run(settings, None, 2, told)
    assert summary.counts.rows == 400
    assert summary.counts.done_before > 0
    assert "is continued" in " ".join(told.messages)
    parts = [(tmp_path / "shared" / f"out-{k}-of-2.jsonl").read_bytes().splitlines() for k in (1, 2)]
    wanted = alone(replace(settings, output=str(tmp_path / "one.jsonl")), tmp_path).splitlines()
    assert parts == [wanted[::2], wanted[1::2]]
    assert len(list((tmp_path / "shared").iterdir())) == 4
    with pytest.raises(ConfigError, match=r"shards is 4, and .*out-1-of-2\.jsonl\.job\.json is of a job in 2 shards"):
        ray_jobs.run(settings, None, 4)


def test_a_task_waits_while_the_one_before_it_lives(cluster, tmp_path):
    """A task may still live although its node is cut off from Ray. Two tasks must never write one part."""
    settings, told = settings_of(tmp_path, "out-{shard}.jsonl"), Told()
    code = (
        "import sys, time; from pathlib import Path; from llamabatch.jobs.output.files import Files\n"
        "from llamabatch.jobs.output.lock import Lock\n"
        "lock = Lock(Files(), Path(sys.argv[1] + '.lock'), Path(sys.argv[1])); print('', flush=True); time.sleep(600)"
    )
    part = part_of_shard(settings.output, 1, 2)
    holder = subprocess.Popen([sys.executable, "-c", code, str(part)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"\n"
    begun = threading.Event()
    told.say = lambda text: (told.messages.append(text), "is writing" in text and begun.set())

    def release():
        if begun.wait(120):
            time.sleep(2)
            assert not part.exists()
            holder.kill()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        summary = ray_jobs.run(settings, None, 2, told)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        thread.join()
    assert summary.counts.ok == 20
    assert any(f"another process (pid {holder.pid}) is writing" in text for text in told.messages)


def test_an_error_of_a_shard_ends_the_job_with_it(cluster, tmp_path):
    settings, told = settings_of(tmp_path, bad=range(60), n=60), Told()
    with pytest.raises(Exception, match="20") as caught:
        ray_jobs.run(settings, None, 2, told)
    assert type(caught.value).__name__ == "JobStoppedError"
    assert any("has ended with an error" in text for text in told.messages)
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with pytest.raises(ModelFileError):
        ray_jobs.run(settings_of(tmp_path, "other.jsonl", model=str(tmp_path / "model.gguf")), None, 2)


def test_no_cluster_at_an_address(tmp_path):
    ray.shutdown()  # earlier tests may have started it
    with pytest.raises(SetupError, match="connected to no Ray cluster"):
        ray_jobs.run(settings_of(tmp_path), None, 2)
    for address in ("127.0.0.1:1", "nothing", "auto"):
        with pytest.raises(SetupError, match="no Ray cluster is reached at"):
            ray_jobs.run(settings_of(tmp_path), address, 2)


def test_settings_that_do_not_go_with_shards(tmp_path):
    settings = settings_of(tmp_path)

    def refused(n=2, **changes):
        with pytest.raises(ConfigError) as caught:
            ray_jobs.run(replace(settings, **changes), "local", n)
        return str(caught.value)

    assert "shards is 0; give a whole number from 1 to 10000" in refused(0)
    assert "shards is 10001" in refused(10_001)
    assert "output of a job on Ray is '-'" in refused(output="-")
    assert "an input of a job on Ray is '-'" in refused(inputs=("-",))
    assert "shard is 1/2; on Ray give the number of all shards alone: shards=2" in refused(
        reading=ReadOptions(shard=(1, 2))
    )
    assert "metrics_file is of one process" in refused(metrics_file="figures.prom")
    assert list((tmp_path / "shared").iterdir()) == []


def test_names_of_parts():
    assert str(part_of_shard("/a/out.csv.gz", 3, 12)) == "/a/out.csv.gz.shards/03-of-12.jsonl"
    assert str(part_of_shard("/a/out-{shard}.csv", 3, 9)) == "/a/out-3-of-9.csv"


def task_of(folder, settings, job_id="0" * 15 + "1"):
    known = plain(identity(settings, find(settings.inputs)))
    settings = replace(settings, reading=replace(settings.reading, shard=(1, 2)), output=str(folder / "1-of-2.jsonl"))
    return ShardTask(settings, known, lock_of(folder / "out.jsonl"), job_id)


def test_a_node_that_does_not_share_the_storage_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.9")
    settings = settings_of(tmp_path)
    task = task_of(tmp_path, settings)
    with pytest.raises(SetupError, match=rf"node 10\.0\.0\.9 does not share the folder {tmp_path}.*No such file"):
        check_storage(task)
    lock = Lock(Files(), task.lock, tmp_path / "out.jsonl")
    lock.write_id(task.job_id)
    check_storage(task)
    with pytest.raises(SetupError, match=r"does not share the folder .*is not the lock of job 0000000000000002"):
        check_storage(replace(task, job_id="0" * 15 + "2"))
    with pytest.raises(SetupError, match=r"has llamabatch .*, and the driver 0\.0\.1"):
        run_shard(replace(task, version="0.0.1"), None)
    (tmp_path / "in.jsonl").write_text('{"prompt": "of another storage"}\n')
    with pytest.raises(SetupError, match=r"node 10\.0\.0\.9 and the driver see different files .*inputs\[0\]"):
        run_shard(task, None)
    lock.release(remove=False)  # another node sees the lock as free, if the file system's locks hold for one node only
    with pytest.raises(SetupError, match="this file system locks a file for one node only"):
        check_storage(task)


def test_a_shard_that_gets_no_further_ends_the_job(tmp_path):
    job = _Job(settings_of(tmp_path), 2, told := Told(), Stop())
    part = part_of_shard(tmp_path / "shared" / "out.jsonl", 1, 2)
    part.parent.mkdir()
    pauses = []
    for _ in range(4):
        job._again(1, "its node died")
        pauses.append(round(job._attempts[1].due - time.monotonic()))
    assert pauses == [0, 1, 3, 7]
    part.write_bytes(b"a new row\n")
    job._again(1, "its node died")
    assert job._attempts[1].n == 1
    job._attempts[1] = _Attempts(4, size=part_bytes(part))
    with pytest.raises(
        EngineClosedError, match="shard 1/2 has ended 5 times in a row without a new row, the last time"
    ):
        job._again(1, "its node died")
    assert told.messages.count("shard 1/2 has failed (its node died), and is started again") == 5


def test_parts_are_joined_in_the_order_of_the_input(tmp_path):
    line = '{{"row": {}, "id": "a", "text": "b", "finish_reason": "stop", "error": null}}\n'
    parts = [tmp_path / f"{k}.jsonl" for k in range(3)]
    for k, part in enumerate(parts):
        part.write_text("".join(line.format(n) for n in range(k, 8, 3)))
    assert [number for number, _ in in_turn(parts)] == list(range(8))
    parts[1].write_text(line.format(1))
    with pytest.raises(OutputError, match=r"row 4 is missing in .*1\.jsonl, but .* has later rows"):
        list(in_turn(parts))
    parts[1].write_text("something else\n")
    with pytest.raises(OutputError, match="has a line that no job has written, at byte 0"):
        list(in_turn(parts))


def test_one_shard_says_that_its_engine_is_ready(tmp_path, monkeypatch):
    told = Told()
    job = _Job(settings_of(tmp_path), 3, told, Stop())
    ready = "the engine is ready after 2.0 s: batched, 32 slots"
    news = [(2, ready), (1, ready), (1, "the disk is full"), (3, "the disk is full")]
    monkeypatch.setattr(ray_jobs.ray, "get", lambda *_, **__: (news, {}))
    board = SimpleNamespace(look=SimpleNamespace(remote=lambda: None))
    job._look(board)
    assert told.messages == [f"shard 2/3: {ready}", "shard 1/3: the disk is full", "shard 3/3: the disk is full"]
    job._look(board)
    assert told.messages[3:] == ["shard 1/3: the disk is full", "shard 3/3: the disk is full"]


def test_the_display_sums_up_the_shards(tmp_path):
    job = _Job(settings_of(tmp_path), 2, Told(), Stop())
    job._total = 100
    job._snapshots = {1: JobSnapshot(10, 50, 1, 30.0, 4, 8, None), 2: JobSnapshot(30, 50, 0, 20.0, 2, 8, None)}
    job._first_rows = {1: 0, 2: 20}
    job._start -= 40
    shown = job._snapshot()
    assert (shown.rows, shown.total, shown.failed, shown.tokens_per_s) == (40, 100, 1, 50.0)
    assert (shown.running, shown.slots) == (6, 16)
    assert shown.left_s == pytest.approx(120, rel=0.01)


def test_a_shard_takes_what_the_plan_says(tmp_path, monkeypatch):
    plan = {"n_slots": 32, "n_ctx": 4096, "n_threads": 8, "n_threads_batch": 16, "instances": 1, "bytes": 2**30}
    asked = []
    monkeypatch.setattr(ray_cluster, "ask_plan", lambda model, options, gpus: asked.append(gpus) or plan)
    nodes = [Node(12, 0, 2**33), Node(16, 0, 2**33)]
    monkeypatch.setattr(Node, "all", classmethod(lambda cls: nodes))
    size = ray_cluster.ShardSize.of(settings_of(tmp_path, engine={}))
    assert size.resources == {"num_cpus": 12, "memory": 1.5 * 2**30}
    assert size.engine == {"n_threads": 8, "n_threads_batch": 12, "n_slots": 32}
    assert ray_cluster.ShardSize.of(settings_of(tmp_path, engine={"n_threads": 4})).engine == {"n_slots": 32}
    nodes[0] = Node(4, 1, 2**33)
    assert ray_cluster.ShardSize.of(settings_of(tmp_path, engine={})).resources["num_gpus"] == 1
    assert "num_gpus" not in ray_cluster.ShardSize.of(settings_of(tmp_path, engine={"n_gpu_layers": 0})).resources
    assert asked == [0, 0, 1, 0]
    nodes[:] = [Node(4, 0, 2**30)]
    with pytest.raises(MemoryPlanError, match="a shard takes 1,536 MiB, and no node has more than 1,024 MiB for Ray"):
        ray_cluster.ShardSize.of(settings_of(tmp_path, engine={}))
