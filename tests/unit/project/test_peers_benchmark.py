"""benchmarks/bench_peers.py with engines that compute nothing."""

import dataclasses
import json
import time
from pathlib import Path

import click
import pytest

from benchmarks import bench_peers, grid, report
from benchmarks.peers import base, openvino, vllm
from benchmarks.peers.base import Model, Result, Setup
from benchmarks.process import PeerFailure
from benchmarks.workloads import PEER_WORKLOADS, WORKLOADS
from llamabatch.gguf.header import read_header
from llamabatch.gguf.resolve import resolve

WORKLOAD = PEER_WORKLOADS["burst, SmolLM2 Q4_1"]
NEVER = 1e18


class Engine:
    """An engine with `tps` tokens a second. Other processes use one of `shares` of the CPU in each measurement."""

    def __init__(self, name, tps, shares=(0.0,), log=None, reads=lambda path: True):
        self.name, self.tps, self.reads = name, tps, reads
        self.shares, self.log = list(shares), [] if log is None else log
        self.facts, self.pids = {}, []

    def open(self, setup, workload):
        if not self.reads(setup.models[workload.model].path):
            raise PeerFailure("it cannot read the file")
        return self

    def close(self):
        self.log.append(("close", self.name))


@pytest.fixture
def measured(monkeypatch):
    """Replaces measurements by the figures of the fake engines."""

    def once(session, setup, workload, rng):
        session.log.append((session.name, rng.random()))
        share = session.shares.pop(0) if len(session.shares) > 1 else session.shares[0]
        facts = dict(session.facts)
        return Result(100 / session.tps, [100], facts=facts, others_cpu_percent=share, first_token_s=0.5)

    monkeypatch.setattr(bench_peers, "measure_once", once)
    monkeypatch.setattr(bench_peers, "open_warm", lambda peer, setup, workload, rng: peer.open(setup, workload))


def setup_of(path="m-Q4_1.gguf"):
    return Setup({WORKLOAD.model: Model(Path(path), 5000, ())}, {}, Path(), None, None, None, Path(), 2, 10.0)


def run(engines, known, rounds, deadline=NEVER, keep=lambda: None):
    bench_peers.run(setup_of(), WORKLOAD, engines, known, rounds, deadline, keep)


def test_each_engine_begins_a_round_and_ids_are_fresh(measured):
    log, known = [], {}
    run([Engine("a", 10, log=log), Engine("b", 20, log=log)], known, 2)
    assert [name for name, _ in log] == ["a", "b", "b", "a", "close", "close"]
    assert len({drawn for _, drawn in log[:4]}) == 2  # all engines of a round get the same token ids
    assert {peer: len(row.results) for (_, peer), row in known.items()} == {"a": 2, "b": 2}


def test_a_disturbed_measurement_is_made_again(measured):
    known = {}
    run([Engine("a", 10, shares=[50.0, 3.0, 9.0, 0.5])], known, 2)
    found = known[WORKLOAD.name, "a"].results
    assert [(each.others_cpu_percent, each.facts["attempts"]) for each in found] == [(3.0, 3), (0.5, 1)]


def test_a_run_goes_on_from_its_file(measured, monkeypatch):
    kept = []
    known = {}

    def keep():
        kept.append(report.document({}, {}, list(known.values()), {}))

    run([Engine("a", 10), Engine("b", 20)], known, 1, keep=keep)
    again = bench_peers.known_series(json.loads(json.dumps(kept[-1])))
    log = []
    run([Engine("a", 10, log=log), Engine("b", 20, log=log)], again, 2)
    assert [name for name, _ in log if name != "close"] == ["b", "a"]
    row = again[WORKLOAD.name, "b"]
    assert [round(each.tokens_per_s) for each in row.results] == [20, 20]
    assert row.results[0].first_token_s == 0.5
    before = len(log)
    run([Engine("a", 10, log=log)], again, 2)
    run([Engine("a", 10, log=log)], again, 9, deadline=time.monotonic() - 1)
    assert len(log) == before  # no engine is loaded when nothing is missing, or when the time is over


def test_a_peer_that_cannot_read_a_file_gets_the_nearest(measured, monkeypatch):
    class Reader(openvino.OpenVino):
        def open(self, setup, workload):
            return Engine(self.name, 10, reads=lambda path: "Q4_0" in path.name).open(setup, workload)

    monkeypatch.setattr(bench_peers, "nearest", lambda model: [Path("m-Q4_1.gguf"), Path("m-Q4_0.gguf")])
    known = {}
    run([Reader("OpenVINO"), Engine("none", 10, reads=lambda path: False)], known, 1)
    assert known[WORKLOAD.name, "OpenVINO"].results[0].facts["file"] == "m-Q4_0.gguf"
    assert known[WORKLOAD.name, "none"].failure == "it cannot read the file"


def test_the_run_with_the_median_time_counts(monkeypatch):
    times, log = iter([3.0, 9.0, 5.0]), []
    monkeypatch.setattr(base, "open_warm", lambda *_, **__: Engine("a", 1, log=log))
    monkeypatch.setattr(base, "measure_once", lambda *_: Result(next(times), [10]))
    assert base.measure(Engine("a", 1), setup_of(), WORKLOAD, None, runs=3).wall_s == 5.0
    assert log == [("close", "a")]


def test_settings_are_found_axis_by_axis(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    setup = setup_of()
    best, tried = openvino.remembered(setup), []
    wanted = {"max_num_batched_tokens=2048", "enable_prefix_caching=1", "KV_CACHE_PRECISION=u8"}

    def one(settings, workload, timeout_s):
        tried.append(settings)
        if "INFERENCE_PRECISION_HINT=bf16" in settings:
            raise PeerFailure("this CPU has no bf16")
        return Result(10 / (1 + len(wanted & set(settings))), [10])

    assert best.flags("burst") == openvino.USUAL
    best.search(WORKLOADS["burst"], one, lambda text: None)
    assert set(best.flags("burst")) == wanted
    assert tried[0] == ()
    assert len(tried) == len(set(tried)) == 1 + sum(map(len, openvino.AXES.values()))
    assert openvino.remembered(setup).flags("burst") == best.flags("burst")
    assert openvino.remembered(dataclasses.replace(setup, threads=4)).flags("burst") == openvino.USUAL
    assert grid.Remembered(tmp_path / "x", "2").flags("burst") == grid.USUAL


def test_settings_go_to_the_scheduler_or_to_the_device(monkeypatch):
    started = []
    monkeypatch.setattr(openvino, "ChildSession", lambda *given, **more: started.append(given[2]))
    setup = dataclasses.replace(setup_of(), bench_python=Path("python"))
    settings = ("max_num_batched_tokens=256", "enable_prefix_caching=0", "KV_CACHE_PRECISION=f16")
    openvino.OpenVino("OpenVINO", settings=settings).open(setup, WORKLOAD)
    scheduler = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    assert started[0]["scheduler"] == scheduler
    assert started[0]["properties"] == {"INFERENCE_NUM_THREADS": 2, "KV_CACHE_PRECISION": "f16"}
    assert not openvino.OpenVino("OpenVINO").applies(WORKLOADS["long prompt among talkers"])


def test_vllm_gets_the_shape_of_the_file():
    path = resolve("tiny")
    header, config = read_header(path), vllm.config_of(path)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == header.n_tokens
    assert config["num_key_value_heads"] == header.own("attention.head_count_kv")
    assert None not in config.values()


def test_a_peer_that_people_install_themselves_needs_its_place(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    record = grid.Remembered(tmp_path / "flags.json", "a CPU")
    searches = {report.STOCK_BEST: record, report.OPENVINO_BEST: record}
    with pytest.raises(click.UsageError, match="needs --vllm-python"):
        bench_peers._engines([report.VLLM], searches, None)
    [peer] = bench_peers._engines([report.VLLM], searches, Path("python"))
    assert peer.name == report.VLLM
