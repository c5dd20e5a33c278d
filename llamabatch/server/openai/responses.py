"""/v1/responses and /v1/responses/input_tokens. Stored responses and their input items can be read and deleted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.errors import PromptError
from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.keys import key_use
from llamabatch.server.openai.files import page_of
from llamabatch.server.openai.kept_responses import KeptResponses
from llamabatch.server.openai.responses_body import ResponsesBody, read_responses
from llamabatch.server.openai.responses_response import ResponseEvents, ResponseHead, response_document
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import json_response, large_response
from llamabatch.server.response.generation import respond
from llamabatch.server.serving.serving import Serving, serving_of
from llamabatch.utils.checks import choice, show


async def responses(request: HttpRequest) -> Any:
    """Answers a text, or the items of a conversation."""
    serving = serving_of(request)
    body = await _read(request, serving)
    keep = None if body.items is None else partial(_kept(request).keep, _owner(), body.items)
    head = ResponseHead.of(serving, body, keep)
    return await respond(
        serving,
        body.chat,
        whole=lambda outputs, n_reasoning: response_document(head, outputs, n_reasoning),
        chunks=lambda _, count: ResponseEvents(head, count),
    )


async def input_tokens(request: HttpRequest) -> Any:
    """Counts the prompt tokens of the input."""
    serving = serving_of(request)
    body = await _read(request, serving)
    _, token_ids = await serving.on_thread(body.chat.rendered, serving.model)
    return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)}, body.chat.ignored)


async def retrieve(request: HttpRequest) -> Any:
    """Returns a stored response, without logprobs."""
    found = _kept(request).find(_owner(), request.path_params["response_id"])
    if found is None:
        raise _not_found(request)
    document = found.document
    return await large_response(serving_of(request), lambda: document)


async def input_items(request: HttpRequest) -> Any:
    """Lists the input items of a stored response and of the responses before it."""
    found = _kept(request).find(_owner(), request.path_params["response_id"])
    if found is None:
        raise _not_found(request)
    query = request.query_params
    order = choice(PromptError, "order", query.get("order", "desc"), ("asc", "desc"))
    inputs = found.inputs if order == "asc" else found.inputs[::-1]
    document = page_of(inputs, query, most=100, usual=20)
    return await large_response(serving_of(request), lambda: document)


async def delete(request: HttpRequest) -> Any:
    """Deletes a stored response."""
    response_id = request.path_params["response_id"]
    if not _kept(request).forget(_owner(), response_id):
        raise _not_found(request)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def compact(request: HttpRequest) -> Any:
    """Answers 404. Without this route, "compact" would match as a response id, and a POST would get a 405."""
    raise HTTPException(404)


def _not_found(request: HttpRequest) -> ApiError:
    response_id = request.path_params["response_id"]
    return ApiError(404, f"there is no response {show(response_id)}", param="response_id")


def _kept(request: HttpRequest) -> KeptResponses:
    """Returns the stored responses of the request's application."""
    kept: KeptResponses = request.app.state.kept_responses
    return kept


def _owner() -> str | None:
    """Returns the name of the current request's API key; None: the request has no key."""
    use = key_use.get()
    return None if use is None else use.key.name


async def _read(request: HttpRequest, serving: Serving) -> ResponsesBody:
    kept = _kept(request)
    find = partial(kept.find, _owner())
    body = await read_body(request, serving, partial(read_responses, find=find, can_keep=kept.can_keep))
    return replace(body, chat=with_model(body.chat, serving))


routes = [
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
    Route("/v1/responses/compact", compact, methods=["POST"], include_in_schema=False),
    Route("/v1/responses/{response_id}", retrieve, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/input_items", input_items, methods=["GET"]),
]
