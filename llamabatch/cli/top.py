"""`llamabatch top`: shows running jobs, live in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import click

from llamabatch.cli import echo_wrapped
from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.errors import InputError
from llamabatch.utils import interrupts


@click.command(cls=GroupedCommand)
@click.argument("what", required=False, metavar="[PID|FILE]")
@click.option("--once", is_flag=True, help="Print the jobs once and end; the default if stdout is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as a JSON list, and end.")
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Seconds between two updates."
)
def top(what: str | None, once: bool, as_json: bool, every: float) -> None:
    """Watch running jobs: `llamabatch run`, and programs with LLM.monitor(publish=True), of this user.

    PID or FILE picks one. Exit codes: 0, or 1 if nothing runs.
    """
    interrupts.careful()
    from rich.live import Live

    from llamabatch.monitor.top import draw, figures, find
    from llamabatch.utils.console import Stdout

    found = find(what)
    context = click.get_current_context()
    if not found:
        echo_wrapped("no job is running" if what is None else f"{what} is no running job")
        context.exit(1)
    console = Stdout()
    if as_json:
        print(json.dumps([figures(status) for status in found]))
    elif once or not sys.stdout.isatty():
        console.print(draw(found))
    else:
        with Live(draw(found), console=console, auto_refresh=False, screen=True) as live:
            while found:
                live.update(draw(found), refresh=True)
                time.sleep(every)
                with contextlib.suppress(InputError):  # a job that ends deletes its file
                    found = find(what)
                    continue
                break
        click.echo("no job runs any more", err=True)
