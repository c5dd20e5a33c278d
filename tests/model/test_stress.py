"""Many requests with random lengths, stops and aborts: at the end, every slot is free and every result is right."""

import queue
import random
import threading

import pytest

from llamabatch import LLM, FinishReason, SamplingParams
from llamabatch.client.thread_client import ThreadClient
from llamabatch.config import EngineConfig
from llamabatch.request.request import Request, new_group
from tests.model.conftest import mixed_conversations

pytestmark = pytest.mark.alone  # threads on all cores

LONGEST = 40


@pytest.mark.parametrize("n_requests", [2000, pytest.param(200, marks=pytest.mark.guard)])
def test_requests_in_bursts(n_requests, reference, logit_gap):
    rng = random.Random(11)
    conversations = mixed_conversations(120, seed=5)
    whole = reference.chat(conversations, SamplingParams(temperature=0, max_tokens=LONGEST))
    client = ThreadClient(EngineConfig("tiny", n_slots=24))
    events: queue.SimpleQueue = queue.SimpleQueue()
    asked, outputs = {}, {}
    try:
        for start in range(0, n_requests, 100):  # in bursts, while earlier requests run
            group = new_group()
            burst = []
            for number in range(start, start + 100):
                which = rng.randrange(len(whole))
                words = whole[which].text.split()
                stop = (rng.choice(words),) if words and rng.random() < 0.3 else ()
                params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, LONGEST), stop=stop)
                request = Request(f"r{number}", whole[which].prompt_token_ids, params, group=group)
                asked[request.request_id] = (which, request)
                burst.append(request)
            client.submit(burst, events.put)
            client.abort(rng.sample(sorted(asked), 15))
        while len(outputs) < n_requests:
            for event in events.get(timeout=120):
                assert event.request_id not in outputs, "answered twice"
                outputs[event.request_id] = event.finished
        stats = client.stats()
    finally:
        client.close()
    assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, 24)
    ended = {reason: sum(o.finish_reason is reason for o in outputs.values()) for reason in FinishReason}
    assert ended[FinishReason.ABORT] > 0.02 * n_requests
    assert ended[FinishReason.ERROR] == 0
    differing = [r for r, o in outputs.items() if not _right(o, asked[r][1], whole[asked[r][0]])]
    assert len(differing) <= 0.01 * n_requests
    for request_id in differing:  # texts may differ only where the model was undecided
        output, wanted = outputs[request_id], whole[asked[request_id][0]]
        at = next(i for i, (a, b) in enumerate(zip(output.token_ids, wanted.token_ids, strict=False)) if a != b)
        assert logit_gap((*output.prompt_token_ids, *output.token_ids[:at])) < 0.15


def _right(output, request, wanted) -> bool:
    """Returns True if the output is the beginning of the text alone, and ends where the request's limits say."""
    n = len(output.token_ids)
    if output.token_ids != wanted.token_ids[:n]:
        return False
    stop = next((s for s in request.params.stop_strings if s in wanted.text), None)
    if stop is not None and stop in output.text:
        return False
    if output.finish_reason is FinishReason.ABORT:
        return wanted.text.startswith(output.text)
    if stop is not None and output.outputs[0].stop_reason == stop:
        return output.text == wanted.text[: wanted.text.index(stop)]
    if output.finish_reason is FinishReason.LENGTH:
        return n == request.params.max_tokens
    return output.token_ids == wanted.token_ids and output.text == wanted.text


def test_many_threads_call_generate_at_once(reference, greedy, assert_equal_by_the_rule):
    conversations = mixed_conversations(48, seed=8)
    wanted = reference.chat(conversations, greedy)
    got = [None] * 8
    with LLM("tiny", n_slots=16) as llm:

        def call(number):
            got[number] = llm.chat(conversations[number * 6 : number * 6 + 6], greedy)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_equal_by_the_rule([output for outputs in got for output in outputs], wanted, least=0.97)
