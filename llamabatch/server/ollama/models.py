"""/api/tags, /api/ps, /api/show and /api/version: the served model in ollama's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from llamabatch.server.http.errors import ApiError
from llamabatch.server.ollama.dialect import API_VERSION, moment, served_name
from llamabatch.server.request.body import BOOLEAN, RULES, TEXT, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.reading import check_model, read_body
from llamabatch.server.response.answer import json_response
from llamabatch.server.response.model_facts import (
    FileFacts,
    capabilities,
    details,
    file_facts,
    model_card,
    model_names,
)
from llamabatch.server.serving.serving import Serving, serving_of

SHOW: Fields = {
    "model": Field(TEXT, "the model"),
    "name": Field(TEXT, "the former name of the field"),
    "verbose": Field(BOOLEAN, "the vocabulary, too", (False,), "/tokenizer_info has it", optional=True),
}
NEVER = "9999-12-31T23:59:59Z"  # the expires_at of a model that stays loaded


def _modified(serving: Serving) -> str:
    try:
        return moment(serving.model.path.stat().st_mtime)
    except OSError:
        return moment(serving.created)


def tags_document(serving: Serving) -> Json:
    """Returns the response of /api/tags: every name of the model, and every adapter."""
    more = {"modified_at": _modified(serving)}
    return {"models": [model_card(serving, name) | more for name in model_names(serving)]}


def ps_document(serving: Serving) -> Json:
    """Returns the response of /api/ps."""
    more = {"expires_at": NEVER, "size_vram": 0, "context_length": serving.plan.config.n_ctx}
    return {"models": [model_card(serving, name) | more for name in model_names(serving)]}


def show_document(serving: Serving) -> Json:
    """Returns the response of /api/show."""
    model = serving.model
    template = serving.options.chat_template or model.chat_template or ""
    found = shown(model.metadata, file_facts(model), template, _capabilities(serving))
    return found | {"modified_at": _modified(serving)}


def shown(metadata: Mapping[str, str], facts: FileFacts, template: str, uses: Sequence[str]) -> Json:
    """Returns the response of /api/show without `modified_at`. The model need not be loaded.

    Args:
        metadata: the metadata of the file as texts. The response leaves out the keys of the tokenizer.
        uses: ollama's names for the capabilities of the model.
    """
    info: Json = {key: _value(text) for key, text in metadata.items() if not key.startswith("tokenizer.")}
    info["general.parameter_count"] = facts.n_params
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "license": metadata.get("general.license", ""),
        "details": details(metadata.get("general.architecture", ""), facts),
        "model_info": info,
        "capabilities": list(uses),
    }


def _capabilities(serving: Serving) -> list[str]:
    """Returns ollama's list of capabilities. For a model that generates text, the list does not have "embedding"."""
    found = capabilities(serving)
    return [name for name in found if name != "rerank" and (name != "embedding" or "completion" not in found)]


def _value(text: str) -> Any:
    """Returns a metadata value as a number or a boolean if possible, because llama.cpp returns all values as texts."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


@reads
def read_show(body: Mapping[str, Any], rules: Rules = RULES) -> tuple[str | None, tuple[str, ...]]:
    """Reads the name of a model, and the ignored fields. Raises ApiError."""
    given = Body(body, SHOW, rules)
    name = given.label("model") or given.label("name")
    return name, tuple(given.ignored)


async def tags(request: HttpRequest) -> Any:
    """Lists the model under each of its names."""
    serving = serving_of(request)
    serving.check_ready()
    return json_response(await serving.on_thread(tags_document, serving))


async def ps(request: HttpRequest) -> Any:
    """Lists the loaded model under each of its names."""
    serving = serving_of(request)
    serving.check_ready()
    return json_response(await serving.on_thread(ps_document, serving))


async def show(request: HttpRequest) -> Any:
    """Returns the metadata and the capabilities of the model."""
    serving = serving_of(request)
    name, ignored = await read_body(request, serving, read_show)
    if name is None:
        raise ApiError(400, "the body has no model; give a name of /api/tags", param="model")
    check_model(served_name(name, serving), serving)
    return json_response(await serving.on_thread(show_document, serving), ignored)


async def alive(request: HttpRequest) -> Any:
    """Answers 200, because ollama's clients check at / whether a server runs.

    If the server's web page is on, the page is the response instead.
    """
    return PlainTextResponse("llamabatch is running")


async def version(request: HttpRequest) -> Any:
    """Returns the supported version of ollama's API."""
    return json_response({"version": API_VERSION})


routes = [
    Route("/", alive, methods=["GET"], include_in_schema=False),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version, methods=["GET"]),
]
