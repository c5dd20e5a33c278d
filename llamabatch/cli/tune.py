"""`llamabatch tune`: measures the fastest settings of a model on this machine, and keeps them as a profile."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import engine_options, json_option, model_option, plot_option
from llamabatch.cli.progress import TuneProgress
from llamabatch.config import EngineConfig
from llamabatch.tools.tune.report import document
from llamabatch.tools.tune.run import NORMAL_S, QUICK_S, Settings, run
from llamabatch.tools.tune.table import show
from llamabatch.utils import interrupts
from llamabatch.utils.console import check_targets, write_report

# Options that the user may set, because they change the measurements. Tuning does not choose them, except the KV types
# with --allow-numerics.
_GIVEN = (
    *("n_gpu_layers", "main_gpu", "split_mode", "devices", "tensor_split", "type_k", "type_v"),
    *("override_tensor", "n_cpu_moe", "cpu_moe", "kv_overrides", "use_mmap", "use_mlock", "numa"),
)


@click.command(cls=GroupedCommand)
@model_option
@json_option
@plot_option
@click.option(
    "--quick",
    is_flag=True,
    help=f"Take about {QUICK_S:.0f} s instead of {NORMAL_S:.0f} s: fewer, shorter measurements.",
)
@click.option("--seconds", type=float, help="Take about so many seconds instead; more of them mean less noise.")
@click.option(
    "--allow-numerics", is_flag=True, help="Also choose the types of the KV cache, which changes the outputs."
)
@click.option(
    "--p95-inter-token-ms",
    type=float,
    help="Also choose a number of slots with which 95 % of the gaps between tokens are within so many ms.",
)
@click.option("--beside-load", is_flag=True, help="Keep the profile even if other processes computed meanwhile.")
@engine_options(exclude=tuple(field.name for field in fields(EngineConfig) if field.name not in _GIVEN))
def tune(
    model: str,
    json_file: Path | None,
    plot_file: Path | None,
    quick: bool,
    seconds: float | None,
    allow_numerics: bool,
    p95_inter_token_ms: float | None,
    beside_load: bool,
    engine: dict[str, Any],
) -> None:
    """Measure the fastest settings of a model on this machine, and keep them: engines use them from then on.

    A setting replaces the one that auto chooses only if it is faster by more than the noise. Exit code 1 if the profile
    is not kept, because other processes used the CPU meanwhile.
    """
    interrupts.careful()
    if quick and seconds is not None:
        raise click.UsageError("--quick and --seconds both say how long to measure; give one of them")
    time_s = seconds if seconds is not None else QUICK_S if quick else NORMAL_S
    settings = Settings(model, time_s, allow_numerics, p95_inter_token_ms, beside_load, engine)
    check_targets(json_file, plot_file)
    with TuneProgress() as progress:
        report = run(settings, progress)
    write_report(report, json_file, plot_file, show=show, document=document, plot="llamabatch.tools.tune.plot")
    if report.file is None:
        click.get_current_context().exit(1)
