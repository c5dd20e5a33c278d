"""The figures of benchmarks/server_http.py: medians, ratios of a round, processor time a token, targets."""

import pytest

pytest.importorskip("psutil")

from benchmarks import report, rounds, server_http
from benchmarks.peers.base import Result
from benchmarks.process import PeerFailure
from benchmarks.workloads import WORKLOADS


def result(tokens, wall_s=1.0, cpu_s=0.01):
    return {"tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s, "engine_cpu_s": 0.5}


def test_ratios_are_those_of_one_round_and_costs_are_a_token_each():
    (load,) = server_http.LOADS["0.5b"]
    lists, http = [result(1000), result(500), result(100)], [result(980), result(480), result(50)]
    found = server_http.summary(load, {"list": lists, "staggered": lists, "streamed": lists, "http": http})
    assert found["tokens_per_s"]["list"] == 500
    assert found["ratios"] == {"staggered": 1.0, "streamed": 1.0, "http": pytest.approx(0.96)}
    assert found["cpu_us_per_token"]["http"]["cpu"] == pytest.approx(10_000 / 480)
    assert [goal["met"] for goal in found["targets"].values()] == [False, True]
    lines = list(server_http.lines({load.name: found}))
    assert lines == [
        "0.5B, 128 tokens: http / list 0.960 (>= 0.970: MISSED)",
        "0.5B, 128 tokens: server cpu, us a token 20.833 (<= 25: met)",
    ]


def test_a_round_without_tokens_is_a_failure():
    (load,) = server_http.LOADS["0.5b"]
    with pytest.raises(PeerFailure, match="no token"):
        server_http.summary(load, {way: [result(0)] for way in ("list", "staggered", "streamed", "http")})


def test_wrk_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(server_http.shutil, "which", lambda name: None)
    with pytest.raises(PeerFailure, match="wrk is not installed"):
        server_http.wrk(1, tmp_path / "bodies", 1.0)


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
