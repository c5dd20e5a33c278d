"""Prefixes on a disk: other sequences go on while they are read."""

import random
from dataclasses import replace

import pytest

from llamabatch.scheduler.output import Limits, SchedulerOutput
from llamabatch.scheduler.policies import policy
from llamabatch.scheduler.prefix_store import StoredPrefix
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import STATE_BYTES, FakeModelRunner, drain, expected_output, sequence, step
from tests.unit.small_prefixes import small_thresholds

HEAD = tuple(range(1, 50)) * 6
ORDINARY = Limits(2, 512, 128, 128, state_bytes=10 * (STATE_BYTES + 5 * 512))
STATES = replace(ORDINARY, can_cut=False, can_pad=False, can_shift=False)


class FakeDisk:
    """Stores states at once. Loads the requested ones when a test calls arrive()."""

    def __init__(self) -> None:
        self.is_busy = False
        self.states: dict[StoredPrefix, bytes] = {}
        self.fetched: list[StoredPrefix] = []

    def alike(self, token_ids, key):
        return [prefix for prefix in self.states if prefix.key == key]

    def wants(self, prefix):
        return all(prefix.token_ids != other.token_ids or prefix.key != other.key for other in self.states)

    def keep(self, prefix):
        kept = StoredPrefix(prefix.token_ids, None, prefix.key, n_prompt=prefix.n_prompt, is_on_disk=True)
        self.states[kept] = prefix.state

    def fetch(self, prefix):
        self.fetched.append(prefix)

    def release(self, prefix):
        prefix.state = None
        self.fetched = [other for other in self.fetched if other is not prefix]

    def discard(self, unwanted):
        for prefix in [prefix for prefix in self.states if unwanted(prefix)]:
            prefix.is_dropped = True
            del self.states[prefix]

    def arrive(self):
        for prefix in self.fetched:
            prefix.state = self.states.get(prefix)


def engine(limits, disk, **options):
    return Scheduler(policy("batched"), limits, disk=disk, **options), FakeModelRunner(limits)


def keep_all(scheduler, runner, disk):
    while (save := scheduler.prefix_cache.next_write()) is not None:
        runner.run(SchedulerOutput(saves=(save,)))
        if save.prefix.state is not None:
            disk.keep(save.prefix)


@pytest.fixture(params=[ORDINARY, STATES], ids=["cells", "states"])
def later(request):
    """Returns a new scheduler, after an earlier one left HEAD on the disk."""
    disk = FakeDisk()
    scheduler, runner = engine(request.param, disk)
    scheduler.add(sequence("first", HEAD, 1))
    drain(scheduler, runner)
    keep_all(scheduler, runner, disk)
    assert max(len(prefix.token_ids) for prefix in disk.states) == len(HEAD)
    assert scheduler.prefix_cache.next_write() is None
    return *engine(request.param, disk), disk


def test_others_go_on_while_a_state_is_read(later):
    scheduler, runner, disk = later
    scheduler.add(sequence("waits", (*HEAD, 60), 1))
    scheduler.add(sequence("other", (50, 51), 5))
    ended = [output.request_id for _ in range(12) for output in step(scheduler, runner) if output.finished]
    assert (ended, scheduler.prefix_cache.reads) == (["other"], True)
    disk.arrive()
    outputs = drain(scheduler, runner)
    assert list(outputs["waits"].token_ids) == expected_output((*HEAD, 60), 1)
    assert scheduler.prefix_cache.num_read_tokens == runner.restored_tokens == len(HEAD)
    assert (disk.fetched, scheduler.prefix_cache.reads) == ([], False)


def test_a_state_that_is_lost_is_computed(later):
    scheduler, runner, disk = later
    scheduler.add(sequence("waits", (*HEAD, 60), 1))
    step(scheduler, runner)
    disk.discard(lambda prefix: True)
    outputs = drain(scheduler, runner)
    assert list(outputs["waits"].token_ids) == expected_output((*HEAD, 60), 1)
    assert (scheduler.prefix_cache.num_read_tokens, disk.fetched) == (0, [])


def test_an_aborted_request_waits_for_no_state(later):
    scheduler, runner, disk = later
    scheduler.add(sequence("waits", (*HEAD, 60), 1))
    step(scheduler, runner)
    assert len(disk.fetched) == 1
    scheduler.abort("waits")
    scheduler.add(sequence("other", (50, 51), 1))
    drain(scheduler, runner)
    assert disk.fetched == []


def test_a_reset_drops_what_is_on_the_disk(later):
    scheduler, runner, disk = later
    scheduler.reset_prefix_cache()
    assert not disk.states
    scheduler.add(sequence("again", (*HEAD, 60), 1))
    drain(scheduler, runner)
    assert runner.restored_tokens == 0


@pytest.mark.parametrize("limits", [ORDINARY, STATES], ids=["cells", "states"])
@pytest.mark.parametrize("seed", range(8))
def test_random_chats_have_the_outputs_that_they_have_alone(limits, seed):
    """States arrive after any number of steps or never, and schedulers are replaced."""
    rng, disk = random.Random(seed), FakeDisk()
    with small_thresholds():
        scheduler, runner = engine(limits, disk, preempt=True)
        chats = [(*HEAD[: rng.randrange(20, 60)], 60 + i) for i in range(4)]
        for turn in range(12):
            for name in rng.sample(range(4), rng.randrange(1, 5)):
                scheduler.add(sequence(f"{turn} {name}", chats[name], 2, priority=rng.choice([0, 1])))
            outputs = {}
            while scheduler.has_work:
                outputs |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished is not None}
                if rng.random() < 0.3:
                    disk.arrive()
                if rng.random() < 0.02:
                    disk.discard(lambda prefix: rng.random() < 0.5)
                scheduler.check_integrity()
            for request_id, output in outputs.items():
                name = int(request_id.split()[1])
                assert list(output.token_ids) == expected_output(chats[name], 2)
                chats[name] = (*chats[name], *output.token_ids, rng.randrange(50, 60))
            if rng.random() < 0.4:
                keep_all(scheduler, runner, disk)
                scheduler, runner = engine(limits, disk, preempt=True)
                disk.fetched.clear()
