"""Comparisons without a model: a clock that counts rows and prompt tokens stands in for the machine."""

from __future__ import annotations

import random

from llamabatch.engine.stats import EngineStats
from llamabatch.planning.memory import Memory
from llamabatch.planning.plan import Plan
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, Timings
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools.compare.measure import BASELINE, Measurement
from llamabatch.tools.compare.report import Report, Row, Spread, compared, row, sweep
from llamabatch.tools.machine_facts import MachineFacts
from llamabatch.tools.workload import Workload
from tests.unit.configs import resolved

MACHINE = MachineFacts(
    cpu="Invented CPU 3000",
    cores=8,
    logical_cores=16,
    memory_bytes=32 * 2**30,
    os="Linux-6.1",
    devices=("CPU: Invented CPU 3000",),
    versions={"llamabatch": "0.1.0", "llama_cpp_python": "0.3.36", "llama_cpp": "b1", "python": "3.11"},
    patches=("0001-amx-tile-config.patch",),
)


def figures(strategy: str, tokens_per_s: float, latency: float = 1.0, ttft: float = 0.5, **more) -> Row:
    """Returns a row with invented figures."""
    return Row(
        strategy, tokens_per_s=tokens_per_s, latency=Spread(latency, 2 * latency), ttft=Spread(ttft, ttft), **more
    )


def output(number: int, tokens: tuple[int, ...], queued: float, times: tuple[float, ...], error: str | None = None):
    reason = FinishReason.ERROR if error else FinishReason.LENGTH
    done = CompletionOutput(0, f"text {number}", tokens, reason)
    timings = Timings(queued, times[0] if times else None, times[-1] if times else queued, times)
    return RequestOutput(f"r{number}", None, (1, 2, 3), (done,), error, timings)


def lengths(n: int = 64) -> list[tuple[int, int]]:
    """Returns (prompt tokens, generated tokens) of each request."""
    rng = random.Random(5)
    return [(rng.randint(10, 120), rng.choice([3, 8, 20, 40, 64])) for _ in range(n)]


def measurement(strategy: str, n_slots: int = 32, work=None, row_ms: float = 0.4, pass_ms: float = 8.0) -> Measurement:
    """Returns the measurement of a machine whose passes take `pass_ms` and whose rows take `row_ms` milliseconds."""
    work = work or lengths()
    name = {"auto": "batched", BASELINE: "sequential"}.get(strategy, strategy)
    n_slots = 1 if name in ("sequential", "length-sorted") else n_slots
    slow = 1.3 if strategy == BASELINE else 1.0
    waiting = list(range(len(work)))
    if name in ("length-sorted", "static"):
        waiting.sort(key=lambda i: work[i][0])
    if name in ("batched", "multi-instance"):
        waiting.sort(key=lambda i: -sum(work[i]))
    clock, calls, rows = 0.0, 0, 0
    running: dict[int, list[float]] = {}
    queued: dict[int, float] = {}
    times: dict[int, tuple[float, ...]] = {}
    while waiting or running:
        if not (name == "static" and running):
            while waiting and len(running) < n_slots:
                i = waiting.pop(0)
                queued[i], running[i] = clock, []
        fresh = [i for i in running if not running[i]]
        if fresh:
            clock += slow * (pass_ms + row_ms * sum(work[i][0] for i in fresh)) / 1000
        turn = list(running) if name != "interleaved" else [min(running, key=lambda i: (len(running[i]), i))]
        clock += slow * (pass_ms + row_ms * len(turn)) / 1000
        calls, rows = calls + 1, rows + len(turn)
        for i in turn:
            running[i].append(clock)
            if len(running[i]) == work[i][1]:
                times[i] = tuple(running.pop(i))
    outputs = tuple(output(i, (7,) * len(times[i]), queued[i], times[i]) for i in range(len(work)))
    config = resolved(
        "tiny", strategy=name, n_slots=n_slots, n_ctx=512, n_threads=4, instances=2 if name == "multi-instance" else 1
    )
    stats = EngineStats(decode_calls=calls, decode_rows=rows, decode_passes=calls)
    memory = (60 + 2 * n_slots) * 2**20
    return Measurement(outputs, clock, memory, stats, Plan(config, Memory(1, n_slots, 1), {}))


def report(strategies=(BASELINE, *STRATEGIES), sizes=(), **machine) -> Report:
    from llamabatch.tools.compare.advice import advise

    rows = tuple(row(name, [measurement(name, **machine)]) for name in strategies)
    rows = compared(rows, rows)
    sized = tuple(row("batched", [measurement("batched", n, **machine)]) for n in sizes)
    workload = Workload("bundled", tuple((1,) * prompt for prompt, _ in lengths()))
    return Report(
        created="2026-01-01T00:00:00+00:00",
        machine=MACHINE,
        model="An invented model",
        model_bytes=2**20,
        workload=workload,
        max_tokens=64,
        rows=rows,
        sweep=sweep(compared(sized, rows)) if sizes else None,
        advice=advise(rows),
    )
