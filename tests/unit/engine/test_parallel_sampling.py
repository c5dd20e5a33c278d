"""Several continuations of one prompt: split into sequences, merged into one output."""

from dataclasses import replace

import pytest

from llamabatch.engine.parallel_sampling import ParallelSampling
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import VOCABULARY, FakeModelRunner, expected_output, step

LIMITS = Limits(n_slots=8, n_batch=64, n_ubatch=64, prefill_budget=64)
PROMPT = tuple(range(1, 51))


def run(request: Request, abort_after: int | None = None):
    """Runs a request beside another one. Returns all of its pieces, and the number of copied prompt tokens."""
    fans, scheduler, runner = ParallelSampling(), Scheduler(POLICIES["batched"], LIMITS), FakeModelRunner(LIMITS)
    for each in [*fans.split(request), Request("company", (5, 6, 7), SamplingParams(max_tokens=20))]:
        scheduler.add(Sequence(each, VOCABULARY, 512))
    pieces = []
    for number in range(200):
        if number == abort_after:
            ended = [scheduler.abort(each) for each in fans.copies_of(request.request_id)]
            pieces += fans.merge(ended)
        if not scheduler.has_work:
            break
        pieces += fans.merge(step(scheduler, runner))
    assert not fans
    own = [piece for piece in pieces if piece.request_id == request.request_id]
    return own, scheduler.prefix_cache.num_shared_tokens


def test_continuations_share_the_prompt_and_come_as_one_output():
    pieces, shared = run(Request("a", PROMPT, SamplingParams(n=3, max_tokens=9)))
    wholes = [piece.finished for piece in pieces if piece.finished is not None]
    assert len(wholes) == 1
    assert pieces[-1].finished is wholes[0]
    assert [completion.index for completion in wholes[0].outputs] == [0, 1, 2]
    assert all(list(c.token_ids) == expected_output(PROMPT, 9) for c in wholes[0].outputs)
    assert wholes[0].request_id == "a"
    assert shared == 2 * (len(PROMPT) - 1)


def test_each_streams_under_its_own_index():
    pieces, _ = run(Request("a", PROMPT, SamplingParams(n=2, max_tokens=9)))
    for index in (0, 1):
        tokens = [token for piece in pieces if piece.index == index for token in piece.token_ids]
        assert tokens == expected_output(PROMPT, 9)


def test_each_draws_with_a_seed_of_its_own():
    request = Request("a", PROMPT, SamplingParams(n=3, seed=2**64 - 1))
    assert [each.seed for each in ParallelSampling().split(request)] == [2**64 - 1, 0, 1]
    assert all(each.params == replace(request.params, n=1) for each in ParallelSampling().split(request))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_abort_ends_all_that_still_run(after):
    pieces, _ = run(Request("a", PROMPT, SamplingParams(n=3, max_tokens=30)), abort_after=after)
    [whole] = [piece.finished for piece in pieces if piece.finished is not None]
    assert {completion.finish_reason for completion in whole.outputs} == {FinishReason.ABORT}
    assert len(whole.outputs) == 3


def test_best_of_gives_those_with_the_highest_logprob_per_token():
    fans = ParallelSampling()
    copies = fans.split(Request("a", PROMPT, SamplingParams(n=2, best_of=4)))
    assert all(copy.ranked for copy in copies)
    merged = []
    for copy, (total, tokens) in zip(copies, [(-8.0, 2), (-6.0, 6), (-3.0, 1), (-4.0, 2)], strict=True):
        completion = CompletionOutput(0, copy.request_id, (1,) * tokens, FinishReason.STOP, None, None, total)
        output = RequestOutput(copy.request_id, None, PROMPT, (completion,))
        merged += fans.merge([SequenceOutput(copy.request_id, (1,), "x", output)])
    [piece] = merged
    assert [c.text for c in piece.finished.outputs] == [copies[1].request_id, copies[3].request_id]
    assert [c.index for c in piece.finished.outputs] == [0, 1]
    assert (piece.token_ids, piece.text) == ((), ""), "nothing is told before it is known which are best"
