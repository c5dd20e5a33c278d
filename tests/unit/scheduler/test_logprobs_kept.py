"""Logprobs from rows to outputs: none is lost, doubled or shifted, whatever happens to the sequence."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamabatch.engine.parallel_sampling import ParallelSampling
from llamabatch.engine.validation import check_logprobs
from llamabatch.errors import PromptError, SamplingError
from llamabatch.request.outputs import FinishReason
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.scheduler.spec_decode import SpecDecoder
from tests.unit.fakes import (
    VOCABULARY,
    Clock,
    FakeModelRunner,
    drain,
    expected_logprobs,
    expected_output,
    random_prompt,
    sequence,
    step,
    steps,
)
from tests.unit.scheduler.test_spec_decode import Guesser

LIMITS = Limits(n_slots=8, n_batch=128, n_ubatch=64, prefill_budget=32)
HEAD = tuple(range(1, 61))


def run(items: list[Sequence], limits: Limits = LIMITS, name: str = "batched", **faults):
    scheduler, runner = Scheduler(policy(name), limits, Clock()), FakeModelRunner(limits, **faults)
    for item in items:
        scheduler.add(item)
    return drain(scheduler, runner), scheduler, runner


def rows_read(runner: FakeModelRunner) -> int:
    return sum(span.prompt_rows for call in runner.calls for span in call.spans)


def check(output, prompt: tuple[int, ...], most: int, top: int | None, prompt_top: int | None) -> None:
    tokens = [*prompt, *expected_output(prompt, most)]
    assert [*prompt, *output.token_ids] == tokens
    told = expected_logprobs(tokens, len(prompt))
    [completion] = output.outputs
    if top is None:
        assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    else:
        assert list(completion.logprobs) == told
        total = sum(logprob.logprob for one in told for logprob in one.values())
        assert completion.cumulative_logprob == pytest.approx(total)
    if prompt_top is None:
        assert output.prompt_logprobs is None
    else:
        assert list(output.prompt_logprobs) == [None, *expected_logprobs(list(prompt), 1)]


SWITCHES = ("can_share", "can_cut", "can_pad", "is_ragged")


@settings(max_examples=160)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    n_slots=st.integers(1, 9),
    n_batch=st.sampled_from([9, 64, 300]),
    prompt_rows=st.sampled_from([1, 2, 7, 64]),
    switches=st.fixed_dictionaries(dict.fromkeys(SWITCHES, st.booleans())),
    row_ladder=st.sampled_from(["off", "on"]),
    no_room_every=st.sampled_from([0, 0, 7]),
    reads=st.booleans(),
)
def test_everybody_gets_their_own(
    seed, name, n_slots, n_batch, prompt_rows, switches, row_ladder, no_room_every, reads
):
    """Each request gets its own text and logprobs, whatever the policy. `reads`: some requests ask for logprobs."""
    rng = random.Random(seed)
    sizes = {"prefill_budget": min(32, n_batch), "prompt_rows": min(prompt_rows, n_batch), "row_ladder": row_ladder}
    limits = Limits(n_slots, n_batch, min(64, n_batch), **sizes, **switches)
    tops, prompt_tops = ([None, 0, 3], [None, None, 0, 2]) if reads else ([None], [None])
    asked = [
        (random_prompt(rng), rng.randrange(1, 40), rng.choice(tops), rng.choice(prompt_tops))
        for _ in range(rng.randrange(1, 25))
    ]
    items = [
        sequence(f"r{i}", prompt, most, logprobs=top, prompt_logprobs=prompt_top)
        for i, (prompt, most, top, prompt_top) in enumerate(asked)
    ]
    outputs, scheduler, _ = run(items, limits, name, no_room_every=no_room_every)
    for i, each in enumerate(asked):
        check(outputs[f"r{i}"], *each)
    assert scheduler.slots.n_free == scheduler.slots.n_slots


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_tokens_that_were_guessed_have_theirs(right):
    rng = random.Random(4)
    decoder = SpecDecoder(Guesser(rng, right), LIMITS, 4, 512, always=True)
    scheduler, runner = Scheduler(policy("batched"), LIMITS, spec_decoder=decoder), FakeModelRunner(LIMITS)
    asked = {f"r{i}": (random_prompt(rng), rng.randrange(9, 40), rng.choice([None, 0]), None) for i in range(12)}
    for name, (prompt, most, top, _) in asked.items():
        scheduler.add(sequence(name, prompt, most, logprobs=top))
    outputs = drain(scheduler, runner)
    for name, each in asked.items():
        check(outputs[name], *each)
    assert any(span.draft for call in runner.calls for span in call.spans)


def test_a_preempted_sequence_reads_no_row_twice():
    prompts = [(*range(10 + i, 40), 5) for i in range(8)]
    limits = replace(LIMITS, prompt_rows=4, prefill_budget=8)
    items = [sequence(f"r{i}", p, 20, logprobs=0, prompt_logprobs=0) for i, p in enumerate(prompts)]
    scheduler, runner = Scheduler(policy("batched"), limits), FakeModelRunner(limits)
    outputs, preempted = {}, 0
    for item in items:
        scheduler.add(item)
    for number in range(400):
        if number % 3 == 1 and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
            preempted += 1
        outputs |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished}
        if not scheduler.has_work:
            break
    assert preempted > 5
    for i, prompt in enumerate(prompts):
        check(outputs[f"r{i}"], prompt, 20, 0, 0)
    assert rows_read(runner) == sum(len(prompt) - 1 for prompt in prompts)


def test_the_context_may_grow_in_the_middle_of_a_prompt():
    limits = replace(LIMITS, n_batch=16, start_slots=1)
    scheduler, runner = Scheduler(policy("batched"), limits), FakeModelRunner(limits)
    scheduler.add(sequence("a", HEAD, 9, logprobs=1, prompt_logprobs=0))
    step(scheduler, runner)
    assert rows_read(runner) == 16
    scheduler.add(sequence("b", (*HEAD, 3), 9, group=1))
    outputs = drain(scheduler, runner)
    check(outputs["a"], HEAD, 9, 1, 0)
    check(outputs["b"], (*HEAD, 3), 9, None, None)
    assert rows_read(runner) == len(HEAD) - 1


def test_a_prompt_whose_rows_are_read_is_no_copy_but_others_copy_it():
    items = [
        sequence("reads", (*HEAD, 5), prompt_logprobs=0, max_tokens=20),
        *[sequence(f"copies{i}", (*HEAD, 6 + i), logprobs=0) for i in range(3)],
        sequence("reads too", (*HEAD, 9), prompt_logprobs=0),
    ]
    outputs, scheduler, runner = run(items)
    assert scheduler.prefix_cache.num_shared_tokens == runner.copied_tokens == 3 * len(HEAD)
    check(outputs["reads"], (*HEAD, 5), 20, None, 0)
    check(outputs["reads too"], (*HEAD, 9), 16, None, 0)
    check(outputs["copies2"], (*HEAD, 8), 16, 0, None)


def test_a_long_prompt_is_read_in_one_step_of_several_calls():
    limits = replace(LIMITS, n_batch=512, prompt_rows=64)
    prompt = tuple(1 + i % 60 for i in range(300))
    outputs, _, runner = run([sequence("r", prompt, 1, prompt_logprobs=0, n_ctx=512)], limits)
    assert [[span.length for span in call.spans] for call in runner.calls] == [[64], [64], [64], [64], [44]]
    check(outputs["r"], prompt, 1, None, 0)


def check_score(output, prompt: tuple[int, ...], first: int) -> None:
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    assert list(output.prompt_logprobs) == [None] * first + expected_logprobs(list(prompt), first)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    n_slots=st.integers(1, 9),
    prompt_rows=st.sampled_from([1, 7, 64]),
    can_share=st.booleans(),
    no_room_every=st.sampled_from([0, 0, 7]),
    guesses=st.booleans(),
)
@example(93012, "batched", 5, 1, True, 7, False)  # a piece has no room, and the next piece shares its call
def test_scores_among_others(seed, name, n_slots, prompt_rows, can_share, no_room_every, guesses):
    rng = random.Random(seed)
    limits = Limits(n_slots, 128, 64, 32, can_share=can_share, prompt_rows=prompt_rows, n_outputs=64)
    decoder = SpecDecoder(Guesser(rng, 0.7), limits, 3, 512, always=True) if guesses else None
    scheduler, runner = (
        Scheduler(policy(name), limits, spec_decoder=decoder),
        FakeModelRunner(limits, no_room_every),
    )
    asked = {}
    for i in range(rng.randrange(1, 20)):
        prompt = (*random_prompt(rng, 60), 7)
        first = rng.randrange(1, len(prompt)) if rng.random() < 0.6 else None
        asked[f"r{i}"] = prompt, first
        scheduler.add(sequence(f"r{i}", prompt, 9, group=rng.choice([0, i]), score_from=first))
    outputs = drain(scheduler, runner)
    for name_of, (prompt, first) in asked.items():
        if first is None:
            check(outputs[name_of], prompt, 9, None, None)
        else:
            check_score(outputs[name_of], prompt, first)
    assert all(not span.output for call in runner.calls for span in call.spans if span.sequence.scores)


@pytest.mark.parametrize("n", [8, 40])
def test_the_prompt_is_computed_once_for_all_its_continuations(n):
    """More requests are scored than there are slots. No request has a row for its last token."""
    prompts = [(*HEAD, 100 + i, *range(1, 1 + i % 3)) for i in range(n)]
    items = [sequence(f"r{i}", prompt, score_from=len(HEAD)) for i, prompt in enumerate(prompts)]
    outputs, _, runner = run(items)
    for i, prompt in enumerate(prompts):
        check_score(outputs[f"r{i}"], prompt, len(HEAD))
    computed = sum(span.length for call in runner.calls for span in call.spans)
    assert computed == len(HEAD) - 1 + sum(len(prompt) - len(HEAD) for prompt in prompts)
    assert rows_read(runner) == sum(len(prompt) - len(HEAD) for prompt in prompts)


@pytest.mark.parametrize("first", [0, 3, -1, 4])
def test_what_nothing_comes_before_is_not_scored(first):
    with pytest.raises(PromptError, match=f"score_from is {first} for 3 tokens; allowed are 1 to 2"):
        check_logprobs(SamplingParams(), 3, 512, 256, first)
    check_logprobs(SamplingParams(), 3, 512, 256, 2)


def test_a_score_is_made_once():
    with pytest.raises(SamplingError, match="n is 2; a request that scores its prompt has 1"):
        check_logprobs(SamplingParams(n=2), 3, 512, 256, 1)


def test_who_does_not_ask_has_no_record_and_no_rows():
    item = sequence("r", HEAD)
    assert item.logprobs is None
    outputs, _, runner = run([item])
    assert rows_read(runner) == 0
    check(outputs["r"], HEAD, 16, None, None)


def test_pieces_of_a_stream_carry_their_own():
    scheduler, runner = Scheduler(policy("batched"), LIMITS), FakeModelRunner(LIMITS)
    scheduler.add(sequence("r", HEAD, 12, logprobs=0))
    pieces = []
    while scheduler.has_work:
        pieces += step(scheduler, runner)
    assert all(len(piece.token_ids) == len(piece.logprobs) == 1 for piece in pieces)
    assert [piece.logprobs[0] for piece in pieces] == list(pieces[-1].finished.outputs[0].logprobs)


def test_continuations_read_the_prompt_once():
    fans, scheduler, runner = ParallelSampling(), Scheduler(policy("batched"), LIMITS), FakeModelRunner(LIMITS)
    params = SamplingParams(n=3, max_tokens=9, prompt_logprobs=0, logprobs=0)
    for each in fans.split(Request("a", HEAD, params)):
        scheduler.add(Sequence(each, VOCABULARY, 512))
    merged = []
    while scheduler.has_work:
        merged += fans.merge(step(scheduler, runner))
    whole = merged[-1].finished
    assert rows_read(runner) == len(HEAD) - 1
    assert scheduler.prefix_cache.num_shared_tokens == 2 * (len(HEAD) - 1)
    assert list(whole.prompt_logprobs) == [None, *expected_logprobs(list(HEAD), 1)]
    told = expected_logprobs([*HEAD, *expected_output(HEAD, 9)], len(HEAD))
    assert [list(completion.logprobs) for completion in whole.outputs] == [told] * 3


def test_those_that_compete_keep_the_sum_alone():
    fans = ParallelSampling()
    items = [Sequence(r, VOCABULARY, 512) for r in fans.split(Request("a", HEAD, SamplingParams(best_of=2)))]
    outputs, _, _ = run(items)
    for output in outputs.values():
        told = expected_logprobs([*HEAD, *output.token_ids], len(HEAD))
        assert output.outputs[0].logprobs is None
        total = sum(logprob.logprob for one in told for logprob in one.values())
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)
    assert all(r.ranked is False for r in ParallelSampling().split(Request("a", HEAD, SamplingParams(n=2))))


def test_an_aborted_request_tells_what_it_has():
    scheduler, runner = Scheduler(policy("batched"), replace(LIMITS, n_batch=16)), FakeModelRunner(LIMITS)
    scheduler.add(sequence("r", HEAD, 30, logprobs=0, prompt_logprobs=0))
    step(scheduler, runner)
    early = scheduler.abort("r").finished
    assert (early.prompt_logprobs, early.outputs[0].logprobs) == (None, ())
    scheduler.add(sequence("s", HEAD, 30, logprobs=0, prompt_logprobs=0))
    steps(scheduler, runner, 6)
    late = scheduler.abort("s").finished
    assert len(late.prompt_logprobs) == len(HEAD)
    assert list(late.outputs[0].logprobs) == expected_logprobs([*HEAD, *late.token_ids], len(HEAD))
    assert late.token_ids


@pytest.mark.parametrize(
    ("params", "n_prompt", "n_ctx"),
    [
        ({"prompt_logprobs": 1024}, 4097, 8192),
        ({"logprobs": 1024, "max_tokens": None}, 10, 8192),
        ({"logprobs": 1024, "max_tokens": 256, "n": 17}, 10, 4096),
        ({"logprobs": -1, "max_tokens": 28}, 10, 4096),
        ({"prompt_logprobs": -1}, 28, 4096),
        ({"logprob_token_ids": range(100_000), "max_tokens": 42}, 10, 4096),
    ],
)
def test_more_than_memory_should_hold_is_refused(params, n_prompt, n_ctx):
    with pytest.raises(SamplingError, match="a request may have 0 to 4194304"):
        check_logprobs(SamplingParams(**params), n_prompt, n_ctx, 151_936)
    check_logprobs(SamplingParams(logprobs=20, prompt_logprobs=20), n_prompt, n_ctx, 151_936)


def test_a_whole_vocabulary_says_how_many_it_has():
    check_logprobs(SamplingParams(logprobs=-1, max_tokens=27), 10, 4096, 151_936)
    with pytest.raises(SamplingError, match=r"up to 256 \(-1 means 151936\): 38895616 in all; .*lower max_tokens"):
        check_logprobs(SamplingParams(logprobs=-1), 10, 4096, 151_936)
    with pytest.raises(SamplingError, match="None and 9 logprob_token_ids for up to 5000000: 45000000 in all"):
        check_logprobs(SamplingParams(logprob_token_ids=range(9), max_tokens=5_000_000), 1, 2**30, 151_936)
