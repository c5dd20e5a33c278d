"""The command line: one file per command, each a thin layer over the library.

The result goes to stdout, everything else to stderr. Exit codes: 0 done; 1 a part failed; 2 usage or bad input;
3 an error of the engine or the installation; 141 the reader of stdout has closed it; 130 interrupted; 143 ended by
SIGTERM; 129 the terminal was closed (see utils/interrupts.py). This package may import all others.
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

# The commands, with their summaries. --help reads the summaries here, so it need not import every command.
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
_COMPLETING = "_LLAMABATCH_COMPLETE"  # a shell's completion script sets this variable
_WITHOUT_DEFAULTS = ("config", "completion")

_LEAST_WIDTH, _CLICK_LEAST_WIDTH = 24, 52
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a disk that takes no more data
_NO_READER = 141  # 128 + SIGPIPE, the exit code of other tools


class LazyGroup(click.Group):
    """A group that imports a command's file only if the command is used. So `--help` and `doctor` import no engine."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"llamabatch.cli.{cmd_name}"), cmd_name)
        command.short_help = COMMANDS[cmd_name]
        return command

    def command_of(self, name: str) -> click.Command:
        """Returns the command of this name, which must be in COMMANDS."""
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
        """Finds a command, and sets the user's defaults (config.toml) for its options."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {name!r}{nearest(name, COMMANDS)}", ctx)
        found, command, rest = super().resolve_command(ctx, args)
        wants_help = {"-h", "--help", "--help-all"} & set(rest)  # help must work even if the config file is broken
        if command is not None and not (ctx.resilient_parsing or wants_help or name in _WITHOUT_DEFAULTS):
            from llamabatch.cli.config_file import check_named, defaults

            check_named()
            ctx.default_map = {name: defaults(name, command, COMMANDS, self.command_of)}
        return found, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LlamaBatchError as error:
            if interrupts.came() is not None:  # a signal during an import or a load may cause a LlamaBatchError
                raise
            echo_wrapped(f"Error: {error}")
            ctx.exit(2 if isinstance(error, InputError) else 3)
        except BrokenPipeError:  # click would exit with 1
            _leave_stdout()
            ctx.exit(_NO_READER)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llamabatch")
def cli() -> None:
    """Many prompts at once through one GGUF model: continuous batching on llama.cpp, in process.

    Defaults of options come from LLAMABATCH_MODEL and from a file: see `llamabatch config`.
    """


def main() -> None:
    """Runs the command line and exits. The exit code is 128 + signal after a signal, and 141 after stdout was closed.
    No traceback is printed in these two cases."""
    _open_streams()
    interrupts.guard()
    if _COMPLETING in os.environ:
        importlib.import_module("llamabatch.cli.completion")  # registers the class for bash's completion
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
            code = _interrupted()  # some code may have turned the signal's KeyboardInterrupt into another exception
        elif isinstance(error, OSError) and error.errno in _NO_ROOM:
            code = _no_room(error)
        else:
            raise
    interrupts.guard()  # from here on, signals end the process at once, since nothing is left to save
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_stdout()
        code = _NO_READER
    except OSError as error:
        code = _no_room(error)
    sys.exit(code if isinstance(code, int) else 0)


def _no_room(error: OSError) -> int:
    """Reports that stdout, or a file, could not be written, and returns the exit code."""
    _leave_stdout()
    echo_wrapped(f"Error: {error.filename or 'the output'} could not be written: {error.strerror}")
    return 3


def _open_streams() -> None:
    """Opens os.devnull for each standard stream that is closed, as after `2>&-`. Otherwise the next opened file would
    get the stream's descriptor, and llama.cpp would write its messages into this file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # os.open takes the lowest free descriptor, which is `number`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115  # stays open


def _interrupted() -> int:
    if interrupts.acknowledge():
        click.echo(interrupts.LINE, err=True)
    return 128 + (interrupts.came() or signal.SIGINT)


def _narrow() -> dict[str, Any]:
    """Returns click's setting for the width of help texts if the terminal is too narrow for click; else {}."""
    columns = shutil.get_terminal_size().columns
    return {"terminal_width": max(_LEAST_WIDTH, columns - 2)} if columns < _CLICK_LEAST_WIDTH else {}


def echo_wrapped(text: str, *, err: bool = True) -> None:
    """Prints sentences to stderr or stdout, with control characters escaped, and wrapped on a terminal."""
    from llamabatch.utils.console import for_terminal  # imported late, since it imports rich

    with contextlib.suppress(OSError) if err else contextlib.nullcontext():  # stderr may be a file on a full disk
        click.echo(for_terminal(visible(text), sys.stderr if err else sys.stdout), err=err)


def _leave_stdout() -> None:
    """Redirects stdout to os.devnull after its reader has closed it, so that Python reports no error at exit."""
    with contextlib.suppress(OSError):  # io.UnsupportedOperation, an OSError, if stdout is not a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
