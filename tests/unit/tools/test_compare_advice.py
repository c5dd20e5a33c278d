"""The one sentence of advice, from invented tables: it must follow from the figures."""

import dataclasses

import pytest

from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools.compare.advice import advise
from llamabatch.tools.compare.measure import BASELINE
from llamabatch.tools.compare.report import Row
from tests.unit.compare_fakes import figures, report


def chosen(*rows: Row) -> tuple[str, str]:
    advice = advise(rows)
    assert advice is not None
    assert advice.sentence.endswith(".")
    assert advice.sentence.count(". ") <= 2
    return advice.strategy, advice.sentence


def test_batched_far_ahead():
    strategy, sentence = chosen(
        figures(BASELINE, 90, latency=9),
        figures("sequential", 100, latency=8),
        figures("length-sorted", 100, latency=7),
        figures("interleaved", 95, latency=15),
        figures("static", 300, latency=2),
        figures("batched", 400, latency=1.5),
        figures("multi-instance", 250, latency=3),
    )
    assert strategy == "batched"
    assert "its 400 tokens/s are 4.4 times those of the loop over llama_cpp.Llama" in sentence
    assert "33 % more than those of static, the next best" in sentence


def test_no_gain_from_batching_prefers_what_is_done_soonest():
    strategy, sentence = chosen(
        figures(BASELINE, 95, latency=9),
        figures("sequential", 100, latency=8, ttft=7.5),
        figures("length-sorted", 100, latency=5, ttft=4.8),
        figures("interleaved", 98, latency=9, ttft=0.5),
        figures("static", 101, latency=7, ttft=6),
        figures("batched", 102, latency=6, ttft=5),
        figures("multi-instance", 80, latency=9),
    )
    assert strategy == "length-sorted"
    assert "done soonest, in 5.00 s" in sentence
    assert "where people wait for the first words, interleaved shows them in 500 ms instead of 4.80 s" in sentence


def test_multi_instance_ahead():
    strategy, sentence = chosen(
        figures("sequential", 100, latency=8, peak_memory_bytes=100),
        figures("batched", 400, latency=2, peak_memory_bytes=200),
        figures("multi-instance", 520, latency=1.6, peak_memory_bytes=500),
    )
    assert strategy == "multi-instance"
    assert "5.2 times those of sequential and 30 % more than those of batched" in sentence
    assert "2.5 times the memory of batched" in sentence


def test_auto_counts_where_it_runs_several_engines():
    strategy, sentence = chosen(
        figures("batched", 400, latency=2),
        figures("auto", 600, latency=1.4, chosen="batched", instances=2),
    )
    assert strategy == "auto"
    assert sentence.startswith("For work like this use auto (batched × 2): ")


def test_a_difference_within_the_noise_goes_to_the_simpler_one():
    strategy, sentence = chosen(figures("sequential", 100, latency=2), figures("batched", 104, latency=1.95))
    assert strategy == "sequential"
    assert "batched is no more than 5 % faster, and sequential is simpler" in sentence
    strategy, sentence = chosen(
        figures("sequential", 50, latency=9), figures("static", 101, latency=2), figures("batched", 100, latency=2)
    )
    assert strategy == "batched"
    assert "2.0 times those of sequential, static is no more than 5 % faster, and batched is simpler" in sentence


def test_no_strategy_is_named_twice():
    _, sentence = chosen(figures("sequential", 100), figures("batched", 400))
    assert sentence == "For work like this use batched: its 400 tokens/s are 4.0 times those of sequential."
    _, sentence = chosen(figures("sequential", 10), figures("interleaved", 20), figures("batched", 50))
    assert sentence.endswith("are 5.0 times those of sequential and 2.5 times those of interleaved, the next best.")


def test_interleaved_wins_by_latency_where_nothing_is_faster():
    strategy, _ = chosen(
        figures("sequential", 100, latency=8), figures("interleaved", 97, latency=4), figures("batched", 60, latency=9)
    )
    assert strategy == "interleaved"


def test_the_loop_wins_where_it_is_faster():
    strategy, sentence = chosen(figures(BASELINE, 120), figures("sequential", 100), figures("batched", 90))
    assert strategy == BASELINE
    assert "stay with the loop over llama_cpp.Llama: its 120 tokens/s are 1.2 times those of sequential" in sentence


def test_differing_texts_are_mentioned():
    assert "7 % of its texts differ" in chosen(figures("batched", 100, equal=0.93))[1]
    assert "differ" not in chosen(figures("batched", 100, equal=0.99))[1]


@pytest.mark.parametrize("rows", [(), (figures(BASELINE, 100),), (Row("batched", error="it died"),)])
def test_nothing_to_advise(rows):
    assert advise(rows) is None


def test_a_row_with_an_error_is_never_advised():
    assert (
        chosen(figures("batched", 400, error="1 of 2 requests failed: x"), figures("sequential", 100))[0]
        == "sequential"
    )


def test_auto_alone_is_advised_under_its_own_name():
    strategy, sentence = chosen(figures("auto", 100, chosen="batched"))
    assert strategy == "auto"
    assert "use auto (batched): it makes 100 tokens/s" in sentence


def test_the_costs_of_a_simulated_machine_decide():
    """The costs of a pass and of a row decide between an accelerator and a machine without gain."""
    assert report(STRATEGIES[:-1], row_ms=0.1, pass_ms=20).advice.strategy == "batched"
    assert report(STRATEGIES[:-1], row_ms=8, pass_ms=0.1).advice.strategy in ("sequential", "length-sorted")


def test_auto_is_advised_where_nothing_is_clearly_faster():
    strategy, sentence = chosen(
        figures("sequential", 100, latency=8),
        figures("static", 193, latency=3),
        figures("auto", 192, latency=3, chosen="batched"),
    )
    assert strategy == "auto"
    assert "its 192 tokens/s are 1.9 times those of sequential, and nothing is more than 5 % faster" in sentence


@pytest.mark.parametrize(
    ("auto", "static", "advised"),
    [
        ({}, {}, "auto"),
        ({"rounds": (1, 2, 3)}, {"rounds": (1, 2)}, "auto"),
        ({"rounds": (1, 2, 3)}, {"rounds": (1, 2, 3)}, "static"),
        ({"wall_s": 61}, {"wall_s": 61}, "static"),
        ({"wall_s": 31, "rounds": (1, 2)}, {"wall_s": 31, "rounds": (1, 2)}, "static"),
    ],
)
def test_another_is_advised_where_long_runs_show_it(auto, static, advised):
    strategy, sentence = chosen(
        dataclasses.replace(figures("static", 240, latency=2), **static),
        dataclasses.replace(figures("auto", 200, latency=2, chosen="batched"), **auto),
    )
    assert strategy == advised
    short = "static was 20 % faster, which may be chance in so short a run: try --rounds 3"
    assert (short in sentence) == (advised == "auto")


def test_a_short_run_in_which_auto_is_far_behind_says_little():
    strategy, sentence = chosen(
        figures(BASELINE, 500, latency=1),
        figures("sequential", 700, latency=1),
        figures("auto", 200, latency=4, chosen="batched"),
    )
    assert strategy == "auto"
    assert sentence == (
        "So short a run says little: try --rounds 3. Here sequential was the fastest with 700 tokens/s, and "
        "auto (batched) had 200."
    )


def test_the_winner_of_latency_is_named_beside_that_of_throughput():
    _, sentence = chosen(figures("length-sorted", 180, latency=2), figures("auto", 200, latency=4, chosen="batched"))
    assert "Half of the requests are done soonest with length-sorted, in 2.00 s instead of 4.00 s" in sentence
