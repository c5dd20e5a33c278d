"""Options for how to sample, of the commands that generate text."""

from __future__ import annotations

import functools
from dataclasses import MISSING, fields
from typing import Any

import click

from llamabatch.cli.options import Bias, Command, Param, ScaledFile
from llamabatch.filled_params import DEFAULTS
from llamabatch.sampling_params import OPEN, SamplingParams

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}


def _help(text: str, name: str) -> str:
    default = f"the model's, else {DEFAULTS[name]}" if name in OPEN else _DEFAULTS[name]
    return f"{text}  [default: {default}]"


_OPTIONS = (
    click.option("-n", "--max-tokens", type=int, help=_help("Tokens to generate at most.", "max_tokens")),
    click.option("-t", "--temperature", type=float, help=_help("0: always the likeliest token.", "temperature")),
    click.option("--top-k", type=int, help=_help("Draw from the k likeliest tokens.", "top_k")),
    click.option("--top-p", type=float, help=_help("Draw from the fewest that weigh p together.", "top_p")),
    click.option("--min-p", type=float, help=_help("Draw from those p times as likely as the likeliest.", "min_p")),
    click.option(
        "--repetition-penalty",
        type=float,
        help=_help("Above 1: makes tokens of prompt and output less likely.", "repetition_penalty"),
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help=_help("Taken from the logit of each token of the output.", "presence_penalty"),
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help=_help("The same for each time that it is in the output.", "frequency_penalty"),
    ),
    click.option(
        "--logit-bias", type=Bias(), multiple=True, help="Added to the logit of a token; may be given several times."
    ),
    click.option(
        "-P",
        "--param",
        "others",
        type=Param(),
        multiple=True,
        help="""Any other field of SamplingParams, its value as JSON: -P n=2 -P bad_words='["foo"]'; see """
        "docs/names.md.",
    ),
    click.option("--seed", type=int, help="Same seed, same text; without one each run draws anew."),
    click.option("--stop", multiple=True, help="End the text before this string; may be given several times."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-generation token."),
)
_NAMES = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos"),
)

lora_option = click.option(
    "--lora",
    "loras",
    type=ScaledFile(),
    multiple=True,
    help="A LoRA or control vector to apply, and its scale; may be given several times.",
)


def sampling_options(command: Command) -> Command:
    """Adds them; the command gets `sampling`, a dict of the fields of SamplingParams that were given. What the user did
    not give is the library's to choose."""

    @functools.wraps(command)
    def wrapped(others: tuple[tuple[str, Any], ...], **values: Any) -> Any:
        given = {name: values.pop(name) for name in _NAMES}
        given = {name: value for name, value in given.items() if value is not None and value != ()}
        for name, value in others:
            if name in given:
                raise click.UsageError(f"{name} is given twice; give it once")
            given[name] = value
        return command(sampling=given, **values)

    decorated: Command = wrapped
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def adapters_of(loras: tuple[tuple[str, float], ...]) -> tuple[tuple[tuple[str, str], ...], dict[str, float] | None]:
    """What the engine is to load, as names and paths; what the requests are to use, as names and scales."""
    paths = tuple((f"lora-{i}", path) for i, (path, _) in enumerate(loras))
    return paths, {f"lora-{i}": scale for i, (_, scale) in enumerate(loras)} or None
