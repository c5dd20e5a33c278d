"""Reads config.toml, the user's defaults for options. Flags and environment variables override these defaults.

Keys are names of options, with - or _. A key in a section such as [run] is for that command alone. Values are converted
to texts as on a command line, so that the option itself checks them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llamabatch.utils.checks import nearest, reason, show
from llamabatch.utils.paths import absolute, of_user

VARIABLE = "LLAMABATCH_CONFIG"
_SECTION = re.compile(r"\s*\[\s*([\w-]+)\s*\]")
_KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")


@dataclass(frozen=True)
class Setting:
    """An option's default in config.toml.

    Attributes:
        section: the only command with this default; "": all commands that have the option.
        key: the key as written in the file.
        value: the value as the TOML parser returns it.
        line: the line number, from 1; 0 if it was not found.
    """

    section: str
    key: str
    value: Any
    line: int

    @property
    def option(self) -> str:
        """The option's name on the command line, without its dashes."""
        return self.key.replace("_", "-")


def config_path() -> Path:
    """Returns the path of the user's config.toml, or the path in LLAMABATCH_CONFIG. The file need not exist."""
    override = os.environ.get(VARIABLE)
    if override:
        return Path(absolute(override))
    import platformdirs

    return of_user(platformdirs.user_config_dir) / "config.toml"


def check_named() -> None:
    """Raises UsageError if LLAMABATCH_CONFIG is set to a file that does not exist."""
    if os.environ.get(VARIABLE) and not os.path.lexists(path := config_path()):
        raise click.UsageError(f"{VARIABLE} is {path}, which is not there")


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML document. Raises ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def read_settings(path: Path, commands: Iterable[str]) -> list[Setting]:
    """Returns the defaults in a file; empty if the file is missing. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
        found = parse_toml(text)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        if not os.path.lexists(path):  # the file is in another user's folder, and this process may not search it
            return []
        raise click.UsageError(f"{path} cannot be read: {reason(error)}") from error
    except (OSError, ValueError) as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise click.UsageError(f"{path} cannot be read: {reason(error)}") from error
    lines, settings = _lines(text), []
    for key, value in found.items():
        if isinstance(value, dict):
            if key not in commands:
                head = re.compile(rf"\s*\[\s*{re.escape(key)}\b")
                line = next((n for n, row in enumerate(text.splitlines(), 1) if head.match(row)), 0)
                raise click.UsageError(f"{_place(path, line)}: there is no command {show(key)}{nearest(key, commands)}")
            settings += [Setting(key, name, each, lines.get((key, name), 0)) for name, each in value.items()]
        else:
            settings.append(Setting("", key, value, lines.get(("", key), 0)))
    return settings


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Returns a dictionary from (section, key) to the line number of the key."""
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, row in enumerate(text.splitlines(), 1):
        if match := _SECTION.match(row):
            section = match[1]
        elif match := _KEY.match(row):
            lines.setdefault((section, match[1]), number)
    return lines


def _place(path: Path, line: int) -> str:
    return f"{path}, line {line}" if line else str(path)


def defaults(
    name: str, command: click.Command, commands: Iterable[str], command_of: Callable[[str], click.Command]
) -> dict[str, Any]:
    """Returns a mapping from the parameters of a command to their defaults in the file.

    Args:
        commands: names of all commands.
        command_of: returns the command with a given name. It is called only for keys that are not for `command`.

    Raises:
        UsageError: a key or a section is unknown, or an option refuses its value. The message names file and line.
    """
    path = config_path()
    found: dict[str, Any] = {}
    own, others = options_of(command), None
    # The settings of sections come last, so that they override settings outside sections.
    for setting in sorted(read_settings(path, commands), key=lambda each: each.section != ""):
        if setting.section in ("", name) and setting.option in own:
            option = own[setting.option]
            found[str(option.name)] = _checked(path, setting, option, command)
            continue
        if setting.section:
            known: Mapping[str, click.Option] = (
                own if setting.section == name else options_of(command_of(setting.section))
            )
        else:
            others = others or {key: value for each in commands for key, value in options_of(command_of(each)).items()}
            known = others
        if setting.option not in known:
            where = f"[{setting.section}] has" if setting.section else "there is"
            raise click.UsageError(
                f"{_place(path, setting.line)}: {where} no option {show(setting.key)}{nearest(setting.option, known)}"
            )
    return found


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Returns the options of a command by their long names, without dashes."""
    return {
        flag[2:]: param
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
        if flag.startswith("--")
    }


def _checked(path: Path, setting: Setting, option: click.Option, command: click.Command) -> Any:
    """Returns a bool for a flag. For any other option, returns the value as on a command line. Raises UsageError."""
    value, where = setting.value, f"{_place(path, setting.line)}: {setting.key} is {show(setting.value)}"
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.UsageError(f"{where}; give true or false")
        return value
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, (str, int, float)) for each in values):
        raise click.UsageError(f"{where}; give a text, a number, true or false, or a list of them")
    texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
    text: Any = texts if option.multiple else ",".join(texts)
    try:
        option.type_cast_value(click.Context(command, resilient_parsing=True), text)
    except click.BadParameter as error:
        raise click.UsageError(f"{where}; {error.message}") from error
    return text
