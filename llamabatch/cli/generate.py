"""`llamabatch generate`: one prompt, streamed to stdout."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any

import click

from llamabatch.cli.options import Bias, engine_options, model_option
from llamabatch.errors import PromptError
from llamabatch.llm import LLM
from llamabatch.request import FinishReason, SequenceOutput
from llamabatch.sampling_params import SamplingParams

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}


@click.command()
@click.argument("prompt", default="-")
@model_option
@click.option("--chat", is_flag=True, help="Treat the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="With --chat: a system message in front.")
@click.option("-n", "--max-tokens", type=int, default=_DEFAULTS["max_tokens"], show_default=True)
@click.option("-t", "--temperature", type=float, default=_DEFAULTS["temperature"], show_default=True)
@click.option("--top-k", type=int, default=_DEFAULTS["top_k"], show_default=True)
@click.option("--top-p", type=float, default=_DEFAULTS["top_p"], show_default=True)
@click.option("--min-p", type=float, default=_DEFAULTS["min_p"], show_default=True)
@click.option(
    "--repetition-penalty", type=float, default=_DEFAULTS["repetition_penalty"], show_default=True,
    help="Above 1: makes tokens of prompt and output less likely.",
)  # fmt: skip
@click.option(
    "--presence-penalty", type=float, default=_DEFAULTS["presence_penalty"], show_default=True,
    help="Taken from the logit of each token of the output.",
)  # fmt: skip
@click.option(
    "--frequency-penalty", type=float, default=_DEFAULTS["frequency_penalty"], show_default=True,
    help="The same for each time that it is in the output.",
)  # fmt: skip
@click.option(
    "--logit-bias", type=Bias(), multiple=True, help="Added to the logit of a token; may be given several times."
)
@click.option("--seed", type=int, help="Same seed, same text; without one each run draws anew.")
@click.option("--stop", multiple=True, help="End the text before this string; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-generation token.")
@click.option("--show-plan", is_flag=True, help="Print to stderr what was chosen for this machine, and why.")
@engine_options()
def generate(
    prompt: str, model: str, chat: bool, system: str | None, show_plan: bool, engine: dict[str, Any], **sampling: Any
) -> None:
    """Continue PROMPT ('-' or nothing: read it from stdin) and stream the text to stdout."""
    params = SamplingParams(**sampling)
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    text = sys.stdin.buffer.read().decode(errors="replace") if prompt == "-" else prompt
    if not text:
        raise PromptError("the prompt is empty; give at least one character")
    engine.setdefault("n_slots", 1)  # one prompt: more would only cost memory and time to start
    with LLM(model, **engine) as llm:
        if show_plan:
            click.echo(llm.plan.describe(), err=True)
        last = _print(llm, _conversation(text, system) if chat else text, params)
    if last.finished is not None and last.finished.finish_reason is FinishReason.ERROR:
        click.echo(f"Error: {last.finished.error}", err=True)
        click.get_current_context().exit(3)


def _conversation(text: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": text}]


def _print(llm: LLM, prompt: Any, params: SamplingParams) -> SequenceOutput:
    """Writes the pieces as they come; returns the last, which holds the whole output."""
    for piece in llm.stream(prompt, params):
        click.echo(piece.text, nl=False)
    click.echo()
    return piece
