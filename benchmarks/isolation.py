"""What isolation costs: the engine in a child process beside one in the process that asks.

    python -m benchmarks.isolation [--pairs N] [--workload NAME]... [--json FILE]

Both are up at once and run the same requests in turn, as in benchmarks/ab.py; each pair gives a ratio of tokens/s.
Printed are the median ratio of isolate=True over isolate=False and its 95 % bootstrap interval.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import facts, places
from benchmarks.ab import Side, interval, ratios
from benchmarks.peers.base import Setup
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.workloads import WORKLOADS, Workload
from llamabatch.compare.figures import significant
from llamabatch.machine import Machine
from native_patches.tools import SetupFailure

COMPARED = ("burst", "tiny")
MOST_LOSS = 0.03  # of throughput, on the burst workload


@click.command()
@click.option("--pairs", type=click.IntRange(min=2), default=10, show_default=True)
@click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="Only this; repeatable.")
@click.option("--full", is_flag=True, help="Do not cut the workloads on the large model.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: the cores of this machine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Where the figures go.")
def main(pairs: int, names: tuple[str, ...], full: bool, threads: int | None, json_file: Path | None) -> None:
    """Measure isolate=True beside isolate=False, alternating."""
    env = environment(os.environ)
    chosen = [WORKLOADS[name] for name in names or COMPARED]
    workloads = [workload if full or workload.model == "tiny" else workload.cut() for workload in chosen]
    try:
        with ended_by_signals():
            _compare(env, workloads, pairs, threads or Machine.here().cores, json_file)
    except (PeerFailure, SetupFailure) as failure:
        raise click.ClickException(str(failure)) from failure


def _compare(env: dict[str, str], workloads: list[Workload], pairs: int, threads: int, json_file: Path | None) -> None:
    models = places.models({workload.model for workload in workloads}, _say)
    setup = Setup(models, env, Path(sys.executable), None, None, None, places.log_folder(), threads, 600.0)
    python = Path(sys.executable)
    sides = (Side("isolated", places.ROOT, python, {"isolate": True}), Side("here", places.ROOT, python))
    shown = Table("workload", "isolated", "here", "median ratio", "95 % interval")
    found: dict[str, Any] = {}
    for workload in workloads:
        speeds = ratios(setup, workload, sides, pairs)
        each = [isolated / here for isolated, here in speeds]
        low, high = interval(each)
        median = float(np.median(each))
        medians = [float(np.median([pair[at] for pair in speeds])) for at in (0, 1)]
        shown.add_row(workload.name, *map(significant, medians), f"{median:.3f}", f"{low:.3f}–{high:.3f}")
        _say(f"{workload.name}: {median:.3f}, {low:.3f}–{high:.3f}")
        found[workload.name] = {"ratio": median, "interval": [low, high], "tokens_per_s": speeds}
    Console().print(shown)
    if json_file is not None:
        about = facts.facts(facts.command_line("python -m benchmarks.isolation"))
        document = {**about, "most_loss": MOST_LOSS, "pairs": pairs, "threads": threads, "workloads": found}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
