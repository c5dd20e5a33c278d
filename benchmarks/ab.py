"""Another revision beside this one: `make bench-ab REF=HEAD~3`. Did a change cost anything?

    python -m benchmarks.ab REF [--pairs N] [--workload NAME]... [--json FILE]

The other revision is unpacked into the user's cache and runs there: on this environment where it wants the same build
of llama.cpp, in one of its own otherwise. Both engines are up at once and run the same requests in turn; each pair
gives a ratio of tokens/s. Printed are the median ratio of this revision over the other and its 95 % bootstrap interval.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import facts, places
from benchmarks.peers.base import LOAD_TIMEOUT_S, SAMPLING, Model, Setup, check_tokens
from benchmarks.peers.child import PROGRAMS, ChildSession
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.workloads import N_SLOTS, WORKLOADS, Workload
from llamabatch.compare.figures import significant
from llamabatch.machine import Machine
from llamabatch.paths import cache_dir
from native_patches.tools import SetupFailure, make_folder, run_logged

COMPARED = ("burst", "ragged", "tiny")
_PAIRS_A_START = 5  # then both start anew: how memory happened to be laid out must not decide
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Side:
    """A revision, and what runs it; `options` of LLM beside those that the workload sets."""

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


def unpack(reference: str) -> tuple[str, Path]:
    """The commit that REF names, and its files in the cache. Raises PeerFailure for one that does not exist."""
    asked = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}"],
        cwd=places.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    commit = asked.stdout.strip()
    if asked.returncode != 0:
        raise PeerFailure(f"{reference!r} is no commit of this repository")
    folder = make_folder(cache_dir() / "ab") / commit[:12]
    if not folder.is_dir():
        done = subprocess.run(["git", "archive", commit], cwd=places.ROOT, capture_output=True, check=True)
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(part)  # our own commit
        os.replace(part, folder)
    return commit[:12], folder


def interpreter(folder: Path, log: Path) -> Path:
    """This environment, if that revision wants the same wheel; else one with its own wheel, made once."""
    asked = subprocess.run(
        [sys.executable, "-m", "native_patches.build", "--print-wheel"], cwd=folder, stdout=subprocess.PIPE, text=True,
        check=False, env=environment(os.environ),
    )  # fmt: skip
    if asked.returncode != 0:
        raise PeerFailure(f"its build of llama.cpp could not be made (folder: {folder})")
    wheel = Path(asked.stdout.strip())
    if wheel.parent.name == places.installed_build():
        return Path(sys.executable)
    venv = folder / ".venv"
    python = venv / "bin" / "python"
    if not (venv / "ready").is_file():
        pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        commands: tuple[list[str | Path], ...] = (
            [sys.executable, "-m", "venv", "--clear", venv],
            [*pip, wheel],
            [*pip, "--editable", folder],
        )
        for command in commands:
            if run_logged(command, log, "installing the other revision") != 0:
                raise PeerFailure(f"the other revision could not be installed (log: {log})")
        (venv / "ready").touch()
    return python


def ratios(setup: Setup, workload: Workload, sides: tuple[Side, Side], pairs: int) -> list[tuple[float, float]]:
    """Tokens/s of both, pair by pair: the same requests within a pair, and each side first in every other one."""
    rng = random.Random(f"ab-{workload.name}")
    model = setup.models[workload.model]
    found: list[tuple[float, float]] = []
    while len(found) < pairs:
        sessions: list[ChildSession] = []
        try:
            for side in sides:
                sessions.append(side.open(setup, workload))
                warm_up = workload.warm_up(rng, model.n_vocab)
                sessions[-1].run(warm_up, streamed=False, timeout_s=LOAD_TIMEOUT_S)
            for _ in range(min(_PAIRS_A_START, pairs - len(found))):
                jobs = workload.jobs(rng, model.n_vocab)
                speeds = [0.0, 0.0]
                for at in (0, 1) if len(found) % 2 == 0 else (1, 0):
                    result = sessions[at].run(jobs, streamed=False, timeout_s=setup.timeout_s)
                    check_tokens(result.tokens, jobs)
                    speeds[at] = result.tokens_per_s
                found.append((speeds[0], speeds[1]))
        finally:
            for session in sessions:
                session.close()
    return found


def interval(values: Sequence[float], share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the median (Efron and Tibshirani, An Introduction to the Bootstrap, ch. 13)."""
    rng = np.random.default_rng(seed)
    drawn = rng.choice(np.asarray(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def verdict(low: float, high: float) -> str:
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference shown"


@click.command()
@click.argument("reference", metavar="REF")
@click.option("--pairs", type=click.IntRange(min=2), default=10, show_default=True)
@click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="Only this; repeatable.")
@click.option("--full", is_flag=True, help="Do not cut the workloads on the large model.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: the cores of this machine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Where the figures go.")
def main(
    reference: str, pairs: int, names: tuple[str, ...], full: bool, threads: int | None, json_file: Path | None
) -> None:
    """Measure this working tree and the revision REF, alternating."""
    env = environment(os.environ)
    chosen = [WORKLOADS[name] for name in names or COMPARED]
    workloads = [workload if full or workload.model == "tiny" else workload.cut() for workload in chosen]
    try:
        with ended_by_signals():
            _compare(env, reference, workloads, pairs, threads or Machine.here().cores, json_file)
    except (PeerFailure, SetupFailure) as failure:
        raise click.ClickException(str(failure)) from failure


def _compare(
    env: dict[str, str], reference: str, workloads: list[Workload], pairs: int, threads: int, json_file: Path | None
) -> None:
    commit, folder = unpack(reference)
    log = places.log_folder() / "ab.log"
    sides = (Side("this", places.ROOT, Path(sys.executable)), Side(commit, folder, interpreter(folder, log)))
    models: dict[str, Model] = places.models({workload.model for workload in workloads}, _say)
    setup = Setup(models, env, Path(sys.executable), None, None, None, places.log_folder(), threads, 600.0)
    shown = Table("workload", "this", commit, "median ratio", "95 % interval", "this is")
    found = {}
    for workload in workloads:
        speeds = ratios(setup, workload, sides, pairs)
        each = [ours / other for ours, other in speeds]
        low, high = interval(each)
        medians = [float(np.median([pair[at] for pair in speeds])) for at in (0, 1)]
        median = float(np.median(each))
        shown.add_row(
            workload.name, *map(significant, medians), f"{median:.3f}", f"{low:.3f}–{high:.3f}", verdict(low, high)
        )
        _say(f"{workload.name}: {median:.3f}, {low:.3f}–{high:.3f}")
        found[workload.name] = {"ratio": median, "interval": [low, high], "tokens_per_s": speeds}
    Console().print(shown)
    if json_file is not None:
        about = facts.facts(facts.command_line("python -m benchmarks.ab"))
        document = {**about, "other": commit, "pairs": pairs, "threads": threads, "workloads": found}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
