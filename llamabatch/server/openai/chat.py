"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.server.openai.chat_response import ChatChunks, chat_response
from llamabatch.server.openai.chunks import Head
from llamabatch.server.request.chat_body import read_chat
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.generation import respond
from llamabatch.server.serving.serving import serving_of


async def chat_completions(request: HttpRequest) -> Any:
    """Answers a conversation."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_chat), serving)
    head = Head.of(serving, "chatcmpl", body)
    return await respond(
        serving,
        body,
        whole=lambda outputs, n_reasoning: chat_response(head, outputs, body, n_reasoning),
        chunks=lambda call, count: ChatChunks(head, body, sum(call.prompt_lengths), count),
    )


PATHS = ("/v1/chat/completions", "/chat/completions")  # the second path is llama-server's

routes = [Route(path, chat_completions, methods=["POST"]) for path in PATHS]
