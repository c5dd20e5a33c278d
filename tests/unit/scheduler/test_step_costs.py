"""Measured costs of passes, rows and copies, and the choices that follow from them on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamabatch.scheduler.batch_builder import MAX_DUMMY_GAP, decode_spans
from llamabatch.scheduler.chunked_prefill import LEAST_CHUNK, SHORT, PrefillPacer
from llamabatch.scheduler.kv_cache import CachedPrefix, KVCacheManager
from llamabatch.scheduler.output import Call, Limits, PrefixCopy, SchedulerOutput
from llamabatch.scheduler.policies import policy
from llamabatch.scheduler.prefix_cache import PrefixCache
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.scheduler.step_costs import StepCosts, StepTimes
from tests.unit.fakes import FakeModelRunner, sequence, steps
from tests.unit.scheduler.test_row_ladder import GPU, decoding

LIMITS = Limits(n_slots=64, n_batch=2048, n_ubatch=512, prefill_budget=512)
ON_GPU = replace(LIMITS, on_device=True)


def decode_step(n_rows: int, copies: int = 0) -> SchedulerOutput:
    copied = tuple(PrefixCopy(number, 60, 1) for number in range(copies))
    return SchedulerOutput(copied, (), (Call(tuple(decode_spans(decoding(*range(n_rows))))),))


def costs_on(limits: Limits, copy_s: float = 0.004) -> StepCosts:
    """Returns the costs that are measured in steps of 1 to 33 rows, some with copies."""
    costs = StepCosts(limits)
    for n_rows in (1, 9, 33):
        for _ in range(4):
            costs.observe(decode_step(n_rows), GPU[0] + n_rows * GPU[1])
        costs.observe(decode_step(n_rows, copies=2), GPU[0] + n_rows * GPU[1] + 2 * copy_s)
    return costs


def test_step_times_lie_between_what_was_measured():
    times = StepTimes()
    assert times.seconds(4) is None
    times.add(4, 1.0)
    assert times.seconds(4) == times.seconds(64) == times.seconds(1) == 1.0
    times.add(64, 7.0)
    assert times.seconds(34) == pytest.approx(4.0)
    times.add(4, 9.0)  # one slow step counts as noise
    assert times.seconds(4) == 1.0


def test_a_pass_is_worth_the_rows_that_cost_as_much():
    costs = costs_on(ON_GPU)
    assert costs.pass_in_rows(8) == pytest.approx(GPU[0] / GPU[1], rel=0.01)
    assert costs.copy_in_rows(16) == pytest.approx(0.004 / GPU[1], rel=0.01)
    assert costs.rows_in(0.05, 33, 0) == int(0.05 * (GPU[0] + 33 * GPU[1]) / GPU[1])


@pytest.mark.parametrize("n_rows", [(), (8,), (8, 9)])
def test_until_rows_have_differed_the_constants_hold(n_rows):
    costs = StepCosts(ON_GPU)
    for n in n_rows:
        costs.observe(decode_step(n), GPU[0] + n * GPU[1])
    assert (costs.pass_in_rows(8), costs.copy_in_rows(16), costs.rows_in(0.05, 8, 3)) == (8, 16, 3)


def test_on_a_cpu_the_constants_hold():
    costs = costs_on(LIMITS)
    assert (costs.pass_in_rows(8), costs.copy_in_rows(16), costs.rows_in(0.05, 8, 3)) == (8, 16, 3)


def test_times_of_steps_with_prompts_do_not_count():
    costs = StepCosts(ON_GPU)
    [call] = decode_step(4).calls
    long = call.spans[0]._replace(length=30)
    costs.observe(SchedulerOutput(calls=(Call((long,)),)), 1.0)
    costs.observe(SchedulerOutput(calls=(call, Call((long,)))), 1.0)
    assert costs._times.ends() is None


@pytest.mark.parametrize(("limits", "n_calls"), [(LIMITS, 0), (ON_GPU, 39)])
def test_a_wide_hole_is_filled_where_a_pass_costs_more(limits, n_calls):
    scheduler, runner = Scheduler(policy("batched"), limits), FakeModelRunner(limits)
    scheduler.costs = scheduler.prefix_cache._costs = costs_on(limits)
    for number in range(41):
        length = 100 if number in (0, 40) else 2
        scheduler.add(sequence(f"r{number}", (1, 2), length, group=number, ignore_eos=True))
    scheduler._close_holes = lambda: None
    steps(scheduler, runner, 4)
    assert [span.slot for span in runner.calls[-1].spans] == [0, 40]
    assert len(runner.calls[-1].dummy_slots) == n_calls
    assert n_calls == 0 or n_calls > MAX_DUMMY_GAP


@pytest.mark.parametrize(("limits", "is_kept"), [(LIMITS, True), (ON_GPU, False)])
def test_cached_cells_between_rows_are_worth_less_than_a_pass_of_a_gpu(limits, is_kept):
    cache = PrefixCache(limits, 8, costs_on(limits))
    rows = decoding(0, 2)
    cache.kv_cache.cached[1] = CachedPrefix([5] * 60_000, 60_000, (), 0)
    assert 18 * 60 < cache.kv_cache.expected_saving(1) < 250 * 60  # 63 steps remain
    cache.evict_between(rows, {0, 2})
    assert (1 in cache.kv_cache.cached) == is_kept


@pytest.mark.parametrize(("limits", "moves"), [(LIMITS, True), (ON_GPU, False)])
def test_a_copy_must_save_more_tokens_where_these_cost_less(limits, moves):
    cells = KVCacheManager(4, limits, costs_on(limits))
    cells.cached[0] = CachedPrefix([5] * 800, 800, (), 0)
    assert 16 < cells.expected_saving(0) < 0.004 / GPU[1]
    cells.lease_this(0)
    assert bool(cells.cached) == moves


@pytest.mark.parametrize(("limits", "n_tokens"), [(LIMITS, 16), (ON_GPU, 200)])
def test_a_prompt_that_takes_no_longer_than_a_pass_is_computed_at_once(limits, n_tokens):
    pacer = PrefillPacer(limits, costs_on(limits))
    pacer.observe(0.0, 4, 0, True)
    prompt = sequence("p", (3,) * 200)
    chosen, budget = pacer.choose([prompt], True, 4)
    assert min(budget, sum(s.num_pending for s in chosen)) == n_tokens
    assert SHORT < 200


@pytest.mark.parametrize(("limits", "least"), [(LIMITS, LEAST_CHUNK), (ON_GPU, 124)])
def test_chunks_of_long_prompts_are_worth_their_pass(limits, least):
    pacer = PrefillPacer(limits, costs_on(limits))
    for _ in range(3):
        pacer.observe(GPU[0], 4, 0, True)
    prompt = sequence("p", (3,) * 500)
    chosen, budget = pacer.choose([prompt], True, 4)
    assert chosen == [prompt]
    assert budget == pytest.approx(least, abs=2)
    assert least <= limits.prefill_budget // 4
