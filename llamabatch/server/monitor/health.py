"""/livez, /readyz and /health: whether to restart the server, and whether to send it requests."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from llamabatch.server.http.errors import ApiError, keep_error
from llamabatch.server.serving.serving import serving_of


async def livez(request: HttpRequest) -> JSONResponse:
    """200 unless the load failed, or engines died so often that the next one is started only after a pause."""
    serving = serving_of(request)
    if serving.state == "failed":
        return JSONResponse({"status": serving.state}, 503)
    return JSONResponse({"status": "ok", "state": serving.state})


async def readyz(request: HttpRequest) -> JSONResponse:
    """200 where a request would run at once or wait for others; else 503, with the state and the reason. While an
    engine that died is being replaced a request is better sent elsewhere, though one that comes is taken, and waits."""
    serving = serving_of(request)
    try:
        serving.check_ready()  # starts the load where nothing has
        if serving.state != "ready":
            raise serving.unavailable()
    except ApiError as error:
        keep_error(request.scope, error)
        return JSONResponse({"status": serving.state, **error.to_openai()}, error.status, error.headers)
    return JSONResponse({"status": "ok"})


routes = [
    Route("/livez", livez, methods=["GET"]),
    Route("/readyz", readyz, methods=["GET"]),
    Route("/health", readyz, methods=["GET"]),
    Route("/v1/health", readyz, methods=["GET"]),
]
