"""`llamabatch compare`: runs every strategy on the same prompts, and writes a table, a JSON file, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import engine_options, json_option, model_option, plot_option
from llamabatch.cli.param_types import File, Names, Numbers
from llamabatch.cli.progress import CompareProgress
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools.compare.document import document
from llamabatch.tools.compare.run import Settings, run
from llamabatch.tools.compare.table import show
from llamabatch.utils import interrupts
from llamabatch.utils.console import check_targets, write_report


@click.command(cls=GroupedCommand)
@model_option
@click.option(
    "--prompts", type=File(), help="Text file with one prompt a line, or JSONL; default: the bundled prompts."
)
@click.option("--strategies", type=Names(), default="all", show_default=True, help=f"Of {', '.join(STRATEGIES)}.")
@click.option("-n", "--max-tokens", type=int, default=64, show_default=True, help="Tokens to generate for each prompt.")
@click.option(
    "--slots",
    "--n-slots",
    "slots",
    type=Numbers(),
    default="auto",
    show_default=True,
    help="Sequences at once; a list measures each size.",
)
@json_option
@plot_option
@click.option(
    "--baseline/--no-baseline", default=True, show_default=True, help="Measure a loop over llama_cpp.Llama too."
)
@click.option("--rounds", type=int, default=1, show_default=True, help="Measure so many times and show the median.")
@engine_options(exclude=("strategy", "n_slots", "isolate"))
def compare(json_file: Path | None, plot_file: Path | None, engine: dict[str, Any], **settings: Any) -> None:
    """Compare all strategies on the same prompts, each alone in fresh processes.

    Exit code 1 if a strategy failed; its row shows the error.
    """
    interrupts.careful()
    chosen = Settings(engine=engine, **settings)
    check_targets(json_file, plot_file)
    with CompareProgress() as progress:
        report = run(chosen, progress)
    write_report(report, json_file, plot_file, show=show, document=document, plot="llamabatch.tools.compare.plot")
    if report.failed:
        click.get_current_context().exit(1)
