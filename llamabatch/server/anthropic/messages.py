"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.server.anthropic.messages_body import read_messages
from llamabatch.server.anthropic.messages_response import MessageEvents, MessageHead, message_response
from llamabatch.server.request.chat_body import ChatBody
from llamabatch.server.request.optional import BETA_HEADER
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import json_response
from llamabatch.server.response.generation import respond
from llamabatch.server.serving.serving import Serving, serving_of


async def messages(request: HttpRequest) -> Any:
    """Answers a conversation, as Anthropic's API does."""
    serving = serving_of(request)
    body = await _read(request, serving)
    head = MessageHead.of(serving, body)
    return await respond(
        serving,
        body,
        whole=lambda outputs, n_thinking: message_response(head, outputs, body, n_thinking),
        chunks=lambda call, count: MessageEvents(head, body, sum(call.prompt_lengths), count),
    )


async def count_tokens(request: HttpRequest) -> Any:
    """Counts the prompt tokens of a conversation."""
    serving = serving_of(request)
    body = await _read(request, serving)
    _, token_ids = await serving.on_thread(body.rendered, serving.model)
    return json_response({"input_tokens": len(token_ids)}, body.ignored)


async def _read(request: HttpRequest, serving: Serving) -> ChatBody:
    read = partial(read_messages, betas=request.headers.getlist(BETA_HEADER))
    return with_model(await read_body(request, serving, read), serving)


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
