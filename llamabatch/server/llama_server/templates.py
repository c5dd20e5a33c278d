"""/apply-template and /v1/chat/completions/input_tokens make a prompt from a conversation, but generate no answer.
Fields for the answer are checked, but have no effect."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.server.request.chat_body import read_chat
from llamabatch.server.request.reading import read_body
from llamabatch.server.response.answer import json_response
from llamabatch.server.serving.serving import serving_of


async def apply_template(request: HttpRequest) -> Any:
    """Returns the prompt for a conversation, as text."""
    serving = serving_of(request)
    body = await read_body(request, serving, read_chat)
    text, _ = await serving.on_thread(body.rendered, serving.model)
    return json_response({"prompt": text}, body.ignored)


async def input_tokens(request: HttpRequest) -> Any:
    """Counts the prompt tokens of a conversation, in llama-server's format."""
    serving = serving_of(request)
    body = await read_body(request, serving, read_chat)
    _, ids = await serving.on_thread(body.rendered, serving.model)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)}, body.ignored)


routes = [
    Route("/apply-template", apply_template, methods=["POST"]),
    Route("/v1/chat/completions/input_tokens", input_tokens, methods=["POST"]),
    Route("/chat/completions/input_tokens", input_tokens, methods=["POST"]),
]
