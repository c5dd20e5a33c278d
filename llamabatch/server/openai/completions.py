"""/v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.server.asked import adapter_ids, ignored_of, json_response, large_response, read_body, with_model
from llamabatch.server.openai.chunks import Head
from llamabatch.server.openai.completion_body import read_completion
from llamabatch.server.openai.completion_response import CompletionChunks, completion_response
from llamabatch.server.serving import serving_of
from llamabatch.server.sse import EventStream


async def completions(request: HttpRequest) -> Any:
    """Continues prompts."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_completion), serving)
    head = Head.of(serving, "cmpl", body)
    texts: list[str] = []  # of the prompts, for echo

    def prepare(inputs: InputProcessor) -> Submission:
        if body.echo:
            texts.extend(
                each if isinstance(each, str) else inputs.detokenize(list(each), False) for each in body.prompts
            )
        return body.submission(inputs, adapter_ids(serving))

    call = await serving.submit(prepare, stream=body.stream)
    if not body.stream:
        outputs = await call.outputs()
        if len(outputs) > 1 or body.params.wants_logprobs:
            return await large_response(serving, completion_response, head, outputs, body, texts, ignored=body.ignored)
        return json_response(completion_response(head, outputs, body, texts), body.ignored)
    ping_s = serving.options.sse_ping_s if body.ping_s is None else body.ping_s
    return EventStream(call, CompletionChunks(head, body, texts), ping_s, ignored_of(body.ignored))


routes = [Route("/v1/completions", completions, methods=["POST"])]
