"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.server.anthropic.messages_body import read_messages
from llamabatch.server.anthropic.messages_response import MessageEvents, MessageHead, message_response
from llamabatch.server.asked import adapter_ids, ignored_of, json_response, read_body, with_model
from llamabatch.server.openai.chunks import reasoning_tokens, thinking_of
from llamabatch.server.openai.tokenize import chat_ids
from llamabatch.server.serving import serving_of
from llamabatch.server.sse import EventStream


async def messages(request: HttpRequest) -> Any:
    """Answers a conversation, as Anthropic's API does."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_messages), serving)
    head = MessageHead.of(serving, body)
    call = await serving.submit(partial(body.submission, loaded=adapter_ids(serving)), stream=body.stream)
    if not body.stream:
        outputs = await call.outputs()
        n_thinking = await thinking_of(outputs, serving)
        return json_response(message_response(head, outputs, body, n_thinking), body.ignored)
    assert call.submission is not None
    n_prompt = sum(len(each.prompt_token_ids) for each in call.submission.requests)
    ping_s = serving.options.sse_ping_s if body.ping_s is None else body.ping_s
    events = MessageEvents(head, body, n_prompt, lambda outputs: reasoning_tokens(outputs, serving.model))
    return EventStream(call, events, ping_s, ignored_of(body.ignored))


async def count_tokens(request: HttpRequest) -> Any:
    """The number of tokens that a conversation has as a prompt."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_messages), serving)
    _, token_ids = await serving.on_thread(chat_ids, serving.model, body)
    return json_response({"input_tokens": len(token_ids)}, body.ignored)


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
