"""`llamabatch eval`: runs tasks of the language model evaluation harness on one model, with all requests at once."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import engine_options, model_option
from llamabatch.cli.param_types import File, Texts
from llamabatch.errors import ConfigError, LlamaBatchError, OutputError, SetupError
from llamabatch.utils.console import check_targets, console, print_table, write_json
from llamabatch.utils.paths import shown

logger = logging.getLogger(__name__)

_DIRECTIONS = {True: "up", False: "down", None: ""}
_OURS = ("max_gen_toks", "think_end_token", "enable_thinking")  # options of LlamaBatchLM, not of lm_eval


@click.command(cls=GroupedCommand)
@model_option
@click.option("--tasks", type=Texts(), required=True, help="Tasks, groups, tags or YAML files, as a,b; or a folder.")
@click.option("--include-path", "--include_path", type=File(), help="A folder with tasks of your own.")
@click.option("-f", "--num-fewshot", "--num_fewshot", type=int, help="Examples in front of each question.")
@click.option("-L", "--limit", type=float, help="Number of questions of each task; below 1: this share of them.")
@click.option("--samples", help="Questions by number, as JSON: '{\"task\": [0, 3]}'; or a file of it.")
@click.option("--gen-kwargs", "--gen_kwargs", help="For tasks that generate: 'temperature=0.7,do_sample=True'.")
@click.option("--max-gen-toks", type=int, default=256, show_default=True, help="Tokens, if the task sets no number.")
@click.option("--apply-chat-template", "--apply_chat_template", is_flag=True, help="Ask through the chat template.")
@click.option("--fewshot-as-multiturn/--no-fewshot-as-multiturn", default=None, help="Examples are turns of their own.")
@click.option("--system-instruction", "--system_instruction", help="The system message.")
@click.option("--think-end-token", help="The text that ends the thinking; the answer is behind it: '</think>'.")
@click.option("--enable-thinking/--no-enable-thinking", default=None, help="The variable of chat templates.")
@click.option("--use-cache", "--use_cache", type=File(), help="Reuse the answers in this file, and add new answers.")
@click.option("--output", "--output-path", "--output_path", type=File(), help="Write results into this folder.")
@click.option("--log-samples", "--log_samples", is_flag=True, help="With --output: each question with its answer, too.")
@click.option("--predict-only", "--predict_only", is_flag=True, help="With --output: write answers, count no metric.")
@click.option("--seed", help="Seed, such as 42; or four of them for python, numpy, torch, few-shot: 0,1234,1234,1234.")
@click.option("--trust-remote-code", "--trust_remote_code", is_flag=True, help="Let data sets run their code.")
@click.option(
    "--confirm-run-unsafe-code", "--confirm_run_unsafe_code", is_flag=True, help="Let tasks run code of the model."
)
@click.option(
    "--json", "json_file", type=File(), help="Write the results as JSON; '-': to stdout, instead of the table."
)
@engine_options(exclude=("isolate", "max_queue", "max_wait_ms"))
def eval(model: str, json_file: Path | None, engine: dict[str, Any], **given: Any) -> None:
    """Run tasks of lm_eval (EleutherAI's lm-evaluation-harness) on a model. Needs llamabatch[lm-eval].

    Options named as in lm_eval, with dashes or underscores, are passed on to it. Requests of one kind, of all tasks,
    are batched together.
    """
    from llamabatch.integrations.lm_eval import SEED, LlamaBatchLM  # imported late: lm_eval takes seconds to import

    check_targets(json_file, None)
    ours = {name: given.pop(name) for name in _OURS}
    with _quiet():
        config, tasks = _configured(model, given)
        lm = LlamaBatchLM(model, **ours, **{"seed": _seed(config.seed, SEED), "isolate": True, **engine})
        try:
            results = _evaluated(lm, model, config, tasks)
        finally:
            lm.close()
    if json_file is not None:
        write_json(_plain(results), json_file)
    if str(json_file) != "-":
        out = console()
        for column in ("results", "groups"):
            if results.get(column):
                print_table(out, table(results, column))


def table(results: dict[str, Any], column: str = "results") -> Table:
    """Returns a table with a row for each metric.

    Args:
        results: the result of simple_evaluate.
        column: "results" for the tasks, or "groups".
    """
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (
        "task" if column == "results" else "group",
        "filter",
        "n-shot",
        "metric",
        "better",
        "value",
        "± stderr",
    ):
        found.add_column(name, justify="right" if name in ("n-shot", "value", "± stderr") else "left", no_wrap=True)
    for task, values in results[column].items():
        shown_name = str(values.get("alias", task))
        n_shot = str(results.get("n-shot", {}).get(task, ""))
        directions = results.get("higher_is_better", {}).get(task, {})
        for key, value in sorted(values.items()):
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            cells = (shown_name, filter_name, n_shot, metric, _DIRECTIONS.get(directions.get(metric), ""))
            found.add_row(*cells, _number(value), _number(error))
            shown_name = n_shot = ""
    return found


def _number(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:.4f}"
    return "" if value in (None, "N/A") else str(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirects stdout to stderr, and hides all progress bars except the engine's.

    lm_eval and datasets show a bar for each phase of each task. lm_eval also runs git, and git prints an error outside
    a repository.
    """
    import datasets
    import tqdm
    from lm_eval import evaluator
    from lm_eval.api import metrics, model, task

    bar = tqdm.tqdm
    bootstrap: Any = getattr(metrics, "bootstrap_stderr", None)

    def no_bar(*args: Any, **given: Any) -> Any:
        return bar(*args, **{**given, "disable": True})

    def quiet_bootstrap(*args: Any, **given: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()), _replaced((tqdm, "tqdm", no_bar)):
            return bootstrap(*args, **given)  # called only if lm_eval has bootstrap_stderr; see _replaced

    had_bars = not datasets.are_progress_bars_disabled() and "HF_DATASETS_DISABLE_PROGRESS_BARS" not in os.environ
    with (
        contextlib.redirect_stdout(sys.stderr),
        _replaced(
            (task, "tqdm", no_bar),
            (model, "tqdm", no_bar),
            (metrics, "bootstrap_stderr", quiet_bootstrap),
            (evaluator, "get_git_commit_hash", _commit),
        ),
    ):
        if had_bars:
            datasets.disable_progress_bars()
        try:
            yield
        finally:
            if had_bars:
                datasets.enable_progress_bars()


@contextlib.contextmanager
def _replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces attributes of modules during the block. Skips an attribute if the module does not have it, since another
    release of lm_eval may lack it.

    Args:
        changes: for each attribute a tuple of the module, the attribute's name, and the value during the block.
    """
    changes = tuple(each for each in changes if hasattr(each[0], each[1]))
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _commit() -> str | None:
    """Returns the commit of the working folder, for lm_eval's results; None without a repository or without git."""
    with contextlib.suppress(OSError):
        found = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else None
    return None


def _configured(model: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """Returns lm_eval's configuration of the run, and its tasks. Raises ConfigError."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    named = dict(given, tasks=list(given["tasks"]), output_path=given.pop("output"), model="llamabatch")
    for name in ("include_path", "use_cache", "output_path"):
        named[name] = None if named[name] is None else str(named[name])
    if named["seed"] is not None:
        named["seed"] = [None if each.strip() == "None" else each for each in named["seed"].split(",")]
    if (limit := named["limit"]) is not None and limit >= 1:
        named["limit"] = int(limit)
    try:
        config = EvaluatorConfig.from_cli(argparse.Namespace(**named))
        tasks = config.process_tasks({**config.metadata, "model": model})
    except LlamaBatchError:
        raise
    except Exception as error:  # functions named in the user's YAML file can raise any exception
        raise ConfigError(f"lm_eval refuses this: {error}") from error
    return config, tasks


def _seed(seeds: list[int | None] | None, default: int) -> int:
    """Returns the seed for sampling: the third of `seeds` (torch's), as in lm_eval's other models; or `default`."""
    found = None if seeds is None else seeds[2]
    return default if found is None else found


def _evaluated(lm: Any, model: str, config: Any, tasks: Any) -> dict[str, Any]:
    """Runs the tasks, writes the results to --output, and returns the results. Raises SetupError if lm_eval fails."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=config.output_path)
    python, numpy, torch, fewshot = config.seed or (None,) * 4
    try:
        results: Any = simple_evaluate(
            lm,
            model_args={"model": model},
            tasks=config.tasks,
            num_fewshot=config.num_fewshot,
            use_cache=config.use_cache,
            limit=config.limit,
            samples=config.samples,
            log_samples=config.log_samples,
            evaluation_tracker=tracker,
            system_instruction=config.system_instruction,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=bool(config.fewshot_as_multiturn),
            gen_kwargs=config.gen_kwargs,
            task_manager=tasks,
            predict_only=config.predict_only,
            random_seed=python,
            numpy_random_seed=numpy,
            torch_random_seed=torch,
            fewshot_random_seed=fewshot,
            confirm_run_unsafe_code=config.confirm_run_unsafe_code,
            metadata=config.metadata,
        )
    except LlamaBatchError:
        raise
    except Exception as error:  # downloads of data sets and the tasks' code can raise any exception
        logger.debug("lm_eval failed", exc_info=True)
        raise SetupError(f"lm_eval ended with {type(error).__name__}: {error}") from error
    samples = results.pop("samples", {})
    if config.output_path:
        _save(config, tracker, results, samples)
    return dict(results)


def _save(config: Any, tracker: Any, results: dict[str, Any], samples: dict[str, Any]) -> None:
    """Writes the files that lm_eval's own command would write. Raises OutputError."""
    before = set(_files(config.output_path))
    tracker.save_results_aggregated(results=results, samples=samples if config.log_samples else None)
    if config.log_samples:
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
    if not set(_files(config.output_path)) - before:  # the tracker logs its errors instead of raising them
        raise OutputError(f"the results could not be written to {shown(config.output_path)}")


def _files(path: str) -> list[Path]:
    folder = Path(path).parent if path.endswith(".json") else Path(path)
    return list(folder.rglob("*")) if folder.is_dir() else []


def _plain(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the results as plain values for JSON, with names in place of the tasks' functions."""
    from lm_eval.utils import handle_non_serializable

    plain: dict[str, Any] = json.loads(json.dumps(results, default=handle_non_serializable))
    return plain
