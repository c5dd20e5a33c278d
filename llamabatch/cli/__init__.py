"""The command line: one file a command, each a thin layer over the library.

The answer goes to stdout, everything else to stderr. Exit codes: 0 done, 1 some of it failed, 2 usage or bad input,
3 the engine or the installation, 141 the reader of stdout has left; 130 interrupted, 143 by SIGTERM, 129 when the
terminal closed (see utils/interrupts.py). Imports all other rooms.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import shutil
import signal
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from llamabatch.errors import InputError, LlamaBatchError, visible
from llamabatch.utils import interrupts
from llamabatch.utils.checks import nearest

# Commands and their summaries, which --help must not import every command for.
COMMANDS = {
    "chat": "Talk with a model in the terminal.",
    "generate": "Continue one prompt and stream the text to stdout.",
    "run": "Run a file of prompts and write a result for each row.",
    "serve": "Serve a model over HTTP, to many clients at once.",
    "eval": "Run tasks of lm_eval on a model.",
    "models": "List the models that were fetched and are kept.",
    "pull": "Fetch a model from the hub or an address.",
    "rm": "Remove fetched models from the cache.",
    "plan": "Show what fits in memory, before anything is loaded.",
    "compare": "Measure all strategies on the same prompts.",
    "tune": "Measure and keep the fastest settings of a model.",
    "top": "Watch running jobs, live in the terminal.",
    "doctor": "Show the installation, its faults, and their cures.",
    "config": "Show your defaults, and where each comes from.",
    "completion": "Print what a shell needs to complete commands.",
    "build": "Build llama.cpp with our patches for this machine.",
    "synth": "Write random weights in the shape of a real model.",
}
_COMPLETING = "_LLAMABATCH_COMPLETE"  # set by the script of a shell
_WITHOUT_DEFAULTS = ("config", "completion")

_LEAST_WIDTH, _CLICK_LEAST_WIDTH = 24, 52
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a disk
_NO_READER = 141  # 128 + SIGPIPE, as of other tools


class LazyGroup(click.Group):
    """Imports the file of a command on first use: `--help` and `doctor` must not wait for the engine."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"llamabatch.cli.{cmd_name}"), cmd_name)
        command.short_help = COMMANDS[cmd_name]
        return command

    def command_of(self, name: str) -> click.Command:
        """A command of COMMANDS."""
        command = self.get_command(None, name)
        assert command is not None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds a command, and puts the user's defaults below it."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {name!r}{nearest(name, COMMANDS)}", ctx)
        found, command, rest = super().resolve_command(ctx, args)
        wants_help = {"-h", "--help", "--help-all"} & set(rest)  # which a broken file must not stop
        if command is not None and not (ctx.resilient_parsing or wants_help or name in _WITHOUT_DEFAULTS):
            from llamabatch.cli.config_file import check_named, defaults

            check_named()
            ctx.default_map = {name: defaults(name, command, COMMANDS, self.command_of)}
        return found, command, rest

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
    """Many prompts at once through one GGUF model: continuous batching on llama.cpp, in process.

    Defaults of options come from LLAMABATCH_MODEL and from a file: see `llamabatch config`.
    """


def main() -> None:
    """Runs the command line; a signal ends it with its exit code and a closed stdout with 141, without a traceback."""
    _open_streams()
    interrupts.guard()
    if _COMPLETING in os.environ:
        importlib.import_module("llamabatch.cli.completion")  # it brings our way of reading bash's line
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
    except Exception as error:
        if interrupts.came() is not None:
            code = _interrupted()  # the signal's exception may have become any other
        elif isinstance(error, OSError) and error.errno in _NO_ROOM:
            code = _no_room(error)
        else:
            raise
    interrupts.guard()  # the command has nothing left to keep
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_stdout()
        code = _NO_READER
    except OSError as error:
        code = _no_room(error)
    sys.exit(code if isinstance(code, int) else 0)


def _no_room(error: OSError) -> int:
    """Says that stdout, or a file, takes no more; returns the exit code."""
    _leave_stdout()
    echo_wrapped(f"Error: {error.filename or 'the output'} could not be written: {error.strerror}")
    return 3


def _open_streams() -> None:
    """Puts nowhere in the place of standard streams that are closed, as behind `2>&-`: else the next file that is
    opened would be in that place, and get what llama.cpp writes there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # in the lowest place that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115  # for good


def _interrupted() -> int:
    if interrupts.acknowledge():
        click.echo(interrupts.LINE, err=True)
    return 128 + (interrupts.came() or signal.SIGINT)


def _narrow() -> dict[str, Any]:
    """The width of help on a terminal that is narrower than click allows for."""
    columns = shutil.get_terminal_size().columns
    return {"terminal_width": max(_LEAST_WIDTH, columns - 2)} if columns < _CLICK_LEAST_WIDTH else {}


def echo_wrapped(text: str, *, err: bool = True) -> None:
    """Prints sentences to stderr or stdout, wrapped between words if that is a terminal, and visible."""
    from llamabatch.utils.console import for_terminal  # with rich; most commands print no sentence

    with contextlib.suppress(OSError) if err else contextlib.nullcontext():  # a full disk has no room for messages
        click.echo(for_terminal(visible(text), sys.stderr if err else sys.stdout), err=err)


def _leave_stdout() -> None:
    """Sends the rest of stdout, its reader having left, to nowhere, so that Python does not complain at its end."""
    with contextlib.suppress(OSError):  # io.UnsupportedOperation is one: stdout is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
