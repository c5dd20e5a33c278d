"""/load, /version, /ping and /reset_prefix_cache."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from llamabatch.server.response.answer import json_response
from llamabatch.server.serving.serving import serving_of
from llamabatch.utils.version import __version__


async def load(request: HttpRequest) -> Any:
    """Returns the number of running calls."""
    return json_response({"server_load": serving_of(request).n_open})


async def version(_: HttpRequest) -> Any:
    """Returns the version of llamabatch."""
    return json_response({"version": __version__})


async def ping(request: HttpRequest) -> Any:
    """Answers 200 if the server takes requests."""
    serving_of(request).check_ready()
    return Response()


async def reset_prefix_cache(request: HttpRequest) -> Any:
    """Clears the cached prefixes of finished requests."""
    serving = serving_of(request)
    serving.check_ready()
    await serving.on_thread(serving.client.call, "reset_prefix_cache")
    return Response()


routes = [
    Route("/load", load, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/ping", ping, methods=["GET", "POST"]),
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
]
