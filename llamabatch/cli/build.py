"""`llamabatch build`: builds llama.cpp with our patches for this machine, and keeps it in the cache."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.errors import InputError, SetupError
from llamabatch.native_build import builds
from llamabatch.native_build import machine as native
from llamabatch.native_build.tools import Heartbeat, SetupFailure
from llamabatch.utils import interrupts
from llamabatch.utils.version import __version__

if TYPE_CHECKING:
    from llamabatch.native_build.tools import Display


@click.command(cls=GroupedCommand)
@click.option(
    "--backend",
    type=click.Choice(("auto", *native.BACKENDS)),
    default=None,
    help="Backend beside the CPU.  [default: auto: metal or cuda where available, else cpu]",
)
@click.option(
    "--portable", is_flag=True, help="Build for any x86 CPU with AVX2, or Arm CPU with NEON, not only this one."
)
@click.option("--list", "list_kept", is_flag=True, help="List the builds that are kept.")
@click.option("--remove", metavar="KEY", help="Remove the build with this key, or beginning of a key.")
def build(backend: str | None, portable: bool, list_kept: bool, remove: str | None) -> None:
    """Build llama.cpp with the patches of llamabatch, from its source on PyPI; later starts use it.

    This needs a C++ compiler, 1 GB of disk meanwhile (3 for GPUs) and some minutes, once: the build is kept in the
    cache. Without a compiler, `pip install llamabatch-llama` brings a build that is ready.
    """
    interrupts.careful()
    if (list_kept or remove is not None) and (backend is not None or portable or (list_kept and remove is not None)):
        raise click.UsageError("--list and --remove go without other options.")
    if list_kept:
        _list()
        return
    try:
        if remove is not None:
            click.echo(f"Removed {builds.remove(remove)}", err=True)
            return
        plan = native.make_plan(backend or "auto", portable=portable)
        package, built = builds.make(plan, __version__, _display)
    except SetupFailure as failure:
        raise (InputError if remove is not None else SetupError)(str(failure)) from failure
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise SetupError(
            f"{error.strerror or error}{where}: check the disk and its permissions, or set LLAMABATCH_CACHE to a "
            "folder on another one"
        ) from error
    words = "Later starts use it." if built else "This build existed already. Later starts use it."
    click.echo(f"{words} `llamabatch doctor` shows it.", err=True)
    click.echo(str(package))


def _list() -> None:
    from rich.table import Table

    from llamabatch.utils.console import console, print_table

    kept = builds.kept()
    if not kept:
        click.echo(f"No builds are kept in {builds.builds_folder()}.", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("key", "backend", "for", "release", "MB", "made"):
        table.add_column(name, justify="right" if name == "MB" else "left", no_wrap=True)
    for each in kept:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.made)) if each.made else "not whole"
        where = "all with AVX2 or NEON" if each.portable else "this CPU"
        table.add_row(each.key, each.backend, where if each.made else "", each.release, f"{each.size / 1e6:.0f}", made)
    print_table(console(), table)


def _display(title: str) -> Display:
    from rich.console import Console

    console = Console(stderr=True)
    return Bar(console, title) if console.is_terminal else Heartbeat(title)


class Bar:
    """A progress bar of the compiled files, as ninja or make counts them."""

    def __init__(self, console: object, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        assert isinstance(console, Console)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(title, total=None)
        self._progress.start()

    def beat(self, progress: str) -> None:
        share = fraction(progress)
        if share is not None:
            self._progress.update(self._task, total=1.0, completed=share)

    def end(self) -> None:
        self._progress.stop()


def fraction(progress: str) -> float | None:
    """Returns the finished share from ninja's `[7/83]` or make's `[ 45%]`; None for any other text."""
    if counted := re.fullmatch(r"\[(\d+)/(\d+)\]", progress):
        return int(counted[1]) / max(1, int(counted[2]))
    if percent := re.fullmatch(r"\[ *(\d+)%\]", progress):
        return int(percent[1]) / 100
    return None
