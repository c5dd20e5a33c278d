"""The number of threads follows the durations of steps, on simulated machines without a clock."""

import random

import pytest

from llamabatch.scheduler import thread_choice
from llamabatch.scheduler.thread_choice import ThreadChoice

IDLE = {1: 2.0, 2: 1.0}
BESIDE_ONE = {1: 2.0, 2: 3.0}  # durations in units of an idle step with two threads
EIGHT = {threads: 8 / threads for threads in range(1, 9)}


class Machine:
    """A machine whose steps take `step_s` with two threads. Each number of threads has a factor; noise is a tenth."""

    def __init__(self, step_s, most=2, tries=True):
        self.choice = ThreadChoice(most, tries)
        self.step_s, self.random = step_s, random.Random(0)
        self.seconds = {}

    def run(self, seconds, factors, rows=8):
        """Returns each number of threads' share of the time."""
        spent = dict.fromkeys(factors, 0.0)
        n_steps = 0
        while sum(spent.values()) < seconds:
            threads = self.choice.threads_of(rows)
            took = self.step_s * factors[threads] * self.random.uniform(0.9, 1.1)
            self.choice.observe(rows, took)
            spent[threads] += took
            n_steps += 1
        self.n_steps = n_steps
        return {threads: each / sum(spent.values()) for threads, each in spent.items()}


STEPS = pytest.mark.parametrize("step_s", [0.0003, 0.01, 0.05])


@STEPS
def test_alone_all_threads_compute(step_s):
    machine = Machine(step_s)
    assert machine.run(120, IDLE)[2] > 0.97
    assert machine.choice.threads == 2


@STEPS
def test_beside_a_busy_process_fewer_do_and_all_again_when_it_ends(step_s):
    machine = Machine(step_s)
    machine.run(20, IDLE)
    machine.run(10, BESIDE_ONE)
    assert machine.choice.threads == 1
    machine.run(60, BESIDE_ONE)
    best = 60 / (machine.step_s * BESIDE_ONE[1])
    assert machine.n_steps > 0.9 * best
    assert machine.choice.threads == 1
    machine.run(30, IDLE)
    assert machine.choice.threads == 2


def test_a_process_that_is_there_from_the_beginning_is_met_too():
    machine = Machine(0.01)
    machine.run(10, BESIDE_ONE)
    assert machine.choice.threads == 1


def test_of_many_threads_one_fewer_or_half_are_tried():
    machine = Machine(0.01, most=8)
    machine.run(30, EIGHT)
    assert machine.choice.threads == 8
    machine.run(60, EIGHT | {8: 2.5, 7: 2.4})
    assert machine.choice.threads == 6, "7 are no faster; 4 are, and 6 are the best"
    machine.run(60, EIGHT)
    assert machine.choice.threads == 8


def test_longer_steps_of_more_rows_are_no_reason():
    machine = Machine(0.01)
    machine.run(60, IDLE)
    machine.step_s = 0.04
    assert machine.run(5, IDLE, rows=32)[2] > 0.9
    assert machine.choice.threads == 2


def test_threads_stay_where_fewer_are_not_to_be_tried():
    machine = Machine(0.01, tries=False)
    machine.run(30, BESIDE_ONE)
    assert machine.choice.threads == 2
    single = Machine(0.01, most=1)
    single.run(30, {1: 1.0})
    assert single.choice.threads == 1


def test_a_prompt_within_a_trial_has_the_threads_from_before():
    choice = ThreadChoice(2)
    while choice.threads_of(8) == 2:
        choice.observe(8, 0.02)
    assert choice.threads_of(0) == 2
    choice.observe(8, 0.04)
    assert choice.threads_of(8) == 1, "the trial goes on"


def test_after_some_seconds_of_prompts_alone_all_threads_compute_again():
    machine = Machine(0.01)
    machine.run(10, BESIDE_ONE)
    assert machine.choice.threads_of(0) == 1
    for _ in range(round(thread_choice.MOST_BELOW_S / 0.5)):
        machine.choice.observe(0, 0.5)
    assert machine.choice.threads_of(0) == 2
    machine.run(10, BESIDE_ONE)
    assert machine.choice.threads == 1


@pytest.mark.parametrize("step_s", [0.5, 2.0, 4.0])
def test_trials_of_long_steps_cost_little(step_s):
    machine = Machine(step_s)
    machine.run(1200, IDLE)
    assert machine.n_steps > 0.96 * 1200 / step_s


def test_a_trial_lasts_longer_than_a_slice_of_the_systems_scheduler():
    choice = ThreadChoice(2)
    seconds = 0.0003
    while choice.threads == 2:
        choice.observe(8, seconds)
    steps = 0
    while choice.threads == 1:
        choice.observe(8, 2 * seconds)
        steps += 1
    assert steps * 2 * seconds >= thread_choice.TRIAL_S
