"""`llamabatch tune`: measures what is fastest for a model on this machine, and keeps it as a profile."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from llamabatch.cli.options import File, engine_options, model_option
from llamabatch.config import EngineConfig
from llamabatch.tools.tune.report import Report, document
from llamabatch.tools.tune.run import NORMAL_S, QUICK_S, Settings, run
from llamabatch.tools.tune.table import show
from llamabatch.utils import interrupts
from llamabatch.utils.console import check_targets, console, sentence, write_json
from llamabatch.utils.progress import HasBar

# ----------------------------------------------------------------------------------------------------
# Where a report goes: the terminal, a JSON file, a picture.


def write(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    """The table to stdout, unless JSON goes there; JSON and picture to their files."""
    if str(json_file) != "-":
        show(report, console())
    write_json(document(report), json_file)
    if plot_file is not None:
        from llamabatch.tools.tune.plot import draw  # matplotlib is optional, and takes a second to import

        draw(report, plot_file)


# ----------------------------------------------------------------------------------------------------
# How far tuning is, on stderr: a bar on a terminal, and a line for each part that is over.


class StderrProgress(HasBar):
    """The Progress of the command line; a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._title, self._share, self._done, self._before = "", 0.0, 0.0, 0.0
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("loading", total=1.0)

    def start(self, title: str, share: float) -> None:
        self._title, self._share, self._done = title, share, 0.0
        self._show()

    def advance(self, share: float) -> None:
        self._done = min(1.0, self._done + share)
        self._show()

    def end(self, outcome: str) -> None:
        self._before += self._share
        self._share = 0.0
        sentence(self._console, f"{self._title}: {outcome}")

    def _show(self) -> None:
        if self._bar is not None:
            completed = self._before + self._share * self._done
            self._bar.update(self._task, description=escape(self._title), completed=completed)


_FILE = File()
# what tuning does not choose, and what decides its figures
_GIVEN = ("n_gpu_layers", "main_gpu", "tensor_split", "type_k", "type_v")


@click.command(short_help="Measure what is fastest for a model here, and keep it.")
@model_option
@click.option("--json", "json_file", type=_FILE, help="Write everything as JSON; '-': to stdout, instead of the table.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw a picture: .png, .svg or .pdf. Needs llamabatch[tools].")
@click.option(
    "--quick",
    is_flag=True,
    help=f"Take about {QUICK_S:.0f} s instead of {NORMAL_S:.0f} s: fewer, shorter measurements.",
)
@click.option("--seconds", type=float, help="Take about so long instead; longer means less noise.")
@click.option(
    "--allow-numerics", is_flag=True, help="Choose the types of the KV cache, too, which changes what is computed."
)
@click.option(
    "--p95-inter-token-ms",
    type=float,
    help="Find the number of slots for which the p95 of the time between two tokens is at most this; it is kept, too.",
)
@engine_options(exclude=tuple(field.name for field in fields(EngineConfig) if field.name not in _GIVEN))
def tune(
    model: str,
    json_file: Path | None,
    plot_file: Path | None,
    quick: bool,
    seconds: float | None,
    allow_numerics: bool,
    p95_inter_token_ms: float | None,
    engine: dict[str, Any],
) -> None:
    """Measure what is fastest for a model on this machine, and keep it: engines use it from then on.

    A choice is taken only if it is better than the rule by more than the noise.
    """
    interrupts.careful()
    if quick and seconds is not None:
        raise click.UsageError("--quick and --seconds both say how long to measure; give one of them")
    time_s = seconds if seconds is not None else QUICK_S if quick else NORMAL_S
    settings = Settings(model, time_s, allow_numerics, p95_inter_token_ms, engine)
    check_targets(json_file, plot_file)
    with StderrProgress() as progress:
        report = run(settings, progress)
    write(report, json_file, plot_file)
