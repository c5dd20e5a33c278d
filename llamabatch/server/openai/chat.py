"""/v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from llamabatch.server.asked import adapter_ids, ignored_of, read_body, with_model
from llamabatch.server.openai.chat_body import read_chat
from llamabatch.server.openai.chat_response import ChatChunks, chat_response
from llamabatch.server.openai.chunks import Head, dump, reasoning_tokens, thinking_of
from llamabatch.server.serving import serving_of
from llamabatch.server.sse import EventStream


async def chat_completions(request: HttpRequest) -> Any:
    """Answers a conversation."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_chat), serving)
    head = Head.of(serving, "chatcmpl", body)
    headers = ignored_of(body.ignored)
    call = await serving.submit(partial(body.submission, loaded=adapter_ids(serving)), stream=body.stream)
    if not body.stream:
        outputs = await call.outputs()
        document = chat_response(head, outputs, body, await thinking_of(outputs, serving))
        return Response(dump(document), headers=headers, media_type="application/json")
    ping_s = serving.options.sse_ping_s if body.ping_s is None else body.ping_s
    return EventStream(
        call, ChatChunks(head, body, lambda outputs: reasoning_tokens(outputs, serving.model)), ping_s, headers
    )


PATHS = ("/v1/chat/completions", "/chat/completions")  # the second as in llama-server

routes = [Route(path, chat_completions, methods=["POST"]) for path in PATHS]
