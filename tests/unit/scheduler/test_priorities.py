"""Priorities, the background tier, preemption, deadlines, company: who is admitted, and that no sequence starves."""

import random
import re
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.request.outputs import FinishReason
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.background import (
    BACKGROUND_CHUNK,
    BACKGROUND_STEPS_BETWEEN,
    BACKGROUND_STEPS_UNTIL_KNOWN,
    STEPS_ALONE,
)
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.request_queue import MAX_OVERTAKEN, PREEMPTION_COUNTS
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import (
    VOCABULARY,
    Clock,
    FakeModelRunner,
    drain,
    expected_output,
    random_prompt,
    sequence,
    sometimes_abort,
    step,
    steps,
)

LIMITS = Limits(n_slots=4, n_batch=256, n_ubatch=64, prefill_budget=64)


def engine(name: str = "batched", limits: Limits = LIMITS, clock: Clock | None = None, **options):
    """Returns a scheduler whose clock stands still, so that no step seems faster than another, and its runner."""
    return Scheduler(policy(name), limits, clock or Clock(), **options), FakeModelRunner(limits)


def long(name: str, most: int = 30, *, prompt: int = 2, **params) -> Sequence:
    start = sum(map(ord, name)) % 50 + 1
    return sequence(name, tuple((start + 7 * i) % 63 + 1 for i in range(prompt)), most, ignore_eos=True, **params)


def arrived_at(one: Sequence, seconds: float) -> Sequence:
    return Sequence(replace(one.request, arrival_s=seconds), VOCABULARY, 512)


def names(sequences: list[Sequence]) -> set[str]:
    return {s.request.request_id for s in sequences}


def greedy_text(one: Sequence) -> list[int]:
    """Returns the tokens of a request that runs alone."""
    scheduler, runner = engine()
    scheduler.add(Sequence(replace(one.request, request_id="alone"), VOCABULARY, 512))
    return list(drain(scheduler, runner)["alone"].token_ids)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_better_priority_enters_first_whatever_the_policy(name):
    scheduler, runner = engine(name, replace(LIMITS, n_slots=1))
    order = []
    for number, priority in enumerate([0, 5, -3, 0, 1]):
        scheduler.add(long(f"{number}", 2, group=number, priority=priority))
    scheduler.add(long("background", 2, group=9, priority=-100, background=True))
    while scheduler.has_work:
        order += [o.request_id for o in step(scheduler, runner) if o.finished]
    assert order == ["2", "0", "3", "4", "1", "background"]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("low", [{"priority": 9}, {"background": True}])
def test_an_endless_stream_of_better_ones_does_not_starve_a_worse_one(name, low):
    scheduler, runner = engine(name)
    count = iter(range(10**6))
    for _ in range(8):
        scheduler.add(long(f"high{next(count)}", 4, group=0))
    scheduler.add(long("low", 4, group=1, **low))
    entered = set()
    for _ in range(3000):
        while scheduler.num_waiting < 8:
            scheduler.add(long(f"high{next(count)}", 4, group=2))
        outputs = step(scheduler, runner)
        entered |= names(scheduler.running)
        if "low" in {o.request_id for o in outputs if o.finished}:
            break
    else:
        pytest.fail("the worse one starves")
    assert len(entered) <= 8 + MAX_OVERTAKEN + 2 * LIMITS.n_slots + BACKGROUND_STEPS_UNTIL_KNOWN * LIMITS.n_slots


def test_the_bound_of_overtaking_is_exact():
    scheduler, runner = engine("sequential")
    scheduler.add(long("first", 1))
    step(scheduler, runner)
    scheduler.add(long("low", 1, group=1, priority=1))
    before_it = 0
    for number in range(200):
        scheduler.add(long(f"{number}", 1, group=2))
        [output] = [o for o in step(scheduler, runner) if o.finished]
        if output.request_id == "low":
            break
        before_it += 1
    assert before_it == MAX_OVERTAKEN


@pytest.mark.parametrize("preempt", [False, True])
def test_a_better_one_takes_a_slot_only_when_asked(preempt):
    scheduler, runner = engine(preempt=preempt)
    low = [long(f"low{i}", 40, group=i, priority=i) for i in range(4)]
    for one in low:
        scheduler.add(one)
    steps(scheduler, runner, 10)
    had = list(low[3].token_ids)
    scheduler.add(long("high", 5, group=9, priority=-1))
    step(scheduler, runner)
    assert ("high" in names(scheduler.running)) is preempt
    assert names(low) - names(scheduler.running) == ({"low3"} if preempt else set())  # the worst priority
    assert low[3].token_ids[: len(had)] == had  # the preempted sequence keeps its tokens
    finished = drain(scheduler, runner)
    assert scheduler.num_preemptions == int(preempt)
    for one in low:
        assert list(finished[one.request.request_id].token_ids) == greedy_text(one)


def test_of_equals_the_youngest_gives_way_and_equals_never_do():
    scheduler, runner = engine(preempt=True)
    for number in range(4):
        scheduler.add(long(f"{number}", 40, group=number, priority=5))
        step(scheduler, runner)
    scheduler.add(long("equal", 4, group=8, priority=5))
    step(scheduler, runner)
    assert "equal" not in names(scheduler.running)
    scheduler.add(long("better", 4, group=9, priority=4))
    step(scheduler, runner)
    assert names(scheduler.running) == {"0", "1", "2", "better"}


def test_no_sequence_is_preempted_for_ever():
    scheduler, runner = engine(limits=replace(LIMITS, n_slots=1), preempt=True)
    low = long("low", 60, prompt=50, priority=1)
    scheduler.add(low)
    finished = {}
    for number in range(500):
        if low.slot is not None:
            scheduler.add(long(f"{number}", 1, group=number + 1))
        finished |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished}
        if "low" in finished:
            break
    assert scheduler.num_preemptions == MAX_OVERTAKEN // PREEMPTION_COUNTS - 1
    assert list(finished["low"].token_ids) == greedy_text(low)


def test_in_a_unified_cache_as_many_give_way_as_are_needed_or_none():
    limits = replace(LIMITS, n_slots=8, n_cells=512, can_pad=False)
    scheduler, runner = engine(limits=limits, preempt=True)
    scheduler.add(long("equal", 100, prompt=100, priority=0))
    for number in range(3):
        scheduler.add(long(f"{number}", 50, prompt=50, group=1, priority=number + 1))
    step(scheduler, runner)
    assert len(scheduler.running) == 4
    scheduler.add(long("too large", 300, prompt=100, group=2))
    step(scheduler, runner)
    assert len(scheduler.running) == 4, "a preemption for nothing"
    scheduler.abort("too large")
    scheduler.add(long("large", 10, prompt=100, group=3))
    step(scheduler, runner)
    assert names(scheduler.running) == {"equal", "0", "1", "large"}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    preempt=st.booleans(),
    n_cells=st.sampled_from([None, 600]),
    n_slots=st.integers(1, 9),
    is_ragged=st.booleans(),
    no_room_every=st.sampled_from([0, 0, 7]),
)
def test_tiers_and_preemption_at_any_step_change_no_text(
    seed, name, preempt, n_cells, n_slots, is_ragged, no_room_every
):
    rng = random.Random(seed)
    limits = Limits(n_slots, 128, 64, 32, n_cells=n_cells, can_pad=n_cells is None, is_ragged=is_ragged)
    scheduler = Scheduler(policy(name), limits, preempt=preempt)
    runner = FakeModelRunner(limits, no_room_every=no_room_every)
    asked, finished = {}, {}
    for number in range(150):
        if rng.random() < 0.3:
            prompt = random_prompt(rng)
            params = {"priority": rng.choice([0, 0, -1, 3]), "background": rng.random() < 0.4}
            asked[f"{number}"] = prompt
            scheduler.add(sequence(f"{number}", prompt, 20, group=number // 5, **params))
        sometimes_abort(rng, scheduler, asked, 0.05)
        finished |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished}
    finished |= drain(scheduler, runner, limit=20_000)
    assert finished.keys() >= asked.keys()
    for request_id, prompt in asked.items():
        assert list(finished[request_id].token_ids) == expected_output(prompt, 20)
    assert scheduler.num_waiting == 0


def test_background_takes_only_slots_that_no_other_waits_for_and_gives_them_back():
    scheduler, runner = engine()
    for number in range(6):
        scheduler.add(long(f"background{number}", 400, group=number, background=True))
    steps(scheduler, runner, 5)
    assert all(s.background for s in scheduler.running)
    assert len(scheduler.running) == 4
    for number in range(3):
        scheduler.add(long(f"{number}", 30, group=10 + number))
    step(scheduler, runner)
    assert len([s for s in scheduler.running if s.background]) == 1
    assert sorted(s.slot for s in scheduler.running if not s.background) == [0, 1, 2]


def test_background_joins_one_step_in_120_and_stays_out_of_the_others_passes():
    limits = Limits(n_slots=8, n_batch=512, n_ubatch=128, prefill_budget=128)
    scheduler, runner = engine(limits=limits)
    scheduler.add(long("talker", 500, group=0))
    steps(scheduler, runner, 3)
    for number in range(3):
        scheduler.add(long(f"background{number}", 100, prompt=60, group=1, background=True))
    step(scheduler, runner)
    mixed, plain = 0, 0
    # groups of steps: two for the prompts, five to measure the cost of rows, one more
    for _ in range(8 * (BACKGROUND_STEPS_UNTIL_KNOWN + 1)):
        spans = steps(scheduler, runner)
        assert sum(span.length for span in spans if span.sequence.background) <= BACKGROUND_CHUNK
    for _ in range(2 * (BACKGROUND_STEPS_BETWEEN + 1)):
        runner.calls.clear()
        rows = steps(scheduler, runner)
        behind = [span for span in rows if span.sequence.background]
        assert sum(not span.sequence.background for span in rows) == 1, "the talker gets its token in every step"
        assert behind or [len(call.spans) + len(call.dummy_slots) for call in runner.calls] == [1]
        mixed, plain = mixed + bool(behind), plain + (not behind)
    assert mixed == 2
    assert plain == 2 * BACKGROUND_STEPS_BETWEEN


@pytest.mark.parametrize(("cost_of_a_row", "most_beside"), [(0.1, 1), (0.03, 3), (0.0, 6)])
@pytest.mark.parametrize("cache", [{"is_ragged": True}, {"n_cells": 4000, "can_pad": False}])
def test_where_a_pass_takes_any_rows_background_has_tokens_in_nearly_all_steps(cost_of_a_row, most_beside, cache):
    limits = Limits(n_slots=12, n_batch=512, n_ubatch=128, prefill_budget=128, **cache)
    clock = Clock()
    scheduler, runner = Scheduler(policy("batched"), limits, clock), FakeModelRunner(limits)
    for number in range(2):
        scheduler.add(long(f"talker{number}", 400, group=number))
    steps(scheduler, runner, 3)
    for number in range(6):
        scheduler.add(long(f"background{number}", 300, prompt=40, group=9, background=True))
    step(scheduler, runner)
    beside, seconds = [], []
    for number in range(300):
        if number == 150:
            scheduler.add(long("prompt", 1, prompt=300, group=30))
        batch = scheduler.schedule()
        assert len(batch.calls) == 1, "all share one pass"
        foreground = [span for span in batch.spans if not span.sequence.background]
        tokens = sum(span.length for span in batch.spans if span.sequence.background)
        assert len(foreground) >= 2, "both talkers get their token in every step"
        before = clock.now
        clock.now += 1.0 + cost_of_a_row * sum(span.length for span in batch.spans)
        scheduler.update(batch, runner.run(batch))
        scheduler.check_integrity()
        if len(foreground) == 2 and number > 60:
            beside.append(tokens)
            seconds.append(clock.now - before)
    plain = 1.0 + 2 * cost_of_a_row
    assert max(seconds) <= 1.15 * plain
    assert sum(tokens > 0 for tokens in beside) > 0.8 * len(beside)
    assert max(beside) >= most_beside
    behind = [s for s in scheduler.running if s.background]
    assert max(s.num_computed for s in behind) - min(s.num_computed for s in behind) <= 45, "they take turns"


def test_background_alone_has_short_passes_while_others_have_just_been_there():
    limits = Limits(n_slots=4, n_batch=512, n_ubatch=512, prefill_budget=512, is_ragged=True)
    scheduler, runner = engine(limits=limits)
    chunks = []
    for number in range(STEPS_ALONE + 60):
        if number % 3 == 0:
            scheduler.add(sequence(f"background{number}", tuple([5 + number] * 400), 1, group=1, background=True))
        if number == 20:
            scheduler.add(long("talker", 4, group=0))
        chunks.append(max((span.length for span in steps(scheduler, runner)), default=0))
    assert max(chunks[:20]) == 400
    assert BACKGROUND_CHUNK // 2 <= max(chunks[24:STEPS_ALONE]) <= BACKGROUND_CHUNK
    assert max(chunks[-20:]) == 400


def test_a_step_has_a_chunk_of_a_prompt_or_background_rows():
    limits = Limits(n_slots=8, n_batch=512, n_ubatch=128, prefill_budget=128)
    scheduler, runner = engine(limits=limits)
    scheduler.add(long("talker", 480, group=0))
    for number in range(3):
        scheduler.add(long(f"background{number}", 400, prompt=100, group=1, background=True))
    steps(scheduler, runner, 40)
    shared = 0
    for number in range(4 * (BACKGROUND_STEPS_UNTIL_KNOWN + 1)):
        if number % 20 == 0:
            scheduler.add(long(f"prompt{number}", 1, prompt=200, group=2 + number))
        spans = steps(scheduler, runner)
        has_background = any(span.sequence.background for span in spans)
        shared += has_background
        assert not (has_background and any(s.length > 1 and not s.sequence.background for s in spans))
    assert 3 <= shared <= 5


def test_a_better_one_does_not_wait_for_a_prefix_that_a_background_one_computes():
    head = tuple(range(1, 61)) * 6
    limits = Limits(n_slots=8, n_batch=512, n_ubatch=512, prefill_budget=512)  # one turn computes the whole head
    scheduler, runner = engine(limits=limits)
    scheduler.add(long("talker", 200, group=0))
    scheduler.add(sequence("behind", (*head, 5), 50, group=1, background=True))
    steps(scheduler, runner, 3)
    scheduler.add(sequence("in front", (*head, 6), 1, group=2))
    for number in range(2 * BACKGROUND_STEPS_UNTIL_KNOWN):  # noqa: B007
        if any(o.request_id == "in front" for o in step(scheduler, runner)):
            break
    assert number <= BACKGROUND_STEPS_UNTIL_KNOWN + 2


@pytest.mark.parametrize(("cost_of_a_row", "least", "most"), [(0.01, 0.8, 0.95), (0.5, 0.005, 0.02)])
def test_where_rows_cost_next_to_nothing_background_joins_in_nearly_all_steps(cost_of_a_row, least, most):
    limits = Limits(n_slots=8, n_batch=512, n_ubatch=128, prefill_budget=128)
    clock = Clock()
    scheduler, runner = Scheduler(policy("batched"), limits, clock), FakeModelRunner(limits)
    run = runner.run

    def timed(batch):
        clock.now += 1.0 + cost_of_a_row * len(batch.spans)
        return run(batch)

    runner.run = timed
    talker = long("talker", 500, group=0)
    scheduler.add(talker)
    for number in range(3):
        scheduler.add(long(f"background{number}", 480, prompt=20, group=1, background=True))
    joined = []
    while not talker.finished:
        joined.append(any(span.sequence.background for span in steps(scheduler, runner)))
    assert len(joined) <= 500 + 5, "the talker gets its token in every step"
    settled = joined[200:450]
    assert least < sum(settled) / len(settled) < most


def test_background_alone_runs_as_fast_as_anything():
    steps = {}
    for background in (False, True):
        scheduler, runner = engine()
        for number in range(8):
            scheduler.add(long(f"{number}", 20, prompt=40, group=0, background=background))
        steps[background] = 0
        while scheduler.has_work:
            step(scheduler, runner)
            steps[background] += 1
    assert steps[True] <= steps[False] + 8  # background prompts are computed in smaller chunks


def test_a_deadline_ends_running_and_waiting_ones_in_the_step_in_which_it_passes():
    clock = Clock()
    scheduler, runner = engine("sequential", clock=clock)
    scheduler.add(arrived_at(long("runs", 200, deadline_s=5.0), 0.0))
    scheduler.add(arrived_at(long("waits", 200, group=1, deadline_s=3.0), 0.0))
    scheduler.add(arrived_at(long("in time", 3, group=2, deadline_s=50.0), 0.0))
    ended = {}
    for second in range(30):
        clock.now = float(second)
        ended |= {o.request_id: (second, o.finished) for o in step(scheduler, runner) if o.finished}
    assert {name: second for name, (second, _) in ended.items()} == {"waits": 3, "runs": 5, "in time": 8}
    late = ended["runs"][1]
    assert late.finish_reason is FinishReason.ERROR
    assert re.match(r"DeadlineExceeded: deadline_s is 5.0; .*5.000 s.* 6 tokens", late.error)
    assert len(late.token_ids) == 6
    assert "waited" in ended["waits"][1].error
    assert ended["in time"][1].error is None
    assert scheduler.deadlines.num_missed == 2


def test_what_has_ended_before_its_deadline_is_kept_by_nothing():
    scheduler, runner = engine()
    for number in range(300):
        scheduler.add(long(str(number), 1, deadline_s=1e9))
        while scheduler.has_work:
            step(scheduler, runner)
    entries = scheduler.deadlines._heap
    assert len(entries) <= 64
    assert {type(reference) for _, _, reference in entries} == {weakref.ref}


def test_a_deadline_during_a_long_prefill_frees_the_slot_within_one_step():
    clock = Clock()
    scheduler, runner = engine(clock=clock)
    scheduler.add(arrived_at(long("talker", 200), 0.0))
    scheduler.add(arrived_at(long("late", 5, prompt=500, group=1, deadline_s=1.0), 0.0))
    steps(scheduler, runner, 4)
    assert next(s for s in scheduler.running if s.request.request_id == "late").num_computed > 0
    clock.now = 1.5
    [output] = [o for o in step(scheduler, runner) if o.finished]
    assert output.request_id == "late"
    assert names(scheduler.running) == {"talker"}
    assert scheduler.num_free_slots == 3


def test_an_abort_during_a_long_prefill_frees_the_slot_at_once():
    scheduler, runner = engine()
    scheduler.add(long("talker", 200))
    scheduler.add(long("doomed", 5, prompt=500, group=1))
    steps(scheduler, runner, 4)
    doomed = next(s for s in scheduler.running if s.request.request_id == "doomed")
    assert 0 < doomed.num_computed < 500
    assert scheduler.abort("doomed").finished.finish_reason is FinishReason.ABORT
    assert scheduler.num_free_slots == 3
    assert [span.sequence.request.request_id for span in steps(scheduler, runner)] == ["talker"]


def test_the_first_waits_for_company_and_no_longer_than_that():
    clock = Clock()
    scheduler, runner = engine(clock=clock, max_wait_s=0.1)
    assert scheduler.wait_s() is None
    clock.now = 7.0
    scheduler.add(long("a", 3))
    assert scheduler.wait_s() == pytest.approx(0.1)
    clock.now = 7.04
    scheduler.add(long("b", 3, group=1))
    assert scheduler.wait_s() == pytest.approx(0.06)
    for number in range(2):
        scheduler.add(long(f"{number}", 3, group=2))
    assert scheduler.wait_s() == 0, "four slots, four requests"
    step(scheduler, runner)
    scheduler.add(long("c", 3, group=3))
    assert scheduler.wait_s() == 0, "no wait while others run"
    drain(scheduler, runner)
    clock.now = 9.0
    scheduler.add(long("d", 3, group=4))
    clock.now = 9.2
    assert scheduler.wait_s() == 0


def test_without_max_wait_there_is_no_wait_and_a_deadline_cuts_it():
    clock = Clock()
    scheduler = Scheduler(policy("batched"), LIMITS, clock)
    scheduler.add(long("a", 3))
    assert scheduler.wait_s() == 0
    scheduler = Scheduler(policy("batched"), LIMITS, clock, max_wait_s=10.0)
    scheduler.add(arrived_at(long("a", 3, deadline_s=0.5), 0.0))
    assert scheduler.wait_s() == pytest.approx(0.5)


def test_both_sides_close_their_holes_and_none_is_filled_twice():
    scheduler, runner = engine(limits=replace(LIMITS, n_slots=8))
    for number in range(8):
        scheduler.add(long(f"front{number}", 200, group=number))
    step(scheduler, runner)
    for slot in (2, 5):  # in each slot, a foreground sequence leaves and a background one enters
        [leaving] = [s for s in scheduler.running if s.slot == slot]
        scheduler.abort(leaving.request.request_id)
        scheduler.add(long(f"background{slot}", 200, group=20 + slot, background=True))
        step(scheduler, runner)
    for s in list(scheduler.running):
        if s.slot in (0, 1, 4, 7):
            scheduler.abort(s.request.request_id)
    assert {s.slot: s.background for s in scheduler.running} == {2: True, 3: False, 5: True, 6: False}
    left = {s.request.request_id: s for s in scheduler.running}
    for _ in range(BACKGROUND_STEPS_BETWEEN):  # hole 4 suits both tiers
        step(scheduler, runner)
        scheduler.check_integrity()
    slots = {
        background: sorted(s.slot for s in left.values() if s.background is background) for background in (True, False)
    }
    assert slots[False] == [3, 4]
    texts = {name: greedy_text(s) for name, s in left.items()}
    assert {name: list(output.token_ids) for name, output in drain(scheduler, runner).items()} == texts


def twins(scheduler: Scheduler, runner: FakeModelRunner) -> tuple[Sequence, Sequence]:
    """Adds two background sequences that begin alike, when all slots are taken.

    The second waits to copy from the first. The first has computed nothing yet, and would be preempted first.
    """
    scheduler.add(long("front", 100))
    scheduler.add(long("old", 100, group=1, background=True))
    step(scheduler, runner)
    step(scheduler, runner)
    twin = long("twin", 4, prompt=80, group=2, background=True)
    first, second = (Sequence(replace(twin.request, request_id=name), VOCABULARY, 512) for name in ("first", "second"))
    scheduler.add(first)
    step(scheduler, runner)
    scheduler.abort("old")
    scheduler.add(second)
    step(scheduler, runner)
    assert scheduler.prefix_cache.waits(second)
    assert first.num_computed == 0
    return first, second


def test_no_sequence_loses_a_slot_that_it_would_have_back_at_once():
    scheduler, runner = engine(limits=replace(LIMITS, n_slots=3, prefill_budget=16))
    first, second = twins(scheduler, runner)
    first.overtaken = second.overtaken = MAX_OVERTAKEN - PREEMPTION_COUNTS
    before = scheduler.num_preemptions
    scheduler.add(long("later", 10, group=3))
    done = drain(scheduler, runner, limit=2000)
    assert scheduler.num_preemptions == before
    assert list(done["first"].token_ids) == list(done["second"].token_ids) == greedy_text(first)


def test_two_that_begin_alike_never_wait_for_each_other():
    scheduler, runner = engine(limits=replace(LIMITS, n_slots=3, prefill_budget=16))
    first, _ = twins(scheduler, runner)
    scheduler._preempt(first)
    scheduler._admit_waiting()  # the first is back before the second has noticed, and begins as the second does
    assert scheduler.prefix_cache.waits(first)
    done = drain(scheduler, runner, limit=2000)
    assert list(done["first"].token_ids) == list(done["second"].token_ids) == greedy_text(first)
