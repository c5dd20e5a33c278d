"""Prompts with pictures: a picture has its own calls, one call where it must, and is shared whole or not at all."""

import random

import pytest

from llamabatch.request.media import MediaRun
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import policy
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import Clock, FakeModelRunner, drain, expected_output, sequence, sometimes_abort, step, steps

PLAIN = Limits(n_slots=4, n_batch=64, n_ubatch=64, prefill_budget=16)
KINDS = {
    "split": PLAIN,
    "ragged": Limits(n_slots=4, n_batch=64, n_ubatch=64, prefill_budget=16, is_ragged=True),
    "unified": Limits(n_slots=4, n_batch=64, n_ubatch=64, prefill_budget=16, n_cells=1200),
    "recurrent": Limits(n_slots=4, n_batch=64, n_ubatch=64, prefill_budget=16, can_cut=False, state_bytes=200_000),
    "checkpoints": Limits(n_slots=4, n_batch=64, n_ubatch=64, prefill_budget=16, state_bytes=200_000),
}


def with_pictures(
    *parts: int | tuple[int, int], is_causal: bool = True
) -> tuple[tuple[int, ...], tuple[MediaRun, ...]]:
    """Makes a prompt of texts, given as numbers of tokens, and pictures, given as (seed, length)."""
    ids, runs = [], []
    for part in parts:
        if isinstance(part, int):
            ids += [2 + at % 50 for at in range(part)]
        else:
            seed, length = part
            runs.append(MediaRun(len(ids), length, len(runs), 0, is_causal, length, length))
            ids += random.Random(seed).choices(range(64, 256), k=length)
    return tuple(ids), tuple(runs)


def scheduler_of(limits: Limits = PLAIN, name: str = "batched") -> Scheduler:
    return Scheduler(policy(name), limits, Clock())


def test_a_picture_has_calls_of_its_own():
    prompt, runs = with_pictures(5, (1, 20), 3, (2, 8), 4)
    scheduler, runner = scheduler_of(), FakeModelRunner(PLAIN)
    scheduler.add(sequence("a", prompt, 4, media_runs=runs))
    spans = steps(scheduler, runner, 5)
    assert [(span.start, span.length, span.media) for span in spans] == [
        (0, 5, None), (5, 20, runs[0]), (25, 3, None), (28, 8, runs[1]), (36, 4, None),
    ]  # fmt: skip
    assert list(drain(scheduler, runner)["a"].outputs[0].token_ids) == expected_output(prompt, 4)


def test_a_picture_that_is_not_causal_is_computed_whole_whatever_the_budget():
    prompt, runs = with_pictures(5, (1, 60), 4, is_causal=False)
    scheduler, runner = scheduler_of(), FakeModelRunner(PLAIN)
    scheduler.add(sequence("talker", (3, 4, 5), 200, group=1, ignore_eos=True))
    steps(scheduler, runner, 3)
    scheduler.add(sequence("a", prompt, 4, group=2, media_runs=runs))
    spans = [span for span in steps(scheduler, runner, 60) if span.media is not None]
    assert [span.length for span in spans] == [60]


def test_others_go_on_while_a_picture_is_encoded():
    prompt, runs = with_pictures(5, (1, 20), 4)
    scheduler, runner = scheduler_of(), FakeModelRunner(PLAIN, encodes_in=30)
    scheduler.add(sequence("talker", (3, 4, 5), 100, group=1, ignore_eos=True))
    scheduler.add(sequence("a", prompt, 4, group=2, media_runs=runs))
    tokens = 0
    while not runner._encoded or max(runner._encoded.values()) < 30:
        tokens += sum(len(output.token_ids) for output in step(scheduler, runner) if output.request_id == "talker")
    assert tokens >= 29
    finished = drain(scheduler, runner)
    assert list(finished["a"].outputs[0].token_ids) == expected_output(prompt, 4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_shared_beginning_ends_before_a_picture_that_differs(is_causal):
    first, first_runs = with_pictures(50, (1, 20), 4, is_causal=is_causal)
    second = (*first[:60], *(255 - each for each in first[60:70]), *first[70:])  # half of the picture's tokens differ
    scheduler, runner = scheduler_of(), FakeModelRunner(PLAIN)
    scheduler.add(sequence("a", first, 4, media_runs=first_runs))
    drain(scheduler, runner)
    scheduler.add(sequence("b", second, 4, media_runs=first_runs))
    finished = drain(scheduler, runner)
    assert finished["b"].num_cached_tokens == 50
    assert list(finished["b"].outputs[0].token_ids) == expected_output(second, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_with_pictures_have_the_outputs_that_they_have_alone(kind, seed):
    rng, limits = random.Random(seed), KINDS[kind]
    scheduler, runner = scheduler_of(limits), FakeModelRunner(limits, no_room_every=7, encodes_in=3)
    asked, number = {}, 0
    finished = {}
    while number < 60 or scheduler.has_work:
        if number < 60 and rng.random() < 0.3:
            parts = [rng.choice([1, 3, 40]), (rng.randrange(3), rng.choice([4, 16, 33, 64]))]
            parts += rng.choice([[], [2, (rng.randrange(3), 16)], [(7, 8)], [30]])
            prompt, runs = with_pictures(*parts, rng.choice([1, 2, 9]), is_causal=rng.random() < 0.5)
            name = f"r{number}"
            asked[name] = prompt
            scheduler.add(sequence(name, prompt, 12, group=number, media_runs=runs, streamed=rng.random() < 0.5))
            number += 1
        sometimes_abort(rng, scheduler, asked, 0.03)
        finished |= {each.request_id: each.finished for each in step(scheduler, runner) if each.finished is not None}
    assert len(asked) > 30
    for name, prompt in asked.items():
        assert list(finished[name].outputs[0].token_ids) == expected_output(prompt, 12), name
