"""The state of slots and queue that an observer sees."""

import random

from llamabatch.scheduler.common_prefix import MIN_SHARED
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES
from llamabatch.scheduler.request_queue import RequestQueue
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.scheduler.slot_state import SlotState
from tests.unit.fakes import FakeModelRunner, drain, sequence, step, steps

LIMITS = Limits(n_slots=4, n_batch=128, n_ubatch=64, prefill_budget=32)


def same(request_id: str) -> tuple[str, int]:
    return request_id, 0


def started(n: int, limits: Limits = LIMITS, **options):
    scheduler, runner = Scheduler(POLICIES["batched"], limits, **options), FakeModelRunner(limits)
    for number in range(n):
        scheduler.add(sequence(f"r{number}", (2 + number,) * 10, 30, group=number))
    step(scheduler, runner)
    return scheduler, runner


def test_each_slot_says_how_far_its_request_is():
    scheduler, runner = started(2)
    states = scheduler.slot_states(same)
    assert [(s.id, s.request_id) for s in states] == [(0, "r0"), (1, "r1"), (2, None), (3, None)]
    assert states[0].n_prompt == states[0].n_prompt_done == 10
    assert (states[0].n_output, states[0].max_output) == (1, 30)
    assert states[0].is_processing
    assert not states[0].is_prefilling
    assert not states[3].is_processing
    assert 0 <= states[0].running_s <= states[0].age_s
    step(scheduler, runner)
    assert scheduler.slot_states(same)[0].n_output == 2
    assert scheduler.steps == 2


def test_a_prompt_on_its_way_shows_its_progress():
    limits = Limits(n_slots=2, n_batch=64, n_ubatch=64, prefill_budget=64)
    scheduler, runner = Scheduler(POLICIES["batched"], limits), FakeModelRunner(limits)
    scheduler.add(sequence("long", tuple(random.Random(1).choices(range(2, 60), k=200)), 5))
    seen = []
    for _ in range(3):
        step(scheduler, runner)
        state = scheduler.slot_states(same)[0]
        seen.append(state.n_prompt_done)
        assert state.n_prompt == 200
        assert state.is_prefilling
    assert seen == sorted(set(seen))
    assert seen[0] > 0
    assert seen[-1] < 200


def test_a_free_slot_tells_the_cells_that_it_keeps():
    scheduler, runner = started(1)
    drain(scheduler, runner)
    kept = scheduler.slot_states(same)[0]
    assert not kept.is_processing
    assert kept.n_cells > 10
    scheduler.reset_prefix_cache()
    assert scheduler.slot_states(same)[0] == SlotState(0)


def test_copies_of_one_prefix_have_one_number():
    scheduler, runner = Scheduler(POLICIES["batched"], LIMITS), FakeModelRunner(LIMITS)
    head = tuple(random.Random(2).choices(range(2, 60), k=2 * MIN_SHARED))
    for name, prompt in {"a": (*head, 2), "b": (*head, 3), "c": (*head, 4), "other": (5,) * 20}.items():
        scheduler.add(sequence(name, prompt, 30, group=1))
    batch = scheduler.schedule()
    waiting = {s.request_id: s.waits_for for s in scheduler.slot_states(same)}
    first = next(s for s in scheduler.slot_states(same) if s.request_id == "a")
    assert waiting == {"a": None, "b": first.id, "c": first.id, "other": None}
    scheduler.update(batch, runner.run(batch))
    steps(scheduler, runner, 3)
    states = {s.request_id: s for s in scheduler.slot_states(same)}
    assert states["a"].prefix == states["b"].prefix == states["c"].prefix != states["other"].prefix
    assert states["b"].n_cached == len(head)
    assert states["a"].n_cached == 0
    assert all(state.waits_for is None for state in states.values())


def test_the_queue_says_why():
    scheduler, _ = started(6)
    waiting = scheduler.waiting_states(10, same)
    assert [w.request_id for w in waiting] == ["r4", "r5"]
    assert {w.reason for w in waiting} == {"slot"}
    assert all(w.n_prompt == 10 and w.n_output == 0 and w.age_s >= 0 for w in waiting)
    assert len(scheduler.waiting_states(1, same)) == 1


def test_a_full_cache_and_awaited_company_are_reasons_of_their_own():
    limits = Limits(n_slots=4, n_batch=128, n_ubatch=64, prefill_budget=32, n_cells=64)
    scheduler, _ = started(3, limits)
    assert [w.reason for w in scheduler.waiting_states(9, same)] == ["cells"] * (3 - len(scheduler.running)) != []
    patient = Scheduler(POLICIES["batched"], LIMITS, max_wait_s=60.0)
    patient.add(sequence("early", (2,) * 4, 4))
    assert [w.reason for w in patient.waiting_states(9, same)] == ["company"]
    eager = Scheduler(POLICIES["batched"], LIMITS)
    eager.add(sequence("early", (2,) * 4, 4))
    assert [w.reason for w in eager.waiting_states(9, same)] == ["step"]


def test_the_head_of_the_queue_is_in_the_order_of_admission():
    rng = random.Random(3)
    for _ in range(20):
        queue = RequestQueue(POLICIES["batched"].key, find_families=False)
        items = [sequence(f"r{i}", (2,) * 4, rng.randrange(1, 90), group=i % 5) for i in range(60)]
        for item in items:
            queue.add(item)
        for item in rng.sample(items, 10):
            queue.forget(item)
        arrived = queue.head(100)
        assert {s.request.request_id for s in arrived} == {s.request.request_id for s in items if queue._is_waiting(s)}
        queue.first()  # this call sorts the arrivals into the queue
        expected = queue.head(100)
        assert queue.head(7) == expected[:7]
        popped = []
        while (found := queue.pop(lambda s: True)) is not None:
            popped.append(found)
        assert popped == expected
