"""Measures the microseconds of Python in a decode step, with an engine whose runner computes nothing.

    python -m benchmarks.host_step [--json FILE] [--rows 1,8,32,64,128] [--steps 300] [--rounds 5] [--way engine]

The rows of a step are greedy requests of the bundled model, all past their prompts; each gets one token. The time of a
step runs from the end of one call of the runner to the begin of the next. It covers the code that decides the step,
applies its tokens, and delivers them. Ways to drive the engine:

    engine    Engine.step in a loop.
    stream    The thread client delivers each token to a sink, as in the server.
    generate  LLM.generate; the caller sees nothing before a request ends.
    runner    Engine.step with the runner of llama.cpp; only llama_decode and the compiled sampler compute nothing.

The figure of a round is the median of its steps; the round with the least figure counts. A line through the figures
gives the fixed part of a step and the part of each row.
"""

from __future__ import annotations

import cProfile
import ctypes
import json
import platform
import pstats
import statistics
import threading
import time
from array import array
from collections import abc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from llamabatch import LLM, SamplingParams
from llamabatch.client.thread_client import ThreadClient
from llamabatch.config import EngineConfig
from llamabatch.engine.engine import Engine
from llamabatch.llama.context import DecodeCode
from llamabatch.planning.cpu import cpu_name
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.sampling import native
from llamabatch.scheduler.output import DecodeStatus, SchedulerOutput, SpanOutput

FIXED_US, ROW_US = 150.0, 2.0  # targets of the line's two parts
_PROMPT = "The capital of France is"
_WARM = 30  # first steps of a round, which do not count


class Stopwatch:
    """Measures the times from one call of the runner to the next, if the next one decodes `n_rows` rows."""

    def __init__(self, n_rows: int) -> None:
        self.seconds: list[float] = []
        self._n_rows = n_rows
        self._last: float | None = None

    def enter(self, batch: SchedulerOutput) -> None:
        """Notes that a call of the runner begins."""
        counts = len(batch.calls) == 1 and batch.calls[0].is_decode and len(batch.calls[0].spans) == self._n_rows
        if self._last is not None and counts:
            self.seconds.append(time.perf_counter() - self._last)

    def leave(self, batch: SchedulerOutput) -> None:
        """Notes that a call of the runner ends; the time of the next step begins."""
        self._last = time.perf_counter()

    @property
    def us(self) -> float:
        """Median microseconds of a step."""
        return statistics.median(self.seconds[_WARM:]) * 1e6


def compute_nothing(engine: Engine, watch: Stopwatch) -> None:
    """Replaces the engine's runner with a function that gives each row the same token."""
    [token_id] = engine.model.tokenize("a", add_special=False)[:1]
    sampled = SpanOutput(DecodeStatus.OK, (token_id,))
    nothing = SpanOutput(DecodeStatus.OK)

    def run(batch: SchedulerOutput) -> list[SpanOutput]:
        watch.enter(batch)
        results = [sampled if span.output else nothing for span in batch.spans]
        watch.leave(batch)
        return results

    engine._runner.run = run  # type: ignore[method-assign]


def decode_nothing(engine: Engine, watch: Stopwatch) -> None:
    """Keeps the engine's runner, but replaces its llama_decode and its compiled sampler."""
    [token_id] = engine.model.tokenize("a", add_special=False)[:1]
    runner: Any = engine._runner
    whole_run = runner.run
    logits = np.zeros((runner.limits.n_slots, engine.model.n_vocab), np.float32)
    runner._context.decode = lambda struct: DecodeCode.OK
    runner._context.logits = lambda n_rows: logits[:n_rows]
    tokens = array("i", [token_id] * runner.limits.n_slots)

    def sample_rows(*arguments: Any) -> int:
        ctypes.memmove(arguments[-1], tokens.buffer_info()[0], 4 * arguments[2])
        return 0

    native._helper = lambda: native._Helper(SimpleNamespace(lb_sample_rows=sample_rows), "")  # type: ignore[assignment]

    def run(batch: SchedulerOutput) -> list[SpanOutput]:
        watch.enter(batch)
        watch.leave(batch)
        results: list[SpanOutput] = whole_run(batch)
        return results

    runner.run = run


def config(n_rows: int) -> EngineConfig:
    return EngineConfig("tiny", n_ctx=512, n_slots=n_rows, n_threads=1, strategy="batched")


def requests(engine: Engine, n_rows: int, n_steps: int) -> list[Request]:
    prompt = tuple(engine.model.tokenize(_PROMPT))
    params = SamplingParams(temperature=0.0, max_tokens=n_steps, ignore_eos=True)
    return [Request(f"request-{i}", prompt, params, group=i) for i in range(n_rows)]


def in_engine(n_rows: int, n_steps: int, replace: Callable[[Engine, Stopwatch], None] = compute_nothing) -> Stopwatch:
    engine, watch = Engine(config(n_rows)), Stopwatch(n_rows)
    helper = native._helper
    try:
        replace(engine, watch)
        for request in requests(engine, n_rows, n_steps):
            engine.add(request)
        while engine.has_work:
            engine.step()
    finally:
        native._helper = helper
        engine.close()
    return watch


def in_runner(n_rows: int, n_steps: int) -> Stopwatch:
    return in_engine(n_rows, n_steps, decode_nothing)


def in_stream(n_rows: int, n_steps: int) -> Stopwatch:
    client, watch = ThreadClient(config(n_rows)), Stopwatch(n_rows)
    left, done = [n_rows], threading.Event()

    def sink(outputs: abc.Sequence[SequenceOutput]) -> None:
        for output in outputs:
            if output.finished is not None:
                left[0] -= 1
        if not left[0]:
            done.set()

    try:
        client.ask(lambda engine: compute_nothing(engine, watch)).result()
        client.submit(requests(client._engine, n_rows, n_steps), sink, stream=True)
        done.wait(120)
    finally:
        client.close()
    return watch


def in_generate(n_rows: int, n_steps: int) -> Stopwatch:
    watch = Stopwatch(n_rows)
    options = config(n_rows)
    names = ("n_ctx", "n_slots", "n_threads", "strategy")
    with LLM("tiny", **{name: getattr(options, name) for name in names}) as llm:
        client: Any = llm._client
        while not isinstance(client, ThreadClient):
            client = client.inner
        client.ask(lambda engine: compute_nothing(engine, watch)).result()
        params = SamplingParams(temperature=0.0, max_tokens=n_steps, ignore_eos=True)
        llm.generate([_PROMPT] * n_rows, params, progress=False)
    return watch


WAYS: dict[str, Callable[[int, int], Stopwatch]] = {
    "engine": in_engine,
    "stream": in_stream,
    "generate": in_generate,
    "runner": in_runner,
}


def measure(ways: abc.Sequence[str], rows: abc.Sequence[int], n_steps: int, rounds: int) -> dict[str, dict[int, float]]:
    """Returns the microseconds of a step by way and rows. All ways and rows take turns in each round."""
    found: dict[str, dict[int, float]] = {way: dict.fromkeys(rows, float("inf")) for way in ways}
    for _ in range(rounds):
        for way in ways:
            for n_rows in rows:
                found[way][n_rows] = min(found[way][n_rows], WAYS[way](n_rows, n_steps).us)
    return found


def line(times: dict[int, float]) -> tuple[float, float]:
    """Returns (fixed microseconds, microseconds a row). The fit's errors are relative, so that short steps count."""
    rows = np.array(list(times), float)
    us = np.array(list(times.values()))
    (fixed, row), *_ = np.linalg.lstsq(np.column_stack((1 / us, rows / us)), np.ones(len(us)), rcond=None)
    return float(fixed), float(row)


def profile(way: str, n_rows: int, n_steps: int) -> None:
    """Prints the functions that take the most time of their own in a round."""
    profiler = cProfile.Profile()
    profiler.runcall(WAYS[way], n_rows, n_steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
@click.option("--rows", default="1,8,32,64,128", show_default=True)
@click.option("--steps", default=300, show_default=True, help="Tokens of a request.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Default: all.")
@click.option("--profile", "profiled", is_flag=True, help="Instead, profile the first way with the most rows.")
def main(path: Path | None, rows: str, steps: int, rounds: int, ways: tuple[str, ...], profiled: bool) -> None:
    ways, counts = ways or tuple(WAYS), [int(each) for each in rows.split(",")]
    if profiled:
        profile(ways[0], max(counts), steps)
        return
    found = measure(ways, counts, steps, rounds)
    lines = {way: line(times) for way, times in found.items()} if len(counts) > 1 else {}
    table = Table(title=f"microseconds a step, {cpu_name()}, Python {platform.python_version()}", title_justify="left")
    for heading in ("way", *(f"{n}" for n in counts), "fixed", "a row"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way, times in found.items():
        fitted = [f"{value:.3g}" for value in lines.get(way, ())]
        table.add_row(way, *(f"{us:.0f}" for us in times.values()), *fitted)
    Console().print(table)
    if path is not None:
        machine = {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()}
        document = {
            "machine": machine,
            "steps": steps,
            "rounds": rounds,
            "target_us": {"fixed": FIXED_US, "row": ROW_US},
            "us": found,
            "fixed_us": {way: fixed for way, (fixed, _) in lines.items()},
            "row_us": {way: row for way, (_, row) in lines.items()},
        }
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
