"""The ASGI application: its routes, its errors, its lifespan, and the middlewares of every request."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields, replace
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
from llamabatch.server import openapi
from llamabatch.server.anthropic import dialect as anthropic
from llamabatch.server.anthropic import messages
from llamabatch.server.batches.service import BatchService
from llamabatch.server.batches.upload import OVERHEAD_BYTES
from llamabatch.server.http.body_limits import BodyLimits
from llamabatch.server.http.counts import HttpCounts
from llamabatch.server.http.errors import exception_handlers
from llamabatch.server.http.file_watch import watch
from llamabatch.server.http.keys import KeyRing
from llamabatch.server.http.middleware import EndsWithItsClient, ErrorShapes, RefusesReadably, RootPath
from llamabatch.server.http.request_log import RequestLog
from llamabatch.server.http.security import secured
from llamabatch.server.llama_server import adapters as lora_scales
from llamabatch.server.llama_server import completion, embedding, props, slots, templates
from llamabatch.server.monitor import health, metrics
from llamabatch.server.ollama import chat as ollama_chat
from llamabatch.server.ollama import dialect as ollama
from llamabatch.server.ollama import embed as ollama_embed
from llamabatch.server.ollama import models as ollama_models
from llamabatch.server.openai import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    models,
    responses,
    transcriptions,
)
from llamabatch.server.openai.batch_lines import reader_of
from llamabatch.server.openai.kept_responses import KeptResponses
from llamabatch.server.page import files as page
from llamabatch.server.pool.model_pool import ModelPool, PooledModel
from llamabatch.server.pool.options import LookAgain, ModelSpec, PoolOptions, check_names
from llamabatch.server.pool.routes import routes as pool_routes
from llamabatch.server.serving.checks import MAX_QUEUE
from llamabatch.server.serving.serving import Connect, Serving
from llamabatch.server.serving.slot_files import SlotFiles
from llamabatch.server.vertex import with_vertex_routes
from llamabatch.server.vllm import adapters as lora_files
from llamabatch.server.vllm import rerank, status, tokenize

_OWN = frozenset(each.name for each in fields(ServerOptions))

# Keys: paths. Values: functions that make the bodies of errors under these paths, even of errors before routing.
ERROR_SHAPES = {each.PATHS: each.error_document for each in (anthropic, ollama)}

ROUTES: tuple[Sequence[BaseRoute], ...] = (
    health.routes,
    chat.routes,
    transcriptions.routes,
    completions.routes,
    embeddings.routes,
    rerank.routes,
    models.routes,
    tokenize.routes,
    templates.routes,
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
    ollama_chat.routes,
    ollama_embed.routes,
    ollama_models.routes,
    openapi.routes,
)


def app(model: str | os.PathLike[str], **options: Any) -> Starlette:
    """Returns the application; see llamabatch.server.app."""
    own = {name: value for name, value in options.items() if name in _OWN}
    engine = {name: value for name, value in options.items() if name not in _OWN}
    return make_app(engine_config(model, engine), ServerOptions(**own))


def engine_config(model: str | os.PathLike[str], options: dict[str, Any]) -> EngineConfig:
    """Returns the options of an engine behind a server. The defaults are a child process, a limited queue, and a
    context that is long enough for agents."""
    return EngineConfig.from_options(model, {"isolate": True, "max_queue": MAX_QUEUE, "n_ctx": "fit"} | options)


def make_app(config: EngineConfig, options: ServerOptions, connect: Connect = connect_engine) -> Starlette:
    """Returns the application. Its `state.serving` is the Serving.

    Args:
        connect: starts the engine; tests pass another function.
    """
    serving = Serving(config, options, connect)
    routes = _routes(options)
    made = _passed(options, serving, routes, routes)
    _set_state(made, serving)
    return made


def make_pool_app(
    models: Sequence[ModelSpec],
    options: ServerOptions,
    pool_options: PoolOptions,
    connect: Connect = connect_engine,
    look_again: LookAgain | None = None,
) -> Starlette:
    """Returns an application of several models. Its `state.serving` is the ModelPool.

    Args:
        models: the models, each with options for its own requests. The first model serves requests without a model
            name.
        options: options for all requests: keys, limits, logs.
        connect: starts an engine; tests pass another function.
        look_again: searches for new models at GET /models?reload=1; None: the models never change.

    Raises:
        ConfigError: two models have the same name.
    """
    check_names(models)
    has_nameless = any(not spec.options.served_model_names for spec in models)
    has_batches = options.batches and len(models) == 1 and look_again is None  # batches need a single model
    kept = KeptResponses(options.max_responses_bytes)

    def pooled(spec: ModelSpec) -> PooledModel:
        serving = Serving(spec.config, replace(spec.options, batches=has_batches, api_key_file=None), connect)
        app = Starlette(routes=_routes(options), exception_handlers=exception_handlers())
        _set_state(app, serving)
        app.state.kept_responses = kept
        app.state.http_counts, app.state.keys = made.state.http_counts, made.state.keys
        return PooledModel(spec, serving, app)

    pool = ModelPool(pool_options, takes_any=options.any_model or has_nameless, look_again=look_again, make=pooled)
    made = _passed(options, pool, pool_routes(pool), _routes(options))
    pool.models += map(pooled, models)
    return made


def _routes(options: ServerOptions) -> list[BaseRoute]:
    found = [route for routes in (*([page.routes] if options.page else []), *ROUTES) for route in routes]
    return with_vertex_routes(found, os.environ)


def _set_state(app: Starlette, serving: Serving) -> None:
    """Sets the application's state for the handlers of one model's routes."""
    folder = serving.options.slot_save_path
    serving.slot_files = None if folder is None else SlotFiles(serving, folder)
    service = BatchService(serving, reader_of)
    serving.parts.append(service)
    app.state.serving = serving
    app.state.batches = service
    app.state.kept_responses = KeptResponses(serving.options.max_responses_bytes)


def _passed(
    options: ServerOptions, serving: Serving | ModelPool, routes: list[BaseRoute], counted: list[BaseRoute]
) -> Starlette:
    """Returns an application that checks, limits, logs and counts all requests. Its lifespan runs `serving`.

    Args:
        counted: additional routes for HttpCounts. For a pool, they are the routes of its models.
    """
    keys = KeyRing(options.keys) if options.api_keys else None

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        serving.start()  # models load on threads; until then, a Serving answers 503
        watching = None
        if keys is not None and options.api_key_file is not None:
            ring, path = keys, options.api_key_file
            watching = asyncio.ensure_future(watch([path], lambda: ring.replace(options.read_keys_again()), "keys"))
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()
            await serving.aclose()

    counts = HttpCounts([*routes, *counted], options.root_path)
    made = Starlette(
        routes=routes,
        middleware=[
            Middleware(ErrorShapes, ERROR_SHAPES, options.root_path),
            Middleware(RefusesReadably),
            Middleware(RequestLog, counts, options.access_log),
            Middleware(RootPath, options.root_path),
            Middleware(secured, options, keys),
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
    made.state.http_counts = counts
    made.state.keys = keys
    return made
