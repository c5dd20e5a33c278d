"""`llamabatch compare`: every strategy on the same prompts; a table, a sentence, a file, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from llamabatch.cli.options import File, engine_options, model_option
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools.compare.document import document
from llamabatch.tools.compare.report import Report
from llamabatch.tools.compare.run import Settings, run
from llamabatch.tools.compare.table import show
from llamabatch.utils import interrupts
from llamabatch.utils.checks import counted
from llamabatch.utils.console import check_targets, console, sentence, write_json
from llamabatch.utils.format import seconds
from llamabatch.utils.progress import HasBar


def write(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    """The table to stdout, unless JSON goes there; JSON and picture to their files."""
    if str(json_file) != "-":
        show(report, console())
    write_json(document(report), json_file)
    if plot_file is not None:
        from llamabatch.tools.compare.plot import draw  # matplotlib is optional, and takes a second to import

        draw(report, plot_file)


# ----------------------------------------------------------------------------------------------------
# How far a comparison is, on stderr: a bar on a terminal, else a line for each run that is over.


class StderrProgress(HasBar):
    """The Progress of the command line; a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._label, self._total = "", 0
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )

    def start(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        if self._bar is not None:
            self._task = self._bar.add_task(escape(label), total=total)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def end(self, wall_s: float | None, error: str | None) -> None:
        if self._bar is not None:
            self._bar.remove_task(self._task)
        if wall_s is not None:
            sentence(self._console, f"{self._label}: {counted(self._total, 'request')} in {seconds(wall_s)}")
        else:
            sentence(self._console, f"{self._label}: failed: {error}")


_FILE = File()


class Names(click.ParamType):  # type: ignore[type-arg]  # generic in some releases of click only
    """Words with commas between them; "all" is none."""

    name = "all|names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        if not names:
            self.fail(f"{value!r} names no strategy; give all, or some of {', '.join(STRATEGIES)}", param, ctx)
        return () if "all" in names else names


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them; "auto" is none."""

    name = "auto|integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return () if value == "auto" else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor a list such as 1,2,4,8", param, ctx)


@click.command(short_help="Measure all strategies on the same prompts.")
@model_option
@click.option("--prompts", type=_FILE, help="Text file with one prompt a line, or JSONL; default: the bundled prompts.")
@click.option("--strategies", type=Names(), default="all", show_default=True, help=f"Of {', '.join(STRATEGIES)}.")
@click.option("-n", "--max-tokens", type=int, default=64, show_default=True, help="Tokens to generate for each prompt.")
@click.option(
    "--slots", type=Numbers(), default="auto", show_default=True, help="Sequences at once; a list measures each size."
)
@click.option("--json", "json_file", type=_FILE, help="Write everything as JSON; '-': to stdout, instead of the table.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw a picture: .png, .svg or .pdf. Needs llamabatch[tools].")
@click.option(
    "--baseline/--no-baseline", default=True, show_default=True, help="Measure a loop over llama_cpp.Llama too."
)
@click.option("--rounds", type=int, default=1, show_default=True, help="Measure that often and show the median.")
@engine_options(exclude=("strategy", "n_slots", "isolate"))
def compare(json_file: Path | None, plot_file: Path | None, engine: dict[str, Any], **settings: Any) -> None:
    """Compare all strategies on the same prompts, each alone in fresh processes.

    Exit code 1 if a strategy failed; its row then tells why.
    """
    interrupts.careful()
    chosen = Settings(engine=engine, **settings)
    check_targets(json_file, plot_file)
    with StderrProgress() as progress:
        report = run(chosen, progress)
    write(report, json_file, plot_file)
    if report.failed:
        click.get_current_context().exit(1)
