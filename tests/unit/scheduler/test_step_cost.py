"""The Python work of a decode step, in calls of functions. Unlike times, calls are the same on any machine."""

import sys

from llamabatch.request.detokenizer import Vocabulary
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import DecodeStatus, Limits, SpanOutput
from llamabatch.scheduler.policies import policy
from llamabatch.scheduler.scheduler import Scheduler

VOCABULARY = Vocabulary(256, {0: True}.__contains__, lambda token: b"a", lambda token: b"a")
SAMPLED = SpanOutput(DecodeStatus.OK, (97,))


def calls_of_a_step(n_rows: int) -> tuple[int, int]:
    """Counts the Python calls that decide a decode step, and those that apply its results."""
    limits = Limits(n_slots=n_rows, n_batch=2048, n_ubatch=512, prefill_budget=512)
    scheduler = Scheduler(policy("batched"), limits)
    params = SamplingParams(max_tokens=64)
    for i in range(n_rows):
        scheduler.add(Sequence(Request(f"{i}", (65, 66, 67 + i % 64), params, group=i), VOCABULARY, 512))
    for _ in range(4):
        batch = scheduler.schedule()
        results = [SAMPLED if span.output else SpanOutput(DecodeStatus.OK) for span in batch.spans]
        outputs = scheduler.update(batch, results)
    count = 0

    def count_calls(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(count_calls)
    try:
        batch, n_deciding = scheduler.schedule(), count
        spans = batch.spans
        count = 0
        scheduler.update(batch, [SAMPLED] * n_rows)
    finally:
        sys.setprofile(None)
    assert [span.length for span in spans] == [1] * n_rows == [len(each.token_ids) for each in outputs]
    return n_deciding, count


def test_a_token_of_a_decode_step_takes_few_calls():
    a_row = (calls_of_a_step(64)[1] - calls_of_a_step(32)[1]) / 32
    assert 5 <= a_row <= 8, "_apply, _accept, accept, ends_at, push, token_bytes, count_tokens, of_step"


def test_a_plain_step_takes_few_calls():
    """A feature that is off costs a look at a field, but no call."""
    assert 20 <= sum(calls_of_a_step(1)) <= 80


def test_deciding_takes_few_calls_a_row():
    assert (calls_of_a_step(64)[0] - calls_of_a_step(32)[0]) / 32 <= 7


def test_an_output_of_a_step_is_as_one_that_is_made_in_full():
    quick, whole = SequenceOutput.of_step("a", (1,), "text"), SequenceOutput("a", (1,), "text")
    assert (quick, hash(quick), repr(quick)) == (whole, hash(whole), repr(whole))
    assert quick.finish_reason is None
