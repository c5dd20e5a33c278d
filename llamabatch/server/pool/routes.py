"""The endpoints of a pool. All other requests go to the application of the requested model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount, Route

from llamabatch.errors import LlamaBatchError
from llamabatch.gguf.header import read_header
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.kv_state import fingerprint
from llamabatch.server.batches.upload import Form
from llamabatch.server.http.errors import ApiError, keep_error
from llamabatch.server.http.keys import KeyRing
from llamabatch.server.http.security import App, Receive, Scope, Send, own_path
from llamabatch.server.monitor.metrics import CONTENT_TYPE, Metrics, PooledFigures
from llamabatch.server.monitor.metrics import metrics as engine_metrics
from llamabatch.server.ollama.dialect import LATEST, moment
from llamabatch.server.ollama.keep_alive import keep_seconds
from llamabatch.server.ollama.models import NEVER, shown
from llamabatch.server.pool.model_pool import ModelPool, PooledModel
from llamabatch.server.pool.waiting_stream import WaitingStream, is_event_stream
from llamabatch.server.request.body import Json
from llamabatch.server.request.json_body import SCOPE_BODY, Pause, read_json
from llamabatch.server.response.answer import json_response
from llamabatch.server.response.model_facts import FileFacts, card, facts_of_file
from llamabatch.server.serving.serving import unavailable
from llamabatch.utils.checks import show
from llamabatch.utils.version import __version__

# The application of the first model answers these paths, even if the model is not loaded.
_WITHOUT_MODEL = frozenset(("/", "/version", "/api/version", "/openapi.json", "/favicon.ico"))
_PAGE = "/page/"
_KEPT = "/v1/responses/"  # path of stored responses; all models share one store
_NO_LOAD = frozenset(("/slots", "/load"))  # paths that load no model: an unloaded model has no slots and no calls
_FILES = ("/v1/files", "/v1/batches")
_OLLAMA = "/api/"
_ON_LOOP = 2**16  # bytes; a larger body is read on a thread
_OWNER = "llamabatch"
_STATES = {"unloading": "loaded"}  # llama-server has no state "unloading"


def routes(pool: ModelPool) -> list[BaseRoute]:
    """Returns the routes of a pool's application."""
    own = _Endpoints(pool)
    return [
        Route("/livez", own.livez, methods=["GET"]),
        Route("/readyz", own.readyz, methods=["GET"]),
        Route("/health", own.readyz, methods=["GET"]),
        Route("/v1/health", own.readyz, methods=["GET"]),
        Route("/ping", own.readyz, methods=["GET", "POST"]),
        Route("/v1/models", own.list_models, methods=["GET"]),
        Route("/models", own.list_models, methods=["GET"]),
        Route("/models/load", own.load, methods=["POST"]),
        Route("/models/unload", own.unload, methods=["POST"]),
        Route("/v1/models/{name:path}", own.retrieve_model, methods=["GET"]),
        Route("/metrics", own.metrics, methods=["GET"]),
        Route("/api/tags", own.tags, methods=["GET"]),
        Route("/api/ps", own.ps, methods=["GET"]),
        Mount("/", _Dispatch(pool)),
    ]


class _Endpoints:
    """Endpoints of a pool that need no loaded model."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    async def livez(self, _: HttpRequest) -> Response:
        """Returns 200 always, because a model that fails does not affect other models."""
        return JSONResponse({"status": "ok", "state": self._pool.state})

    async def readyz(self, request: HttpRequest) -> Response:
        """Returns 200 once the initial models are loaded or have failed, until the server drains; otherwise 503."""
        state = self._pool.state
        if state == "ready":
            return JSONResponse({"status": "ok"})
        error = unavailable(state)
        keep_error(request.scope, error)
        return JSONResponse({"status": state, **error.to_openai()}, error.status, error.headers)

    async def list_models(self, request: HttpRequest) -> Response:
        """Lists the models and their adapters, with their states. `reload` in the query searches for models again."""
        if request.query_params.get("reload", "").lower() in ("1", "true"):
            await self._pool.reload()
        found: list[Json] = []
        entries: list[Json] = []
        for model in self._pool.models:
            found.append(await self._entry(model))
            found += [await self._entry(model) | {"id": name, "parent": model.name} for name in model.adapters]
            entries.append(await asyncio.to_thread(_ollama_card, model, model.name) | {"capabilities": _uses(model)})
        return json_response({"object": "list", "data": found, "models": entries})

    async def retrieve_model(self, request: HttpRequest) -> Response:
        """Returns a model by its name."""
        name = request.path_params["name"]
        if not name:
            return await self.list_models(request)
        model = self._pool.find(name)
        more = {"id": name} if name in model.serving.names else {"id": name, "parent": model.name}
        return json_response(await self._entry(model) | more)

    async def load(self, request: HttpRequest) -> Response:
        """Starts to load a model."""
        self._pool.load(await self._named(request))
        return json_response({"success": True})

    async def unload(self, request: HttpRequest) -> Response:
        """Unloads a model once its running requests have ended."""
        model = await self._named(request)
        await self._pool.unload(model)
        return json_response({"success": True})

    async def tags(self, _: HttpRequest) -> Response:
        """Lists all models in ollama's format."""
        return json_response(
            {"models": [await asyncio.to_thread(_ollama_card, m, n) for m in self._pool.models for n in _names(m)]}
        )

    async def ps(self, _: HttpRequest) -> Response:
        """Lists the loaded models in ollama's format."""
        found = []
        for model in self._pool.models:
            if model.state == "loaded":
                left_s = self._pool.left_s(model)
                more: Json = {"size_vram": 0, "context_length": model.spec.plan.config.n_ctx}
                more["expires_at"] = NEVER if left_s is None else moment(time.time() + left_s)
                found += [await asyncio.to_thread(_ollama_card, model, name) | more for name in _names(model)]
        return json_response({"models": found})

    async def metrics(self, request: HttpRequest) -> Response:
        """Returns the metrics of one engine, or the metrics of loads and HTTP requests.

        The engine's metrics are returned if the query has `model`, or if there is only one model.
        """
        name, models = request.query_params.get("model") or None, self._pool.models
        state = request.app.state
        if name is not None or len(models) == 1:
            request.scope["app"] = self._pool.find(name).app
            of_engine: Response = await engine_metrics(request)
            return of_engine
        keys: KeyRing | None = state.keys
        found = [PooledFigures(m.name, int(m.state == "loaded"), m.n_users, m.n_loads) for m in models]
        text = await asyncio.to_thread(
            Metrics("").text_of_pool, found, state.http_counts, None if keys is None else keys.counts()
        )
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def _named(self, request: HttpRequest) -> PooledModel:
        body = read_json(await request.body(), request.headers)
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise ApiError(400, f"model is {show(name)}; give the name of a model", param="model")
        return self._pool.find(name)

    async def _entry(self, model: PooledModel) -> Json:
        """Returns an entry of /v1/models."""
        status: Json = {"value": _STATES.get(model.state, model.state)}
        if model.error is not None:
            status |= {"failed": True, "exit_code": 1}
        if model.last_load_s is not None:
            status["last_load_s"] = round(model.last_load_s, 3)
        return {
            "id": model.name,
            "object": "model",
            "created": model.serving.created,
            "owned_by": _OWNER,
            "root": model.name,
            "parent": None,
            "aliases": list(model.serving.names[1:]),
            "max_model_len": model.spec.plan.config.n_ctx,
            "status": status,
        }


class _Dispatch:
    """An ASGI application that loads the model of a request, and passes the request to the model's application."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, pool = own_path(scope), self._pool
        first = pool.find(None)
        is_post = scope["method"] == "POST"
        reads = is_post and not path.startswith(_FILES)  # an upload streams to the disk, and its body names no model
        no_model = path in _WITHOUT_MODEL or path.startswith(_PAGE) or (path.startswith(_KEPT) and not is_post)
        if no_model or not _has_route(first.app, scope):
            await first.app(scope, receive, send)
            return
        if path.startswith(_FILES) and not first.serving.options.batches:
            raise ApiError(501, "a server of several models has no files and batches; start one of a single model")
        request = HttpRequest(scope)
        query = request.query_params
        name, keep, streams, ping_s = query.get("model") or None, None, False, None
        if reads:
            body, receive = await _read(request, receive)
            given = body.get("model")
            if given is None and path.startswith(_OLLAMA):
                given = body.get("name")  # the former name of the field
            name = given if isinstance(given, str) else name
            if path.startswith(_OLLAMA) and name is not None and not pool.has(name):
                name = name.removesuffix(LATEST)
            keep = keep_seconds(body.get("keep_alive")) if path.startswith(_OLLAMA) else None
            streams, ping_s = is_event_stream(path, body), _ping_s(body.get("sse_ping_interval"))
            if body:
                scope[SCOPE_BODY] = body
            del body
        elif path == "/props" and name is None and (len(pool.models) > 1 or first.state != "loaded"):
            await _props(pool)(scope, receive, send)
            return
        model = pool.find(name)
        if path == "/api/show" and model.state != "loaded":  # no load, because clients ask about every listed model
            await json_response(await asyncio.to_thread(_ollama_show, model))(scope, receive, send)
            return
        loads = {"true": True, "1": True, "false": False, "0": False}.get(query.get("autoload", ""))
        looks = scope["method"] in ("GET", "HEAD")
        holds = not looks or path.startswith(_FILES)
        use = pool.using(model, False if path in _NO_LOAD else loads, looks=looks, holds=holds, keep_s=keep)
        if streams and not pool.is_open(model):
            await _streamed(pool, model, use, ping_s, scope, receive, send)
        else:
            async with use:
                await model.app(scope, receive, send)


async def _streamed(
    pool: ModelPool,
    model: PooledModel,
    use: contextlib.AbstractAsyncContextManager[None],
    ping_s: float | None,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Loads a model, then passes it a request for a stream. SSE comments keep the stream open during the load."""
    every_s = model.serving.options.sse_ping_s if ping_s is None else ping_s
    stream = WaitingStream(scope, send, lambda: pool.wait_in_words(model), every_s)
    try:
        async with contextlib.AsyncExitStack() as stack:
            await stream.until(stack.enter_async_context(use))
            await model.app(scope, receive, stream.send)
    except ApiError as error:
        if not stream.has_begun:
            raise
        keep_error(scope, error)
        await stream.fail(error)


async def _read(request: HttpRequest, receive: Receive) -> tuple[Json, Receive]:
    """Returns the JSON object or the form fields of a body, and a `receive` that returns the same body again.

    If the body is empty or a list, the first result is {}.

    Raises:
        ApiError: as in read_json and in Form.
    """
    data = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise asyncio.CancelledError  # the client has left
        data += message.get("body", b"")
        more = message.get("more_body", False)
    body: Json = {}
    kind = request.headers.get("content-type", "")
    if kind.lower().startswith("multipart/form-data"):
        form = Form(kind)
        form.feed(bytes(data))
        body = {**form.fields}
    elif data.strip() and not data.strip().startswith(b"["):
        read = functools.partial(read_json, data, request.headers)
        body = read() if len(data) <= _ON_LOOP else await asyncio.to_thread(lambda: read(Pause()))
    parts = [bytes(data)]

    async def again() -> Any:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

    return body, again


def _has_route(app: Any, scope: Scope) -> bool:
    """Returns True if the application has an endpoint for this path and method. Otherwise no model is needed."""
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def _props(pool: ModelPool) -> App:
    """Returns the response of /props to a request without a model. The fields are those of llama-server's router."""
    return JSONResponse(
        {
            "role": "router",
            "max_instances": pool.options.max_loaded,
            "models_autoload": pool.options.autoload,
            "model_alias": _OWNER,
            "model_path": "",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "build_info": f"b0-{_OWNER}-{__version__}",
            "is_sleeping": all(model.state == "sleeping" for model in pool.models),
        }
    )


def _ping_s(interval: object) -> float | None:
    """Returns the seconds of sse_ping_interval; None: the field is missing, or wrong. The model's application refuses a
    wrong field."""
    if isinstance(interval, bool) or not isinstance(interval, int):
        return None
    return float(max(0, interval))


def _names(model: PooledModel) -> list[str]:
    return [*model.serving.names, *model.adapters]


def _ollama_card(model: PooledModel, name: str) -> Json:
    """Returns the entry of a model in ollama's lists. Reads the header of the model's file."""
    try:
        path = resolve(model.serving.config.model)
        state = path.stat()
        facts, architecture = facts_of_file(path), read_header(path).architecture
        digest, modified_s = _digest(path, (state.st_size, state.st_mtime_ns)), state.st_mtime
    except (OSError, LlamaBatchError):  # the file is gone
        facts, architecture, digest, modified_s = FileFacts(), "", "", float(model.serving.created)
    found = card(name, facts, architecture, hashlib.sha256(f"{digest}:{name}".encode()).hexdigest())
    return found | {"modified_at": moment(modified_s)}


@functools.lru_cache(256)
def _digest(path: Path, _unchanged: tuple[int, int]) -> str:
    return fingerprint(path)


def _ollama_show(model: PooledModel) -> Json:
    """Returns the response of /api/show for a model that is not loaded. Raises ModelFileError and OSError."""
    path = resolve(model.serving.config.model)
    metadata, serving = read_header(path).texts(), model.serving
    template = serving.options.chat_template or metadata.get("tokenizer.chat_template", "")
    found = shown(metadata, facts_of_file(path), template, _uses(model))
    return found | {"modified_at": moment(path.stat().st_mtime)}


def _uses(model: PooledModel) -> list[str]:
    """Returns ollama's names for the capabilities of a model. The model need not be loaded."""
    spec = model.spec
    uses = {
        "completion": not spec.is_encoder,
        "embedding": spec.is_encoder,
        "vision": spec.plan.config.mmproj is not None,
        "tools": not spec.is_encoder,
        "thinking": spec.plan.reasoning is not None,
    }
    return [name for name, can in uses.items() if can]
