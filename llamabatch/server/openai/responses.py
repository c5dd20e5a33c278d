"""/v1/responses, which keeps nothing: each body has all items before; and /v1/responses/input_tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.server.asked import adapter_ids, ignored_of, json_response, read_body, with_model
from llamabatch.server.openai.chunks import reasoning_tokens, thinking_of
from llamabatch.server.openai.responses_body import ResponsesBody, read_responses
from llamabatch.server.openai.responses_response import ResponseEvents, ResponseHead, response_document
from llamabatch.server.openai.tokenize import chat_ids
from llamabatch.server.serving import Serving, serving_of
from llamabatch.server.sse import EventStream


async def responses(request: HttpRequest) -> Any:
    """Answers a text, or the items of a conversation."""
    serving = serving_of(request)
    body = await _read(request, serving)
    chat, head = body.chat, ResponseHead.of(serving, body)
    call = await serving.submit(partial(chat.submission, loaded=adapter_ids(serving)), stream=chat.stream)
    if not chat.stream:
        outputs = await call.outputs()
        n_reasoning = await thinking_of(outputs, serving)
        return json_response(response_document(head, outputs, n_reasoning), chat.ignored)
    ping_s = serving.options.sse_ping_s if chat.ping_s is None else chat.ping_s
    return EventStream(
        call,
        ResponseEvents(head, lambda outputs: reasoning_tokens(outputs, serving.model)),
        ping_s,
        ignored_of(chat.ignored),
    )


async def input_tokens(request: HttpRequest) -> Any:
    """The number of tokens that the input has as a prompt."""
    serving = serving_of(request)
    body = await _read(request, serving)
    _, token_ids = await serving.on_thread(chat_ids, serving.model, body.chat)
    return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)}, body.chat.ignored)


async def _read(request: HttpRequest, serving: Serving) -> ResponsesBody:
    body = await read_body(request, serving, read_responses)
    return replace(body, chat=with_model(body.chat, serving))


routes = [
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
]
