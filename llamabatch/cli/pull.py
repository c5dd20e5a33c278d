"""`llamabatch pull`: fetches a model into the cache."""

from __future__ import annotations

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.gguf.resolve import resolve
from llamabatch.utils.checks import show
from llamabatch.utils.paths import is_remote, model_name


@click.command(cls=GroupedCommand)
@click.argument("name")
def pull(name: str) -> None:
    """Fetch a model into the cache and print its path. NAME is owner/repo:Q4_K_M on Hugging Face's hub, or the https
    address of a .gguf file. An interrupted download is resumed.
    """
    if not is_remote(model_name(name)):
        raise click.UsageError(f"{show(name)} names nothing on the hub; give owner/repo:Q4_K_M, or an https address")
    click.echo(resolve(name))
