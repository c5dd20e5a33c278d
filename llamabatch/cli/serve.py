"""`llamabatch serve`: a model over HTTP."""

from __future__ import annotations

from typing import Any

import click

from llamabatch.cli import echo_wrapped
from llamabatch.cli.help_groups import GroupedCommand
from llamabatch.cli.options import engine_options, model_option
from llamabatch.server.options import ServerOptions


@click.command(cls=GroupedCommand)
@model_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, type=int, show_default=True, help="Port to listen on; 0: any free one.")
@engine_options()
def serve(model: str, host: str, port: int, engine: dict[str, Any]) -> None:
    """Serve a model over HTTP: OpenAI's API. Needs llamabatch[server]."""
    from llamabatch.server.application import engine_config  # late: they need the extra
    from llamabatch.server.run import serve as run

    options = ServerOptions(host=host, port=port)
    options.check_exposure()
    run(engine_config(model, engine), options, lambda urls: echo_wrapped(f"{model} is served at {', '.join(urls)}"))
