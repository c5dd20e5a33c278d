"""Requests that outgrow their slot: refused, cut at the left, or shifted."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.client.codec import pack, unpack
from llamabatch.client.wire import unpack_output, unpack_request
from llamabatch.engine.validation import RequestLimits, check_prompt, check_shift, fitted
from llamabatch.errors import PromptError, SamplingError
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import BOS, EOG, FakeModelRunner, drain, expected_shifted, sequence, sometimes_abort, step

N_CTX = 64
LIMITS = Limits(n_slots=6, n_batch=256, n_ubatch=64, prefill_budget=32)


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "stays"),
    [
        (51, 15, 51),  # a prompt that fits stays whole, even if the output then ends early
        (64, 1000, 64),
        (65, 15, 50),  # the last token needs no cell
        (500, 15, 50),
        (500, 32, 33),
        (500, 1000, 33),  # at most half of the slot is left free for the output
        (500, None, 33),
        (64, 1, 64),
        (65, 1, 64),
    ],
)
@pytest.mark.parametrize("bos", [None, BOS])
def test_a_prompt_loses_its_left_so_that_the_output_fits(n_prompt, max_tokens, stays, bos):
    prompt = (BOS, *(2 + i % 60 for i in range(n_prompt - 1)))
    request = Request("r", prompt, SamplingParams(max_tokens=max_tokens, overflow="truncate"))
    cut = fitted(request, N_CTX, bos)
    assert len(cut.prompt_token_ids) == stays
    assert cut.num_truncated == n_prompt - stays
    if bos is None or stays == n_prompt:
        assert cut.prompt_token_ids == prompt[n_prompt - stays :]
    else:
        assert cut.prompt_token_ids == (BOS, *prompt[n_prompt - stays + 1 :])
    check_prompt(cut.prompt_token_ids, 256, N_CTX)
    assert fitted(cut, N_CTX, bos) == cut


def test_others_are_refused_as_ever():
    for overflow in ("refuse", "shift"):
        request = Request("r", (5,) * 65, SamplingParams(overflow=overflow))
        assert fitted(request, N_CTX, None) is request
        with pytest.raises(PromptError, match="65 tokens; n_ctx allows 1 to 64"):
            check_prompt(request.prompt_token_ids, 256, N_CTX)


def test_how_much_was_cut_crosses_the_wire_and_stands_in_the_output():
    request = fitted(Request("r", (5,) * 80, SamplingParams(max_tokens=10, overflow="truncate")), N_CTX, None)
    assert unpack_request(unpack(pack(request))).num_truncated == request.num_truncated == 25
    item = sequence("r", (5,) * 55, 10)
    item.request = request
    item.fail("over")
    output = item.output()
    assert output.num_truncated == 25
    scheduler = Scheduler(policy("batched"), LIMITS)
    scheduler.add(sequence("s", (5,) * 5))
    event = replace(scheduler.abort("s"), request_id="r", finished=output)
    assert unpack_output(unpack(pack(event)), request).finished.num_truncated == 25


def test_what_cannot_shift_says_why():
    shift, possible = SamplingParams(overflow="shift"), RequestLimits(N_CTX, N_CTX, N_CTX, can_shift=True)
    impossible = replace(possible, can_shift=False)
    check_shift(shift, possible)
    with pytest.raises(SamplingError, match=r"overflow is 'shift'.*cannot do.*'refuse' or 'truncate'"):
        check_shift(shift, impossible)
    with pytest.raises(SamplingError, match="max_tokens is None"):
        check_shift(SamplingParams(overflow="shift", max_tokens=None), possible)
    check_shift(SamplingParams(), impossible)


def test_a_full_slot_forgets_the_older_half_and_the_text_goes_on():
    scheduler, runner = Scheduler(policy("batched"), LIMITS), FakeModelRunner(LIMITS)
    prompt = (BOS, *range(2, 42))
    scheduler.add(sequence("r", prompt, 300, n_ctx=N_CTX, overflow="shift", ignore_eos=True))
    longest = 0
    outputs = {}
    while scheduler.has_work:
        for output in step(scheduler, runner):
            if output.finished:
                outputs[output.request_id] = output.finished
        longest = max(longest, len(runner.cells[0]))
    assert longest == N_CTX
    assert list(outputs["r"].token_ids) == expected_shifted(prompt, 300, N_CTX, ignore_eos=True)
    assert not scheduler._kv_cache.cached  # cells of a shifted text are not cached


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    n_slots=st.integers(1, 6),
    n_cells=st.sampled_from([None, None, 200]),
    no_room_every=st.sampled_from([0, 0, 5]),
    carries=st.booleans(),
)
def test_a_shifted_text_does_not_depend_on_its_company(seed, name, n_slots, n_cells, no_room_every, carries):
    """Prefixes, preemption, growth, aborts: a sequence that is computed again drops its cells at the same tokens."""
    rng = random.Random(seed)
    limits = Limits(n_slots, 128, 64, 16, n_cells=n_cells, can_pad=n_cells is None, start_slots=1)
    scheduler = Scheduler(policy(name), limits)
    runner = FakeModelRunner(limits, no_room_every=no_room_every, growth_steps=2, carries=carries)
    asked, finished = {}, {}
    for number in range(60):
        if number < 30 and rng.random() < 0.5:
            head = tuple(range(rng.choice([1, 2]), 41))
            prompt = head[: rng.choice([1, 33, 40])] + tuple(rng.randrange(1, 64) for _ in range(rng.randrange(20)))
            overflow, most = rng.choice(["shift", "shift", "refuse"]), rng.choice([3, 30, 120])
            asked[f"{number}"] = (prompt, most, overflow)
            scheduler.add(sequence(f"{number}", prompt, most, n_ctx=N_CTX, group=number, overflow=overflow))
        sometimes_abort(rng, scheduler, asked, 0.05)
        finished |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished}
    finished |= drain(scheduler, runner)
    for request_id, (prompt, most, overflow) in asked.items():
        if overflow == "refuse":
            most = min(most, N_CTX + 1 - len(prompt))
        assert list(finished[request_id].token_ids) == expected_shifted(prompt, most, N_CTX)
        assert finished[request_id].token_ids[-1] == EOG or len(finished[request_id].token_ids) == most


def test_first_tokens_and_a_limit_of_the_prompt_hold_where_tokens_are_taken_away():
    prompt = (BOS, *range(2, 91))
    for n_keep, kept in ((0, 1), (5, 5), (500, 32), (-1, 32)):
        params = SamplingParams(max_tokens=10, overflow="truncate", n_keep=n_keep)
        cut = fitted(Request("r", prompt, params), N_CTX, BOS)
        assert (cut.prompt_token_ids[:kept], cut.prompt_token_ids[kept:]) == (prompt[:kept], prompt[-55 + kept :])
        assert fitted(cut, N_CTX, BOS) == cut
        item = sequence("r", prompt[:40], 90, n_ctx=N_CTX, overflow="shift", n_keep=n_keep)
        assert item.shift() == (kept, (N_CTX - kept + 1) // 2)
    limited = fitted(Request("r", prompt, SamplingParams(truncate_prompt_tokens=7)), N_CTX, BOS)
    assert (limited.prompt_token_ids, limited.num_truncated) == ((BOS, *prompt[-6:]), 83)
    assert fitted(limited, N_CTX, BOS) == limited
    assert (
        len(fitted(Request("r", prompt, SamplingParams(truncate_prompt_tokens=-1)), N_CTX, BOS).prompt_token_ids) < 64
    )
