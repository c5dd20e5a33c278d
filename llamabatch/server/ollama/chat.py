"""/api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.server.ollama.answer import Lines, Writer, answer
from llamabatch.server.ollama.body import EmptyBody, read_generate, read_ollama_chat
from llamabatch.server.ollama.dialect import LineStream, served_name
from llamabatch.server.request.body import Json, Rules
from llamabatch.server.request.generation import Generation
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import json_response
from llamabatch.server.response.generation import respond
from llamabatch.server.serving.serving import serving_of

Read = Callable[[Json, Rules], Generation | EmptyBody]


async def chat(request: HttpRequest) -> Any:
    """Answers a conversation, as ollama does."""
    return await _answer(request, read_ollama_chat, is_chat=True)


async def generate(request: HttpRequest) -> Any:
    """Answers a message, or continues a text, as ollama does."""
    return await _answer(request, read_generate, is_chat=False)


async def _answer(request: HttpRequest, read: Read, *, is_chat: bool) -> Any:
    serving = serving_of(request)
    body = await read_body(request, serving, read)
    name = body.model
    if name is not None:
        body = replace(body, model=served_name(name, serving))
    body = with_model(body, serving)
    if isinstance(body, EmptyBody):
        empty = Writer(name or serving.names[0], is_chat)
        return json_response(empty.loaded(unload=body.unload), body.ignored)
    writer = Writer.of(serving, body, name, is_chat=is_chat)
    return await respond(
        serving,
        body,
        whole=lambda outputs, n_reasoning: answer(writer, outputs),
        chunks=lambda call, count: Lines(writer),
        stream=LineStream,
    )


routes = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
]
