"""Sequences with different adapter sets in flight: names and scales, turns, slots, prefixes."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.errors import AdapterError
from llamabatch.request.adapters import adapter_set, adapter_sets, check_known
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.adapter_batching import STEPS_A_TURN, AdapterScheduler
from llamabatch.scheduler.kv_cache import KVCacheManager, Placement
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import VOCABULARY, FakeModelRunner, drain, expected_output, step, steps

A, B = (("a", 1.0),), (("b", 0.5),)


class AdaptedRunner(FakeModelRunner):
    """Checks that a step computes one set of adapters, and that cells are used only with their own set."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.turns: list[tuple] = []  # the adapter set of each step
        self._of_slot: dict[int, tuple] = {}

    def run(self, batch):
        for copy in batch.copies:
            self._of_slot[copy.target] = self._of_slot[copy.source]
        for cut in batch.cuts:
            if cut.count == 0:
                self._of_slot.pop(cut.slot, None)
        sets = {span.sequence.request.adapters for span in batch.spans}
        assert len(sets) <= 1, "a step computes one set"
        assert {call.adapters for call in batch.calls} == sets
        self.turns += sets
        for span in batch.spans:
            assert self._of_slot.setdefault(span.slot, *sets) == span.sequence.request.adapters, "another set's cells"
        return super().run(batch)


def sequence(name, prompt, adapters, max_tokens=16, group=0):
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(Request(name, prompt, params, group=group, adapters=adapters), VOCABULARY, 512)


def limits(**changes):
    return Limits(**({"n_slots": 8, "n_batch": 256, "n_ubatch": 256, "prefill_budget": 64} | changes))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("cells", [None, 2048])
def test_requests_of_all_sets_finish_as_they_would_alone(name, cells):
    rng = random.Random(1)
    scheduler, runner = Scheduler(policy(name), limits(n_cells=cells)), AdaptedRunner(limits(n_cells=cells))
    head = tuple(range(1, 50))
    prompts = {f"r{i}": (*head, *(rng.randrange(1, 64) for _ in range(rng.randrange(1, 60)))) for i in range(40)}
    for i, (request_id, prompt) in enumerate(prompts.items()):
        scheduler.add(sequence(request_id, prompt, rng.choice([(), A, B]), group=i // 10))
    outputs = drain(scheduler, runner)
    for request_id, prompt in prompts.items():
        assert list(outputs[request_id].token_ids) == expected_output(prompt, 16)


def test_sets_take_turns_and_none_starves():
    scheduler, runner = Scheduler(policy("batched"), limits()), AdaptedRunner(limits())
    for i, adapters in enumerate([(), A, B, ()]):
        scheduler.add(sequence(f"r{i}", (1 + i, 2, 3), adapters, max_tokens=400, group=i))
    steps(scheduler, runner, 6 * STEPS_A_TURN)
    lengths = [(key, len(list(run))) for key, run in itertools.groupby(runner.turns)]
    assert [key for key, _ in lengths[:6]] == [(), A, B] * 2
    assert all(length == STEPS_A_TURN for _, length in lengths[1:-1])


def test_a_step_of_long_prompts_is_a_turn_of_its_own():
    scheduler, runner = Scheduler(policy("batched"), limits()), AdaptedRunner(limits())
    scheduler.add(sequence("talker", (1, 2, 3), (), max_tokens=400))
    steps(scheduler, runner, 3)
    scheduler.add(sequence("reader", tuple(range(1, 60)) * 8, A, max_tokens=4, group=1))
    tokens = []
    for _ in range(60):
        if not scheduler.has_work:
            break
        before = len(runner.calls)
        step(scheduler, runner)
        tokens += [sum(span.length for span in call.spans) for call in runner.calls[before:] if call.adapters == A]
    assert max(tokens) <= 64, "others wait: no more than prefill_budget in a step"


def test_one_list_is_computed_set_by_set():
    scheduler, runner = Scheduler(policy("batched"), limits(n_slots=4)), AdaptedRunner(limits(n_slots=4))
    for i in range(12):
        scheduler.add(sequence(f"r{i}", (1 + i, 2, 3), (A, B)[i % 2]))
    drain(scheduler, runner)
    assert len(list(itertools.groupby(runner.turns))) <= 6


@given(st.lists(st.sampled_from([(), A, B]), min_size=1, max_size=12))
def test_each_set_that_is_ready_gets_a_turn(sets):
    ready = [sequence(f"r{i}", (1,), adapters) for i, adapters in enumerate(sets)]
    turns, served = AdapterScheduler(), set()
    for _ in range(len(set(sets)) * STEPS_A_TURN):
        chosen = turns.choose(ready)
        assert chosen == [s for s in ready if s.request.adapters == turns.current]
        served.add(turns.current)
        turns.count_step([])
    assert served == set(sets)
    assert turns.choose([]) == []


def test_a_slot_beside_the_own_set():
    cells = KVCacheManager(8, limits())
    assert [cells.lease(), cells.lease()] == [0, 1]
    assert cells.lease(Placement(neighbours=[])) == 7, "a set without rows: away from the others"
    assert [cells.lease(Placement(neighbours=[7])), cells.lease(Placement(neighbours=[0, 1]))] == [6, 2]
    cells.vacate(0)
    assert cells.lease() == 0
    cells.check_integrity()


@pytest.mark.parametrize("again", [A, (), (("a", 0.5),)])
def test_finished_requests_leave_their_cells_to_those_of_the_same_set(again):
    scheduler, runner = Scheduler(policy("batched"), limits()), AdaptedRunner(limits())
    prompt = tuple(range(1, 60))
    scheduler.add(sequence("first", prompt, A))
    drain(scheduler, runner)
    if again == ():
        scheduler.forget_adapter("a")
    scheduler.add(sequence("second", prompt, A if again == () else again))
    drain(scheduler, runner)
    assert scheduler.prefix_cache.num_prefix_hits == (again == A), (
        "not of another set, nor of an adapter that was unloaded since"
    )


def test_what_a_set_may_be():
    assert adapter_set(None) == adapter_set({}) == adapter_set({"a": 0}) == ()
    assert adapter_set("a") == adapter_set({"a": 1}) == adapter_set(A) == A
    assert adapter_set({"b": 1, "a": 2}) == (("a", 2.0), ("b", 1.0)) == adapter_set({"a": 2, "b": 1})
    assert adapter_sets([None, "a"], 2) == [(), A]
    assert adapter_sets("a", 2) == [A, A]


@pytest.mark.parametrize(
    "given",
    [7, [("a", 1.0)], {"a": float("nan")}, {"a": 2**64}, {"a": None}, {"a": True}, {"": 1.0}, {7: 1.0}, {"x" * 999: 1},
     (("a", 1.0), ("a", 2.0)), b"a"],
)  # fmt: skip
def test_what_is_no_set_is_refused_by_name(given):
    with pytest.raises(AdapterError, match="adapter"):
        adapter_set(given)


def test_an_unknown_name_names_the_known_ones():
    check_known(A, ["a", "b"])
    with pytest.raises(AdapterError, match=r"no adapter 'a'.*known: b"):
        check_known(A, ["b"])
