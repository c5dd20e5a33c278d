"""`llamabatch doctor`: shows the installation, its faults, and their cures."""

from __future__ import annotations

import json

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.tools.doctor import Check, Report, Status, examine
from llamabatch.utils.checks import counted

_LEAST_DETAIL = 40  # columns for details; if fewer are left, details are on the lines below the names
_UNWRAPPED = 100_000
_EXTRA, _ABSENT = "extra ", "not installed"
# Findings that are shown even if their status is OK.
_USUAL = ("versions", "system", "cpu", "cores", "memory", "library", "devices", "build", "sampler", "gpu", "cache")
_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.ERROR: "bold red"}


@click.command(cls=GroupedCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Print all findings, those that are well too.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, verbose: bool) -> None:
    """Show what is wrong first, with the cure of each fault, then versions, CPU, library and surroundings.

    Exit code 0: llamabatch works here; 1: it does not.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report, report.checks if verbose else _shortened(report.checks))
    ctx.exit(0 if report.ok else 1)


def _shortened(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Returns the checks that are not OK, the checks in _USUAL, and one check that sums up the optional packages."""
    faults = sorted((each for each in checks if each.status is not Status.OK), key=lambda each: each.status.value)
    fine = [each for each in checks if each.status is Status.OK]
    extras = [each for each in fine if each.name.startswith(_EXTRA) and each.name != "extra buffers"]
    absent = [each.name.removeprefix(_EXTRA) for each in extras if each.detail.startswith(_ABSENT)]
    there = [name for each in extras if (name := each.name.removeprefix(_EXTRA)) not in absent]
    shown = [each for each in fine if each.name in _USUAL]
    detail = f"{', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    return (*faults, *shown, Check("extras", Status.OK, detail))


def _print(report: Report, checks: tuple[Check, ...]) -> None:
    """Prints name, status and detail side by side. On a narrow terminal the detail is on the lines below. Wraps lines
    only on a terminal."""
    from rich.text import Text

    from llamabatch.utils.console import Stdout, wrapped

    console = Stdout()
    width = max(len(check.name) for check in checks)
    marks = max(len(check.status.value) for check in checks)
    columns = console.width if console.is_terminal else _UNWRAPPED
    indent = width + marks + 4
    side_by_side = columns >= indent + _LEAST_DETAIL
    indent = indent if side_by_side else 2
    told = set[str]()
    for check in checks:
        style = _STYLES[check.status]
        line = Text(f"{check.name:<{width}}  ").append(check.status.value.ljust(marks if side_by_side else 0), style)
        detail = wrapped(check.detail, columns - indent).split("\n")
        cure = wrapped(f"→ {check.cure}", columns - indent).split("\n") if check.cure and check.cure not in told else []
        told.add(check.cure)
        if side_by_side:
            line.append(f"  {detail.pop(0)}")
        console.print(line, highlight=False, soft_wrap=True)
        for text, shown in ((detail, ""), (cure, style)):
            for each in text:
                console.print(Text(" " * indent).append(each, shown), highlight=False, soft_wrap=True)
    errors = sum(check.status is Status.ERROR for check in report.checks)
    warnings = sum(check.status is Status.WARN for check in report.checks)
    more = "" if len(checks) == len(report.checks) else f" `doctor --verbose` shows all {len(report.checks)} findings."
    console.print(f"\n{counted(errors, 'error')}, {counted(warnings, 'warning')}.{more}", highlight=False)
