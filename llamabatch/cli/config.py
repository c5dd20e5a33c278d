"""`llamabatch config`: the defaults of options, and where each comes from."""

from __future__ import annotations

import json
import os

import click

from llamabatch.cli import COMMANDS, cli
from llamabatch.cli.config_file import config_path, defaults, read_settings
from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import MODEL_VARIABLE


@click.command(cls=GroupedCommand)
@click.option("--path", "path_only", is_flag=True, help="Print the path of the file alone, be it there or not.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def config(path_only: bool, as_json: bool) -> None:
    """Show the defaults that you have given to options, and where each comes from.

    A flag goes before the environment (LLAMABATCH_MODEL), and the environment before the file. The file is TOML: keys
    are names of options for all commands that have them, or for one command in a section such as [run].
    """
    path = config_path()
    if path_only:
        click.echo(path)
        return
    settings = read_settings(path, COMMANDS)
    for name in COMMANDS:  # unknown keys and bad values are told here, before a command meets them
        defaults(name, cli.command_of(name), COMMANDS, cli.command_of)
    model = os.environ.get(MODEL_VARIABLE)
    rows = [("model", model, MODEL_VARIABLE, True)] if model else []
    for each in settings:
        name = f"{each.section}.{each.option}" if each.section else each.option
        in_force = not (model and each.option == "model")
        rows.append((name, each.value, f"{path.name}, line {each.line}" if each.line else path.name, in_force))
    if as_json:
        keys = ("option", "value", "from", "in_force")
        document = {"file": str(path), "exists": path.exists(), "defaults": [dict(zip(keys, row)) for row in rows]}  # noqa: B905
        click.echo(json.dumps(document, indent=1, ensure_ascii=False, default=str))
        return
    click.echo(f"file: {path}{'' if path.exists() else ' (not there)'}")
    if not rows:
        click.echo('no defaults are given; write model = "owner/repo:Q4_K_M" into the file, say')
        return
    widths = [max(len(str(row[i])) for row in rows) for i in (0, 1)]
    for option, value, source, in_force in rows:
        rest = "" if in_force else f"; {MODEL_VARIABLE} goes before it"
        click.echo(f"{option:<{widths[0]}}  {value!s:<{widths[1]}}  {source}{rest}")
