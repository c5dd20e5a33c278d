"""What callers see if an engine's child process dies."""

import itertools
import os
import queue
import signal
import threading
import time

import numpy as np
import pytest

from llamabatch import LLM, EngineClosedError, EngineError, FinishReason, SamplingParams
from llamabatch.client.front_client import FrontClient
from llamabatch.client.process_client import ChildClient
from llamabatch.client.restart_policy import RestartPolicy
from llamabatch.client.wire import Wire
from llamabatch.config import EngineConfig
from llamabatch.request.request import Request
from llamabatch.utils import system
from tests.model.adapter_files import write_lora
from tests.unit.fakes import Clock
from tests.waiting import PATIENCE_S, until
from tests.workers.poisoned_worker import BUG, POISON

SHORT = SamplingParams(max_tokens=5)


def front(client):
    llm = LLM.__new__(LLM)
    llm._client = FrontClient(client)
    return llm


def poisoned(n_slots=4, **policy):
    return ChildClient(
        EngineConfig("tiny", n_slots=n_slots, n_ctx=512), "tests.workers.poisoned_worker", RestartPolicy(**policy)
    )


@pytest.fixture(scope="module")
def isolated(steps):
    with front(ChildClient(EngineConfig("tiny", isolate=True, n_slots=4, n_ctx=1024, kv="split"))) as llm:
        yield llm


@pytest.fixture
def killed_after(isolated, steps):
    """A function that yields the pieces of a stream, and kills the child after so many tokens. A piece may have several
    tokens."""

    def pieces(n_tokens, stream):
        n_seen, is_killed = 0, False
        with steps.held(60):
            for piece in stream:
                yield piece
                n_seen += len(piece.token_ids)
                if n_seen >= n_tokens and not is_killed:
                    is_killed = True
                    os.kill(isolated._client.pids[0], signal.SIGKILL)
                    steps.let_go()

    return pieces


STREAMS = {
    "sampled, with penalties": {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "logprobs": {"temperature": 0.7, "seed": 4, "logprobs": 2, "prompt_logprobs": 1},
    "stop string": {"temperature": 0.8, "seed": 5, "stop": ["the 9", "zebra crossing"], "min_tokens": 30},
    "DRY": {"temperature": 0.8, "seed": 6, "dry_multiplier": 0.8},
    "mirostat": {"temperature": 0.8, "seed": 7, "mirostat": 2},
    "regex": {"temperature": 0.8, "seed": 8, "structured_outputs": {"regex": "([a-z]+ ){60,70}end"}},
    "two continuations": {"temperature": 0.9, "seed": 9, "n": 2},
}


@pytest.mark.parametrize("what", STREAMS)
def test_a_stream_goes_on_where_it_was_when_the_child_died(isolated, killed_after, what):
    eos = {} if "regex" in what else {"ignore_eos": True}
    params = SamplingParams(max_tokens=150, **eos, **STREAMS[what])
    prompt = "Tell me about the sea."
    [wanted] = isolated.generate(prompt, params)
    [killed] = isolated._client.pids
    pieces = list(killed_after(10, isolated.stream(prompt, params)))
    assert isolated._client.pids != [killed]
    last = pieces[-1].finished
    assert last.error is None
    for index, completion in enumerate(wanted.outputs):
        mine = [piece for piece in pieces if piece.index == index]
        assert tuple(token for piece in mine for token in piece.token_ids) == completion.token_ids
        assert "".join(piece.text for piece in mine) == last.outputs[index].text
        assert last.outputs[index].token_ids == completion.token_ids
        assert last.outputs[index].text == completion.text
        assert last.outputs[index].stop_reason == completion.stop_reason
        if params.logprobs is not None:
            told = [one for piece in mine for one in piece.logprobs]
            assert [list(one) for one in told] == [list(one) for one in completion.logprobs]
            assert last.outputs[index].logprobs == tuple(told)
            assert last.outputs[index].cumulative_logprob == pytest.approx(completion.cumulative_logprob, abs=0.5)
            assert len(last.prompt_logprobs) == len(wanted.prompt_logprobs)
    times = last.timings.token_times_s
    assert list(times) == sorted(times)
    assert last.timings.queued_s <= last.timings.ttft_s == times[0] < last.timings.total_s


@pytest.mark.timed
def test_figures_never_go_backwards_and_count_each_request_once(isolated, killed_after):
    before, began = isolated.stats(), time.monotonic()
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            seen.append(isolated.stats())
            time.sleep(0.01)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(2):
            for _ in killed_after(30, isolated.stream(["a b c", "d e f", "g h i"], params)):
                pass
    finally:
        done.set()
        looking.join()
    after = isolated.stats().since(before)
    assert (after.restarts, after.submitted, after.finished_length) == (2, 6, 6)
    assert (after.errors, after.in_flight) == (0, 0)
    assert after.e2e_s.count == 6
    for one, other in itertools.pairwise(seen):
        assert all(value >= one.counts()[name] for name, value in other.counts().items())
    until(lambda: isolated._client.heartbeats[0].last_token_s is not None)  # the child reports this once a second
    asked = time.monotonic()
    isolated.stats()
    beat = isolated._client.heartbeats[0]
    assert beat.up
    assert beat.silent_s < time.monotonic() - asked
    assert beat.last_token_s < time.monotonic() - began
    assert beat.restarts >= 2


def test_what_was_loaded_is_there_again(isolated, tmp_path):
    adapter = write_lora(tmp_path / "one.gguf", seed=1)
    isolated.load_adapter("one", adapter)
    prompt = "Once upon a time there was a small house by the sea. " * 3
    n_tokens = isolated.save_prefix(prompt, tmp_path / "prefix")
    isolated.load_prefix(tmp_path / "prefix")
    [killed] = isolated._client.pids
    os.kill(killed, signal.SIGKILL)
    hits = isolated.stats().prefix_tokens
    until(lambda: isolated._client.pids not in ([killed], []))
    assert isolated.adapters == ["one"]
    params = SamplingParams(max_tokens=4, temperature=0)
    [output] = isolated.generate(prompt, params)
    assert output.error is None
    assert isolated.stats().prefix_tokens - hits >= n_tokens - 1
    [output] = isolated.generate(prompt, params, adapters="one")
    assert output.error is None
    isolated.unload_prefix(tmp_path / "prefix")
    isolated.unload_adapter("one")


def test_embeddings_and_scores_survive(isolated):
    texts = [f"{i} " + "a text to embed " * 20 for i in range(12)]
    wanted = isolated.embed(texts, normalize=True)
    before = isolated.stats().submitted
    got = queue.SimpleQueue()
    threading.Thread(
        target=lambda: got.put((isolated.embed(texts, normalize=True), isolated.score("a b", [" c"])))
    ).start()
    until(lambda: isolated.stats().submitted > before)
    os.kill(isolated._client.pids[0], signal.SIGKILL)
    vectors, scores = got.get(timeout=60)
    assert all(np.allclose(one, other, atol=0.05) for one, other in zip(vectors, wanted, strict=True))
    assert [score.error for score in scores] == [None]


def test_an_abort_a_deadline_and_an_end_do_not_wait_for_a_restart():
    client = poisoned(first_s=3600.0, longest_s=3600.0)
    events = queue.SimpleQueue()
    client.submit([Request("poison", (*POISON, 5), SHORT)], events.put)
    [ended] = events.get(timeout=PATIENCE_S)
    assert "ended 2 times while it computed this request alone, at last with SIGSEGV" in ended.finished.error
    assert client.pids == []  # the third child starts only after a long pause
    client.submit([Request("taken back", (5, 6), SHORT), Request("left", (5, 6), SHORT)], events.put)
    assert client.stats().waiting == 2
    client.abort(["taken back"])
    [ended] = events.get(timeout=PATIENCE_S)
    assert (ended.request_id, ended.finished.finish_reason) == ("taken back", FinishReason.ABORT)
    client.submit([Request("late", (5, 6), SamplingParams(max_tokens=5, deadline_s=0.5))], events.put)
    [ended] = events.get(timeout=PATIENCE_S)
    assert (ended.request_id, ended.finished.error[:16]) == ("late", "DeadlineExceeded")
    client.close()
    [ended] = events.get(timeout=PATIENCE_S)
    assert (ended.request_id, ended.finished.error) == ("left", "the engine is closed")
    with pytest.raises(EngineClosedError):
        client.stats()


def test_too_many_deaths_in_a_row_end_all_requests_until_a_call_brings_another_child():
    client = poisoned(most=3, first_s=0.0)
    clock = client._children[0]._clock = Clock()
    events = queue.SimpleQueue()
    client.submit([Request(f"poison {i}", (*POISON, i + 20), SHORT) for i in range(8)], events.put)
    errors = {}
    while len(errors) < 8:
        for ended in events.get(timeout=60):
            errors[ended.request_id] = ended.finished.error
    assert sum("4 times in a row without a result, at last with SIGSEGV" in error for error in errors.values()) == 7
    with pytest.raises(EngineClosedError, match="4 times in a row"):
        client.submit([Request("x", (5, 6), SHORT)], events.put)
    assert client.stats().restarts == 3
    clock.now = 1.0
    until(lambda: client.outage is None)
    client.submit([Request("x", (5, 6), SHORT)], events.put)
    [ended] = events.get(timeout=60)
    assert ended.finished.error is None
    client.close()


def test_a_question_that_the_child_does_not_survive_is_an_error_of_its_asker(tmp_path):
    client = poisoned()
    llm = front(client)
    os.kill(client.pids[0], signal.SIGSTOP)
    asked = queue.SimpleQueue()

    def ask():
        with pytest.raises(EngineError, match="load_prefix: the engine process ended: SIGKILL"):
            llm.load_prefix(tmp_path / "none")
        asked.put(True)

    threading.Thread(target=ask).start()
    until(lambda: client._children[0]._child._answers)
    os.kill(client.pids[0], signal.SIGKILL)
    assert asked.get(timeout=PATIENCE_S)
    assert llm.generate("x", SHORT)[0].error is None
    client.close()


def test_an_engine_that_fails_is_replaced_as_one_that_dies():
    client = poisoned()
    events = queue.SimpleQueue()
    client.submit([Request("bug", (*BUG, 5), SHORT), *(Request(str(i), (5, i), SHORT) for i in range(6))], events.put)
    errors = {}
    while len(errors) < 7:
        errors.update((ended.request_id, ended.finished.error) for ended in events.get(timeout=60))
    assert "at last with the engine failed: RuntimeError: a bug of ours" in errors.pop("bug")
    assert set(errors.values()) == {None}
    client.close()


def test_a_send_that_is_interrupted_ends_the_stream():
    client = poisoned()
    [child] = [supervisor._child for supervisor in client._children]
    os.kill(child.pid, signal.SIGSTOP)  # the paused child reads nothing, so the pipe fills up

    def interrupt(number, frame):
        while frame is not None and frame.f_code is not Wire.send_packed.__code__:
            frame = frame.f_back
        if frame is not None:  # the signal came in the middle of a message
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.submit([Request(str(i), (5,) * 400, SHORT) for i in range(3000)], lambda outputs: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    os.kill(child.pid, signal.SIGCONT)
    assert front(client).generate("x", SHORT)[0].error is None
    assert client.stats().restarts == 1
    client.close()


def test_a_child_that_hangs_is_replaced():
    client = ChildClient(EngineConfig("tiny", n_slots=2))
    [supervisor], [stopped], events = client._children, client.pids, queue.SimpleQueue()
    os.kill(stopped, signal.SIGSTOP)
    client.submit([Request("x", (5, 6), SHORT)], events.put)
    supervisor._policy = RestartPolicy(hang_s=0.0)
    until(lambda: stopped not in client.pids)
    supervisor._policy = RestartPolicy()  # the next child has enough time, even on a busy machine
    [ended] = events.get(timeout=60)
    assert ended.finished.error is None
    assert client.stats().restarts >= 1  # two, if this thread changed the policy too late for the second child
    client.close()


def test_a_sink_that_takes_long_is_no_hang_of_the_child():
    """While the sink runs, no message of the child can be read. tests/unit/client/test_supervisor.py has more."""
    client = ChildClient(EngineConfig("tiny", n_slots=2))
    [child] = [supervisor._child for supervisor in client._children]
    events = queue.SimpleQueue()

    def slow(outputs):
        events.put((child.reader_is_busy, outputs))

    client.submit([Request("slow", (5, 6), SHORT)], slow)
    is_busy, outputs = events.get(timeout=60)
    assert is_busy
    assert outputs[0].finished.error is None
    client.close()


def test_outputs_too_large_for_a_message_go_one_by_one_or_are_errors():
    client = ChildClient(EngineConfig("tiny", n_slots=4, n_ctx=512), "tests.workers.short_wire_worker")
    outputs = front(client).generate(["a", "b", "c", "d"], SamplingParams(max_tokens=100, ignore_eos=True))
    assert [output.error for output in outputs] == [None] * 4
    params = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=10)
    [output] = front(client).generate("a", params, errors="return")
    assert "too large" in output.error
    client.close()


def test_children_that_inherit_no_socket_generate_and_are_replaced(monkeypatch):
    """On Windows, children connect over the loopback address. Here, this is simulated."""
    monkeypatch.setattr(system, "INHERITS_SOCKETS", False)
    config, prompts = EngineConfig("tiny", n_slots=4, n_ctx=512), ["Once", "One day", "The cat"]
    greedy = SamplingParams(temperature=0, max_tokens=5)
    with LLM("tiny", n_slots=4, n_ctx=512) as llm:
        expected = [output.text for output in llm.generate(prompts, greedy)]
    with front(ChildClient(config, "tests.workers.loopback_worker")) as llm:
        assert [output.text for output in llm.generate(prompts, greedy)] == expected
        os.kill(llm._client.pids[0], signal.SIGKILL)
        assert [output.text for output in llm.generate(prompts, greedy)] == expected
