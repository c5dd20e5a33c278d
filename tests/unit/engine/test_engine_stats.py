"""Histograms and how exact they are; figures that add up and can be sent to another process."""

import itertools
import math
import random
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.engine.stats import EngineStats
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.scheduler.spec_decode import SpecDecoder
from llamabatch.utils.histogram import LIMITS_S, Histogram, Tally
from tests.unit.fakes import FakeModelRunner, drain, next_token, random_prompt, sequence

durations = st.lists(st.floats(1e-6, 9999), min_size=1, max_size=50)


def histogram(values) -> Histogram:
    tally = Tally()
    for value in values:
        tally.add(value)
    return tally.histogram()


@given(durations, st.floats(0.1, 100))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, percent):
    true = sorted(values)[math.ceil(len(values) * percent / 100 - 1e-9) - 1]
    assert histogram(values).percentile(percent) == pytest.approx(true, rel=0.2501, abs=1.0001e-4)


@given(durations, durations)
def test_histograms_add_and_subtract(first, second):
    a, b = histogram(first), histogram(second)
    assert (a + b).counts == histogram(first + second).counts
    assert (a + b).count == len(first) + len(second)
    assert (a + b).sum_s == pytest.approx(sum(first) + sum(second))
    assert ((a + b) - a).counts == b.counts
    assert b.mean_s == pytest.approx(sum(second) / len(second))


def test_the_limits_are_close_enough_for_what_the_docs_say():
    assert all(high <= low * 1.25 * (1 + 1e-9) for low, high in itertools.pairwise(LIMITS_S))
    assert (LIMITS_S[0], LIMITS_S[-1]) == (1e-4, 1e4)


def test_a_duration_counts_in_the_bucket_that_ends_with_it():
    assert histogram([0.01]).at_most([0.0075, 0.008, 0.01]) == [0, 0, 1]
    assert histogram([1e5, 20.0]).at_most([1e4]) == [1]
    assert histogram([1e5]).percentile(50) == LIMITS_S[-1]


def test_percentiles_of_nothing():
    assert Histogram().percentile(50) is None
    assert Histogram().mean_s is None


def any_stats(start: int) -> EngineStats:
    """Returns stats in which all figures differ."""
    kinds = {f.name: isinstance(f.default, Histogram) for f in fields(EngineStats)}
    values = {name: start + i for i, (name, is_histogram) in enumerate(kinds.items()) if not is_histogram}
    seconds = {
        name: histogram([start + i, 0.5]) for i, (name, is_histogram) in enumerate(kinds.items()) if is_histogram
    }
    return EngineStats(**values, **seconds)


def test_figures_cross_the_wire():
    stats = any_stats(1)
    assert EngineStats.from_wire(msgpack.unpackb(msgpack.packb(stats.to_wire()))) == stats


def test_figures_add_up_and_go_back():
    a, b = any_stats(1), any_stats(100)
    both = a + b
    assert sum([a, b], EngineStats()) == both
    assert both.decode_rows == a.decode_rows + b.decode_rows
    assert both.ttft_s == a.ttft_s + b.ttft_s
    later = both.since(a)
    assert (later.generated_tokens, later.ttft_s.counts) == (b.generated_tokens, b.ttft_s.counts)
    assert (later.running, later.kv_cells) == (both.running, both.kv_cells)  # the state of now
    assert both.longest == later.longest == b.longest > a.longest


def test_an_engine_that_is_gone_has_counts_only():
    gone = any_stats(5).of_the_past()
    assert (gone.running, gone.waiting, gone.free_slots, gone.kv_cells, gone.kv_cells_used) == (0, 0, 0, 0, 0)
    assert gone.decode_rows == any_stats(5).decode_rows
    assert gone.inter_token_s == any_stats(5).inter_token_s


class Guesser:
    """Proposes draft tokens: a right one, then mostly a wrong one."""

    is_free = True

    def propose(self, sequences, n):
        return [[next_token(one.token_ids), 0][:n] for one in sequences]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("no_room_every", [0, 7])
def test_a_scheduler_counts_what_its_outputs_tell(name, no_room_every):
    """Every gap between tokens, every first token and every wait is in the histograms, also across preemptions."""
    guesses = bool(no_room_every) == bool([*POLICIES].index(name) % 2)  # each pair of values of the three occurs
    rng = random.Random(f"{name} {guesses}")
    limits = Limits(n_slots=8, n_batch=128, n_ubatch=64, prefill_budget=32)
    decoder = SpecDecoder(Guesser(), limits, 4, 512, True) if guesses else None
    scheduler, runner = (
        Scheduler(policy(name), limits, spec_decoder=decoder),
        FakeModelRunner(limits, no_room_every),
    )
    for number in range(40):
        scheduler.add(sequence(f"r{number}", random_prompt(rng, 100), rng.randrange(1, 30)))
    outputs = drain(scheduler, runner)
    told = EngineStats(**scheduler.stats())
    assert told.prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs.values())
    assert told.generated_tokens == sum(len(o.token_ids) for o in outputs.values())
    timings = [o.timings for o in outputs.values()]
    gaps = [gap for t in timings for gap in t.inter_token_s]
    assert told.inter_token_s.count == len(gaps)
    assert told.inter_token_s.sum_s == pytest.approx(sum(gaps), abs=1e-9)
    assert told.ttft_s.count == len(timings)
    assert told.ttft_s.sum_s == pytest.approx(sum(t.ttft_s for t in timings), abs=1e-9)
    assert told.queue_s.count == len(timings)
    assert told.queue_s.sum_s <= sum(t.queued_s for t in timings)  # the timings are taken a moment later
    if no_room_every and name in ("batched", "static"):
        assert scheduler.num_preemptions > 0


def test_figures_are_shown_where_there_are_some():
    assert repr(EngineStats()) == "EngineStats()"
    stats = EngineStats(submitted=3, queue_s=Histogram((2, *(0,) * len(LIMITS_S)), 0.25))
    assert repr(stats) == "EngineStats(submitted=3, queue_s=Histogram(count=2, sum=0.25))"
