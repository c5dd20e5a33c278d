"""stats() of every kind of client loses nothing, counts nothing twice, and waits for no step."""

import asyncio
import os
import queue
import signal
import threading

import pytest

from llamabatch import LLM, AsyncLLM, Engine, EngineConfig, FinishReason, Request, SamplingParams
from llamabatch.monitor.snapshot import Snapshot
from tests.clients import innermost
from tests.waiting import PATIENCE_S, until

KINDS = {
    "thread": {"n_slots": 4, "instances": 1, "n_threads": 1},
    "threads": {"n_slots": 4, "instances": 2},
    "child": {"n_slots": 4, "isolate": True, "n_threads": 1},
    "children": {"n_slots": 4, "strategy": "multi-instance", "instances": 2, "n_threads": 1},
}
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def llm(request, steps):
    """One LLM for all tests of its kind, because starting a process takes a while. Each test looks at its own span of
    the stats."""
    with LLM("tiny", **KINDS[request.param]) as made:
        made.kind = request.param
        yield made


def settled(llm):
    """Waits until no request is in flight, and returns the stats. An aborted request ends with the current step."""
    return until(lambda: stats if not (stats := llm.stats()).in_flight else None)


def test_all_requests_are_counted_by_how_they_ended(llm, steps):
    before = llm.stats()
    prompts = ["Once", "", [5, 10**6], list(range(1, 5000)), "a", "b"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True), errors="return")
    late = SamplingParams(max_tokens=3000, ignore_eos=True, deadline_s=0.05)
    with steps.each_takes(0.01):
        outputs += llm.generate(["x"] * 6, late, errors="return")
    outputs += llm.generate(["q", "r"], SamplingParams(n=3, max_tokens=5, temperature=1.0, ignore_eos=True))
    llm.embed(["one text", "another"])
    with steps.each_takes(0.02):
        for _ in llm.stream(["s", "t", "u"], LONG):
            break
        for _ in llm.as_completed(["v", "w"], [SamplingParams(max_tokens=1), LONG]):
            break
    stats = settled(llm).since(before)
    reasons = [output.finish_reason for output in outputs]
    bad = reasons.count(FinishReason.ERROR)
    assert bad >= 3
    assert stats.submitted == len(outputs) + 2 + 3 + 2
    assert stats.errors == bad
    assert stats.aborted == 3 + 1
    assert stats.ok == reasons.count(FinishReason.STOP) + reasons.count(FinishReason.LENGTH) + 2 + 1
    assert stats.submitted == stats.ok + stats.errors + stats.aborted
    assert (stats.running, stats.waiting, stats.kv_cells_used) == (0, 0, 0)
    assert stats.free_slots == stats.n_slots == 4 * (2 if llm.kind == "children" else 1)
    assert stats.e2e_s.count == stats.ok


def test_tokens_and_times_are_those_of_the_outputs(llm):
    before = llm.stats()
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 30, 40, 50, 60)]
    outputs = llm.generate(["Once upon a time"] * 6, params)
    stats = llm.stats().since(before)
    assert stats.generated_tokens == sum(len(o.token_ids) for o in outputs)
    assert stats.prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs)
    assert stats.prompt_tokens <= stats.prefill_tokens + stats.shared_tokens + stats.prefix_tokens
    gaps = [gap for o in outputs for gap in o.timings.inter_token_s]
    assert stats.inter_token_s.count == len(gaps)
    assert stats.inter_token_s.sum_s == pytest.approx(sum(gaps), rel=1e-6)
    assert stats.ttft_s.count == stats.queue_s.count == stats.e2e_s.count == 6
    assert stats.ttft_s.sum_s == pytest.approx(sum(o.timings.ttft_s for o in outputs), rel=1e-6)
    assert stats.e2e_s.sum_s == pytest.approx(sum(o.timings.total_s for o in outputs), rel=1e-6)
    assert stats.e2e_s.percentile(100) >= max(o.timings.total_s for o in outputs) * 0.79
    assert stats.ttft_s.percentile(50) <= stats.e2e_s.percentile(99)


def test_what_runs_is_in_the_figures_at_once(llm, steps):
    before = llm.stats()
    with steps.each_takes(0.02):
        pieces = llm.stream(["Once", "a", "b"], LONG)
        for _, piece in zip(range(60), pieces, strict=False):
            assert piece.finished is None
        stats = llm.stats().since(before)
    assert (stats.submitted, stats.in_flight, stats.ok) == (3, 3, 0)
    assert stats.ttft_s.count == 3
    assert stats.inter_token_s.count >= 50
    assert 0 < stats.slot_use <= 1
    assert stats.kv_cells >= stats.kv_cells_used >= 50
    assert stats.e2e_s.count == 0
    pieces.close()
    assert settled(llm).since(before).aborted == 3


def test_a_sink_may_ask(llm):
    """A sink may call stats(). It runs on the engine's thread, or on the thread that reads from a child; another
    engine's sink may call at the same time."""
    before = llm.stats()
    seen: queue.SimpleQueue = queue.SimpleQueue()

    def sink(outputs):
        seen.put((llm.stats().since(before).submitted, sum(o.finished is not None for o in outputs)))

    requests = [Request(f"r{i}", (5, 6, i + 1), SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(20)]
    llm._client.submit(requests, sink, stream=True)
    n_ended = 0
    while n_ended < 20:
        submitted, ended = seen.get(timeout=PATIENCE_S)
        assert submitted == 20
        n_ended += ended


def test_stats_wait_for_no_long_step():
    """stats() returns even if the engine is blocked in a step."""
    with LLM("tiny", n_slots=2, instances=1) as llm:
        go_on, inside = threading.Event(), threading.Event()
        innermost(llm).ask(lambda engine: (inside.set(), go_on.wait(PATIENCE_S)))
        assert inside.wait(PATIENCE_S)
        llm._client.submit([Request("waits", (1, 2))], print)
        stats = llm.stats()
        assert (stats.waiting, stats.in_flight) == (1, 1)  # a request counts before the engine has received it
        go_on.set()


def test_an_engine_counts_its_requests_itself():
    with Engine(EngineConfig("tiny", n_slots=2)) as engine:
        engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))
        engine.add(Request("b", (1, 2, 3), SamplingParams(max_tokens=4, n=2, ignore_eos=True)))
        engine.add(Request("c", (4,), SamplingParams(max_tokens=400, ignore_eos=True)))
        engine.step()
        with pytest.raises(ValueError, match="token"):
            engine.add(Request("d", (10**6,)))
        while engine.stats().ok < 2:
            engine.step()
        engine.abort("c")
        stats = engine.stats()
    assert (stats.submitted, stats.finished_length, stats.aborted, stats.in_flight) == (3, 2, 1, 0)


@pytest.mark.parametrize("kind", ["threads", "children"])
def test_a_monitor_watches_while_it_runs_and_ends_with_the_llm(kind, tmp_path, begun, steps):
    seen: list[Snapshot] = []
    llm = LLM("tiny", **KINDS[kind])
    first = llm.stats()
    assert (first.submitted, first.in_flight, first.prompt_tokens) == (0, 0, 0)
    monitor = llm.monitor(seen.append, every_s=0.02, metrics_file=tmp_path / "x.prom").start()
    with steps.held(20):
        pieces = llm.stream(["Once upon a time"] * 8, SamplingParams(max_tokens=60, ignore_eos=True))
        next(pieces)
        until(lambda: any(s.stats.slot_use > 0.4 for s in seen))
    outputs = [piece.finished for piece in pieces if piece.finished is not None]
    llm.close()
    assert not begun.threads()
    assert not monitor._thread.is_alive()
    assert sum(s.recent.generated_tokens for s in seen) == sum(len(o.token_ids) for o in outputs)
    assert max(s.generated_tokens_per_s for s in seen) > 0
    assert max(s.machine.cpu_percent for s in seen) > 0
    assert seen[-1].stats.ok == 8
    assert 'finished_reason="length",model_name="tiny.gguf"} 8.0' in (tmp_path / "x.prom").read_text()


def test_a_forgotten_llm_ends_though_it_is_watched():
    llm = LLM("tiny", n_slots=1, instances=1)
    monitor = llm.monitor(every_s=0.02).start()
    thread = innermost(llm)._lifetime._parts.thread
    del llm
    monitor._thread.join(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not monitor._thread.is_alive()


def test_an_async_llm_is_watched_alike():
    seen = []

    async def main():
        async with AsyncLLM("tiny", n_slots=2, instances=1) as llm:
            with await llm.monitor(seen.append, every_s=0.02):
                await llm.generate("Once", SamplingParams(max_tokens=50, ignore_eos=True))

    asyncio.run(main())
    assert seen[-1].stats.generated_tokens == 50


@pytest.mark.parametrize("kind", ["child", "children"])
def test_nothing_is_lost_or_counted_twice_when_a_process_dies(kind, steps):
    with LLM("tiny", **KINDS[kind]) as llm:
        events: queue.SimpleQueue = queue.SimpleQueue()
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        with steps.held(30):
            llm._client.submit([Request(f"r{i}", (5, 6, i + 1), params) for i in range(12)], events.put)
            until(lambda: llm.stats().generated_tokens >= 60)
            before = llm.stats()
            os.kill(llm._client.pids[0], signal.SIGKILL)
        n_ended = 0
        while n_ended < 12:
            n_ended += sum(o.finished is not None for o in events.get(timeout=60))
        stats = llm.stats()
    assert stats.submitted == 12 == stats.ok + stats.errors + stats.aborted
    assert (stats.ok, stats.restarts, stats.e2e_s.count) == (12, 1, 12)
    assert stats.generated_tokens >= before.generated_tokens
    assert stats.decode_rows > before.decode_rows
