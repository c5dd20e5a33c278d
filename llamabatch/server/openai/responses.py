"""/v1/responses, which keeps nothing: each body has all items before; and /v1/responses/input_tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.server.openai.responses_body import ResponsesBody, read_responses
from llamabatch.server.openai.responses_response import ResponseEvents, ResponseHead, response_document
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import json_response
from llamabatch.server.response.generation import respond
from llamabatch.server.serving.serving import Serving, serving_of


async def responses(request: HttpRequest) -> Any:
    """Answers a text, or the items of a conversation."""
    serving = serving_of(request)
    body = await _read(request, serving)
    head = ResponseHead.of(serving, body)
    return await respond(
        serving,
        body.chat,
        whole=lambda outputs, n_reasoning: response_document(head, outputs, n_reasoning),
        chunks=lambda _, count: ResponseEvents(head, count),
    )


async def input_tokens(request: HttpRequest) -> Any:
    """The number of tokens that the input has as a prompt."""
    serving = serving_of(request)
    body = await _read(request, serving)
    _, token_ids = await serving.on_thread(body.chat.rendered, serving.model)
    return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)}, body.chat.ignored)


async def _read(request: HttpRequest, serving: Serving) -> ResponsesBody:
    body = await read_body(request, serving, read_responses)
    return replace(body, chat=with_model(body.chat, serving))


routes = [
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
]
