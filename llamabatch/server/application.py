"""The ASGI application: its routes, its errors, its lifespan, and what every request passes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.errors import SetupError
from llamabatch.server.options import ServerOptions

try:
    from starlette.applications import Starlette
except ImportError as error:
    raise SetupError(f'the server needs the extra: pip install "llamabatch[server]" ({error})') from error

from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from llamabatch.client.connect import connect as connect_engine
from llamabatch.server import health, metrics, openapi
from llamabatch.server.anthropic import messages
from llamabatch.server.batches.service import BatchService
from llamabatch.server.batches.upload import OVERHEAD_BYTES
from llamabatch.server.errors import exception_handlers
from llamabatch.server.gate import MAX_QUEUE
from llamabatch.server.limits import BodyLimits
from llamabatch.server.llama_server import adapters as lora_scales
from llamabatch.server.llama_server import completion, embedding, props, slots
from llamabatch.server.logs import AccessLog
from llamabatch.server.openai import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    models,
    rerank,
    responses,
    tokenize,
)
from llamabatch.server.page import files as page
from llamabatch.server.request_log import RequestLog
from llamabatch.server.security import own_path, secured
from llamabatch.server.serving import Connect, Serving
from llamabatch.server.vertex import vertex_routes
from llamabatch.server.vllm import adapters as lora_files
from llamabatch.server.vllm import status

_OWN = frozenset(each.name for each in fields(ServerOptions))

ROUTES: tuple[Sequence[BaseRoute], ...] = (
    health.routes,
    chat.routes,
    completions.routes,
    embeddings.routes,
    rerank.routes,
    models.routes,
    tokenize.routes,
    responses.routes,
    messages.routes,
    metrics.routes,
    completion.routes,
    embedding.routes,
    slots.routes,
    props.routes,
    lora_scales.routes,
    status.routes,
    lora_files.routes,
    files.routes,
    batches.routes,
    openapi.routes,
)


def app(model: str | os.PathLike[str], **options: Any) -> Starlette:
    """As llamabatch.server.app."""
    own = {name: value for name, value in options.items() if name in _OWN}
    engine = {name: value for name, value in options.items() if name not in _OWN}
    return make_app(engine_config(model, engine), ServerOptions(**own))


def engine_config(model: str | os.PathLike[str], options: dict[str, Any]) -> EngineConfig:
    """The options of an engine behind a server: in a child process, with a bound on its queue, unless they say
    otherwise."""
    return EngineConfig.from_options(model, {"isolate": True, "max_queue": MAX_QUEUE} | options)


def make_app(config: EngineConfig, options: ServerOptions, connect: Connect = connect_engine) -> Starlette:
    """The application; its `state.serving` is the Serving.

    Args:
        connect: starts the engine; tests have others.
    """
    serving = Serving(config, options, connect)
    batch_service = BatchService(serving)
    serving.parts.append(batch_service)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        serving.start()  # on a thread: meanwhile all that needs the model is a 503
        try:
            yield
        finally:
            await serving.aclose()

    found = [route for routes in (*ROUTES, *([page.routes] if options.page else [])) for route in routes]
    made = Starlette(
        routes=[*found, *vertex_routes(found, os.environ)],
        middleware=[
            Middleware(RequestLog),
            *([Middleware(AccessLog)] if options.access_log else []),
            Middleware(RootPath, options.root_path),
            Middleware(secured, options),
            Middleware(
                BodyLimits,
                options.max_body_bytes,
                options.max_bodies_bytes,
                {"/v1/files": options.max_file_bytes + OVERHEAD_BYTES},
            ),
            Middleware(EndsWithItsClient),
        ],
        exception_handlers=exception_handlers(),
        lifespan=lifespan,
    )
    made.state.serving = serving
    made.state.batches = batch_service
    return made


class RootPath:
    """A middleware that lets all paths begin with a prefix, too: a proxy in front may strip it or leave it."""

    def __init__(self, app: Any, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._prefix and scope["type"] == "http":
            path, root = own_path(scope), str(scope.get("root_path", "")) + self._prefix
            if not f"{path}/".startswith(f"{self._prefix}/"):
                scope = {**scope, "path": root + path}
            scope = {**scope, "root_path": root}
        await self._app(scope, receive, send)


class EndsWithItsClient:
    """A middleware that cancels the handler of a request when its client disconnects, streamed or not.

    Without it a handler that waits for the engine would learn of that only when it sends. It looks once the body has
    been read, as what a handler has not read yet comes on the same channel.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        client = _Client(receive)
        handler = asyncio.ensure_future(self._app(scope, client.receive, send))
        client.handler = handler
        try:
            await asyncio.shield(handler)
        except asyncio.CancelledError:
            handler.cancel()  # also where this task is cancelled, at the end of the server
            with contextlib.suppress(asyncio.CancelledError):
                await handler
            if not client.has_left:
                raise
        finally:
            client.stop()


class _Client:
    """The receiving side of a request.

    Attributes:
        handler: the task to be cancelled once the client is gone.
        has_left: it is gone.
    """

    def __init__(self, receive: Any) -> None:
        self.handler: asyncio.Future[Any] | None = None
        self.has_left = False
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    async def receive(self) -> Any:
        """As the server's, for the handler."""
        if self._watch is not None:  # the body is complete: what comes is the end
            await asyncio.shield(self._watch)
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.has_left = True
        elif not message.get("more_body", False):
            self._watch = asyncio.ensure_future(self._look())
        return message

    def stop(self) -> None:
        """The response is complete."""
        if self._watch is not None:
            self._watch.cancel()

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.handler is not None and not self.handler.done():
            self.has_left = True
            self.handler.cancel()
