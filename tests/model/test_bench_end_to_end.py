"""The benchmark runs a few requests on the bundled model, with llamabatch and with a loop over llama_cpp.Llama."""

import dataclasses
import os
import random
import sys
from pathlib import Path

import pytest

from benchmarks import report, rounds
from benchmarks.peers.base import Setup
from benchmarks.peers.child import LlamaLoop, Ours
from benchmarks.places import describe_model
from benchmarks.process import PeerFailure, environment
from benchmarks.workloads import Shape, Workload
from llamabatch.gguf.resolve import resolve
from tests.processes import Started

SMALL = Workload("tiny", "tiny", tuple(Shape(16 + i, 4 + i) for i in range(12)), n_ctx=256, loop_every=3)
TALK = Workload("talk", "tiny", (Shape(8, 6), Shape(8, 6), Shape(64, 4, 0.05, talker=False)), n_ctx=256, streamed=True)


@pytest.fixture
def setup(tmp_path):
    model = describe_model(resolve("tiny"))
    env = environment(os.environ)
    return Setup({"tiny": model}, env, Path(sys.executable), None, None, None, tmp_path, 1, 120.0)


def test_ours_and_the_loop_are_measured(setup):
    started = Started()
    peers = [Ours(), LlamaLoop()]
    found = rounds.run(setup, [SMALL, TALK], peers, 1, say=lambda text: None, after_round=lambda series: None)
    ours, loop, talk = found
    assert [row.failure for row in found] == [None] * 3
    assert sum(ours.results[0].tokens) == SMALL.n_generated
    assert len(loop.results[0].tokens) == 4
    assert ours.results[0].facts["options"]["n_slots"] == 32
    assert ours.results[0].facts["counts"]["decode_calls"] > 0
    assert 2**20 < ours.results[0].peak_memory_bytes < 2**32
    assert len(talk.results[0].gaps_s) == 10
    assert talk.results[0].tokens == [6, 6, 4]
    assert 0 < talk.results[0].first_token_s < talk.results[0].wall_s
    assert {(c.workload, c.peer) for c in report.compare(found) if c.figure == "tokens/s"} == {("tiny", report.LOOP)}
    assert started() == []


def test_a_warm_cache_is_that_of_the_shared_part(setup):
    shared = Workload("warm", "tiny", (Shape(96, 4),) * 4, n_ctx=256, shared=80, warm=True)
    result = Ours(options={"n_slots": 4}).measure(setup, shared, random.Random(1))
    assert 4 * 16 <= result.facts["counts"]["prefill_tokens"] < 80 + 4 * 16  # a cold cache needs at least so many


def test_a_second_turn_computes_what_its_first_has_not(setup):
    chat = Workload(
        "chat", "tiny", (Shape(116, 4),), n_ctx=256, shared=100, warm=True, second_turn=True, streamed=True
    )  # fmt: skip
    result = Ours(options={"n_slots": 4}).measure(setup, chat, random.Random(1))
    assert result.first_token_s > 0
    assert 16 <= result.facts["counts"]["prefill_tokens"] < 50


def test_endless_requests_are_aborted_when_the_others_have_ended(setup):
    shapes = (*[Shape(8, 1900, endless=True)] * 2, Shape(64, 4, 0.05, talker=False))
    talk = Workload("endless", "tiny", shapes, n_ctx=2048, streamed=True)
    result = Ours(options={"n_slots": 4}).measure(setup, talk, random.Random(1))
    assert result.tokens[2] == 4
    assert all(4 < n < 1900 for n in result.tokens[:2])
    assert [len(times) for times in result.times_s] == result.tokens
    assert max(times[0] for times in result.times_s[:2]) + 0.05 <= result.began_s[2] < result.times_s[2][0]


def test_a_refused_option_is_a_failure_with_its_reason(setup):
    started = Started()
    found = rounds.run(
        setup, [SMALL], [Ours(options={"n_slotz": 2})], 1, say=lambda text: None, after_round=lambda series: None
    )
    assert found[0].results == []
    assert "n_slotz" in found[0].failure
    assert started() == []


def test_a_program_that_cannot_start_is_a_failure(setup):
    missing = dataclasses.replace(setup.models["tiny"], path=Path("/no/such.gguf"))
    with pytest.raises(PeerFailure, match="no/such"):
        Ours().open(dataclasses.replace(setup, models={"tiny": missing}), SMALL)
