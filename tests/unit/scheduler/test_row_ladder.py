"""Dummy rows that keep the shape of decode calls constant, on simulated machines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from llamabatch.scheduler.output import Call, Limits
from llamabatch.scheduler.policies import policy
from llamabatch.scheduler.row_ladder import RowLadder
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.scheduler.step_costs import StepCosts
from tests.unit.fakes import FakeModelRunner, drain, sequence, steps

GPU = (0.005, 0.00002)  # seconds for a pass, and for each row
CPU = (0.023, 0.0023)
RUNGS = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 24), (19, 32), (33, 40), (34, 48), (41, 48), (49, 56), (50, 64)]
LIMITS = Limits(n_slots=64, n_batch=512, n_ubatch=512, prefill_budget=512, on_device=True, row_ladder="auto")


class Machine(FakeModelRunner):
    """A runner on which a pass takes pass_s seconds, a row row_s, and a copy of a slot copy_s."""

    def __init__(self, limits: Limits, pass_s: float, row_s: float, copy_s: float = 0.0) -> None:
        super().__init__(limits)
        self.now = 0.0
        self._pass_s, self._row_s, self._copy_s = pass_s, row_s, copy_s

    def run(self, batch):
        self.now += self._copy_s * len(batch.copies)
        return super().run(batch)

    def _run_call(self, call):
        rows = sum(span.length for span in call.spans) + len(call.dummy_slots)
        self.now += self._pass_s + self._row_s * rows
        return super()._run_call(call)


def measured(limits: Limits, pass_s: float, row_s: float, rows=(1, 64)) -> StepCosts:
    """Returns the costs that are measured after steps of so many rows."""
    costs = StepCosts(limits)
    for n in rows:
        costs._times.add(n, pass_s + n * row_s)
    return costs


def decoding(*slots: int, n_cells: int = 20):
    found = []
    for slot in slots:
        one = sequence(f"{slot}", (1,) * (n_cells + 1), 64)
        one.admit(slot)
        one.num_computed = n_cells
        found.append(one)
    return found


def width(call: Call) -> int:
    return len(call.spans) + len(call.dummy_slots)


@pytest.mark.parametrize(("n", "rung"), RUNGS)
def test_where_rows_cost_next_to_nothing_they_are_those_of_a_rung(n, rung):
    call = RowLadder(LIMITS, measured(LIMITS, *GPU)).call(decoding(*range(n)), {}, 64)
    assert width(call) == rung
    assert call.is_padded
    assert call.dummy_slots == tuple(range(n, rung))
    assert (rung - n) * GPU[1] <= 0.05 * (GPU[0] + n * GPU[1])


@pytest.mark.parametrize(("n", "rung"), [(2, 2), (3, 3), (7, 7), (9, 9), (31, 32), (33, 34)])
def test_where_a_row_costs_a_tenth_of_a_pass_they_are_their_own_rung(n, rung):
    assert width(RowLadder(LIMITS, measured(LIMITS, *CPU)).call(decoding(*range(n)), {}, 64)) == rung


def test_before_costs_are_known_none_is_added():
    assert width(RowLadder(LIMITS, StepCosts(LIMITS)).call(decoding(*range(33)), {}, 64)) == 33


def test_the_window_stays_while_sequences_end_and_begin_in_it():
    ladder = RowLadder(LIMITS, measured(LIMITS, *GPU))
    windows = []
    for slots in ([*range(12)], [*range(1, 12)], [1, 2, 5, 11], [1, 2, 11, 15], [0, 15]):
        call = ladder.call(decoding(*slots), {}, 64)
        windows.append(sorted([*(s.slot for s in call.spans), *call.dummy_slots]))
    assert windows == [list(range(16))] * 5
    assert width(ladder.call(decoding(*range(17)), {}, 64)) == 24


def test_cells_of_others_stay_and_long_ones_are_not_attended_to():
    ladder = RowLadder(LIMITS, measured(LIMITS, *GPU))
    call = ladder.call(decoding(0, 2), {1: 255, 3: 40}, 64)
    assert call.dummies == ((1, 255), (3, 40))
    call = ladder.call(decoding(0, 1, 2), {3: 256}, 64)
    assert call.dummy_slots == ()
    assert ladder.call(decoding(0, 2), {1: 256}, 64) is None
    assert ladder.call(decoding(0, 2, n_cells=256), {1: 256}, 64).dummies == ((1, 256),)
    uncut = Limits(64, 512, 512, 512, can_share=False, on_device=True, row_ladder="auto")
    assert RowLadder(uncut, measured(uncut, *GPU)).call(decoding(0, 2), {1: 1}, 64) is None


def test_a_call_has_no_more_rows_than_the_context_takes():
    assert width(RowLadder(LIMITS, measured(LIMITS, *GPU)).call(decoding(*range(9)), {}, 12)) == 12
    few = Limits(64, 24, 24, 24, on_device=True, row_ladder="on")
    assert width(RowLadder(few, StepCosts(few)).call(decoding(*range(17)), {}, 64)) == 24


@pytest.mark.parametrize(
    ("changed", "is_on"),
    [
        ({}, True),
        ({"on_device": False}, False),
        ({"row_ladder": "off"}, False),
        ({"on_device": False, "row_ladder": "on"}, True),
        ({"can_pad": False}, False),
        ({"n_cells": 4096}, False),
    ],
)
def test_it_is_for_devices(changed, is_on):
    limits = replace(LIMITS, **changed)
    assert RowLadder(limits, StepCosts(limits)).is_on == is_on


def run(n_requests: int = 24, n_slots: int = 24, machine=GPU, **changed):
    """Runs requests of unequal lengths that start together.

    Returns their tokens, the number of times that two decode calls in a row differ in shape, and the runner.
    """
    sizes = {"n_slots": n_slots, "n_batch": 512, "n_ubatch": 512, "prefill_budget": 512}
    limits = Limits(**{**sizes, "on_device": True, "row_ladder": "auto", **changed})
    runner = Machine(limits, *machine)
    scheduler = Scheduler(policy("batched"), limits, lambda: runner.now)
    for i in range(n_requests):
        scheduler.add(sequence(f"r{i}", (1, 2, 3 + i), 20 + 7 * (i * 5 % n_requests), ignore_eos=True))
    texts = {name: output.token_ids for name, output in drain(scheduler, runner).items()}
    shapes = [[*(s.slot for s in call.spans), *call.dummy_slots] for call in runner.calls if call.is_decode]
    changes = sum(sorted(one) != sorted(other) for one, other in itertools.pairwise(shapes))
    return texts, changes, runner


def test_sequences_that_end_change_the_shape_few_times():
    texts, changes, runner = run()
    plain, plain_changes, plain_runner = run(row_ladder="off")
    assert texts == plain
    assert plain_changes >= 20
    assert changes <= 6
    assert runner.now <= 1.05 * plain_runner.now
    assert runner.copied_tokens == 0  # no sequence moves into a hole


def test_on_a_machine_whose_rows_are_dear_steps_take_no_longer():
    texts, _, runner = run(machine=CPU)
    plain, _, plain_runner = run(machine=CPU, row_ladder="off")
    assert texts == plain
    assert runner.now <= 1.05 * plain_runner.now


def test_a_sequence_that_computes_its_prompt_does_not_cut_the_call_of_the_others():
    limits = Limits(4, 64, 64, 16, on_device=True, row_ladder="auto", prefill_share=0.5)
    runner = Machine(limits, *GPU)
    scheduler = Scheduler(policy("batched"), limits, lambda: runner.now)
    for n in (1, 64):
        scheduler.costs._times.add(n, GPU[0] + n * GPU[1])
    for i in range(3):
        scheduler.add(sequence(f"r{i}", (1, 2, 3 + i), 5 if i == 1 else 200, group=i, ignore_eos=True))
    steps(scheduler, runner, 8)
    scheduler.add(sequence("late", (9,) * 100, 4, group=9))
    found = drain(scheduler, runner)
    beside = [call for call in runner.calls if call.is_decode and 1 in call.dummy_slots and any(call.dummy_starts)]
    assert len(beside) >= 3
    assert len(found["r0"].token_ids) == 200
