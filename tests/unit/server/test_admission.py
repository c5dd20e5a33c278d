"""The estimated wait of a new request, computed from earlier requests."""

import random

import pytest

from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, Timings
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.serving.admission import MAX_RETRY_S, MIN_MEASURED, WINDOW_S
from llamabatch.server.serving.admission import Admission as Counting

PROMPT = (1, 2, 3, 4)


def request(name, n_prompt=4, **params):
    return Request(str(name), PROMPT[:1] * n_prompt, SamplingParams(**params))


def output(asked, *, queued_s=0.0, prefill_s=0.4, token_s=0.1, n=10, reason=FinishReason.STOP, error=None):
    """Returns the output of a request: the first token comes after prefill_s, each other token_s later."""
    first = queued_s + prefill_s
    times = tuple(first + at * token_s for at in range(n))
    timings = Timings(queued_s, first if n else None, times[-1] if n else queued_s, times)
    done = CompletionOutput(0, "", tuple(range(n)), reason)
    return RequestOutput(asked.request_id, None, asked.prompt_token_ids, (done,), error, timings)


class Admission(Counting):
    """An admission with a front's count: the continuations that have entered and not left."""

    def __init__(self, n_slots, **options):
        self.copies = {}
        super().__init__(n_slots, lambda: sum(self.copies.values()), **options)

    def enter(self, requests, now):
        self.copies.update((each.request_id, each.params.n_copies) for each in requests)
        super().enter(requests, now)

    def leave(self, request_id, output, now):
        self.copies.pop(request_id, None)
        super().leave(request_id, output, now)


def measured(n_slots=2, **options):
    """Returns an Admission after requests of 0.1 s a prompt token, 0.1 s an output token and 10 output tokens."""
    admission = Admission(n_slots, **options)
    for at in range(MIN_MEASURED):
        asked = request(f"past {at}")
        admission.enter([asked], float(at))
        admission.leave(asked.request_id, output(asked), at + 1.0)
    return admission


def entered(admission, count, now, **params):
    asked = [request(f"{now} {at} {count} {params}", **params) for at in range(count)]
    admission.enter(asked, now)
    return asked


def test_nothing_is_refused_before_anything_was_measured():
    admission = Admission(1)
    entered(admission, 100, 0.0, max_tokens=1000, ignore_eos=True)
    assert admission.wait_s(request("new"), 0.0) is None
    assert admission.retry_after_s(1, 0.0) == 1


def test_the_wait_is_the_rest_of_what_runs_and_all_that_waits_before():
    admission = measured(2)
    # 4 tokens of prompt take 0.4 s, and 10 steps take 1.0 s
    entered(admission, 1, 10.0)
    assert admission.wait_s(request("new"), 10.0) == 0.0, "a slot is free"
    admission.enter([request("second")], 10.0)
    assert admission.wait_s(request("new"), 10.0) == pytest.approx(1.4)
    assert admission.wait_s(request("new"), 11.0) == pytest.approx(0.4)
    assert admission.wait_s(request("new"), 99.0) == 0.0, "what runs longer than expected may end at once"
    entered(admission, 4, 11.0)
    assert admission.wait_s(request("new"), 11.0) == pytest.approx(0.4 + 2 * 1.4)


def test_a_request_that_never_ends_by_itself_counts_with_all_its_tokens():
    admission = measured(1)
    entered(admission, 1, 10.0, max_tokens=500, ignore_eos=True)
    assert admission.wait_s(request("new"), 10.0) == pytest.approx(0.4 + 50.0)
    admission = measured(1)
    entered(admission, 1, 10.0, max_tokens=5)
    assert admission.wait_s(request("new"), 10.0) == pytest.approx(0.4 + 0.5)
    admission = measured(1)
    entered(admission, 1, 10.0, max_tokens=500)
    assert admission.wait_s(request("new"), 10.0) == pytest.approx(1.4), "it may end as early as others"


def test_only_what_is_ahead_in_its_tier_or_a_better_one_counts():
    admission = measured(1)
    entered(admission, 1, 10.0)
    entered(admission, 3, 10.0, priority=5)
    entered(admission, 2, 10.0, background=True)
    assert admission.wait_s(request("new"), 10.0) == pytest.approx(1.4)
    assert admission.wait_s(request("new", priority=5), 10.0) == pytest.approx(4 * 1.4)
    assert admission.wait_s(request("new", background=True), 10.0) == pytest.approx(6 * 1.4)


def test_background_work_and_with_preempt_worse_priorities_give_way():
    admission = measured(1)
    entered(admission, 1, 10.0, background=True)
    assert admission.wait_s(request("new"), 10.0) == 0.0
    assert admission.wait_s(request("new", background=True), 10.0) == pytest.approx(1.4)
    for preempt, wait_s in ((False, 1.4), (True, 0.0)):
        admission = measured(1, preempt=preempt)
        entered(admission, 1, 10.0, priority=3)
        assert admission.wait_s(request("new"), 10.0) == pytest.approx(wait_s)
        assert admission.wait_s(request("new", priority=3), 10.0) == pytest.approx(1.4)


def test_each_continuation_takes_a_slot():
    admission = measured(2)
    entered(admission, 1, 10.0, n=4)
    assert admission.n_in_flight == 4
    assert admission.wait_s(request("new"), 10.0) == pytest.approx(2 * 1.4)
    admission.enter([request("four more", n=4)], 10.0)
    assert admission.wait_s(request("new"), 10.0) == pytest.approx(4 * 1.4)


def test_texts_to_embed_take_no_slot():
    admission = measured(1)
    admission.enter([Request(f"text {at}", PROMPT, embed=True) for at in range(50)], 10.0)
    assert admission.wait_s(request("new"), 10.0) == 0.0
    assert admission.wait_s(Request("text", PROMPT, embed=True), 10.0) is None
    assert admission.n_in_flight == 50


def test_errors_and_aborts_say_nothing_of_the_speed_but_free_a_place():
    admission = measured(1)
    [slow] = entered(admission, 1, 10.0)
    admission.leave(slow.request_id, output(slow, token_s=100.0, error="it failed"), 10.1)
    [slow] = entered(admission, 1, 10.1)
    admission.leave(slow.request_id, output(slow, token_s=100.0, reason=FinishReason.ABORT), 10.2)
    [never] = entered(admission, 1, 10.2)
    admission.leave(never.request_id, None, 10.2)
    admission.leave("unknown", None, 10.2)
    assert admission.n_in_flight == 0
    entered(admission, 1, 10.2)
    assert admission.wait_s(request("new"), 10.2) == pytest.approx(1.4)


def test_retry_after_follows_the_measured_rate_and_promises_each_place_once():
    admission = Admission(4)
    asked = entered(admission, 24, 0.0)
    for at in range(20):  # one ends each 0.5 s, on four slots
        admission.leave(asked[at].request_id, output(asked[at]), (at + 1) * 0.5)
    entered(admission, 20, 10.0)
    assert admission.rate.per_s == pytest.approx(2.0)
    told = [admission.retry_after_s(1, 10.0) for _ in range(8)]
    assert told == [1, 1, 2, 2, 3, 3, 4, 4]
    assert admission.retry_after_s(4, 10.0) == 6
    assert admission.retry_after_s(1000, 10.0) == 12, "the 24 in flight have all ended by then"
    assert admission.retry_after_s(1, 10.0) == 12
    assert admission.retry_after_s(1, 200.0) >= 1


def test_retry_after_is_bounded_where_nothing_ends():
    admission = Admission(1)
    entered(admission, 5, 0.0)
    assert admission.retry_after_s(1, 20.0) == 20
    assert admission.retry_after_s(1, 20_000.0) == MAX_RETRY_S


def test_idle_time_is_not_measured_and_old_ends_are_forgotten():
    admission = Admission(1)
    for at in range(10):
        [asked] = entered(admission, 1, at * 1000.0)
        admission.leave(asked.request_id, output(asked), at * 1000.0 + 0.5)
    assert admission.rate.per_s == pytest.approx(2.0)
    for at in range(200):
        [asked] = entered(admission, 1, 20_000.0 + at)
        admission.leave(asked.request_id, output(asked), 20_000.1 + at)
    assert admission.rate.per_s == pytest.approx(10.0, rel=0.2)
    now = 30_000.0
    for _ in range(int(WINDOW_S) + 1):
        [asked] = entered(admission, 1, now)
        now += 1.0
        admission.leave(asked.request_id, output(asked), now)
    assert admission.rate.per_s == pytest.approx(1.0)


@pytest.mark.parametrize("n_slots", [1, 4, 16])
def test_estimates_are_near_the_start_of_a_simulated_queue(n_slots):
    """Simulates a queue with requests of random lengths. Compares each estimated start with the real start."""
    rng = random.Random(n_slots)
    admission, now = measured(n_slots), 100.0
    waiting, running, off = [], [], []
    for number in range(400):
        asked = request(number, n_prompt=4, max_tokens=rng.randrange(5, 40), ignore_eos=True)
        waiting.append((asked, now, admission.wait_s(asked, now)))
        admission.enter([asked], now)
        until = now + rng.expovariate(n_slots / 2.5)
        while True:
            while waiting and len(running) < n_slots:
                asked, entered_s, estimate_s = waiting.pop(0)
                off.append((now - entered_s) - estimate_s)
                running.append((now + 0.4 + 0.1 * asked.params.max_tokens, asked))
            running.sort(key=lambda pair: pair[0])
            if not running or running[0][0] > until:
                break
            now, asked = running.pop(0)
            admission.leave(asked.request_id, output(asked, n=asked.params.max_tokens), now)
        now = until
    assert len(off) > 300
    assert max(map(abs, off)) < 0.3, (min(off), max(off))


def test_requests_that_leave_while_they_wait_take_no_memory():
    admission = Admission(1)
    entered(admission, 1, 0.0)
    for at in range(2000):
        [left] = entered(admission, 1, float(at + 1))
        admission.leave(left.request_id, None, float(at + 1))
    assert len(admission._waiting) < 100


def test_no_request_is_left_in_the_model_of_the_slots():
    rng = random.Random(1)
    admission, alive = Admission(3), {}
    for step in range(3000):
        if alive and rng.random() < 0.5:
            asked = alive.pop(rng.choice(list(alive)))
            admission.leave(asked.request_id, rng.choice((None, output(asked))), step * 0.1)
        else:
            asked = request(step, n=rng.choice((1, 1, 3)), background=rng.random() < 0.3)
            alive[step] = asked
            admission.enter([asked], step * 0.1)
        assert admission.n_in_flight == sum(each.params.n_copies for each in alive.values())
        assert (admission.wait_s(request("new"), step * 0.1) or 0.0) >= 0.0
    for asked in alive.values():
        admission.leave(asked.request_id, None, 300.0)
    assert admission.n_in_flight == 0
    assert admission._n_running == 0


def test_measures_are_added_up_when_a_wait_is_asked_for(monkeypatch):
    sums = []
    monkeypatch.setattr("builtins.sum", lambda *values, sum=sum: sums.append(values) or sum(*values))
    admission = measured()
    assert not sums
    asked, late = [request(at) for at in range(2)], request("late")
    admission.enter(asked, 100.0)
    waits = [admission.wait_s(late, 100.0) for _ in range(3)]
    n_sums = len(sums)
    assert waits[0] == waits[1] == waits[2] == pytest.approx(1.4, abs=0.1)
    admission.leave(asked[0].request_id, output(asked[0], token_s=0.5), 101.0)
    assert n_sums == 6  # one sum for each kind of measure serves all three waits
    admission.enter([request(2)], 101.0)
    assert admission.wait_s(late, 101.0) != waits[0]
