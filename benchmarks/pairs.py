"""Compares two ways to run the same engine, side by side: the common part of ab.py and isolation.py.

Both engines are loaded at once and run the same requests in turn; each pair of runs gives a ratio of tokens/s. The
program prints the median ratio of the first side over the second, and its 95 % bootstrap interval.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import facts, places
from benchmarks.peers.base import LOAD_TIMEOUT_S, SAMPLING, Setup, check_tokens
from benchmarks.peers.child import PROGRAMS, ChildSession
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.workloads import N_SLOTS, WORKLOADS, Workload
from llamabatch.native_build.tools import SetupFailure
from llamabatch.planning.machine import Machine
from llamabatch.utils.format import significant

_PAIRS_A_START = 5  # pairs until both engines restart, so that one layout of memory does not decide
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Side:
    """A revision and its interpreter. `options` are more options of LLM, beside those that the workload sets."""

    name: str
    folder: Path
    python: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, setup: Setup, workload: Workload) -> ChildSession:
        threads = setup.threads
        engine = {
            "strategy": "batched", "n_slots": N_SLOTS, "n_ctx": workload.n_ctx, "n_threads": threads,
            "n_threads_batch": threads, **self.options,
        }  # fmt: skip
        start = {"model": str(setup.models[workload.model].path), "engine": engine, "sampling": SAMPLING}
        session = ChildSession(
            f"ab-{self.name}", PROGRAMS / "ours.py", start, setup, python=self.python,
            env={**setup.env, "PYTHONPATH": str(self.folder)},
        )  # fmt: skip
        if Path(session.facts["folder"]).parent.resolve() != self.folder.resolve():
            session.close()
            raise PeerFailure(f"{self.name} was to run from {self.folder}, not from {session.facts['folder']}")
        return session


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a command that compares two sides; the command passes their values to `compare`."""
    for option in (
        click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="For the figures."),
        click.option("--threads", type=click.IntRange(min=1), help="Default: the cores of this machine."),
        click.option("--full", is_flag=True, help="Do not cut the workloads on the large model."),
        click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="Repeatable."),
        click.option("--pairs", type=click.IntRange(min=2), default=10, show_default=True),
    ):
        command = option(command)
    return command


def compare(
    find_sides: Callable[[], tuple[Side, Side]],
    usual: Sequence[str],
    program: str,
    *,
    pairs: int,
    names: tuple[str, ...],
    full: bool,
    threads: int | None,
    json_file: Path | None,
    **about: Any,
) -> None:
    """Measures both sides and prints the ratios.

    Args:
        find_sides: returns both sides; called after the signal handlers are set.
        usual: workloads that are measured if `names` is empty.
        program: the command line, without its arguments.
        about: more entries of the JSON file.

    Raises:
        click.ClickException: a side cannot be built or measured.
    """
    chosen = [WORKLOADS[name] for name in names or usual]
    workloads = [workload if full or workload.model == "tiny" else workload.cut() for workload in chosen]
    threads = threads or Machine.here().cores
    try:
        with ended_by_signals():
            sides = find_sides()
            found = _measured(sides, workloads, pairs, threads)
    except (PeerFailure, SetupFailure) as failure:
        raise click.ClickException(str(failure)) from failure
    if json_file is not None:
        known = {**facts.facts(facts.command_line(program)), "other": sides[1].name, **about}
        document = {**known, "pairs": pairs, "threads": threads, "workloads": found}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _measured(sides: tuple[Side, Side], workloads: list[Workload], pairs: int, threads: int) -> dict[str, Any]:
    env = environment(os.environ)
    models = places.models({workload.model for workload in workloads}, say)
    setup = Setup(models, env, Path(sys.executable), None, None, None, places.log_folder(), threads, 600.0)
    one, other = (side.name for side in sides)
    shown = Table("workload", one, other, "median ratio", "95 % interval", f"{one} is")
    found = {}
    for workload in workloads:
        speeds = ratios(setup, workload, sides, pairs)
        each = [first / second for first, second in speeds]
        low, high = interval(each)
        median = float(np.median(each))
        medians = [float(np.median([pair[at] for pair in speeds])) for at in (0, 1)]
        shown.add_row(
            workload.name, *map(significant, medians), f"{median:.3f}", f"{low:.3f}–{high:.3f}", verdict(low, high)
        )
        say(f"{workload.name}: {median:.3f}, {low:.3f}–{high:.3f}")
        found[workload.name] = {"ratio": median, "interval": [low, high], "tokens_per_s": speeds}
    Console().print(shown)
    return found


def ratios(setup: Setup, workload: Workload, sides: tuple[Side, Side], pairs: int) -> list[tuple[float, float]]:
    """Returns tokens/s of both sides, pair by pair. Both sides of a pair run the same requests; their order alternates.

    The order of loading alternates with each start. On a machine of two cores the side that was loaded first was 3 %
    slower: a commit against itself gave 0.966.
    """
    rng = random.Random(f"ab-{workload.name}")
    model = setup.models[workload.model]
    found: list[tuple[float, float]] = []
    for start in itertools.count():
        if len(found) >= pairs:
            break
        sessions: dict[int, ChildSession] = {}
        try:
            for at in (0, 1) if start % 2 == 0 else (1, 0):
                sessions[at] = sides[at].open(setup, workload)
                warm_up = workload.warm_up(rng, model.n_vocab)
                sessions[at].run(warm_up, streamed=False, timeout_s=LOAD_TIMEOUT_S)
            for _ in range(min(_PAIRS_A_START, pairs - len(found))):
                jobs = workload.jobs(rng, model.n_vocab)
                speeds = [0.0, 0.0]
                for at in (0, 1) if len(found) % 2 == 0 else (1, 0):
                    result = sessions[at].run(jobs, streamed=False, timeout_s=setup.timeout_s)
                    check_tokens(result.tokens, jobs)
                    speeds[at] = result.tokens_per_s
                found.append((speeds[0], speeds[1]))
        finally:
            for session in sessions.values():
                session.close()
    return found


def interval(values: Sequence[float], share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of the median.

    See Efron and Tibshirani, An Introduction to the Bootstrap, ch. 13.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.choice(np.asarray(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def verdict(low: float, high: float) -> str:
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference shown"


def say(text: str) -> None:
    click.echo(text, err=True)
