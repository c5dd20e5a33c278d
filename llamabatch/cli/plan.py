"""`llamabatch plan`: shows the slots, contexts and engines that fit in memory, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llamabatch.cli import echo_wrapped
from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import engine_options, model_option, plot_option
from llamabatch.cli.param_types import AutoInt, File
from llamabatch.tools.plan.kubernetes import model_in_pod, patch, yaml
from llamabatch.tools.plan.report import Report, document
from llamabatch.tools.plan.run import Question, answer, size_in_bytes
from llamabatch.tools.plan.table import show
from llamabatch.utils.console import check_targets, write_json, write_plot, write_report

_PLOT = "llamabatch.tools.plan.plot"


@click.command(cls=GroupedCommand)
@model_option
@click.option(
    "--slots", "--n-slots", "slots", type=AutoInt(), help="Requests computed at once; by default as many as fit."
)
@click.option("--prompts", type=File(), help="Text file with one prompt a line, or JSONL: the longest decides n_ctx.")
@click.option(
    "-n", "--max-tokens", type=int, default=256, show_default=True, help="With --prompts: tokens to generate."
)
@click.option("--memory", help="Free memory to plan for, such as 8G; by default the free memory here.")
@click.option(
    "--load",
    type=int,
    help="Requests that arrive at once; by default the number of --prompts.",
)
@click.option("--latency", type=float, help="Limit of the time between two tokens (p95), milliseconds.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--kubernetes",
    is_flag=True,
    help="Print a kustomize patch: model, memory, CPUs and options of a container. YAML; with --json: JSON.",
)
@plot_option
@engine_options(exclude=("n_slots",))
def plan(
    model: str, slots: Any, memory: str | None, latency: float | None, as_json: bool, kubernetes: bool,
    plot_file: Path | None, engine: dict[str, Any], **others: Any,
) -> None:  # fmt: skip
    """Show what fits in memory: slots, context, number of engines, the best strategy, what to change. Loads no model.

    Exit code 1 if the plan asked for does not fit.
    """
    if slots is not None:
        engine["n_slots"] = slots
    free = None if memory is None else size_in_bytes(memory)
    question = Question(model, engine, memory_bytes=free, latency_ms=latency, **others)
    check_targets(None, plot_file)
    report = answer(question)
    if kubernetes and report.fits:
        write_patch(report, {"model": model_in_pod(question.model), **engine}, as_json, plot_file)
    elif kubernetes:
        echo_wrapped(str(report.refusal))
    else:
        json_file = Path("-") if as_json else None
        write_report(report, json_file, plot_file, show=show, document=document, plot=_PLOT)
    if not report.fits:
        click.get_current_context().exit(1)


def write_patch(report: Report, engine: dict[str, Any], as_json: bool, plot_file: Path | None) -> None:
    """Writes the kustomize patch to stdout, and the picture to its file."""
    operations = patch(report, engine)
    if as_json:
        write_json(operations, Path("-"))
    else:
        click.echo(yaml(operations, report), nl=False)
    write_plot(_PLOT, report, plot_file)
