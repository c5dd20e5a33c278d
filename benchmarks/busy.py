"""Measures an engine beside busy processes: with one thread, with all threads, and with the number that it chooses.

    python -m benchmarks.busy [--model NAME]... [--neighbours N]... [--rounds N] [--json FILE]

The third engine chooses its number of threads by the times of its steps. All three engines are loaded at once. They run
a burst of 32 requests in turn, beside N processes that each want a whole core; the engine that runs first changes from
round to round. Each engine runs bursts for some seconds before the first round, so that the times of its steps are
known. The median of all rounds counts. The ratio is the third engine's median over the better one of the two others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click

from benchmarks import facts, places
from benchmarks.bench_peers import say
from benchmarks.peers.base import SAMPLING, Setup, check_tokens
from benchmarks.peers.child import PROGRAMS, ChildSession
from benchmarks.process import ended_by_signals, environment, neighbour
from benchmarks.rounds import turned
from benchmarks.workloads import N_SLOTS, WORKLOADS, Workload
from llamabatch.native_build.tools import main_guard
from llamabatch.planning.machine import Machine

MODELS = {"tiny": "tiny", "0.5B": "synth", "1B": "synth 1B"}
ONE, ALL, CHOSEN = "one thread", "all threads", "chosen"
LEAST = 0.9  # least ratio of CHOSEN to the better of ONE and ALL
LEARN_S = 5.0


def start(name: str, setup: Setup, workload: Workload) -> ChildSession:
    threads = 1 if name == ONE else setup.threads
    engine = {
        "strategy": "batched", "instances": 1, "n_slots": N_SLOTS, "n_ctx": workload.n_ctx, "n_threads": threads,
        "n_threads_batch": threads,
    }  # fmt: skip
    program = PROGRAMS / ("ours.py" if name == CHOSEN else "all_threads.py")
    given = {"model": str(setup.models[workload.model].path), "engine": engine, "sampling": SAMPLING}
    return ChildSession(f"busy {name}", program, given, setup)


def measure(setup: Setup, workload: Workload, n: int, rounds: int) -> dict[str, list[float]]:
    """Returns tokens/s of each engine, round by round, beside `n` busy processes."""
    rng = random.Random(f"busy-{workload.model}-{n}")
    found: dict[str, list[float]] = {name: [] for name in (ONE, ALL, CHOSEN)}
    with contextlib.ExitStack() as stack:
        sessions = {name: start(name, setup, workload) for name in found}
        for session in sessions.values():
            stack.callback(session.close)
        for _ in range(n):
            stack.enter_context(neighbour(True, setup.env))

        def run(name: str, jobs: Any) -> float:
            result = sessions[name].run(jobs, streamed=False, timeout_s=setup.timeout_s)
            check_tokens(result.tokens, jobs)
            return result.tokens_per_s

        n_vocab = setup.models[workload.model].n_vocab
        for name in found:
            end = time.monotonic() + LEARN_S
            while time.monotonic() < end:
                run(name, workload.jobs(rng, n_vocab))
        for number in range(rounds):
            jobs = workload.jobs(rng, n_vocab)
            for at in turned(len(found), number):
                name = list(found)[at]
                found[name].append(run(name, jobs))
    return found


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), default=list(MODELS))
@click.option("--neighbours", multiple=True, type=click.IntRange(0, 8), default=(0, 1, 2), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(min=2), help="Default: the cores of this machine.")
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Where the figures go.")
def main(
    models: tuple[str, ...], neighbours: tuple[int, ...], rounds: int, threads: int | None, path: Path | None
) -> None:
    """Measure bursts beside busy processes. Exit code 1 where the choice is not near the better way."""
    about = facts.facts(facts.command_line("python -m benchmarks.busy"))
    cells: list[dict[str, Any]] = []
    with ended_by_signals():
        setup = Setup(
            models=places.models({MODELS[name] for name in models}, say), env=environment(os.environ),
            python=Path(sys.executable), bench_python=None, programs=None, lcp_server=None, logs=places.log_folder(),
            threads=threads or Machine.here().cores, timeout_s=300.0,
        )  # fmt: skip
        click.echo(f"{'model':6}{'busy':>6}" + "".join(f"{name:>13}" for name in (ONE, ALL, CHOSEN)) + f"{'ratio':>8}")
        for name in models:
            burst = dataclasses.replace(WORKLOADS["burst"], model=MODELS[name])
            workload = burst if name == "tiny" else burst.cut()
            for n in neighbours:
                found = measure(setup, workload, n, rounds)
                medians = {way: statistics.median(speeds) for way, speeds in found.items()}
                ratio = medians[CHOSEN] / max(medians[ONE], medians[ALL])
                cells.append({"model": name, "neighbours": n, "tokens_per_s": found, "ratio": round(ratio, 3)})
                click.echo(f"{name:6}{n:6}" + "".join(f"{each:13,.1f}" for each in medians.values()) + f"{ratio:8.2f}")
                if path is not None:
                    document = {**about, "threads": setup.threads, "rounds": rounds, "least": LEAST, "cells": cells}
                    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if any(cell["ratio"] < LEAST for cell in cells):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main_guard(main))
