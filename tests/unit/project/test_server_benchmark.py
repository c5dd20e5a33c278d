"""The figures of benchmarks/server_http.py: medians, ratios in a round, processor time for each token, targets."""

import dataclasses

import pytest

pytest.importorskip("psutil")

from benchmarks import report, rounds, server_batch, server_http, serving
from benchmarks.peers.base import Result
from benchmarks.process import PeerFailure
from benchmarks.workloads import WORKLOADS


def result(tokens, wall_s=1.0, cpu_s=0.01):
    return {"tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s, "engine_cpu_s": 0.5}


def test_ratios_are_those_of_one_round_and_costs_are_a_token_each():
    load = dataclasses.replace(server_http.LOADS["tiny"][0], name="small", at_least=0.97)
    lists, http = [result(1000), result(500), result(100)], [result(980), result(480), result(50)]
    found = server_http.summary(load, {"list": lists, "streamed": lists, "http": http})
    assert found["tokens_per_s"]["list"] == 500
    assert found["ratios"] == {"streamed": 1.0, "http": pytest.approx(0.96)}
    assert found["cpu_us_per_token"]["http"]["cpu"] == pytest.approx(10_000 / 480)
    assert [goal["met"] for goal in found["targets"].values()] == [False, True]
    lines = list(serving.lines({load.name: found}))
    assert lines == [
        "small: http / list 0.960 (>= 0.970: MISSED)",
        "small: server cpu, us a token 20.833 (<= 25: met)",
    ]


def test_a_round_without_tokens_is_a_failure():
    (load,) = server_http.LOADS["0.5b"]
    with pytest.raises(PeerFailure, match="no token"):
        server_http.summary(load, {way: [result(0)] for way in ("list", "streamed", "http")})


def test_wrk_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(server_http.shutil, "which", lambda name: None)
    with pytest.raises(PeerFailure, match="wrk is not installed"):
        server_http.wrk(1, tmp_path / "bodies", 1)


def test_the_server_is_compared_with_the_stock_llama_server():
    workload = WORKLOADS["burst"]

    def row(peer, speeds, failure=None):
        results = [Result(1.0, [speed], facts={"flags": ["-np", "32"]}) for speed in speeds]
        return rounds.Series(peer, workload.name, results, failure)

    series = [
        row(report.OURS, [300, 310]),
        row("llamabatch serve", [290, 310]),
        row(report.STOCK, [100, 100]),
        row(report.STOCK_BEST, [90], "it ended with SIGILL"),
        row(report.PATCHED, [280, 280]),
    ]
    [(name, entry)] = server_http.beside_llama_server([workload], series).items()
    assert name == "burst"
    assert entry["targets"] == {
        "serve / llama-server, stock": {
            "value": pytest.approx(3.0), "at_least": pytest.approx(0.97 * 3.05), "met": True,
        },
    }  # fmt: skip
    assert entry["failures"] == {report.STOCK_BEST: "it ended with SIGILL"}
    assert entry["tokens_per_s"][report.PATCHED] == 280
    assert entry["flags"][report.STOCK] == ["-np", "32"]


def batch_round(p99, tokens=0.0):
    gaps = {"p50": 10.0, "p95": 11.0, "p99": p99, "max": 2 * p99}
    return {"gaps_ms": gaps, "client_tokens_per_s": 90.0, "batch_tokens_per_s": tokens}


def test_gaps_beside_a_batch_are_compared_with_those_of_the_round_without_one():
    without, beside = [batch_round(20), batch_round(10), batch_round(40)], [batch_round(22, 50), batch_round(13, 70)]
    found = server_batch.summary({"alone": without, "beside a batch": [*beside, batch_round(44, 60)]})
    assert found["gaps_ms"]["alone"] == {"p50": 10, "p95": 11, "p99": 20, "max": 40}
    assert found["round_ratios"]["p99"] == [pytest.approx(1.1), pytest.approx(1.3), pytest.approx(1.1)]
    assert found["ratios"]["p50"] == 1
    assert found["tokens_per_s"]["beside a batch"] == {"client_tokens_per_s": 90, "batch_tokens_per_s": 60}
    assert list(serving.lines({"0.5b": found})) == ["0.5b: p99 of the gaps, beside a batch / alone 1.100 (<= 1.2: met)"]


def test_percentiles_of_gaps():
    found = server_batch.percentiles_ms([each / 1000 for each in range(1, 101)])
    assert found == {"p50": pytest.approx(50, abs=1), "p95": pytest.approx(95, abs=1),
                     "p99": pytest.approx(99, abs=1), "max": pytest.approx(100)}  # fmt: skip
    with pytest.raises(PeerFailure, match="no two tokens"):
        server_batch.percentiles_ms([])
