"""Reads flags.toml: the flags of llama-server and `vllm serve`, and their meaning in `llamabatch serve`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llamabatch.cli.config_file import parse_toml
from llamabatch.config.other_servers import SETTINGS
from llamabatch.utils.checks import reason, show

Args = tuple[str, ...]
TRUE = ("on", "enabled", "true", "1")  # TRUE and FALSE are as in llama.cpp (common/arg.cpp, is_truthy, is_falsey)
FALSE = ("off", "disabled", "false", "0")
MANY = -1  # Row.takes if a flag takes all words up to the next flag, at least one
LLAMA, VLLM = "llama-server", "vLLM"


@dataclass(frozen=True)
class Row:
    """A flag of another server, with its meaning here.

    Attributes:
        program: the server, LLAMA or VLLM.
        names: the names of the flag.
        negatives: names that turn the flag off.
        env: environment variables of llama-server, with blanks between them, older names first; "": none.
        takes: number of values; MANY: one or more.
        args: converts a value to our arguments; None: the flag is translated to no arguments.
        on: our arguments for one of the `names`, if the flag has no value.
        off: our arguments for one of the `negatives`.
        note: the reason why the flag has no effect, shown when it is given; "": nothing is shown.
        cure: advice, shown when the flag or its value is refused.
        fine: the only accepted values; (): `args` checks the values, or `cure` refuses the flag.
    """

    program: str
    names: Args
    negatives: Args = ()
    env: str = ""
    takes: int = 0
    args: Callable[[str], Args] | None = None
    on: Args = ()
    off: Args = ()
    note: str = ""
    cure: str = ""
    fine: Args = ()


def read_rows() -> tuple[Row, ...]:
    """Returns the rows of flags.toml, llama-server's first."""
    table = parse_toml(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))
    return tuple(
        _row(program, flag, {"to": entry, "on": entry} if isinstance(entry, (str, list)) else entry, table["texts"])
        for program in (LLAMA, VLLM)
        for key, entry in table[program].items()
        for flag in key.split(", ")
    )


def _row(program: str, flag: str, entry: Mapping[str, Any], texts: Mapping[str, str]) -> Row:
    head, _, tail = flag.partition(" / ")
    if head.startswith("--[no-]"):
        head, tail = f"--{head[7:]}", f"--no-{head[7:]}"
    names = head.split()
    takes = MANY if names[-1] == "N..." else names.count("N")
    if "field" in entry:  # the field of this name in SETTINGS has the advice and the accepted values
        setting = SETTINGS[entry["field"]]
        usual = [str(value) for value in setting.usual if value != ""]
        entry = {**entry, "note" if setting.optional else "cure": setting.advice, "fine": usual}
    notes = {key: str(entry.get(key, "")) for key in ("note", "cure")}
    return Row(
        program,
        tuple(name for name in names if name.startswith("-")),
        tuple(tail.split()),
        entry.get("env", ""),
        takes,
        _args(entry) if takes else None,
        () if takes else _words(entry.get("on", "")),
        () if takes else _words(entry.get("off", "")),
        fine=_words(entry.get("fine", "")),
        **{key: texts[text[1:]] if text.startswith("@") else text for key, text in notes.items()},
    )


def _words(text: str | list[str]) -> Args:
    return tuple(text.split() if isinstance(text, str) else text)


def _args(entry: Mapping[str, Any]) -> Callable[[str], Args] | None:
    """Returns the function that converts a value of the flag to our options; None if the entry names no options."""
    if "call" in entry:
        return CALLS[entry["call"]]
    if "values" in entry:
        options = {value: _words(words) for value, words in entry["values"].items()}
        return lambda value: options[_one_of(value, options)]
    if "to" in entry:
        words, skip = _words(entry["to"]), _words(entry.get("skip", ""))
        if "{" not in "".join(words):
            words = (*words, "{}")
        return lambda value: () if value in skip else tuple(_filled(word, value) for word in words)
    if "on" in entry:
        on, off, auto = (_words(entry.get(key, "")) for key in ("on", "off", "auto"))
        return lambda value: _switched(value, on, off, auto)
    return None


def _filled(word: str, value: str) -> str:
    return re.sub(r"\{(\w*)\}", lambda match: VALUES[match[1]](value), word)


def _one_of(value: str, known: Mapping[str, object]) -> str:
    if value not in known:
        raise click.UsageError(f"{show(value)} is none of {', '.join(known)}")
    return value


def _switched(value: str, on: Args, off: Args, auto: Args) -> Args:
    for values, args in ((TRUE, on), (FALSE, off), (("auto", "-1"), auto)):
        if value.lower() in values:
            return args
    raise click.UsageError(f"{show(value)} is none of on, off and auto")


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(2**20)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{show(path)} cannot be read: {reason(error)}") from error


def _bias(value: str) -> str:
    match = re.fullmatch(r"(\d+)([+-].+)", value)
    return f"{match[1]}={match[2].lstrip('+')}" if match else value


def _inverse(value: str) -> str:
    try:
        return repr(1 / float(value))
    except (ValueError, ZeroDivisionError):
        raise click.UsageError(f"{show(value)} is no number above 0") from None


def _verbosity(value: str) -> str:
    try:
        level = int(value)
    except ValueError:
        raise click.UsageError(f"{show(value)} is no whole number") from None
    return "error" if level <= 1 else "warning" if level == 2 else "info" if level == 3 else "debug"


def _list(value: str) -> str:
    try:
        found = json.loads(value)
    except ValueError:
        found = value.split(",")
    return ",".join(str(each) for each in (found if isinstance(found, list) else [found]))


def _counted(value: str) -> str:
    """Expands vLLM's short forms of numbers: 8k is 8000, 8K is 8192."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", value)
    if not match:
        return value
    base = 1000 if match[2].islower() else 1024
    return str(int(float(match[1]) * base ** ("kmg".index(match[2].lower()) + 1)))


def _module(value: str) -> str:
    """Returns an adapter as name=path. The value is in this form already, or is vLLM's JSON object."""
    if not value.lstrip().startswith("{"):
        return value
    try:
        given = json.loads(value)
        return f"{given['name']}={given['path']}"
    except (ValueError, KeyError, TypeError):
        raise click.UsageError(f"{show(value)} is no JSON object with name and path") from None


# These functions convert the value of a flag to the value of our option. flags.toml calls them as {name}.
VALUES: Mapping[str, Callable[[str], str]] = {
    "": str,
    "json": json.dumps,
    "file": lambda path: json.dumps(_text_of(path)),
    "bias": _bias,
    "breakers": lambda value: json.dumps([] if value == "none" else [value]),
    "commas": lambda value: value.replace("/", ",").replace(";", ","),
    "counted": _counted,
    "inverse": _inverse,
    "layers": lambda value: "-1" if value in ("auto", "all") else value,
    "level": lambda value: {"critical": "error", "trace": "debug"}.get(value, value),
    "list": _list,
    "methods": lambda value: "GET,POST,DELETE,OPTIONS" if _list(value) == "*" else _list(value),
    "module": _module,
    "ping": lambda value: "0" if value.startswith("-") else value,
    "reasoning": lambda value: "none" if value == "none" else "auto",
    "room": lambda value: "auto" if value == "-1" else value,
    "tight": lambda value: value.replace(" ", ""),
    "verbosity": _verbosity,
}


def _each(value: str) -> Args:
    """Returns --lora for each part of a comma-separated list. An existing file with a comma in its name is one part."""
    parts = [value] if os.path.exists(value) else [part for part in value.split(",") if part]
    return tuple(arg for part in parts for arg in ("--lora", part))


def _scaled(value: str) -> Args:
    """Converts llama-server's comma-separated list of path:scale to several --lora path=scale."""
    found: list[str] = []
    for part in value.split(","):
        path, colon, scale = part.rpartition(":")
        try:
            number = float(scale)
        except ValueError:
            colon = ""
        found += ["--lora", f"{path}={number:g}" if colon else part]
    return tuple(found)


def _spec_type(value: str) -> Args:
    kinds = {part.strip() for part in value.split(",")}
    if kinds <= {"none"}:
        return ()
    if all(kind.startswith("ngram") for kind in kinds):
        return "--speculate", "lookup"
    if kinds == {"draft-simple"}:
        return "--speculate", "draft"
    raise click.UsageError(f"{show(value)} is not supported; give none, draft-simple or ngram-simple")


def _speculative(value: str) -> Args:
    """Converts vLLM's JSON object with "method", "model" and "num_speculative_tokens" to our options."""
    try:
        given = json.loads(value)
        method, n_draft = given.get("method"), given.get("num_speculative_tokens")
    except (ValueError, AttributeError):
        raise click.UsageError(f"{show(value)} is no JSON object") from None
    tail: Args = () if n_draft is None else ("--n-draft", str(n_draft))
    if method == "ngram":
        return "--speculate", "lookup", *tail
    if given.get("model") and method in (None, "draft_model"):
        return "--speculate", "draft", "--draft-model", str(given["model"]), *tail
    raise click.UsageError(f"the method {show(method)} is not supported; give ngram, or draft_model with a model")


def _generation(value: str) -> Args:
    """Converts vLLM's JSON of sampling defaults to -P options."""
    try:
        given = json.loads(value)
        return tuple(arg for name, each in given.items() for arg in ("-P", f"{name}={json.dumps(each)}"))
    except (ValueError, AttributeError):
        raise click.UsageError(f"{show(value)} is no JSON object") from None


def _kv_dtype(value: str) -> Args:
    kinds = {"auto": "", "fp16": "f16", "float16": "f16", "bfloat16": "bf16", "bf16": "bf16"}
    if value not in kinds:
        raise click.UsageError(f"{show(value)} is no type that llama.cpp has; give --type-k and --type-v, as q8_0")
    kind = kinds[value]
    return ("--type-k", kind, "--type-v", kind) if kind else ()


# These functions convert the value of a flag to several of our options. A row of flags.toml names one as `call`.
CALLS: Mapping[str, Callable[[str], Args]] = {
    "each": _each,
    "generation": _generation,
    "kv_dtype": _kv_dtype,
    "scaled": _scaled,
    "spec_method": lambda value: _speculative(json.dumps({"method": value})),
    "spec_type": _spec_type,
    "speculative": _speculative,
}
