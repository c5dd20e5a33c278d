"""`llamabatch completion`: prints a script for a shell, which then completes commands, options and their values."""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from llamabatch.cli import cli
from llamabatch.cli.help_groups import GroupedCommand

_PROGRAM, _VARIABLE = "llamabatch", "_LLAMABATCH_COMPLETE"
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' completion value
    COMPREPLY=()
    for completion in $(env LLAMABATCH_LINE="${COMP_LINE:0:COMP_POINT}" LLAMABATCH_BREAKS="$COMP_WORDBREAKS" \\
            %(complete_var)s=bash_complete "$1"); do
        value="${completion#*,}"
        COMPREPLY+=("$value")
        [[ $value == */ ]] && compopt -o nospace
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """The completion for bash. click's own class would split owner/repo:Q4_K_M at the colon, as bash does."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the complete words before the cursor, and the incomplete word that ends there."""
        line = os.environ.get("LLAMABATCH_LINE", "")
        words = split_arg_string(line)
        incomplete = "" if not words or line[-1:].isspace() else words.pop()
        breaks = os.environ.get("LLAMABATCH_BREAKS", ":=")
        value = incomplete.partition("=")[2] if incomplete.startswith("-") else incomplete
        # bash replaces only the text after the last : or =, so a reply leaves out the text up to this sign.
        self._kept = value[: max((value.rfind(sign) + 1 for sign in ":=" if sign in breaks), default=0)]
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Returns a reply for bash, without the beginning that bash keeps on the line."""
        return f"{item.type},{item.value.removeprefix(self._kept)}"

    @staticmethod
    def _check_version() -> None:
        """Does nothing. click would check the version of the bash on the path, but another bash may read the script."""


add_completion_class(Bash)


@click.command(cls=GroupedCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, choices, models and files in SHELL.

    \b
    bash: llamabatch completion bash > \\
          ~/.local/share/bash-completion/completions/llamabatch
    zsh:  llamabatch completion zsh > "${fpath[1]}/_llamabatch"
    fish: llamabatch completion fish > ~/.config/fish/completions/llamabatch.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, _PROGRAM, _VARIABLE).source())
