"""`llamabatch config`: shows the user's defaults of options, with their sources."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import click

from llamabatch.cli import COMMANDS, cli
from llamabatch.cli.config_file import VARIABLE, Setting, config_path, defaults, options_of, read_settings
from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import MODEL_VARIABLE, variable_of
from llamabatch.utils.checks import show


@dataclass(frozen=True)
class _Variable:
    """An environment variable that is set and gives an option its default.

    Attributes:
        commands: the commands that read the variable.
    """

    name: str
    value: str
    commands: tuple[str, ...]

    @property
    def readers(self) -> str:
        """The names of the commands, joined by "and"; "" for LLAMABATCH_MODEL, because all commands read it."""
        return "" if self.name == MODEL_VARIABLE else " and ".join(self.commands)


@click.command(cls=GroupedCommand)
@click.option("--path", "path_only", is_flag=True, help="Print the path of the file alone, be it there or not.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def config(path_only: bool, as_json: bool) -> None:
    """Show the defaults that you have given to options, and where each comes from.

    A flag overrides the environment, which overrides the file. LLAMABATCH_MODEL holds for all commands, variables of
    engine options such as LLAMABATCH_N_SLOTS hold for run and serve. The file is TOML: keys are names of options for
    all commands that have them, or for one command in a section such as [run].
    """
    path = config_path()
    if path_only:
        click.echo(path)
        return
    settings = read_settings(path, COMMANDS)
    for name in COMMANDS:  # reports unknown keys and bad values of all commands
        defaults(name, cli.command_of(name), COMMANDS, cli.command_of)
    variables = _variables()
    rows: list[tuple[str, Any, str, bool, str]] = [
        (option, each.value, each.name + (f", for {each.readers}" if each.readers else ""), True, "")
        for option, each in variables.items()
    ]
    for setting in settings:
        name = f"{setting.section}.{setting.option}" if setting.section else setting.option
        place = f"{path.name}, line {setting.line}" if setting.line else path.name
        rows.append((name, setting.value, place, *_overruled(setting, variables.get(setting.option))))
    if as_json:
        keys = ("option", "value", "from", "in_force")
        found = [dict(zip(keys, row[:4], strict=True)) for row in rows]
        document = {"file": str(path), "exists": path.exists(), "defaults": found}
        click.echo(json.dumps(document, indent=1, ensure_ascii=False, default=str))
        return
    refusal = f"; {VARIABLE} names it, so other commands refuse to start" if os.environ.get(VARIABLE) else ""
    click.echo(f"file: {path}{'' if path.exists() else f' (not there{refusal})'}")
    if not rows:
        click.echo('no defaults are given; for example, write model = "owner/repo:Q4_K_M" into the file')
        return
    widths = [max(len(str(row[i])) for row in rows) for i in (0, 1)]
    for option, value, source, _, remark in rows:
        click.echo(f"{option:<{widths[0]}}  {value!s:<{widths[1]}}  {source}{remark}")


def _variables() -> dict[str, _Variable]:
    """Returns the user's LLAMABATCH_… variables by the names of their options. Hides the values of keys and tokens."""
    found: dict[str, _Variable] = {}
    for command in COMMANDS:
        for option, param in options_of(cli.command_of(command)).items():
            names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
            for name in names:
                if os.environ.get(name) and name.startswith(variable_of("")):
                    _check(name, param, command)
                    others = found[option].commands if option in found else ()
                    value = "(not shown)" if {"key", "token"} & set(option.split("-")) else os.environ[name]
                    found[option] = _Variable(name, value, (*others, command))
    return found


def _check(name: str, option: click.Option, command: str) -> None:
    """Raises UsageError if an option refuses the value of its variable."""
    context = click.Context(cli.command_of(command), resilient_parsing=True)
    try:
        option.type_cast_value(context, option.value_from_envvar(context))
    except click.BadParameter as error:
        raise click.UsageError(f"{name} is {show(os.environ[name])}; {error.message}") from error


def _overruled(setting: Setting, variable: _Variable | None) -> tuple[bool, str]:
    """Returns True if a setting of the file is in force for at least one command. Also returns a remark, which names a
    variable that overrides the setting."""
    if variable is None or (setting.section and setting.section not in variable.commands):
        return True, ""
    is_partial = bool(variable.readers) and not setting.section
    where = f" for {variable.readers}" if is_partial else ""
    return is_partial, f"; {variable.name} overrides it{where}"
