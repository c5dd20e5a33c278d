"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from llamabatch.chat.conversation import ChatOptions
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.jobs.input.lines import Overlay, parse_openai
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.errors import ApiError
from llamabatch.server.openai.chat_response import ChatChunks, chat_response
from llamabatch.server.openai.chunks import Head, dump
from llamabatch.server.serving import serving_of
from llamabatch.server.sse import EventStream


async def chat_completions(request: HttpRequest) -> Any:
    """Answers a conversation."""
    serving = serving_of(request)
    serving.check_ready()
    body = await request.json()
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    stream = bool(body.pop("stream", False))
    given = body.pop("stream_options", None) or {}
    line = parse_openai(
        {"custom_id": "-", "url": "/v1/chat/completions", "body": body}, Overlay(SamplingParams(max_tokens=None))
    )
    head = Head.of(serving, "chatcmpl", line.model)
    call = await serving.submit(_prepared(line.prompt, line.params, line.options), stream=stream)
    if not stream:
        return Response(dump(chat_response(head, await call.outputs())), media_type="application/json")
    chunks = ChatChunks(head, include_usage=bool(given.get("include_usage")))
    return EventStream(call, chunks, serving.options.sse_ping_s)


def _prepared(conversation: Any, params: SamplingParams, options: ChatOptions) -> Any:
    def prepare(inputs: InputProcessor) -> Submission:
        return inputs.conversations(conversation, params, options, None, "raise")

    return prepare


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
