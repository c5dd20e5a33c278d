"""`llamabatch generate`: one prompt, streamed to stdout."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any

import click

from llamabatch.cli.options import Bias, Param, ScaledFile, engine_options, model_option
from llamabatch.errors import PromptError
from llamabatch.filled_params import DEFAULTS
from llamabatch.llm import LLM
from llamabatch.request import FinishReason, SequenceOutput
from llamabatch.sampling_params import OPEN, SamplingParams

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}


def _help(text: str, name: str) -> str:
    default = f"the model's, else {DEFAULTS[name]}" if name in OPEN else _DEFAULTS[name]
    return f"{text}  [default: {default}]"


@click.command()
@click.argument("prompt", default="-")
@model_option
@click.option("--chat", is_flag=True, help="Treat the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="With --chat: a system message in front.")
@click.option("-n", "--max-tokens", type=int, help=_help("Tokens to generate at most.", "max_tokens"))
@click.option("-t", "--temperature", type=float, help=_help("0: always the likeliest token.", "temperature"))
@click.option("--top-k", type=int, help=_help("Draw from the k likeliest tokens.", "top_k"))
@click.option("--top-p", type=float, help=_help("Draw from the fewest that weigh p together.", "top_p"))
@click.option("--min-p", type=float, help=_help("Draw from those p times as likely as the likeliest.", "min_p"))
@click.option(
    "--repetition-penalty", type=float,
    help=_help("Above 1: makes tokens of prompt and output less likely.", "repetition_penalty"),
)  # fmt: skip
@click.option(
    "--presence-penalty", type=float,
    help=_help("Taken from the logit of each token of the output.", "presence_penalty"),
)  # fmt: skip
@click.option(
    "--frequency-penalty", type=float,
    help=_help("The same for each time that it is in the output.", "frequency_penalty"),
)  # fmt: skip
@click.option(
    "--logit-bias", type=Bias(), multiple=True, help="Added to the logit of a token; may be given several times."
)
@click.option(
    "-P", "--param", "others", type=Param(), multiple=True,
    help="""Any other field of SamplingParams, its value as JSON: -P n=2 -P bad_words='["foo"]'; see docs/names.md.""",
)  # fmt: skip
@click.option("--seed", type=int, help="Same seed, same text; without one each run draws anew.")
@click.option("--stop", multiple=True, help="End the text before this string; may be given several times.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-generation token.")
@click.option(
    "--lora", "loras", type=ScaledFile(), multiple=True,
    help="A LoRA or control vector to apply, and its scale; may be given several times.",
)  # fmt: skip
@click.option("--show-plan", is_flag=True, help="Print to stderr what was chosen for this machine, and why.")
@engine_options()
def generate(
    prompt: str, model: str, chat: bool, system: str | None, show_plan: bool, engine: dict[str, Any],
    others: tuple[tuple[str, Any], ...], loras: tuple[tuple[str, float], ...], **sampling: Any,
) -> None:  # fmt: skip
    """Continue PROMPT ('-' or nothing: read it from stdin) and stream the text to stdout."""
    params = _params(sampling, others)
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    text = sys.stdin.buffer.read().decode(errors="replace") if prompt == "-" else prompt
    if not text:
        raise PromptError("the prompt is empty; give at least one character")
    engine["adapters"] = tuple((f"lora-{i}", path) for i, (path, _) in enumerate(loras))
    scales = {f"lora-{i}": scale for i, (_, scale) in enumerate(loras)}
    engine.setdefault("n_slots", 1)  # one prompt: more would only cost memory and time to start
    with LLM(model, **engine) as llm:
        if show_plan:
            click.echo(llm.plan.describe(), err=True)
        last = _print(llm, _conversation(text, system) if chat else text, params, scales)
    if last.finished is not None and last.finished.finish_reason is FinishReason.ERROR:
        click.echo(f"Error: {last.finished.error}", err=True)
        click.get_current_context().exit(3)


def _params(sampling: dict[str, Any], others: tuple[tuple[str, Any], ...]) -> SamplingParams:
    """What the user gave; what he did not is the library's to choose."""
    given = {name: value for name, value in sampling.items() if value is not None and value != ()}
    for name, value in others:
        if name in given:
            raise click.UsageError(f"{name} is given twice; give it once")
        given[name] = value
    return SamplingParams.from_options(**given)


def _conversation(text: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": text}]


def _print(llm: LLM, prompt: Any, params: SamplingParams, adapters: dict[str, float]) -> SequenceOutput:
    """Writes the pieces as they come, or several continuations one after another; returns the last piece, which holds
    the whole output."""
    for piece in llm.stream(prompt, params, adapters=adapters or None):
        if params.n == 1:
            click.echo(piece.text, nl=False)
    if params.n > 1 and piece.finished is not None:
        click.echo("\n\n".join(completion.text for completion in piece.finished.outputs), nl=False)
    click.echo()
    return piece
