"""/livez says whether to restart the server. /readyz and /health say whether to send requests to the server."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from llamabatch.server.http.errors import ApiError, keep_error
from llamabatch.server.serving.serving import serving_of


async def livez(request: HttpRequest) -> JSONResponse:
    """Returns 200 unless the load failed, or engines crashed so often that the next start has to wait."""
    serving = serving_of(request)
    if serving.state == "failed":
        return JSONResponse({"status": serving.state}, 503)
    return JSONResponse({"status": "ok", "state": serving.state})


async def readyz(request: HttpRequest) -> JSONResponse:
    """Returns 200 if a request would run at once or wait in the queue; else 503, with the state and the reason.

    While a dead engine is replaced, the status is 503. A request would be accepted, but another server answers sooner.
    """
    serving = serving_of(request)
    try:
        serving.check_ready()  # also starts the load if needed
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
