"""Measures every strategy on four kinds of work: one request, a burst, a ragged list, a trickle.

    python benchmarks/strategies.py -m tiny --rounds 3 --json benchmarks/results/strategies-tiny.json

All strategies and the loop over llama_cpp.Llama run in turn for several rounds, in children of this process. Each round
has new random token ids, decoding is greedy and ignores end-of-generation tokens. Only ratios within one run count. The
figure of a trickle is the number of requests over their summed latency; all other figures are generated tokens/s.
"""

from __future__ import annotations

import dataclasses
import json
import math
import queue
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from llamabatch import EngineConfig, Request, SamplingParams
from llamabatch.client.process_client import ChildClient, RouterClient
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import new_group
from llamabatch.tools.compare.measure import BASELINE, BASELINE_PROGRAM
from llamabatch.tools.machine_facts import MachineFacts

STRATEGIES = (BASELINE, "sequential", "length-sorted", "interleaved", "static", "batched", "multi-instance", "auto")
Client = ChildClient | RouterClient
Shape = tuple[int, int]  # prompt tokens, generated tokens


def one() -> list[Shape]:
    return [(64, 64)]


def burst() -> list[Shape]:
    return [(64, 64)] * 32


def ragged() -> list[Shape]:
    rng = random.Random(1)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    return [(log_uniform(16, 256), log_uniform(8, 256)) for _ in range(96)]


def trickle() -> list[Shape]:
    return [(64, 32)] * 8


def requests(shapes: list[Shape], n_vocab: int, rng: random.Random) -> list[Request]:
    group, now = new_group(), time.perf_counter()
    return [
        Request(
            f"{group}-{i}",
            tuple(rng.randrange(300, n_vocab - 300) for _ in range(prompt)),
            SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True),
            arrival_s=now,
            group=group,
        )
        for i, (prompt, generated) in enumerate(shapes)
    ]


def together(client: Client, shapes: list[Shape], rng: random.Random) -> float:
    """Submits all requests at once and returns the generated tokens/s."""
    todo = requests(shapes, client.model.n_vocab, rng)
    events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
    start = time.perf_counter()
    client.submit(todo, events.put)
    tokens = done = 0
    while done < len(todo):
        for event in events.get():
            assert event.finished is not None
            assert event.finished.error is None, event.finished.error
            tokens += len(event.finished.token_ids)
            done += 1
    return tokens / (time.perf_counter() - start)


def one_by_one(client: Client, shapes: list[Shape], rng: random.Random, gap_s: float) -> float:
    """Submits a request every gap_s seconds; returns the number of requests over their summed latency."""
    events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
    for shape in shapes:
        client.submit(requests([shape], client.model.n_vocab, rng), events.put)
        time.sleep(gap_s)
    latencies: list[float] = []
    while len(latencies) < len(shapes):
        latencies += [event.finished.timings.total_s for event in events.get() if event.finished]
    return len(latencies) / sum(latencies)


def measure(strategy: str, config: dict[str, Any], seed: int, gap_s: float | None) -> dict[str, float]:
    """Measures one round of one strategy in new child processes, after a warm-up."""
    client = connect(strategy, config)
    rng = random.Random(seed)
    try:
        together(client, [(64, 4)] * 32, rng)
        works: dict[str, Callable[[], list[Shape]]] = {"one": one, "burst": burst, "ragged": ragged}
        figures = {name: together(client, shapes(), rng) for name, shapes in works.items()}
        if gap_s is not None and strategy != BASELINE:
            figures["trickle"] = one_by_one(client, trickle(), rng, gap_s)
        return figures
    finally:
        client.close()


def connect(strategy: str, config: dict[str, Any]) -> Client:
    if strategy == BASELINE:
        return ChildClient(EngineConfig.from_options(config["model"], {**options(config), "strategy": "sequential"}),
                           program=BASELINE_PROGRAM)  # fmt: skip
    engine = EngineConfig.from_options(config["model"], {**options(config), "strategy": strategy})
    return RouterClient(engine) if strategy == "multi-instance" else ChildClient(engine)


def options(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "model"}


def table(medians: dict[str, dict[str, float]], works: list[str]) -> Table:
    """Returns a table of medians, with the ratio to the best strategy of each work in brackets."""
    shown = Table("strategy", *works)
    for strategy, figures in medians.items():
        best = {w: max(f[w] for f in medians.values() if w in f) for w in works}
        cells = [f"{figures[w]:,.1f} ({figures[w] / best[w]:.2f})" if w in figures else "" for w in works]
        shown.add_row(strategy, *cells)
    return shown


@click.command()
@click.option("-m", "--model", default="tiny")
@click.option("--rounds", default=3)
@click.option("--n-slots", default=32)
@click.option("--n-ctx", default=512)
@click.option("--gap", default=0.2, help="Seconds between the requests of the trickle.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(model: str, rounds: int, n_slots: int, n_ctx: int, gap: float, path: Path | None) -> None:
    config = {"model": model, "n_slots": n_slots, "n_ctx": n_ctx}
    found: dict[str, list[dict[str, float]]] = {strategy: [] for strategy in STRATEGIES}
    for number in range(rounds):
        for strategy in STRATEGIES:
            found[strategy].append(measure(strategy, config, number, gap))
            click.echo(f"round {number + 1}, {strategy}: {found[strategy][-1]}", err=True)
    works = ["one", "burst", "ragged", "trickle"]
    medians = {
        strategy: {w: statistics.median(r[w] for r in rows) for w in works if w in rows[0]}
        for strategy, rows in found.items()
    }
    Console().print(table(medians, works))
    if path is not None:
        document = {
            "machine": dataclasses.asdict(MachineFacts.here()),
            "model": Path(model).name,
            "options": options(config),
            "gap_s": gap,
            "rounds": found,
            "medians": medians,
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
