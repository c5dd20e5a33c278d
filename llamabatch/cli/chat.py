"""`llamabatch chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Generator
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
    lora_option,
    model_option,
    sampling_options,
)
from llamabatch.config import EngineConfig
from llamabatch.engine.resolve_config import check_chat_template
from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import EngineClosedError, LlamaBatchError, PromptError
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.tools.chat_session import NAMES, ChatSession, Leave
from llamabatch.utils import interrupts, system

_PROMPT, _MORE = "> ", ". "
# A table for str.translate that deletes control characters, so that a model's text cannot move the cursor or change
# the terminal's title.
_CONTROLS = dict.fromkeys([n for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"])


@click.command(cls=GroupedCommand)
@model_option
@click.option("--system", help="A system message in front.")
@chat_template_option
@functools.partial(sampling_options, is_chat=True)
@lora_option
@engine_options(exclude=("max_queue", "max_wait_ms"))
def chat(
    model: str, system: str | None, chat_template: str | None, engine: dict[str, Any],
    loras: tuple[tuple[str, float], ...], sampling: dict[str, Any],
) -> None:  # fmt: skip
    """Talk with a model through its chat template; answers stream, and thinking is dimmed.

    /help lists the commands. Ctrl-C ends an answer, Ctrl-D leaves. In a pipe stdin is one message: its answer goes to
    stdout, the thinking to stderr, and the command ends. An answer may be as long as n_ctx allows, unless
    --max-tokens is given.
    """
    params = SamplingParams.from_options(**sampling)  # checks the options before the model is loaded
    if params.n != 1 or params.best_of is not None:
        raise click.UsageError("a chat has one answer at a time; leave n and best_of out")
    template = template_source(chat_template)
    engine["adapters"], scales = adapters_of(loras)
    if template is None:
        check_chat_template(EngineConfig.from_options(model, engine), ON_A_LINE)
    interactive = sys.stdin.isatty()
    message = "" if interactive else sys.stdin.buffer.read().decode(errors="replace").strip()
    if not interactive and not message:
        raise PromptError("the message is empty; give at least one character")
    engine.setdefault("n_slots", 1)
    with LLM(model, **engine) as llm:
        interrupts.careful()
        session = ChatSession(llm, sampling, system, {"chat_template": template, "adapters": scales})
        if not interactive:
            _show(session.answer(message))
            return
        first = f"{llm.plan.config.model}, n_ctx {llm.n_ctx:,}. /help lists the commands."
        click.echo(click.style(first, dim=True) if _has_styles() else first, err=True)
        _talk(session)


def _talk(session: ChatSession) -> None:
    """Answers messages and runs commands until the user leaves. Raises EngineClosedError, and KeyboardInterrupt after
    a signal other than Ctrl-C."""
    system.edit_lines(_completed, " \n")
    while True:
        try:
            line = _read()
            if line.startswith("/") and not line.startswith("//"):
                answer = session.command(line)
                if isinstance(answer, str):
                    click.echo(answer)
                else:
                    _show(answer)
            elif line:
                _show(session.answer(line.removeprefix("/") if line.startswith("//") else line))
        except (EOFError, Leave):
            return
        except KeyboardInterrupt:
            if not interrupts.forget(signal.SIGINT):
                raise
            click.echo()
        except EngineClosedError:
            raise
        except LlamaBatchError as error:
            echo_wrapped(f"Error: {error}")


def _read() -> str:
    """Reads the next message. A line that ends with a backslash is continued. Raises EOFError at Ctrl-D."""
    lines = [_line(_PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_line(_MORE))
    return "\n".join(lines).strip()


def _line(prompt: str) -> str:
    try:
        if sys.stdout.isatty():
            return interrupts.read_line(lambda: input(prompt))
        click.echo(prompt, nl=False, err=True)  # stdout is a file or a pipe, and must contain only the answers
        return interrupts.read_line(input)
    except EOFError:
        click.echo(err=not sys.stdout.isatty())
        raise


def _has_styles() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _completed(text: str, state: int) -> str | None:
    """Returns a text's completion at index `state`, for readline: a command, or None after the last command."""
    found = [name for name in NAMES if name.startswith(text)] if text.startswith("/") else []
    return found[state] if state < len(found) else None


def _show(pieces: Generator[SequenceOutput, None, None]) -> None:
    """Writes the pieces of an answer as they come. Always closes the generator, even after an interrupt."""
    terminal, thinks, begun, ended = sys.stdout.isatty(), False, False, False
    dim = terminal and _has_styles()
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                if piece.reasoning:
                    text = piece.reasoning.translate(_CONTROLS)
                    click.echo(click.style(text, dim=True) if dim else text, nl=False, err=not terminal)
                    thinks = True
                if piece.text:
                    text = piece.text if begun or not thinks else piece.text.lstrip("\n")
                    if thinks and not begun:
                        click.echo("\n", nl=True, err=not terminal)
                    click.echo(text.translate(_CONTROLS) if terminal else text, nl=False)
                    begun = True
                sys.stdout.flush()
        ended = True
    finally:
        if begun or thinks or ended or terminal:  # a pipe gets no line break after an error without text
            click.echo()
