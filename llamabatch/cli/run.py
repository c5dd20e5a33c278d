"""`llamabatch run`: runs a file of prompts, and writes a file of results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from llamabatch.chat.options import template_source
from llamabatch.cli import echo_wrapped
from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import (
    adapters_of,
    chat_template_option,
    engine_options,
    engine_variables,
    form_options,
    lora_option,
    model_option,
    sampling_options,
)
from llamabatch.cli.param_types import Columns, File, Shard
from llamabatch.errors import OutputError
from llamabatch.jobs.job import JobInterrupted, preview
from llamabatch.jobs.job import run as run_job
from llamabatch.jobs.output.output import ORDERS, OutputOptions
from llamabatch.jobs.output.parquet import COMPRESSIONS
from llamabatch.jobs.output.records import SHAPES, RecordOptions
from llamabatch.jobs.progress import StderrProgress
from llamabatch.jobs.rows import ReadOptions, Task
from llamabatch.jobs.settings import Settings
from llamabatch.jobs.summary import Summary
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils import interrupts
from llamabatch.utils.console import check_targets, write_json, write_plot
from llamabatch.utils.paths import AUTO


@click.command(cls=GroupedCommand)
@click.argument("inputs", nargs=-1, metavar="IN...")
@click.argument("output", metavar="OUT", default="")
@model_option
@click.option("--prompt", help="Jinja2 template of each prompt, over the columns: 'Translate: {{ text }}'.")
@click.option("--template", help="The same in the older notation, 'Translate: {text}', too.  [default: {prompt}]")
@click.option("--chat", is_flag=True, help="Treat each prompt as a user's message, through the chat template.")
@click.option("--system", help="With --chat: a system message in front; may be a template, too.")
@chat_template_option
@click.option("--embed", is_flag=True, help="Embed each prompt; generate nothing.")
@click.option(
    "--image-column", "image_columns", type=Columns(), metavar="NAMES",
    help="Columns with pictures, placed before the text of a chat: bytes, or paths from the folder of IN.",
)  # fmt: skip
@click.option(
    "--audio-column", "audio_columns", type=Columns(), metavar="NAMES", help="The same for sounds.",
)  # fmt: skip
@click.option("--id-column", help="Column of the ids; '' numbers the rows.  [default: id or custom_id, else numbers]")
@click.option(
    "--params-from", type=Columns(), metavar="NAMES",
    help="With a template: columns that are parameters of their row, as 'max_tokens,seed'; all others are data.",
)  # fmt: skip
@click.option("--keep", type=Columns(), help="Columns of IN to copy to OUT, as 'name,label'; all: every column.")
@click.option("--answer", default="text", show_default=True, help="The column of OUT that holds the generated text.")
@click.option("--parse", is_flag=True, help="With --json-schema: its fields are columns of OUT, too.")
@sampling_options
@form_options
@lora_option
@click.option(
    "--order", type=click.Choice(ORDERS), default="input", show_default=True, help="Order of the rows in OUT."
)
@click.option(
    "--shape", type=click.Choice(SHAPES), default="auto", show_default=True,
    help="Form of the rows in OUT; auto: results of OpenAI's batch API for lines of its format, else flat rows.",
)  # fmt: skip
@click.option(
    "--compression", type=click.Choice(COMPRESSIONS), default=COMPRESSIONS[0], show_default=True,
    help="Compression of a Parquet file's columns; others are compressed where OUT ends with .gz or .zst.",
)  # fmt: skip
@click.option("--token-ids", is_flag=True, help="Write the ids of the generated tokens.")
@click.option("--times", is_flag=True, help="Write the times at which each row waited, began and ended.")
@click.option(
    "--ray", "address", metavar="ADDRESS",
    help="Run --shards on the nodes of a Ray cluster: auto, HOST:PORT, local. Needs llamabatch[ray].",
)  # fmt: skip
@click.option("--shards", type=int, metavar="N", help="With --ray: the number of parts, the same at each start.")
@click.option("--limit", type=int, help="Only the first so many rows of the inputs.")
@click.option("--shard", type=Shard(), default="1/1", show_default=True, help="The i-th of n equal parts of the rows.")
@click.option("--retry-errors", is_flag=True, help="Run the rows again that ended in OUT with an error.")
@click.option(
    "--max-start-errors", type=int, default=20, show_default=True,
    help="Stop if the first N rows all fail with the same error, and write none of them; 0: never.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Continue OUT although model, inputs or parameters have changed.")
@click.option("--dry-run", is_flag=True, help="Check every line and print the plan; load no weights, write nothing.")
@click.option("--sample", type=int, default=0, help="With --dry-run: run so many rows, to say what the job takes.")
@click.option("--price-per-hour", type=float, help="Price of an hour of this machine; the summary has the cost.")
@click.option("--json", "json_file", type=File(), help="Write the summary as JSON; '-': to stdout.")
@click.option("--plot", "plot_file", type=File(), help="Draw a report: .png, .svg or .pdf. Needs llamabatch[tools].")
@click.option("--metrics-file", help="Write a file of figures for Prometheus. Needs llamabatch[metrics].")
@engine_options(exclude=("isolate", "max_queue", "max_wait_ms"))
def run(
    inputs: tuple[str, ...], output: str, dry_run: bool, sample: int, json_file: Path | None, plot_file: Path | None,
    chat: bool, embed: bool, sampling: dict[str, Any], loras: tuple[tuple[str, float], ...],
    address: str | None, shards: int | None, **given: Any,
) -> None:  # fmt: skip
    """Run each row of IN (files, globs or '-') and write one result a row to OUT (a file or '-').

    IN has prompts as JSONL, CSV, TSV, plain text, Parquet or Excel; OUT is JSONL, CSV, TSV or Parquet.

    The same command again goes on where it was stopped or killed. Exit codes: 0 all rows are done; 1 some rows are
    errors; 2 wrong usage; 3 a failure of the engine or the disk, or a missing package; 130 interrupted (143 by SIGTERM,
    129 when the terminal closed); 141 the reader of stdout has left.
    """
    if not inputs:
        missing, name = ("OUT is", shlex.quote(output)) if output else ("IN and OUT are", "prompts.csv")
        raise click.UsageError(f"{missing} missing; for example: llamabatch run {name} results.jsonl")
    if chat and embed:
        raise click.UsageError("give --chat or --embed, not both")
    if sample and not dry_run:
        raise click.UsageError("--sample goes with --dry-run; --limit runs the first rows of a job")
    if str(json_file) == "-" and output == "-":
        raise click.UsageError("--json - and OUT - would both go to stdout; give one of them a file")
    if (address is None) != (shards is None):
        raise click.UsageError("--ray and --shards go together: --ray auto --shards 4")
    if address is not None and plot_file is not None:
        raise click.UsageError(
            "--plot draws the run of one engine, so it does not work with --ray; --json has the figures"
        )
    check_targets(json_file, plot_file)
    task: Task = "chat" if chat else "embedding" if embed else "completion"
    settings = _settings(inputs, output, task, sampling, loras, given)
    context = click.get_current_context()
    if dry_run:
        found = preview(settings, sample)
        write_json(found.document(), json_file)
        echo_wrapped(found.describe(), err=str(json_file) == "-")
        context.exit(found.exit_code)
    with StderrProgress() as progress:
        try:
            if address is not None and shards is not None:
                from llamabatch.integrations import ray_jobs  # imported late: ray takes a second to import

                summary = ray_jobs.run(settings, address, shards, progress)
            else:
                summary = run_job(settings, progress)
        except JobInterrupted as interruption:
            summary = interruption.summary
            interrupts.acknowledge()
            again = "the same command begins again" if output == "-" else "the same command continues from there"
            progress.say(f"Interrupted: what had finished is written; {again}.")
        except OutputError as error:
            if isinstance(error.__cause__, BrokenPipeError):  # the reader of stdout has closed it
                raise error.__cause__ from None
            raise
    _report(summary, json_file, plot_file)
    context.exit(summary.exit_code)


def _settings(
    inputs: tuple[str, ...], output: str, task: Task, sampling: dict[str, Any], loras: tuple[tuple[str, float], ...],
    given: dict[str, Any],
) -> Settings:  # fmt: skip
    """Returns the settings of a job. Removes the used options from `sampling` and `given`. Raises UsageError."""
    seed = sampling.pop("seed", None)
    reading = ReadOptions(
        SamplingParams.from_options(**sampling),
        task=task,
        chat_template=template_source(given.pop("chat_template")),
        **{name: given.pop(name) for name in ("template", "prompt", "system", "id_column", "keep", "params_from")},
        image_columns=given.pop("image_columns"),
        audio_columns=given.pop("audio_columns"),
        **{name: given.pop(name) for name in ("shard", "limit")},
    )
    records = RecordOptions(**{name: given.pop(name) for name in ("shape", "token_ids", "times", "answer", "parse")})
    writing = OutputOptions(
        records=records, **{name: given.pop(name) for name in ("order", "retry_errors", "force", "compression")}
    )
    if reading.has_media:
        given["engine"].setdefault("mmproj", AUTO)
    given["engine"]["adapters"], scales = adapters_of(loras)
    return Settings(inputs, output, reading=reading, writing=writing, seed=seed, adapters=scales, **given)


def _report(summary: Summary, json_file: Path | None, plot_file: Path | None) -> None:
    echo_wrapped(summary.describe())
    write_json(summary.document(), json_file)
    if summary.timeline.points:
        write_plot("llamabatch.jobs.plot", summary, plot_file)


engine_variables(run)
