"""The monitor over a fake engine: its snapshots, files that are whole at any time, and its end."""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llamabatch.engine.stats import EngineStats
from llamabatch.errors import ConfigError, EngineClosedError, InputError, SetupError
from llamabatch.monitor import host, status
from llamabatch.monitor.host import MachineSample, MachineSampler
from llamabatch.monitor.monitor import Monitor
from llamabatch.monitor.prometheus import MetricsFile
from llamabatch.monitor.snapshot import Snapshot
from tests.unit.fakes import times
from tests.waiting import until

STATS = EngineStats(
    running=3, waiting=2, free_slots=1, kv_cells=100, kv_cells_used=25, submitted=20, finished_stop=6,
    finished_length=4, errors=3, aborted=2, prompt_tokens=50, prefix_tokens=7, shared_tokens=3, generated_tokens=400,
    preemptions=1, decode_calls=10, decode_rows=30, decode_passes=12, ttft_s=times(0.0004, 0.03, 0.03),
    inter_token_s=times(0.012, 0.012, 700), queue_s=times(0.3), e2e_s=times(2.0, 9000),
)  # fmt: skip


class Engine:
    """An engine that makes 10 tokens between two looks."""

    pids = ()

    def __init__(self) -> None:
        self.stats_now, self.closed, self.looks = STATS, False, 0

    def stats(self) -> EngineStats:
        if self.closed:
            raise EngineClosedError("closed")
        self.looks += 1
        return STATS + EngineStats(generated_tokens=10 * self.looks)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))


def snapshot(stats=STATS, **machine_) -> Snapshot:
    return Snapshot(1e9, 5.0, stats, 2.0, EngineStats(generated_tokens=50, errors=1), MachineSample(**machine_))


def test_a_callback_is_told_every_so_often_and_once_more_at_the_end(begun):
    engine, seen = Engine(), queue.SimpleQueue()
    with Monitor(engine, seen.put, every_s=0.01):
        assert len(begun.threads()) == 1
        told = [seen.get(timeout=60) for _ in range(3)]
    assert not begun.threads()
    assert [s.recent.generated_tokens for s in told] == [10, 10, 10]
    assert all(s.recent.submitted == 0 and s.recent.running == 3 for s in told)
    assert told[2].stats.generated_tokens - told[0].stats.generated_tokens == 20
    assert all(s.generated_tokens_per_s == pytest.approx(10 / s.interval_s) for s in told)
    assert told[0].elapsed_s < told[1].elapsed_s < told[2].elapsed_s
    assert told[0].machine.memory_bytes > 10**6
    assert told[0].machine.cpu_percent >= 0
    assert seen.get(timeout=60) is not None  # the snapshot of the last look


def test_rates():
    told = snapshot()
    assert told.generated_tokens_per_s == 25
    assert told.requests_per_s == 0.5
    assert Snapshot(0, 0, STATS, 0, STATS, MachineSample()).generated_tokens_per_s == 0


def test_a_callback_that_raises_is_logged_once_and_told_again(caplog):
    engine, calls = Engine(), queue.SimpleQueue()

    def callback(_):
        calls.put(None)
        raise RuntimeError("mine")

    with caplog.at_level(logging.ERROR), Monitor(engine, callback, every_s=0.01):
        for _ in range(3):
            calls.get(timeout=60)
    assert caplog.text.count("Traceback") == 1


def test_it_ends_with_the_engine_or_when_that_is_forgotten_or_from_its_callback():
    engine, told = Engine(), threading.Event()
    monitor = Monitor(engine, lambda _: told.set(), every_s=0.01).start()
    assert told.wait(60)
    engine.closed = True
    monitor._thread.join(60)
    assert not monitor._thread.is_alive()
    with pytest.raises(EngineClosedError):
        Monitor(engine).start()
    engine = Engine()
    monitor = Monitor(engine, every_s=0.01).start()
    del engine
    monitor._thread.join(60)
    assert not monitor._thread.is_alive()
    engine = Engine()
    monitor = Monitor(engine, lambda _: monitor.stop(), every_s=0.01).start()
    monitor._thread.join(60)
    assert not monitor._thread.is_alive()
    monitor.stop()
    with pytest.raises(EngineClosedError, match="stopped"):
        monitor.start()


@pytest.mark.parametrize("bad", [0, -1, 0.001, 3601, float("nan"), "1", True, None])
def test_how_often_is_checked(bad):
    with pytest.raises(ConfigError, match=r"every_s is .*3600"):
        Monitor(Engine(), every_s=bad)


# --- a file for Prometheus --------------------------------------------------------------------------------------


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
            assert sample.labels["model_name"] == "m.gguf"
    return found


def test_names_are_vllms_under_our_prefix(tmp_path):
    path = tmp_path / "x.prom"
    gpu = host.GpuSample(1, "Card", 50.0, 100, 200, 30.0)
    MetricsFile(path, "m.gguf").write(
        snapshot(cpu_percent=150.0, memory_bytes=5, cpu_power_w=12.5, gpus=(gpu, host.GpuSample(2, "old")))
    )
    found = samples(path.read_text())
    p = "llamabatch:"
    assert found[p + "num_requests_running"] == 3
    assert found[p + "num_requests_waiting"] == 2
    assert found[p + "kv_cache_usage_perc"] == 0.25
    assert found[p + "slot_usage_perc"] == 0.75
    assert found[p + "prompt_tokens_total"] == 50
    assert found[p + "generation_tokens_total"] == 400
    assert found[p + "num_preemptions_total"] == 1
    assert (found[p + "prefix_cache_queries_total"], found[p + "prefix_cache_hits_total"]) == (50, 10)
    reasons = {
        r: found[f"{p}request_success_total{{finished_reason={r}}}"] for r in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 6, "length": 4, "abort": 2, "error": 3}
    assert found[p + "requests_submitted_total"] == 20
    assert found[p + "time_to_first_token_seconds_bucket{le=0.0005}"] == 1
    assert found[p + "time_to_first_token_seconds_bucket{le=0.02}"] == 1
    assert found[p + "time_to_first_token_seconds_bucket{le=0.04}"] == 3
    assert found[p + "time_to_first_token_seconds_bucket{le=2560.0}"] == 3
    assert found[p + "inter_token_latency_seconds_bucket{le=80.0}"] == 2
    assert found[p + "inter_token_latency_seconds_bucket{le=+Inf}"] == 3
    assert found[p + "inter_token_latency_seconds_count"] == 3
    assert found[p + "inter_token_latency_seconds_sum"] == pytest.approx(700.024)
    assert found[p + "request_queue_time_seconds_bucket{le=0.3}"] == 1
    assert found[p + "e2e_request_latency_seconds_bucket{le=7680.0}"] == 1
    assert found[p + "process_cpu_usage_cores"] == 1.5
    assert found[p + "cpu_power_watts"] == 12.5
    assert found[p + "gpu_usage_perc{gpu=1}"] == 0.5
    assert p + "gpu_usage_perc{gpu=2}" not in found
    assert p + "gpu_power_watts{gpu=1}" in found


def test_what_the_machine_does_not_tell_is_left_out(tmp_path):
    path = tmp_path / "x.prom"
    MetricsFile(path, "m.gguf").write(snapshot())
    assert not [name for name in samples(path.read_text()) if "gpu" in name or "watts" in name or "process" in name]


def test_a_reader_finds_a_whole_file_at_any_time(tmp_path):
    path, told, engine = tmp_path / "x.prom", [], Engine()

    def read():
        found = samples(path.read_text())
        assert len(found) > 100
        told.append(found["llamabatch:generation_tokens_total"])
        return len(told) >= 100 and told[-1] > 420  # the file was replaced while it was read

    with Monitor(engine, metrics_file=path, every_s=0.01, title="m.gguf") as monitor:
        until(path.exists)
        until(read)
        assert told == sorted(told)
        monitor.stop()
    assert [p.name for p in tmp_path.iterdir()] == ["x.prom"]  # no temporary file is left, and the last figures stay


def test_a_metrics_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        MetricsFile(tmp_path / "missing" / "x.prom")
    with pytest.raises(ConfigError, match="that is a folder"):
        Monitor(Engine(), metrics_file=tmp_path)


def test_without_prometheus_client_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SetupError, match=r"pip install 'llamabatch\[metrics\]'"):
        MetricsFile(tmp_path / "x.prom")


def test_a_folder_that_vanishes_is_logged_and_no_end(tmp_path, caplog):
    folder, engine = tmp_path / "gone", Engine()
    folder.mkdir()
    file = MetricsFile(folder / "x.prom")
    folder.rmdir()
    seen = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR), Monitor(engine, seen.put, metrics_file=file, every_s=0.01):
        for _ in range(3):
            seen.get(timeout=60)
    assert "x.prom" in caplog.text


# --- for `llamabatch top` ---------------------------------------------------------------------------------------


def test_a_status_is_private_whole_and_gone_at_the_end():
    engine, told = Engine(), queue.SimpleQueue()
    with Monitor(engine, told.put, every_s=0.01, publish=True, title="m", job=lambda: {"rows": 5, "total": 10}):
        for _ in range(4):
            told.get(timeout=60)
        [found] = status.running()
        [path] = status.folder().glob("*.json")
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert (found.pid, found.title, found.job) == (os.getpid(), "m", {"rows": 5, "total": 10})
        assert found.stats.ttft_s == STATS.ttft_s
        assert found.recent.generated_tokens == found.stats.generated_tokens - 410
        assert len(found.speeds) >= 3
        assert status.Status.from_document(json.loads(json.dumps(found.document()))) == found
    assert list(status.folder().iterdir()) == []
    assert status.running() == []


def leave_behind(pid: int, created_s: float):
    told = status.StatusFile("old", 1.0)
    told.write(snapshot())
    packed = json.loads(told.path.read_text()) | {"pid": pid, "created_s": created_s}
    told.path.write_text(json.dumps(packed))
    return told.path


def test_what_dead_programs_left_is_ignored_and_removed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = leave_behind(ended.pid, time.time())
    another = leave_behind(os.getpid(), 1000.0)  # a new process with this id is another program
    other = status.folder() / "77-0.json"
    other.write_text('{"version": 99}')  # the file of another release is not removed
    assert status.running() == []
    assert not gone.exists()
    assert not another.exists()
    assert other.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"version": 1}', '{"version": 2}', "\x00"])
def test_what_is_no_status_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match="no status file"):
        status.read(path)
    with pytest.raises(InputError, match="No such file"):
        status.read(tmp_path / "missing")


def test_rates_of_a_status_are_those_of_the_last_half_minute():
    told, tokens = status.StatusFile("m", 1.0), 1000
    for second in range(1, 100):
        tokens += 5 if second <= 50 else 20
        told.write(Snapshot(1e9, second, EngineStats(generated_tokens=tokens), 1.0, EngineStats(), MachineSample()))
    found = status.read(told.path)
    assert found.window_s == pytest.approx(30)
    assert found.recent.generated_tokens == 30 * 20
    told.remove()


# --- the machine ------------------------------------------------------------------------------------------------


def test_cpu_memory_and_power_of_the_engines_processes(tmp_path, monkeypatch):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text("1000000")
    now = [100.0]
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        sampler = MachineSampler(lambda: [child.pid, 2**22 + 5], clock=lambda: now[0], powercap=tmp_path)
        (zone / "energy_uj").write_text("31000000")
        known = psutil.Process(child.pid)
        used_s = sum(known.cpu_times()[:2])
        until(lambda: sum(known.cpu_times()[:2]) > used_s + 0.1)
        now[0] += 2.0
        told = sampler.sample()
        sampler.close()
    finally:
        child.kill()
        child.wait()
    assert told.cpu_power_w == pytest.approx(15)
    assert told.cpu_percent > 1  # a busy child, while the clock advances 2 s
    assert told.memory_bytes > 15 * 10**6
    assert 0 <= told.system_cpu_percent <= 100
    assert told.system_available_bytes > 0


def test_a_machine_that_tells_nothing(tmp_path):
    sampler = MachineSampler(list, powercap=tmp_path / "nothing")
    told = sampler.sample()
    assert told.cpu_power_w is None
    sampler.close()
