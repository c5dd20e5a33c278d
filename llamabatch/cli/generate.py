"""`llamabatch generate`: continues one prompt, and streams the text to stdout."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from llamabatch.chat.named_templates import ON_A_LINE
from llamabatch.chat.options import template_source
from llamabatch.cli import echo_wrapped
from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import (
    adapters_of,
    chat_template_option,
    engine_options,
    form_options,
    lora_option,
    model_option,
    sampling_options,
)
from llamabatch.config import EngineConfig
from llamabatch.engine.resolve_config import check_chat_template
from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import PromptError
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils import interrupts
from llamabatch.utils.checks import show
from llamabatch.utils.paths import AUTO


@click.command(cls=GroupedCommand)
@click.argument("prompt", default="-")
@model_option
@click.option("--chat", is_flag=True, help="Treat the prompt as a user's message, through the model's chat template.")
@chat_template_option
@click.option("--system", help="With --chat: a system message in front.")
@click.option(
    "--image",
    "images",
    multiple=True,
    help="With --chat: a picture before the prompt, a path; may be given again.",
)
@click.option(
    "--audio",
    "sounds",
    multiple=True,
    help="With --chat: a sound before the prompt, a path; may be given again.",
)
@sampling_options
@form_options
@lora_option
@click.option("--show-plan", is_flag=True, help="Print to stderr the options chosen for this machine, with reasons.")
@engine_options()
def generate(
    prompt: str, model: str, chat: bool, chat_template: str | None, system: str | None, images: tuple[str, ...],
    sounds: tuple[str, ...], show_plan: bool,
    engine: dict[str, Any], loras: tuple[tuple[str, float], ...], sampling: dict[str, Any],
) -> None:  # fmt: skip
    """Continue PROMPT ('-' or nothing: read it from stdin) and stream the text to stdout.

    With --chat, the thinking of a model that thinks goes to stderr.
    """
    params = SamplingParams.from_options(**sampling)
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if chat_template is not None and not chat:
        raise click.UsageError("--chat-template needs --chat")
    if images or sounds:
        if not chat:
            raise click.UsageError(f"{'--image' if images else '--audio'} needs --chat")
        engine.setdefault("mmproj", AUTO)
    template = template_source(chat_template)  # checks the template before the model is loaded
    engine["adapters"], scales = adapters_of(loras)
    if chat and template is None:
        check_chat_template(EngineConfig.from_options(model, engine), ON_A_LINE)
    if prompt.endswith(".gguf") and Path(prompt).is_file():
        raise click.UsageError(f"the prompt is {show(prompt)}, a model; give -m {shlex.quote(prompt)} and a prompt")
    text = sys.stdin.buffer.read().decode(errors="replace") if prompt == "-" else prompt
    if not text:
        raise PromptError("the prompt is empty; give at least one character")
    engine.setdefault("n_slots", 1)  # more slots than prompts would only cost memory and start time
    with LLM(model, **engine) as llm:
        interrupts.careful()
        if show_plan:
            echo_wrapped(llm.plan.describe())
        _print(llm, _conversation(text, system, images, sounds) if chat else text, params, scales, template)


def _conversation(
    text: str, system: str | None, images: tuple[str, ...], sounds: tuple[str, ...]
) -> list[dict[str, Any]]:
    before = [{"role": "system", "content": system}] if system is not None else []
    media = [{"type": "image", "image": path} for path in images]
    media += [{"type": "audio", "audio": path} for path in sounds]
    return [*before, {"role": "user", "content": [*media, {"type": "text", "text": text}] if media else text}]


def _print(
    llm: LLM, prompt: Any, params: SamplingParams, adapters: dict[str, float] | None, template: str | None
) -> None:
    """Writes the pieces of a single continuation as they come, or several continuations at the end. Raises as
    LLM.stream."""
    pieces = llm.stream(prompt, params, chat_template=template, adapters=adapters)
    thinks = begun = False
    try:
        for piece in pieces:
            if params.n == 1:
                thinks = _echo_thinking(piece, thinks)
                click.echo(piece.text, nl=False)
                begun = begun or bool(piece.text)
            elif piece.finished is not None:
                click.echo("\n\n".join(completion.text for completion in piece.finished.outputs), nl=False)
    except BaseException:
        if begun:
            click.echo()
        raise
    click.echo()


def _echo_thinking(piece: SequenceOutput, thinks: bool) -> bool:
    """Writes thinking to stderr, with a line break before the answer. Returns True while the thinking continues.

    Args:
        thinks: the return value for the previous piece.
    """
    click.echo(piece.reasoning, nl=False, err=True)
    if thinks and (piece.text or piece.finished is not None):
        click.echo(err=True)
        return False
    return thinks or bool(piece.reasoning)
