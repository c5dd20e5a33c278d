"""The command line: one file a command, each a thin layer over the library.

The answer goes to stdout, everything else to stderr. Exit codes: 0 done, 1 some of it failed, 2 usage or bad input,
3 the engine or the installation, 141 the reader of stdout has left; 130 interrupted, 143 by SIGTERM, 129 when the
terminal closed (see utils/interrupts.py). Imports all other rooms.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import signal
import sys
from typing import Any

import click

from llamabatch.errors import InputError, LlamaBatchError
from llamabatch.utils import interrupts

COMMANDS = ("generate", "run", "plan", "compare", "tune", "top", "doctor", "build", "synth")

_LEAST_WIDTH, _CLICK_LEAST_WIDTH = 24, 52
_NO_READER = 141  # 128 + SIGPIPE, as of other tools


class LazyGroup(click.Group):
    """Imports the file of a command on first use: `--help` and `doctor` must not wait for the engine."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"llamabatch.cli.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LlamaBatchError as error:
            if interrupts.came() is not None:  # an interrupted import or load may look like a failed one
                raise
            echo_wrapped(f"Error: {error}")
            ctx.exit(2 if isinstance(error, InputError) else 3)
        except BrokenPipeError:  # click would end with 1
            _leave_stdout()
            ctx.exit(_NO_READER)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llamabatch")
def cli() -> None:
    """Many prompts at once through one GGUF model: continuous batching on llama.cpp, in process."""


def main() -> None:
    """Runs the command line; a signal ends it with its exit code and a closed stdout with 141, without a traceback."""
    interrupts.guard()
    try:
        code = cli.main(standalone_mode=False, **_narrow())
    except (click.Abort, KeyboardInterrupt):
        code = _interrupted()
    except click.ClickException as error:
        if interrupts.came() is None:
            text = io.StringIO()
            error.show(text)
            echo_wrapped(text.getvalue().rstrip("\n"))
            code = error.exit_code
        else:
            code = _interrupted()
    except Exception:
        if interrupts.came() is None:
            raise
        code = _interrupted()  # the signal's exception may have become any other
    interrupts.guard()  # the command has nothing left to keep
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_stdout()
        code = _NO_READER
    sys.exit(code if isinstance(code, int) else 0)


def _interrupted() -> int:
    if interrupts.acknowledge():
        click.echo(interrupts.LINE, err=True)
    return 128 + (interrupts.came() or signal.SIGINT)


def _narrow() -> dict[str, Any]:
    """The width of help on a terminal that is narrower than click allows for."""
    columns = shutil.get_terminal_size().columns
    return {"terminal_width": max(_LEAST_WIDTH, columns - 2)} if columns < _CLICK_LEAST_WIDTH else {}


def echo_wrapped(text: str, *, err: bool = True) -> None:
    """Prints sentences to stderr or stdout, wrapped between words if that is a terminal."""
    from llamabatch.utils.console import for_terminal  # with rich; most commands print no sentence

    click.echo(for_terminal(text, sys.stderr if err else sys.stdout), err=err)


def _leave_stdout() -> None:
    """Sends the rest of stdout, its reader having left, to nowhere, so that Python does not complain at its end."""
    with contextlib.suppress(OSError):  # io.UnsupportedOperation is one: stdout is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
