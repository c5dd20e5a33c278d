"""/livez, /readyz and /health: whether to restart the server, and whether to send it requests."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from llamabatch.server.serving import serving_of


async def livez(request: HttpRequest) -> JSONResponse:
    """200 unless the load failed or the engine is gone: then only a new process helps."""
    serving = serving_of(request)
    if serving.state == "failed":
        return JSONResponse({"status": serving.state}, 503)
    return JSONResponse({"status": "ok", "state": serving.state})


async def readyz(request: HttpRequest) -> JSONResponse:
    """200 where requests are taken."""
    serving_of(request).check_ready()  # raises the 503, whose message says why
    return JSONResponse({"status": "ok"})


routes = [
    Route("/livez", livez, methods=["GET"]),
    Route("/readyz", readyz, methods=["GET"]),
    Route("/health", readyz, methods=["GET"]),
    Route("/v1/health", readyz, methods=["GET"]),
]
