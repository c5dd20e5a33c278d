"""Several engines in one process that share the weights."""

import gc
import threading
import time

import pytest

from llamabatch import LLM, EngineClosedError, EngineConfig, FinishReason, Request, SamplingParams
from llamabatch.client.connect import connect
from llamabatch.client.multi_engine_client import MultiEngineClient
from llamabatch.client.thread_client import ThreadClient
from tests.clients import innermost
from tests.model.conftest import mixed_conversations

TWO = {"strategy": "batched", "instances": 2, "n_slots": 8}


def test_texts_are_those_of_one_engine_and_both_work(reference, greedy, assert_equal_by_the_rule):
    conversations = mixed_conversations(60)
    with LLM("tiny", **TWO) as llm:
        assert isinstance(innermost(llm), MultiEngineClient)
        assert_equal_by_the_rule(llm.chat(conversations, greedy), reference.chat(conversations, greedy))
        loads = [client.stats().decode_rows for client in innermost(llm)._clients]
        assert min(loads) > 0.25 * sum(loads)
        assert llm.stats().decode_rows == sum(loads)
        assert llm.stats().free_slots == 8


def test_abort_reaches_the_engine_that_has_it():
    client = connect(EngineConfig.from_options("tiny", TWO))
    done, outputs = threading.Event(), []

    def sink(batch):
        outputs.extend(o.finished for o in batch if o.finished)
        if len(outputs) == 2:
            done.set()

    requests = [Request(f"{i}", (5, 6, 7), SamplingParams(max_tokens=4000, ignore_eos=True)) for i in range(2)]
    client.submit(requests, sink)
    client.abort(["0", "1", "unknown"])
    assert done.wait(20)
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    client.close()
    client.close()
    with pytest.raises(EngineClosedError):
        client.submit(requests, sink)
    with pytest.raises(EngineClosedError):
        client.stats()


def test_the_weights_go_with_the_last_engine():
    first = ThreadClient(EngineConfig("tiny", strategy="batched", n_slots=2))
    second = ThreadClient(EngineConfig("tiny", strategy="batched", n_slots=2), model=first.model)
    assert second.model is first.model
    first.close()
    assert second.model.tokenize("still there")
    second.close()
    with pytest.raises(EngineClosedError):
        second.model.tokenize("gone")


def test_a_forgotten_one_ends_its_threads(begun):
    llm = LLM("tiny", **TWO)
    assert len(begun.threads()) == 2
    del llm
    gc.collect()
    deadline = time.monotonic() + 10
    while begun.threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not begun.threads()


def test_the_engine_knows_which_requests_are_read_as_they_come():
    client = ThreadClient(EngineConfig("tiny", n_slots=4, n_ctx=512, n_threads=1, strategy="batched"))
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
    try:
        for name, stream in (("whole", False), ("streamed", True)):
            request = Request(name, tuple(client.model.tokenize("Once")), params, group=int(stream))
            client.submit([request], lambda outputs: None, stream=stream)
        running = client.ask(lambda engine: (engine.step(), list(engine._scheduler.running))[1]).result()
        assert [s.streamed for s in running] == [False, False, True, True]
    finally:
        client.close()
