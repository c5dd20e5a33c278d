"""/api/tags, /api/ps, /api/show and /api/version: the model that is served, as ollama lists its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from llamabatch.server.http.errors import ApiError
from llamabatch.server.ollama.dialect import API_VERSION, moment, served_name
from llamabatch.server.request.body import RULES, Body, Field, Fields, Json, Rules, reads
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
    "model": Field({"type": ["string", "null"]}, "the model"),
    "name": Field({"type": ["string", "null"]}, "the former name of the field"),
    "verbose": Field(
        {"type": ["boolean", "null"]}, "the vocabulary, too", (False,), "/tokenizer_info has it", optional=True
    ),
}
NEVER = "9999-12-31T23:59:59Z"  # the model stays loaded


def _modified(serving: Serving) -> str:
    try:
        return moment(serving.model.path.stat().st_mtime)
    except OSError:
        return moment(serving.created)


def tags_document(serving: Serving) -> Json:
    """The answer of /api/tags: each name under which the model answers, adapters too."""
    more = {"modified_at": _modified(serving)}
    return {"models": [model_card(serving, name) | more for name in model_names(serving)]}


def ps_document(serving: Serving) -> Json:
    """The answer of /api/ps."""
    more = {"expires_at": NEVER, "size_vram": 0, "context_length": serving.plan.config.n_ctx}
    return {"models": [model_card(serving, name) | more for name in model_names(serving)]}


def show_document(serving: Serving) -> Json:
    """The answer of /api/show."""
    model = serving.model
    template = serving.options.chat_template or model.chat_template or ""
    found = shown(model.metadata, file_facts(model), template, _capabilities(serving))
    return found | {"modified_at": _modified(serving)}


def shown(metadata: Mapping[str, str], facts: FileFacts, template: str, uses: Sequence[str]) -> Json:
    """The same without a time, of a model that may not be loaded. The file's metadata are without lists and vocabulary.

    Args:
        uses: the model's, in ollama's words.
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
    """Those of ollama: there a model that generates is none for embeddings."""
    found = capabilities(serving)
    return [name for name in found if name != "rerank" and (name != "embedding" or "completion" not in found)]


def _value(text: str) -> Any:
    """The value of a metadata key, whose text is all that llama.cpp gives."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


@reads
def read_show(body: Mapping[str, Any], rules: Rules = RULES) -> tuple[str | None, tuple[str, ...]]:
    """The name of a model, and ignored fields. Raises ApiError."""
    given = Body(body, SHOW, rules)
    name = given.label("model") or given.label("name")
    return name, tuple(given.ignored)


async def tags(request: HttpRequest) -> Any:
    """The model, under each of its names."""
    serving = serving_of(request)
    serving.check_ready()
    return json_response(await serving.on_thread(tags_document, serving))


async def ps(request: HttpRequest) -> Any:
    """The loaded model, under each of its names."""
    serving = serving_of(request)
    serving.check_ready()
    return json_response(await serving.on_thread(ps_document, serving))


async def show(request: HttpRequest) -> Any:
    """The metadata and the capabilities of the model."""
    serving = serving_of(request)
    name, ignored = await read_body(request, serving, read_show)
    if name is None:
        raise ApiError(400, "the body has no model; give a name of /api/tags", param="model")
    check_model(served_name(name, serving), serving)
    return json_response(await serving.on_thread(show_document, serving), ignored)


async def alive(request: HttpRequest) -> Any:
    """200, where no page has this path: ollama's clients look here whether a server is there."""
    return PlainTextResponse("llamabatch is running")


async def version(request: HttpRequest) -> Any:
    """The version of ollama whose API this is."""
    return json_response({"version": API_VERSION})


routes = [
    Route("/", alive, methods=["GET"], include_in_schema=False),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version, methods=["GET"]),
]
