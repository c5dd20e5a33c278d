"""`llamabatch rm`: removes models from the cache."""

from __future__ import annotations

import sys

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.param_types import CachedName
from llamabatch.gguf.model_cache import cached_models, find, remove
from llamabatch.utils.format import file_size


@click.command(cls=GroupedCommand)
@click.argument("names", nargs=-1, required=True, metavar="NAME...", type=CachedName())
@click.option("-y", "--yes", is_flag=True, help="Do not ask; needed where stdin is no terminal.")
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Remove models from the caches, by the names that `llamabatch models` lists. Asks first on a terminal."""
    known = cached_models()
    chosen = list({model.path: model for model in (find(name, known) for name in names)}.values())
    total = file_size(sum(model.n_bytes for model in chosen))
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("stdin is no terminal that could answer; give --yes")
        listed = ", ".join(model.name for model in chosen)
        click.confirm(f"Remove {listed} ({total})?", abort=True, err=True)
    for model in chosen:
        remove(model)
        click.echo(f"removed {model.name} ({file_size(model.n_bytes)})", err=True)
