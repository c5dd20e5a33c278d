"""Measures the cost of prefixes that slots copy, beside another build of llama.cpp: native_patches/0013.

    python -m benchmarks.copies REF [--starts 3] [--rounds 4] [--json FILE]

Both sides run this tree with strategy batched. The other side uses the llama.cpp that the revision REF builds, from the
cache or built now. 6ae7f06~1 is the last revision that copies whole slots, not only used cells. Both engines are loaded
at once and run the same requests in turn: 32 requests that begin with the same tokens, other tokens in each round. The
first round of an engine is reported separately, since it writes the slots for the first time. One short request runs
before it, so that the weights are in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import ab, facts, places
from benchmarks.pairs import Side, interval
from benchmarks.peers.base import LOAD_TIMEOUT_S, Setup
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.workloads import N_SLOTS, Job, Shape, Workload
from llamabatch.config import EngineConfig
from llamabatch.llama.model import Model
from llamabatch.native_build.tools import SetupFailure
from llamabatch.planning.machine import Machine
from llamabatch.tools import workload as bundled

WORKLOADS = (
    Workload("100 tokens in slots of 1,024, tiny", "tiny", (Shape(116, 32),) * N_SLOTS, n_ctx=1024, shared=100),
    Workload("100 tokens in slots of 256, tiny", "tiny", (Shape(116, 32),) * N_SLOTS, n_ctx=256, shared=100),
    Workload("100 tokens in slots of 4,096", "synth", (Shape(116, 4),) * N_SLOTS, n_ctx=4096, shared=100),
    Workload("512 tokens in slots of 768", "synth", (Shape(544, 16),) * N_SLOTS, n_ctx=768, shared=512),
)
BUNDLED = Workload("the bundled prompts", "tiny", (Shape(64, 32),) * N_SLOTS, n_ctx=512)
"""Only the warm-up uses these shapes; the jobs are the prompts of llamabatch compare."""

_MIB = 2**20
_TIMEOUT_S = 600.0
_GENERATED = 32  # tokens for each bundled prompt

Jobs = Callable[[], list[Job]]


def sides(reference: str) -> tuple[Side, Side]:
    """Returns this tree in this environment, and this tree in the revision's. Raises PeerFailure, SetupFailure."""
    commit, folder = ab.unpack(reference)
    python = ab.interpreter(folder, places.log_folder() / "copies.log")
    if python == Path(sys.executable):
        raise PeerFailure(f"{reference} wants the build of llama.cpp that is installed here; name one with another")
    return Side("this", places.ROOT, Path(sys.executable)), Side(f"llama.cpp of {commit}", places.ROOT, python)


def measure(setup: Setup, workload: Workload, pair: Sequence[Side], starts: int, rounds: int, jobs: Jobs) -> Any:
    """Returns milliseconds and resident MiB of each side, by start and round. The order of the sides alternates."""
    found: dict[str, list[list[dict[str, float]]]] = {side.name: [] for side in pair}
    rng = random.Random(f"copies-{workload.name}")
    for start in range(starts):
        with contextlib.ExitStack() as stack:
            sessions = {}
            for side in pair[:: 1 if start % 2 == 0 else -1]:
                sessions[side.name] = side.open(setup, workload)
                stack.callback(sessions[side.name].close)
                warm_up = workload.warm_up(rng, setup.models[workload.model].n_vocab, 1)
                sessions[side.name].run(warm_up, streamed=False, timeout_s=LOAD_TIMEOUT_S)
                found[side.name].append([])
            for number in range(rounds):
                now = jobs()
                for side in pair[:: 1 if (start + number) % 2 == 0 else -1]:
                    session = sessions[side.name]
                    seconds = session.run(now, streamed=False, timeout_s=setup.timeout_s).wall_s
                    resident = sum(psutil.Process(pid).memory_info().rss for pid in session.pids) / _MIB
                    found[side.name][-1].append({"ms": round(1000 * seconds, 1), "resident_mib": round(resident)})
    return found


def summary(found: dict[str, list[list[dict[str, float]]]]) -> dict[str, Any]:
    """Returns medians of time and memory of the first rounds, and the median ratios of the other side's time to ours.

    Args:
        found: result of `measure` with at least two rounds, ours first.
    """
    ours, other = found.values()
    later = [
        that["ms"] / this["ms"]
        for one, two in zip(ours, other, strict=True)
        for this, that in zip(one[1:], two[1:], strict=True)
    ]
    return {
        **{name: {key: statistics.median(start[0][key] for start in of) for key in ("ms", "resident_mib")}
           for name, of in (("first", ours), ("first of the other", other))},
        "first_ratio": statistics.median(two[0]["ms"] / one[0]["ms"] for one, two in zip(ours, other, strict=True)),
        "later_ratio": statistics.median(later),
        "later_interval": interval(later),
    }  # fmt: skip


def _jobs(workload: Workload, setup: Setup) -> Jobs:
    n_vocab = setup.models[workload.model].n_vocab
    rng = random.Random(f"jobs-{workload.name}")
    if workload is not BUNDLED:
        return lambda: workload.jobs(rng, n_vocab)
    path = setup.models[workload.model].path
    model = Model(path, EngineConfig(str(path)))
    try:
        prompts = bundled.load(None, model, workload.n_ctx - _GENERATED).prompts
    finally:
        model.close()
    return lambda: [Job(list(prompt), _GENERATED, 0.0, True) for prompt in prompts]


@click.command(help=__doc__)
@click.argument("reference", metavar="REF")
@click.option("--starts", type=click.IntRange(min=1), default=3, show_default=True, help="Of both engines.")
@click.option("--rounds", type=click.IntRange(min=2), default=4, show_default=True, help="Of each start.")
@click.option("--tiny", is_flag=True, help="The bundled model alone.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(reference: str, starts: int, rounds: int, tiny: bool, json_file: Path | None) -> None:
    workloads = [each for each in (*WORKLOADS, BUNDLED) if each.model == "tiny" or not tiny]
    threads = Machine.here().cores
    document = facts.facts(facts.command_line("python -m benchmarks.copies"))
    results: dict[str, Any] = {}
    table = Table("workload", "first: other / this, ms", "times", "later, times", "95 %", "MiB: other / this")
    try:
        with ended_by_signals():
            pair = sides(reference)
            models = places.models({each.model for each in workloads}, click.echo)
            env = environment(os.environ)
            setup = Setup(models, env, Path(sys.executable), None, None, None, places.log_folder(), threads, _TIMEOUT_S)
            for each in workloads:
                found = measure(setup, each, pair, starts, rounds, _jobs(each, setup))
                short = summary(found)
                results[each.name] = {**each.outline(), **short, "rounds": found}
                one, two = short["first"], short["first of the other"]
                low, high = short["later_interval"]
                table.add_row(
                    each.name, f"{two['ms']:,.0f} / {one['ms']:,.0f}", f"{short['first_ratio']:.2f}",
                    f"{short['later_ratio']:.2f}", f"{low:.2f}–{high:.2f}",
                    f"{two['resident_mib']:,.0f} / {one['resident_mib']:,.0f}",
                )  # fmt: skip
    except (PeerFailure, SetupFailure) as failure:
        raise click.ClickException(str(failure)) from failure
    Console().print(table)
    if json_file is not None:
        about = {"other": pair[1].name, "starts": starts, "rounds": rounds, "threads": threads}
        json_file.write_text(json.dumps({**document, **about, "workloads": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
