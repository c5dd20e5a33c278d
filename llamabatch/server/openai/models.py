"""/v1/models: the served model and its adapters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.llama.model import Model
from llamabatch.planning.plan import Plan
from llamabatch.server.http.errors import model_not_found
from llamabatch.server.request.body import Json
from llamabatch.server.response.answer import json_response
from llamabatch.server.response.model_facts import architecture_of, capabilities, file_facts, model_card
from llamabatch.server.serving.serving import Serving, serving_of

# Keys: values of tokenizer.ggml.model. Values: llama.cpp's numbers for types of vocabularies (llama-vocab.cpp).
_VOCAB_TYPES = {
    "no_vocab": 0,
    "none": 0,
    "llama": 1,
    "gpt2": 2,
    "bert": 3,
    "t5": 4,
    "rwkv": 5,
    "plamo2": 6,
    "gemma4": 2,
}


def models_response(serving: Serving) -> Json:
    """Returns the list of models: the served model under its first name, and the adapters as its children."""
    facts = model_facts(serving.model, serving.plan)
    base = _card(serving, serving.names[0], facts) | {"aliases": list(serving.names[1:])}
    adapters = [
        _card(serving, name, facts) | {"parent": serving.names[0], "root": name} for name in serving.client.adapters
    ]
    uses = capabilities(serving)
    entry = model_card(serving, serving.names[0]) | {
        "modified_at": "",
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": [*uses, *(["multimodal"] if {"vision", "audio"} & set(uses) else [])],  # as in llama-server
        "parameters": "",
    }
    return {"object": "list", "data": [base, *adapters], "models": [entry]}


def _card(serving: Serving, name: str, facts: Json) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "llamabatch",
        "root": serving.names[0],
        "parent": None,
        "max_model_len": serving.plan.config.n_ctx,
        "meta": facts,
    }


def model_facts(model: Model, plan: Plan) -> Json:
    """Returns llama-server's `meta` of a model: the type and size of its vocabulary, the sizes of its context and its
    embeddings, and the numbers of its parameters and bytes."""
    metadata = model.metadata
    architecture = architecture_of(model)
    embd, trained = (metadata.get(f"{architecture}.{key}", "") for key in ("embedding_length", "context_length"))
    file = file_facts(model)
    return {
        "vocab_type": _VOCAB_TYPES.get(metadata.get("tokenizer.ggml.model", ""), 0),
        "n_vocab": model.n_vocab,
        "n_ctx": plan.config.n_ctx,
        "n_ctx_train": int(trained) if trained.isdigit() else plan.config.n_ctx,
        "n_embd": int(embd) if embd.isdigit() else model.n_embd_out,
        "n_params": file.n_params,
        "size": file.n_bytes,
    }


async def list_models(request: HttpRequest) -> Any:
    """Lists the models."""
    serving = serving_of(request)
    serving.check_ready()
    return json_response(await serving.on_thread(models_response, serving))


async def retrieve_model(request: HttpRequest) -> Any:
    """Returns a model by its name."""
    serving = serving_of(request)
    serving.check_ready()
    name = request.path_params["name"]
    if not name:
        return await list_models(request)
    listed = (await serving.on_thread(models_response, serving))["data"]
    found = {each["id"]: each for each in listed} | {alias: listed[0] | {"id": alias} for alias in serving.names[1:]}
    if name not in found:
        raise model_not_found(name, list(found))
    return json_response(found[name])


routes = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", retrieve_model, methods=["GET"]),
]
