import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamabatch.request.outputs import FinishReason
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.batch_builder import MIN_STEPS_TO_MOVE
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import (
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

LIMITS = Limits(n_slots=8, n_batch=128, n_ubatch=64, prefill_budget=32)


def run(name: str, sequences: list[Sequence], limits: Limits = LIMITS, **faults):
    scheduler, runner = Scheduler(policy(name), limits, Clock()), FakeModelRunner(limits, **faults)
    for item in sequences:
        scheduler.add(item)
    return drain(scheduler, runner), scheduler, runner


@settings(max_examples=60)
@example(
    seed=2857, name="batched", can_cut=True, is_ragged=False, row_ladder="off"
)  # a prompt of one token moves before it begins
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    can_cut=st.booleans(),
    is_ragged=st.booleans(),
    row_ladder=st.sampled_from(["off", "on"]),
)
def test_arrivals_and_aborts_at_any_step_disturb_no_other(seed, name, can_cut, is_ragged, row_ladder):
    rng = random.Random(seed)
    limits = replace(LIMITS, can_cut=can_cut, is_ragged=is_ragged, row_ladder=row_ladder)
    scheduler, runner = Scheduler(policy(name), limits), FakeModelRunner(limits)
    prompts, finished, aborted = {}, {}, set()
    for number in range(120):
        if number < 60 and rng.random() < 0.4:
            request_id = f"r{number}"
            prompts[request_id] = random_prompt(rng)
            scheduler.add(sequence(request_id, prompts[request_id], 20, group=number, streamed=rng.random() < 0.5))
        if prompts and rng.random() < 0.15:
            victim = rng.choice(list(prompts))
            output = scheduler.abort(victim)
            assert (output is None) == (victim in finished or victim in aborted)
            if output is not None:
                assert output.finished.finish_reason is FinishReason.ABORT
                aborted.add(victim)
        for output in step(scheduler, runner):
            if output.finished is not None:
                finished[output.request_id] = output.finished
    finished |= drain(scheduler, runner)
    assert finished.keys() | aborted == prompts.keys()
    for request_id, output in finished.items():
        assert list(output.token_ids) == expected_output(prompts[request_id], 20)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    start_slots=st.sampled_from([1, 1, 3]),
    memory_for=st.sampled_from([None, None, 1, 3]),
    growth_steps=st.sampled_from([0, 1, 9]),
    carries=st.sampled_from([True, True, False]),
    keeps=st.booleans(),
    can_cut=st.booleans(),
    row_ladder=st.sampled_from(["off", "on"]),
)
def test_shared_heads_and_early_ends_while_the_context_grows(
    seed, name, start_slots, memory_for, growth_steps, carries, keeps, can_cut, row_ladder
):
    """Sources end at their first token, followers wait, and arrivals make the context grow."""
    rng = random.Random(seed)
    limits = replace(LIMITS, start_slots=start_slots, keeps_prefixes=keeps, can_cut=can_cut, row_ladder=row_ladder)
    runner = FakeModelRunner(limits, memory_for=memory_for, growth_steps=growth_steps, carries=carries)
    scheduler = Scheduler(policy(name), limits)
    head = tuple(range(1, 100))
    asked, finished = {}, {}
    for number in range(30):
        for twin in range(rng.choice([0, 0, 1, 2, 3])):
            prompt = head[: rng.choice([40, 60, 99])] + tuple(rng.randrange(1, 64) for _ in range(rng.randrange(3)))
            name_of, most = f"{number}.{twin}", rng.choice([1, 1, 2, 9])
            asked[name_of] = (prompt, most)
            scheduler.add(sequence(name_of, prompt, most, group=rng.choice([0, number])))
        sometimes_abort(rng, scheduler, asked, 0.1)
        finished |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished}
    finished |= drain(scheduler, runner, limit=5000)
    for request_id, (prompt, most) in asked.items():
        assert list(finished[request_id].token_ids) == expected_output(prompt, most)
    assert scheduler.num_waiting == 0


def grown(carries: bool = True, **options) -> tuple[Scheduler, FakeModelRunner, list[set[str]]]:
    """Adds two requests to eight that run on eight slots, and runs all to their end.

    The larger context takes five steps to make. Returns scheduler, runner and, for each step, the ids with an output.
    """
    limits = Limits(n_slots=10, n_batch=128, n_ubatch=64, prefill_budget=32, start_slots=8, **options)
    scheduler, runner = Scheduler(policy("batched"), limits), FakeModelRunner(limits, growth_steps=5, carries=carries)
    for i in range(8):
        scheduler.add(sequence(f"r{i}", (10 + i, 20), 60, ignore_eos=True))
    steps(scheduler, runner, 20)
    for i in (8, 9):
        scheduler.add(sequence(f"r{i}", (10 + i, 20), 60, group=i, ignore_eos=True))
    told = []
    while scheduler.has_work:
        told.append({output.request_id for output in step(scheduler, runner)})
    return scheduler, runner, told


def computed_tokens(runner: FakeModelRunner) -> int:
    return sum(span.length for call in runner.calls for span in call.spans)


def test_a_context_grows_without_computing_anything_again():
    scheduler, runner, told = grown()
    assert len(runner.cells) == scheduler.slots.n_slots == 10
    assert all({f"r{i}" for i in range(8)} <= names for names in told[:38]), "a running one has to wait"
    assert {"r8", "r9"} <= told[6], "what comes waits for the larger context, and no longer"
    assert scheduler.num_preemptions == 0
    assert computed_tokens(runner) == 10 * (2 + 60 - 1), "each token once"


def test_what_a_follower_waits_for_is_carried_over_although_its_source_has_ended():
    limits = replace(LIMITS, start_slots=2, keeps_prefixes=False)
    scheduler, runner = Scheduler(policy("batched"), limits), FakeModelRunner(limits)
    head = tuple(range(1, 61))
    scheduler.add(sequence("source", (*head, 3), 1))
    scheduler.add(sequence("follower", (*head, 4), 1))
    assert [output.request_id for output in step(scheduler, runner)] == ["source"]
    for i in range(3):
        scheduler.add(sequence(f"r{i}", (10 + i, 20), 9))
    outputs = drain(scheduler, runner)
    assert scheduler.slots.n_slots == 8
    assert runner.copied_tokens == scheduler.prefix_cache.num_shared_tokens == 60
    assert list(outputs["follower"].token_ids) == expected_output((*head, 4), 1)


def test_where_no_cells_can_be_carried_over_the_running_ones_are_computed_again():
    scheduler, runner, _ = grown(carries=False, can_share=False)
    assert scheduler.num_preemptions == 8
    assert computed_tokens(runner) > 10 * (2 + 60 - 1) + 8 * 20


def test_all_slots_are_there_from_the_start_unless_the_limits_say_otherwise():
    for name in POLICIES:
        scheduler = Scheduler(policy(name), LIMITS)
        assert scheduler.slots.n_slots == (1 if policy(name).one_slot else 8)
        for i in range(20):
            scheduler.add(sequence(f"r{i}", (10 + i, 20)))
        assert scheduler.wanted_slots() is None


def test_a_failing_sequence_touches_no_other():
    items = [sequence(f"r{i}", (10 + i, 20)) for i in range(6)]
    outputs, scheduler, _ = run("batched", [*items, sequence("bad", (7, 200, 9))], bad_token=200)
    assert outputs["bad"].error == "bad token"
    assert outputs["bad"].finish_reason is FinishReason.ERROR
    for i in range(6):
        assert list(outputs[f"r{i}"].token_ids) == expected_output((10 + i, 20), 16)
    assert scheduler.slots.n_free == 8


def test_no_room_for_the_only_sequence_is_its_error():
    outputs, _, _ = run("sequential", [sequence("r", (1, 2))], no_room_every=1)
    assert "too small" in outputs["r"].error


def test_no_room_preempts_the_youngest_and_loses_nothing():
    items = [sequence(f"r{i}", (10 + i, 20, 30), 30) for i in range(8)]
    outputs, scheduler, _ = run("batched", items, no_room_every=5)
    assert scheduler.num_preemptions > 0
    for i in range(8):
        assert list(outputs[f"r{i}"].token_ids) == expected_output((10 + i, 20, 30), 30)


def test_a_shared_prefix_is_computed_once():
    head = tuple(range(1, 61))
    items = [sequence(f"r{i}", (*head, 70 + i)) for i in range(8)]
    outputs, scheduler, runner = run("batched", items)
    assert runner.copied_tokens == 7 * len(head) == scheduler.prefix_cache.num_shared_tokens
    prompt_tokens = sum(span.length for call in runner.calls for span in call.spans if span.start < len(head) + 1)
    assert prompt_tokens == len(head) + 8
    assert list(outputs["r7"].token_ids) == expected_output((*head, 77), 16)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_decode_step_of_full_slots_is_one_call(name):
    items = [sequence(f"r{i}", (10 + i, 20), 30, ignore_eos=True) for i in range(8)]
    _, _, runner = run(name, items)
    decode_rows = [len(call.spans) for call in runner.calls if all(span.start >= 2 for span in call.spans)]
    widest = {"batched": 8, "static": 8}.get(name, 1)
    assert set(decode_rows) == {widest}


def test_holes_get_dummy_rows():
    items = [sequence(f"r{i}", (10 + i, 20), 30 if i in (0, 5) else 2, ignore_eos=True) for i in range(8)]
    _, _, runner = run("static", items)
    holes = [call.dummy_slots for call in runner.calls if len(call.spans) == 2]
    assert holes
    assert len(set(holes)) == 1
    assert len(holes[0]) == max(span.slot for span in runner.calls[-1].spans) - 1


def test_no_dummy_rows_where_state_cannot_be_cut():
    limits = Limits(8, 128, 64, 32, can_pad=False, can_share=False)
    items = [sequence(f"r{i}", (10 + i, 20), 30 if i in (0, 5) else 2, ignore_eos=True) for i in range(8)]
    _, _, runner = run("static", items, limits)
    assert not any(call.dummy_slots for call in runner.calls)


def test_prompts_of_one_list_go_first_so_that_rows_are_full():
    limits = Limits(n_slots=4, n_batch=64, n_ubatch=64, prefill_budget=32, can_share=False)
    items = [sequence(f"r{i}", tuple([10 + i] * 40), 6, ignore_eos=True) for i in range(8)]
    _, _, runner = run("batched", items, limits)
    decode_rows = [len(call.spans) for call in runner.calls if all(span.start >= 40 for span in call.spans)]
    assert set(decode_rows) == {4}


def test_static_admits_none_before_all_have_finished():
    items = [sequence(f"r{i}", (10 + i, 20), 2 + i, ignore_eos=True) for i in range(16)]
    scheduler, runner = Scheduler(policy("static"), LIMITS), FakeModelRunner(LIMITS)
    for item in items:
        scheduler.add(item)
    seen = set()
    while scheduler.has_work:
        before = {s.request.request_id for s in scheduler.running}
        n_calls = len(runner.calls)
        step(scheduler, runner)
        computed = {s.sequence.request.request_id for call in runner.calls[n_calls:] for s in call.spans}
        assert not before or computed <= before
        seen |= computed
    assert len(seen) == 16


def test_interleaved_takes_turns():
    items = [sequence(f"r{i}", (10 + i, 20), 5, ignore_eos=True) for i in range(4)]
    _, _, runner = run("interleaved", items)
    order = [call.spans[0].sequence.request.request_id for call in runner.calls]
    assert order[:12] == ["r0", "r1", "r2", "r3"] * 3


def test_order_of_entry():
    def entered(name, lengths, groups=None):
        scheduler, runner = Scheduler(policy(name), Limits(1, 512, 512, 512)), FakeModelRunner(Limits(1, 512, 512, 512))
        for i, length in enumerate(lengths):
            group = 0 if groups is None else groups[i]
            scheduler.add(sequence(str(i), tuple([10 + i] * length), 2, group=group))
        drain(scheduler, runner)
        return [c.spans[0].sequence.request.request_id for c in runner.calls if c.spans[0].start == 0]

    assert entered("sequential", [5, 3, 9]) == ["0", "1", "2"]
    assert entered("length-sorted", [5, 3, 9]) == ["1", "0", "2"]
    assert entered("batched", [5, 3, 9]) == ["2", "0", "1"]
    # a later call's requests do not overtake an earlier one's
    assert entered("length-sorted", [9, 9, 1], groups=[0, 0, 1]) == ["0", "1", "2"]


def test_a_prompt_that_fills_its_slot_gives_one_token():
    prompt = tuple([5] * 32)
    outputs, _, _ = run("batched", [sequence("r", prompt, 10, n_ctx=32, ignore_eos=True)])
    assert len(outputs["r"].token_ids) == 1
    assert outputs["r"].finish_reason is FinishReason.LENGTH


def test_a_request_id_in_flight_is_refused():
    scheduler = Scheduler(policy("batched"), LIMITS)
    scheduler.add(sequence("same", (1, 2)))
    with pytest.raises(ValueError, match="already in flight"):
        scheduler.add(sequence("same", (1, 2)))


def test_prompt_chunks_share_a_call_where_they_are_alike():
    limits = Limits(n_slots=8, n_batch=512, n_ubatch=128, prefill_budget=128, can_share=False)
    lengths = [60, 60, 60, 90, 3, 9, 16, 40]
    scheduler, runner = Scheduler(policy("static"), limits), FakeModelRunner(limits)  # the shortest prompt enters first
    for number, length in enumerate(lengths):
        scheduler.add(sequence(str(number), tuple([10 + number] * length), 2))
    step(scheduler, runner)
    shared = [[span.length for span in call.spans] for call in runner.calls]
    assert shared == [[3, 9, 16], [40], [60, 60], [60], [90]]


def running_ones(n: int, max_tokens: int):
    """Returns a scheduler with n running sequences, one in each slot, its runner and their prompts."""
    scheduler, runner = Scheduler(policy("batched"), LIMITS), FakeModelRunner(LIMITS)
    prompts = {f"{i}": (60 - i,) * 5 for i in range(n)}
    for name, prompt in prompts.items():
        scheduler.add(sequence(name, prompt, max_tokens, ignore_eos=True))
    steps(scheduler, runner, 3)
    return scheduler, runner, prompts


def slots_of_next_call(scheduler, runner) -> list[int]:
    runner.calls.clear()
    step(scheduler, runner)
    (call,) = runner.calls
    assert not call.dummy_slots
    return [span.slot for span in call.spans]


def test_holes_are_closed_by_moving_when_none_waits():
    scheduler, runner, prompts = running_ones(8, 60)
    for slot in (0, 2, 5):
        scheduler.abort(next(s.request.request_id for s in scheduler.running if s.slot == slot))
    assert slots_of_next_call(scheduler, runner) == [1, 2, 3, 4, 5]
    for name, output in drain(scheduler, runner).items():  # the runner has checked each cell of the moved sequences
        assert list(output.token_ids) == expected_output(prompts[name], 60, ignore_eos=True)


def test_a_sequence_about_to_end_does_not_move():
    scheduler, runner, _ = running_ones(4, MIN_STEPS_TO_MOVE)
    scheduler.abort(next(s.request.request_id for s in scheduler.running if s.slot == 0))
    assert slots_of_next_call(scheduler, runner) == [1, 2, 3]
    drain(scheduler, runner)


def test_none_moves_while_another_waits_for_the_slot():
    scheduler, runner, _ = running_ones(8, 60)
    scheduler.add(sequence("waits", (5,) * 9, 60, ignore_eos=True))
    scheduler.abort(next(s.request.request_id for s in scheduler.running if s.slot == 3))
    step(scheduler, runner)
    assert {s.request.request_id for s in scheduler.running if s.slot == 3} == {"waits"}
    drain(scheduler, runner)
