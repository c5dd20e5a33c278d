"""Translates flags of llama-server and `vllm serve`, so that a start script only needs another program name.

Each flag has a Row. A flag becomes options of `llamabatch serve`, or has no effect and a line says why, or is refused
with advice. docs/serve_flags.md is generated from the rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import click

from llamabatch.cli.flag_table import FALSE, MANY, TRUE, Args, Row, read_rows


@dataclass
class Translated:
    """A command line or environment variables, translated to our arguments.

    Attributes:
        args: the translated arguments, for click.
        notes: a line for each flag that has no effect.
        environ: environment variables set by the flags.
    """

    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)


ROWS = read_rows()


def _by_name(rows: Iterable[Row]) -> dict[str, tuple[Row, bool]]:
    """Returns a dictionary. Keys: names of flags. Values: the row of the flag, and True if this name turns the flag
    off. If both servers have a flag of the same name, the row is llama-server's."""
    found: dict[str, tuple[Row, bool]] = {}
    for row in rows:
        for name in row.names:
            found.setdefault(name, (row, False))
        for name in row.negatives:
            found.setdefault(name, (row, True))
    return found


BY_NAME = _by_name(ROWS)
# vLLM's flags that take several values. translate() prefers them to llama-server's flags of the same names, which take
# one value.
_MANY = {name: row for row in ROWS if row.takes == MANY for name in row.names}
_VARIABLES = {"--hf-token": "HF_TOKEN", "--rpc": "LLAMABATCH_RPC"}


def translate(argv: Sequence[str], own: Mapping[str, int]) -> Translated:
    """Translates the arguments of a command line to our options. Arguments without a row stay as they are.

    Args:
        own: maps each of our flags to the number of its values.

    Raises:
        click.UsageError: a flag is refused, or a value is missing.
    """
    found = Translated()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            found.args += [word, *rest]
            break
        if not word.startswith("-") or word == "-":
            found.args.append(word)
            continue
        name, equals, value = word.partition("=")
        name = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
        if name in own and name not in BY_NAME:
            _copy(name, equals + value, own[name], rest, found.args)
            continue
        if name not in BY_NAME:
            found.args.append(word)  # click then reports an unknown flag
            continue
        row, is_off = (_MANY[name], False) if name in _MANY else BY_NAME[name]
        values = [value] if equals and row.takes else _values(name, row, rest)
        apply(row, name, values, is_off, found)
    found.args = _last_params(found.args)
    return found


def _copy(name: str, value: str, takes: int, rest: list[str], args: list[str]) -> None:
    args.append(name + value)
    if not value:
        args += [rest.pop(0) for _ in range(min(takes, len(rest)))]


def _values(name: str, row: Row, rest: list[str]) -> list[str]:
    if row.takes == MANY:
        taken: list[str] = []
        while rest and (not taken or not rest[0].startswith("-")):
            taken.append(rest.pop(0))
    elif name in ("-fa", "--flash-attn") and (not rest or rest[0] not in (*TRUE, *FALSE, "auto")):
        return ["on"]  # older releases of llama-server have this flag without a value
    else:
        taken = [rest.pop(0) for _ in range(min(row.takes, len(rest)))]
    if len(taken) < max(row.takes, 1 if row.takes == MANY else 0):
        raise click.UsageError(f"{name} needs a value")
    return taken


def apply(row: Row, name: str, values: Sequence[str], is_off: bool, found: Translated) -> None:
    """Adds the translation of a flag with its values to `found`. Raises UsageError with the flag's name."""
    try:
        if row.takes and row.args is not None and (not row.fine or set(values) <= set(row.fine)):
            args = [arg for value in values for arg in row.args(value)]
        elif row.cure and not (row.takes and values and set(values) <= set(row.fine)) and not is_off:
            raise click.UsageError(row.cure)
        else:
            args = list(row.off if is_off else row.on)
    except click.UsageError as error:
        given = " ".join([name, *values])
        raise click.UsageError(f"{given}: {error.message}") from error
    if row.note:
        found.notes.append(f"{name} has no effect: {row.note}")
    if args and args[0] in _VARIABLES:
        found.environ[_VARIABLES[args[0]]] = args[1]
    elif args == ["--offline"]:
        found.environ["HF_HUB_OFFLINE"] = "1"
    else:
        found.args += args


def from_environment(environ: Mapping[str, str]) -> Translated:
    """Translates llama-server's environment variables to our options. Raises UsageError with the variable's name."""
    found = Translated()
    variables = [(row, name) for row in ROWS for name in row.env.split()]
    for row, variable in variables:
        name, value = variable, environ.get(variable)
        if row.negatives and (no := variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")) in environ:
            name, value = no, "0"  # any value of LLAMA_ARG_NO_… means off, as in llama-server
        if value is None or (not value and row.takes):
            continue
        if row.takes:
            apply(row, name, [value], False, found)
        elif value.lower() in TRUE:
            apply(row, name, (), False, found)
        elif value.lower() in FALSE and row.negatives:
            apply(row, name, (), True, found)
    found.args = _last_params(found.args)
    return found


def _last_params(args: list[str]) -> list[str]:
    """Removes each `-P name=…` that is followed by another with the same name. For other repeated options this is not
    needed, because click uses only the last."""
    last: dict[str, int] = {}
    for i, arg in enumerate(args[:-1]):
        if arg == "-P":
            last[args[i + 1].partition("=")[0]] = i
    kept: list[str] = []
    i = 0
    while i < len(args):
        if args[i] == "-P" and i + 1 < len(args) and last[args[i + 1].partition("=")[0]] != i:
            i += 2
            continue
        kept.append(args[i])
        i += 1
    return kept


def meaning(row: Row) -> str:
    """Describes the row's meaning for the table in docs/serve_flags.md."""
    if row.note:
        return f"no effect: {row.note}"
    if row.cure and not row.args:
        return f"{f'only {_listed(row.fine)}; ' if row.fine else ''}refused: {row.cure}"
    if row.takes and row.args is not None:
        return _shown(row)
    if row.on or row.off:
        return " / ".join(f"`{' '.join(args)}`" for args in (row.on, row.off) if args)
    return "always so"


def _listed(values: Args) -> str:
    return ", ".join(f"`{value}`" for value in values)


_SAMPLES = ("8", "0.5", "auto", "on", "mmap", "ngram-simple", "ngram", "fp16", "VALUE", '{"method": "ngram"}')


def _shown(row: Row) -> str:
    """Returns our options for the flag. Tries sample values until the row translates one to options."""
    assert row.args is not None
    for sample in (*row.fine, *_SAMPLES):
        try:
            args = row.args(sample)
        except click.UsageError:
            continue
        names = [arg.partition("=")[0] if i and args[i - 1] == "-P" else arg for i, arg in enumerate(args)]
        options = [
            f"-P {names[i + 1]}" if name == "-P" else name for i, name in enumerate(names) if name.startswith("-")
        ]
        options = [option for option in options if not re.fullmatch(r"-?\d+", option)]
        if options:
            return ", ".join(f"`{option}`" for option in dict.fromkeys(options))
    return "`-P structured_outputs`"  # if the value must be the name of a file, no sample value is accepted
