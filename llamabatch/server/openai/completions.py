"""/v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from llamabatch.jobs.input.lines import Overlay, parse_openai
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.errors import ApiError
from llamabatch.server.openai.chunks import Head, dump
from llamabatch.server.openai.completion_response import CompletionChunks, completion_response
from llamabatch.server.serving import serving_of
from llamabatch.server.sse import EventStream


async def completions(request: HttpRequest) -> Any:
    """Continues prompts."""
    serving = serving_of(request)
    serving.check_ready()
    body = await request.json()
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    stream = bool(body.pop("stream", False))
    given = body.pop("stream_options", None) or {}
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list)):
        body["prompt"] = prompts[0]
    else:
        prompts = [prompts]
    line = parse_openai(
        {"custom_id": "-", "url": "/v1/completions", "body": body}, Overlay(SamplingParams(max_tokens=16))
    )
    head, params = Head.of(serving, "cmpl", line.model), line.params
    call = await serving.submit(lambda inputs: inputs.prompts(prompts, params, None, "raise"), stream=stream)
    if not stream:
        document = completion_response(head, await call.outputs(), n=params.n, top=params.logprobs)
        return Response(dump(document), media_type="application/json")
    chunks = CompletionChunks(head, n=params.n, top=params.logprobs, include_usage=bool(given.get("include_usage")))
    return EventStream(call, chunks, serving.options.sse_ping_s)


routes = [Route("/v1/completions", completions, methods=["POST"])]
