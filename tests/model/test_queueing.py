"""Queues, priorities, deadlines, batches and preemption with a real engine, in this process and in children."""

import threading

import pytest

from llamabatch import LLM, FinishReason, QueueFull, SamplingParams
from tests.waiting import until

LONG = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0)
ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    "options",
    [{"n_slots": 2}, {"n_slots": 1, "strategy": "multi-instance", "instances": 2}],
    ids=["threads", "router"],
)
def test_a_full_queue_refuses_a_whole_call(options, steps):
    with LLM("tiny", max_queue=1, **options) as llm:
        with pytest.raises(QueueFull, match="4 more would be 4 in flight; allowed are 2 that run and max_queue=1"):
            llm.generate(["a"] * 4, ONE)
        assert llm.stats().prefill_tokens == 0, "a part of it was queued"
        with steps.held(3):
            stream = llm.stream(["a"] * 3, LONG)
            next(stream)
            with pytest.raises(QueueFull):
                llm.generate("b", ONE)
            stream.close()
        until(lambda: not (llm.stats().running + llm.stats().waiting))
        assert len(llm.generate(["a"] * 3, ONE)) == 3
        assert llm.stats().rejected == 5


def test_the_best_priority_goes_first_and_background_last():
    params = [
        SamplingParams(max_tokens=3, priority=5),
        SamplingParams(max_tokens=3, background=True, priority=-9),
        SamplingParams(max_tokens=3, priority=-1),
        SamplingParams(max_tokens=3),
    ]
    with LLM("tiny", strategy="sequential") as llm:
        assert [index for index, _ in llm.as_completed(["a", "b", "c", "d"], params)] == [2, 3, 0, 1]


@pytest.mark.parametrize("options", [{}, {"isolate": True}], ids=["here", "child"])
def test_past_its_deadline_a_request_ends_with_the_text_so_far(options, steps):
    with LLM("tiny", n_slots=1, **options) as llm:
        llm.generate("a", ONE)
        late = SamplingParams(max_tokens=2000, ignore_eos=True, deadline_s=0.2)
        with steps.each_takes(0.01):
            outputs = llm.generate(["a", "b", "c"], [late, late, SamplingParams(max_tokens=20)], errors="return")
        ended = [output for output in outputs if output.error is not None]
        assert len(ended) == 2
        assert all(output.finish_reason is FinishReason.ERROR for output in ended)
        assert all(output.error.startswith("DeadlineExceeded: deadline_s is 0.2; ") for output in ended)
        assert all(output.timings.total_s >= 0.2 for output in ended)
        assert outputs[2].error is None
        assert llm.stats().missed_deadlines == 2
        assert llm.stats().free_slots == 1
    ran, waited = sorted(ended, key=lambda output: len(output.token_ids), reverse=True)
    assert ran.text
    assert f"with {len(ran.token_ids):,} tokens generated" in ran.error
    assert "while it waited for a slot" in waited.error


def test_a_deadline_counts_for_each_continuation(steps):
    with LLM("tiny", n_slots=4) as llm:
        late = SamplingParams(max_tokens=2000, ignore_eos=True, deadline_s=0.1, n=2)
        with steps.each_takes(0.01):
            [output] = llm.generate("a", late, errors="return")
        assert "DeadlineExceeded" in output.error
        assert len(output.outputs) == 2
        assert llm.stats().missed_deadlines == 2


def test_a_first_request_waits_for_company_but_not_when_there_is_enough_of_it():
    with LLM("tiny", n_slots=4, instances=1, max_wait_ms=100) as llm:
        [output] = llm.generate("a", ONE)
        assert output.timings.queued_s >= 0.1
    with LLM("tiny", n_slots=4, instances=1, max_wait_ms=60_000) as llm:
        outputs = llm.generate(["a"] * 4, ONE)
        assert all(output.timings.queued_s < 60 for output in outputs)

        before = llm.stats()
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        threads = [threading.Thread(target=llm.generate, args=(f"{i}", params)) for i in range(4)]
        for thread in threads[:-1]:
            thread.start()
        until(lambda: llm.stats().waiting == 3)
        threads[-1].start()
        for thread in threads:
            thread.join()
        after = llm.stats()
        assert after.decode_rows - before.decode_rows == 4 * (after.decode_calls - before.decode_calls)


@pytest.mark.parametrize("options", [{}, {"isolate": True}], ids=["here", "child"])
def test_preempted_work_goes_on_with_the_same_text(options, assert_equal_by_the_rule, steps):
    with LLM("tiny", n_slots=1, preempt=True, **options) as llm:
        low = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0, priority=1)
        [alone] = llm.generate("Once upon a time", low)
        got = []
        thread = threading.Thread(target=lambda: got.extend(llm.generate("Once upon a time", low)))
        with steps.each_takes(0.1):
            thread.start()
            until(lambda: llm.stats().running)
            [high] = llm.generate("The sea", SamplingParams(max_tokens=3))
            assert not got, "the better one waited"
        thread.join()
        assert high.error is None
        assert llm.stats().preemptions == 1
        assert_equal_by_the_rule(got, [alone], least=0)


def test_background_work_gives_the_same_text_and_steps_aside(assert_equal_by_the_rule, steps):
    with LLM("tiny", n_slots=4, instances=1) as llm:
        behind = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0, background=True)
        alone = llm.generate(["Once", "The sea", "A fox"], behind)
        got = []
        thread = threading.Thread(target=lambda: got.extend(llm.generate(["Once", "The sea", "A fox"], behind)))
        before = llm.stats()
        with steps.held(5):
            talker = llm.stream("Chapter 1", SamplingParams(max_tokens=80, ignore_eos=True))
            next(talker)
            thread.start()
            until(lambda: llm.stats().in_flight == 4)
        assert sum(1 for _ in talker) > 0
        thread.join()
        after = llm.stats()
        assert_equal_by_the_rule(got, alone, least=0)
        steps = after.decode_calls - before.decode_calls
        assert steps >= 79, "the talker had to wait for a step of the others"
        assert steps <= 79 + 20 + 10, "what the others had not computed beside it they compute together"
