"""Vertex AI's API: /predict, as in llama-server. The route exists if AIP_MODE is PREDICTION. Each instance of a body is
a request to another endpoint.

https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import BaseRoute, Route

from llamabatch.server.http.errors import ApiError
from llamabatch.server.monitor.health import readyz
from llamabatch.server.request.json_body import read_json
from llamabatch.server.response.answer import json_response
from llamabatch.utils.checks import show

FORMAT = "@requestFormat"
MAX_INSTANCES = 128
_STREAMS = ("/api/chat", "/api/generate")  # paths that stream by default


def with_vertex_routes(routes: Sequence[BaseRoute], environment: Mapping[str, str]) -> list[BaseRoute]:
    """Returns the given routes. On Vertex AI, adds the routes from the AIP_… variables.

    AIP_HEALTH_ROUTE comes first, because its path may be "/", which has a route already. If AIP_PREDICT_ROUTE is the
    path of one of `routes`, requests still go to that route, not to `predict`.

    Args:
        routes: the endpoints. An instance names an endpoint by its path, or by the parts of the path in camel case
            ("chatCompletions").
    """
    if environment.get("AIP_MODE") != "PREDICTION":
        return list(routes)
    paths = [each.path for each in routes if isinstance(each, Route) and "POST" in (each.methods or ())]
    names = {_camel(path): path for path in reversed(paths)} | {path: path for path in paths}

    async def predict(request: HttpRequest) -> Any:
        """Sends each instance to its endpoint. Returns the answers in the same order."""
        instances = read_json(await request.body(), request.headers).get("instances")
        if not isinstance(instances, list) or len(instances) > MAX_INSTANCES:
            what = f"{len(instances)} of them" if isinstance(instances, list) else show(instances)
            raise ApiError(400, f"instances is {what}; give a list of at most {MAX_INSTANCES}", param="instances")
        answers = [_answer(request, names, place, each) for place, each in enumerate(instances)]
        return json_response({"predictions": await asyncio.gather(*answers)})

    path = _path(environment.get("AIP_PREDICT_ROUTE") or "/predict")
    found = [*routes, Route(path, predict, methods=["POST"])]
    if alive := environment.get("AIP_HEALTH_ROUTE"):
        found.insert(0, Route(_path(alive), readyz, methods=["GET"]))
    return found


def _path(given: str) -> str:
    return given if given.startswith("/") else f"/{given}"


def _camel(path: str) -> str:
    first, *rest = re.split("[/_-]", path.removeprefix("/v1").strip("/"))
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


async def _answer(request: HttpRequest, names: Mapping[str, str], place: int, instance: object) -> Any:
    """Returns the response of an instance's endpoint, or an error."""
    name = instance.get(FORMAT) if isinstance(instance, dict) else None
    path = names.get(name) if isinstance(name, str) else None
    if not isinstance(instance, dict) or path is None:
        message = f"instances[{place}] has the {FORMAT} {show(name)}; give an endpoint, as chatCompletions"
        return ApiError(400, message, param="instances").to_openai()
    body = {key: value for key, value in instance.items() if key not in (FORMAT, "stream", "stream_options")}
    if path in _STREAMS:
        body["stream"] = False
    return json.loads(await _call(request, path, json.dumps(body).encode()))


async def _call(request: HttpRequest, path: str, body: bytes) -> bytes:
    """Calls an endpoint of the same application without its middlewares, and returns the response's body."""
    own = (b"content-length", b"content-type", b"transfer-encoding")
    headers = [(name, value) for name, value in request.scope["headers"] if name not in own]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    full = request.scope.get("root_path", "") + path
    scope = {**request.scope, "path": full, "raw_path": full.encode(), "query_string": b"", "headers": headers}
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    parts: list[bytes] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()  # no message is needed, because a disconnect cancels the outer request

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await request.app.router(scope, receive, send)
    return b"".join(parts)
