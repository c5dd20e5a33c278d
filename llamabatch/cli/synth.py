"""`llamabatch synth`: writes a model file with a real model's shape and random weights."""

from __future__ import annotations

from pathlib import Path

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.param_types import File, Text
from llamabatch.tools import synth as library
from llamabatch.tools.synth.projectors import PROJECTORS, write_projector
from llamabatch.utils import interrupts
from llamabatch.utils.paths import shown


@click.command(cls=GroupedCommand, epilog=f"Shapes: {', '.join(sorted(library.SHAPES))}.")
@click.argument("shape", metavar="SHAPE", type=Text(tuple(sorted(library.SHAPES))))
@click.argument("out", type=File())
@click.option(
    "--quant",
    type=click.Choice(library.QUANTS, case_sensitive=False),
    default="Q8_0",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--encoder",
    type=click.Choice(sorted(PROJECTORS), case_sensitive=False),
    help="Also write mmproj-OUT, an encoder of pictures (ultravox: of sounds).",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same file.")
def synth(shape: str, out: Path, quant: str, encoder: str | None, seed: int) -> None:
    """Write random weights in the shape of a real model to OUT, for measuring speed without a download.

    The text of such a model means nothing. An existing file OUT is replaced.
    """
    interrupts.careful()
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    found = library.find_shape(shape)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("writing", total=None)
        size = library.write_model(
            found, out, quant, seed, lambda done, total: bar.update(task, completed=done, total=total)
        )
    click.echo(f"{shown(out)}: {size / 1e6:,.0f} MB", err=True)
    if encoder is not None:
        beside = out.with_name(f"mmproj-{out.name}")
        size = write_projector(beside, PROJECTORS[encoder], found.n_embd, seed)
        click.echo(f"{shown(beside)}: {size / 1e6:,.0f} MB", err=True)
