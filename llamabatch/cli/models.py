"""`llamabatch models`: lists the models in the caches."""

from __future__ import annotations

import json
import time

import click

from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.gguf.model_cache import CachedModel, cached_models
from llamabatch.utils.format import file_size


@click.command(cls=GroupedCommand)
@click.option("--json", "as_json", is_flag=True, help="Print them as a JSON list, with their paths.")
def models(as_json: bool) -> None:
    """List the models in llamabatch's cache and in huggingface_hub's, with name (for -m), quantisation, size, date.

    `llamabatch pull NAME` fetches one, `llamabatch rm NAME` removes one.
    """
    found = cached_models()
    if as_json:
        click.echo(json.dumps([_figures(model) for model in found], indent=1, ensure_ascii=False))
        return
    if not found:
        click.echo("no model is kept; fetch one: llamabatch pull owner/repo:Q4_K_M", err=True)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from llamabatch.utils.console import console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold", ratio=1)
    for title, justify in (("quant", "left"), ("size", "right"), ("fetched", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for model in found:
        day = time.strftime("%Y-%m-%d", time.localtime(model.modified_s))
        table.add_row(Text(model.name), model.quantisation or "", file_size(model.n_bytes), day)
    console().print(table)


def _figures(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name, "quantisation": model.quantisation, "bytes": model.n_bytes,
        "modified": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.modified_s)), "path": str(model.path),
        "files": [str(file) for file in model.files],
    }  # fmt: skip
