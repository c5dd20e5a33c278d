"""Several engines in one process, which share the weights."""

import platform
import subprocess
import sys
import textwrap
import threading

import pytest

from llamabatch import LLM, AdapterError, EngineClosedError, EngineConfig, FinishReason, Request, SamplingParams
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


def test_abort_reaches_the_engine_that_has_it(steps):
    client = connect(EngineConfig.from_options("tiny", TWO))
    done, outputs = threading.Event(), []

    def sink(batch):
        outputs.extend(o.finished for o in batch if o.finished)
        if len(outputs) == 2:
            done.set()

    requests = [Request(f"{i}", (5, 6, 7), SamplingParams(max_tokens=4000, ignore_eos=True)) for i in range(2)]
    with steps.held():
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


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_between_two_pauses_leaves_no_engine_paused(number, monkeypatch):
    with LLM("tiny", **TWO) as llm:
        asked = innermost(llm)._clients[number]
        ask = asked.ask

        def interrupted(function):
            ask(function)  # Ctrl-C may also come before this call; then there is less to undo
            raise KeyboardInterrupt

        monkeypatch.setattr(asked, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.unload_adapter("a")
        monkeypatch.undo()
        outputs = llm.generate(["x"] * 8, SamplingParams(max_tokens=2, deadline_s=60), errors="return")
        assert [output.error for output in outputs] == [None] * 8
        with pytest.raises(AdapterError):
            llm.unload_adapter("a")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is a call of glibc")
def test_closed_engines_give_their_memory_back():
    """glibc keeps the freed memory of each thread for reuse. Without a trim, the process is 45 MB larger here."""
    code = """
        import sys, threading
        from llamabatch import LLM, SamplingParams

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        def work():
            with LLM("tiny", n_slots=8, n_ctx=2048, instances=1) as llm:
                llm.generate(["Once"] * 8, SamplingParams(max_tokens=4))

        work()
        before = resident()
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(resident() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) < 20 * 2**20


def test_the_engine_knows_which_requests_are_read_as_they_come(steps):
    client = ThreadClient(EngineConfig("tiny", n_slots=4, n_ctx=512, n_threads=1, strategy="batched"))
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
    try:
        with steps.held():
            for name, stream in (("whole", False), ("streamed", True)):
                request = Request(name, tuple(client.model.tokenize("Once")), params, group=int(stream))
                client.submit([request], lambda outputs: None, stream=stream)
            running = client.ask(lambda engine: (engine.step(), list(engine._scheduler.running))[1])
        assert [s.streamed for s in running.result()] == [False, False, True, True]
    finally:
        client.close()
