"""`llamabatch doctor`: what is installed here, and what is wrong with it."""

from __future__ import annotations

import json

import click

from llamabatch.checks import counted
from llamabatch.doctor import Report, Status, examine

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.ERROR: "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show versions, CPU, library and surroundings, and what is wrong with the cure for each.

    Exit code 0: llamabatch works here; 1: it does not.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    ctx.exit(0 if report.ok else 1)


def _print(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from llamabatch.stdout import Stdout

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        detail = Text(check.detail)
        if check.cure:
            detail.append(f"\n→ {check.cure}", _STYLES[check.status])
        table.add_row(check.name, Text(check.status.value, _STYLES[check.status]), detail)
    console = Stdout()
    console.print(table)
    errors = sum(check.status is Status.ERROR for check in report.checks)
    warnings = sum(check.status is Status.WARN for check in report.checks)
    console.print(f"\n{counted(errors, 'error')}, {counted(warnings, 'warning')}.", highlight=False)
