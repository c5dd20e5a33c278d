"""Engines in child processes give the same answers, and leave nothing behind, however parent or child ends."""

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from llamabatch import LLM, ConfigError, EngineClosedError, FinishReason, MemoryPlanError, SamplingParams
from llamabatch.client.front_client import FrontClient
from llamabatch.client.process_client import ChildClient, RouterClient
from llamabatch.client.restart_policy import NO_RESTART
from llamabatch.client.spawn import Child
from llamabatch.client.wire import Wire
from llamabatch.config import EngineConfig
from llamabatch.request.request import Request
from tests.model.conftest import mixed_conversations
from tests.processes import alive
from tests.waiting import PATIENCE_S, until

LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)


def until_gone(pids):
    until(lambda: not alive(pids), pids)


def test_what_the_child_refuses_is_raised_here(tmp_path):
    with pytest.raises(ConfigError, match="n_ctx"):
        LLM("tiny", isolate=True, n_ctx=10**6)
    with pytest.raises(MemoryPlanError, match="64 engines of"):
        LLM("tiny", strategy="multi-instance", instances=64, n_slots=256, n_ctx=1024, kv="split")


def front(client):
    llm = LLM.__new__(LLM)
    llm._client = FrontClient(client)
    return llm


def computing(client, steps=3):
    """Waits until the client's children have made some decode steps."""
    before = client.stats().decode_calls
    until(lambda: client.stats().decode_calls >= before + steps)


def in_background(call):
    """Starts `call` in a thread. Returns a function that waits for its result."""
    got = queue.SimpleQueue()
    threading.Thread(target=lambda: got.put(call()), daemon=True).start()
    return lambda: got.get(timeout=60)


def test_a_child_that_dies_is_replaced_and_its_requests_go_on(steps):
    with LLM("tiny", isolate=True, n_slots=8, n_ctx=1024, kv="split") as llm:
        prompts = [f"{i} Once upon a time" for i in range(12)]
        params = SamplingParams(max_tokens=30, temperature=0.9, seed=1, ignore_eos=True)
        wanted = llm.generate(prompts, params)
        for how in (signal.SIGKILL, signal.SIGSEGV):
            first = llm._client.pids
            with steps.held(10):
                result = in_background(lambda: llm.generate(prompts, params))
                computing(llm._client)
                os.kill(first[0], how)
            outputs = result()
            assert [o.error for o in outputs] == [None] * 12
            assert sum(o.token_ids == w.token_ids for o, w in zip(outputs, wanted, strict=True)) >= 11
            until_gone(first)
            assert llm._client.pids != first
            assert llm.stats().decode_calls > 0


def test_without_restarts_a_killed_child_is_an_error_for_those_in_flight_and_no_hang(steps):
    client = ChildClient(EngineConfig("tiny", n_slots=2), policy=NO_RESTART)
    llm = front(client)
    with steps.held(10):
        result = in_background(lambda: llm.generate(["a", "b", "c"], LONG, errors="return"))
        computing(client)
        os.kill(client.pids[0], signal.SIGKILL)
    got = result()
    assert [o.finish_reason for o in got] == [FinishReason.ERROR] * 3
    assert all("SIGKILL" in o.error for o in got)
    with pytest.raises(EngineClosedError, match="SIGKILL"):
        llm.generate("x")
    client.close()


def test_the_router_shares_the_load_and_outlives_a_child(greedy):
    client = RouterClient(EngineConfig("tiny", strategy="multi-instance", instances=2, n_slots=4))
    llm = front(client)
    conversations = mixed_conversations(20)
    wanted = [o.text for o in llm.chat(conversations, greedy)]
    rows = [child.stats().decode_rows for child in client._children]
    assert min(rows) > 0.25 * max(rows), "one child did nearly all of the work"
    assert client._engine._loads == [0, 0]
    killed, other = client.pids
    os.kill(killed, signal.SIGKILL)
    assert [o.text for o in llm.chat(conversations, greedy)] == wanted
    until_gone([killed])
    assert other in client.pids
    client.close()
    until_gone([*client.pids, other])
    with pytest.raises(EngineClosedError):
        client.stats()


def test_close_leaves_no_child():
    for strategy in ("batched", "multi-instance"):
        llm = LLM("tiny", strategy=strategy, isolate=True, instances=2, n_slots=1)
        pids = llm._client.pids
        llm.close()
        assert not alive(pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_after_any_death_of_the_parent(how, steps):
    code = """
        from llamabatch import LLM, SamplingParams
        llm = LLM("tiny", strategy="multi-instance", instances=2, n_slots=2)
        print(*llm._client.pids, flush=True)
        for _ in llm.stream(["a"] * 500, SamplingParams(max_tokens=400, ignore_eos=True)):
            print("computing", flush=True)
    """
    with steps.each_takes(0.02):
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert parent.stdout.readline() == b"computing\n"
        assert all(psutil.pid_exists(pid) for pid in pids)
        parent.send_signal(how)
        parent.wait(30)
    parent.stdout.close()
    until_gone(pids)


def a_parent(code):
    """Starts a program, and returns it with its child once the child has started."""
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r})\n" + textwrap.dedent(code)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert parent.stderr.readline() == b"loading\n"
    [child] = psutil.Process(parent.pid).children()
    return parent, child


SLOW_LOAD = """
    from llamabatch.client.process_client import ChildClient
    from llamabatch.config import EngineConfig
    ChildClient(EngineConfig("tiny"), "tests.workers.slow_worker")
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_when_the_parent_ends_while_the_child_loads(how):
    parent, child = a_parent(SLOW_LOAD)
    parent.send_signal(how)
    parent.wait(30)
    parent.stderr.close()
    until_gone([child.pid])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell a stopped process")
def test_no_orphan_where_the_child_is_stopped():
    parent, child = a_parent(SLOW_LOAD)
    child.suspend()
    parent.kill()
    parent.wait(30)
    parent.stderr.close()
    until_gone([child.pid])


def test_the_thread_that_makes_an_engine_may_end():
    made = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: made.put(LLM("tiny", isolate=True, n_slots=1)))
    thread.start()
    thread.join()
    with made.get() as llm:
        until(lambda: thread.native_id not in [each.id for each in psutil.Process().threads()])
        assert llm.generate("x", SamplingParams(max_tokens=2))[0].error is None
        assert llm.stats().restarts == 0


def test_a_script_without_a_main_guard_works(tmp_path):
    script = tmp_path / "queue.py"  # named like a standard module: a child must not import it instead
    script.write_text(
        textwrap.dedent("""
        import sys; sys.path.pop(0)
        from llamabatch import LLM, SamplingParams
        llm = LLM("tiny", strategy="multi-instance", instances=2)
        print(len(llm.generate(["a", "b"], SamplingParams(max_tokens=2))))
        llm.close()
        """)
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_sink_that_raises_harms_no_other_request(greedy, caplog):
    client = ChildClient(EngineConfig("tiny", n_slots=2))
    told = threading.Event()

    def bad_sink(outputs):
        told.set()
        raise RuntimeError("a bug of the caller's")

    client.submit([Request("bad", (5, 6), greedy)], bad_sink)
    assert told.wait(20)
    llm = front(client)
    assert llm.generate("x", greedy)[0].error is None
    client.close()
    assert "could not be delivered" in caplog.text


def test_doubled_ids_and_odd_text_cross_the_wire(greedy, steps):
    with LLM("tiny", isolate=True, n_slots=2) as llm:
        outputs = llm.generate(["ok", "a\ud800"], SamplingParams(max_tokens=3, stop="\ud800"))
        assert [o.error for o in outputs] == [None, None]
        assert outputs[1].prompt == "a\ud800"
        events = queue.SimpleQueue()
        with steps.held():
            llm._client.submit([Request("same", (5, 6), LONG), Request("same", (5, 6), LONG)], events.put)
            assert "already in flight" in events.get(timeout=20)[0].finished.error
            llm._client.abort(["same"])
        assert events.get(timeout=20)[0].finished.finish_reason is FinishReason.ABORT


def test_a_long_list_goes_in_many_messages(monkeypatch):
    monkeypatch.setattr("llamabatch.client.wire.MAX_MESSAGE", 400_000)
    with LLM("tiny", isolate=True, n_slots=16) as llm:
        outputs = llm.generate([[5] * 200] * 600, SamplingParams(max_tokens=1))
    assert {o.error for o in outputs} == {None}


def is_sending(thread):
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code is not Wire.send_packed.__code__:
        frame = frame.f_back
    return frame is not None


def test_close_ends_a_child_that_hangs_with_a_full_pipe(monkeypatch):
    monkeypatch.setattr("llamabatch.client.process_client._CLOSE_TIMEOUT_S", 0.1)
    client = ChildClient(EngineConfig("tiny", n_slots=2))
    os.kill(client.pids[0], signal.SIGSTOP)
    requests = [Request(f"r{i}", (5,) * 500, LONG) for i in range(3000)]
    sender = threading.Thread(target=client.submit, args=(requests, lambda outputs: None), daemon=True)
    sender.start()
    until(lambda: is_sending(sender))
    client.close()
    until_gone(client.pids)
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


def test_a_fork_of_the_parent_leaves_the_children_alone():
    code = """
        import os, sys
        from llamabatch import LLM, SamplingParams
        llm = LLM("tiny", isolate=True, n_slots=1)
        if os.fork() == 0:
            sys.exit(0)  # with all that a normal end runs
        os.wait()
        print(len(llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids))
        llm.close()
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "2\n", done.stderr


def test_a_kill_from_outside_is_told_from_one_for_want_of_memory(monkeypatch):
    kills = iter([3, 3, 3, 4])
    monkeypatch.setattr("llamabatch.client.spawn.oom_kills", lambda: next(kills))
    for wanted in (True, False):
        gone = queue.SimpleQueue()
        listener = SimpleNamespace(on_exit=gone.put)
        child = Child(EngineConfig("tiny"), {}, "tests.workers.slow_worker", listener)
        os.kill(child.pid, signal.SIGKILL)
        assert gone.get(timeout=20) is child
        assert (child.exit_reason, child.from_outside) == ("SIGKILL", wanted)
        child.end()
