"""/v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.server.openai.chunks import Head
from llamabatch.server.openai.completion_body import read_completion
from llamabatch.server.openai.completion_response import CompletionChunks, completion_response
from llamabatch.server.request.reading import adapter_ids, read_body, with_model
from llamabatch.server.response.generation import respond
from llamabatch.server.serving.serving import serving_of


async def completions(request: HttpRequest) -> Any:
    """Continues prompts."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_completion), serving)
    head = Head.of(serving, "cmpl", body)
    texts: list[str] = []  # the texts of the prompts, for echo

    def prepare(inputs: InputProcessor) -> Submission:
        if body.echo:
            texts.extend(
                each if isinstance(each, str) else inputs.detokenize(list(each), False) for each in body.prompts
            )
        return body.submission(inputs, adapter_ids(serving))

    return await respond(
        serving,
        body,
        whole=lambda outputs, _: completion_response(head, outputs, body, serving.model.piece, texts),
        chunks=lambda call, _: CompletionChunks(head, body, serving.model.piece, sum(call.prompt_lengths), texts),
        prepare=prepare,
    )


routes = [Route("/v1/completions", completions, methods=["POST"])]
