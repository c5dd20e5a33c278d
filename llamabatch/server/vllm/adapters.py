"""/v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from llamabatch.server.request.body import BOOLEAN, RULES, TEXT, Body, Field, Fields, Rules, reads, string
from llamabatch.server.request.reading import read_body
from llamabatch.server.response.answer import ignored_of
from llamabatch.server.serving.adapters import files_of
from llamabatch.server.serving.serving import serving_of

LOAD: Fields = {
    "lora_name": Field({"type": "string"}, "name of the adapter, which requests give as that of a model"),
    "lora_path": Field({"type": "string"}, "its file, in the folder of adapters"),
    "load_inplace": Field(BOOLEAN, "one of this name is unloaded first"),
    "base_model_name": Field(TEXT, "without effect: there is one model"),
}
UNLOAD: Fields = {
    "lora_name": LOAD["lora_name"],
    "lora_int_id": Field({"type": ["integer", "null"]}, "without effect: the name is enough"),
}


@dataclass(frozen=True)
class AdapterBody:
    """A request to load or to unload an adapter.

    Attributes:
        name: the name of the adapter.
        path: the file of the adapter; "" in a request to unload.
        in_place: True: a loaded adapter of this name is unloaded first.
        ignored: names of unknown fields.
    """

    name: str
    path: str = ""
    in_place: bool = False
    ignored: tuple[str, ...] = ()


@reads
def read_load(body: Mapping[str, Any], rules: Rules = RULES) -> AdapterBody:
    """Reads an AdapterBody from a request to load. Raises ApiError."""
    given = Body(body, LOAD, rules)
    name = string("lora_name", given.needed("lora_name", "a name"))
    path = string("lora_path", given.needed("lora_path", "a file"))
    return AdapterBody(name, path, given.boolean("load_inplace"), tuple(given.ignored))


@reads
def read_unload(body: Mapping[str, Any], rules: Rules = RULES) -> AdapterBody:
    """Reads an AdapterBody from a request to unload. Raises ApiError."""
    given = Body(body, UNLOAD, rules)
    name = string("lora_name", given.needed("lora_name", "a name"))
    return AdapterBody(name, ignored=tuple(given.ignored))


async def load(request: HttpRequest) -> Any:
    """Loads an adapter."""
    serving = serving_of(request)
    body = await read_body(request, serving, read_load)
    await serving.on_thread(lambda: files_of(serving).load(body.name, body.path, in_place=body.in_place))
    text = f"Success: LoRA adapter '{body.name}' added successfully."
    return PlainTextResponse(text, headers=ignored_of(body.ignored))


async def unload(request: HttpRequest) -> Any:
    """Unloads an adapter."""
    serving = serving_of(request)
    body = await read_body(request, serving, read_unload)
    await serving.on_thread(lambda: files_of(serving).unload(body.name))
    text = f"Success: LoRA adapter '{body.name}' removed successfully."
    return PlainTextResponse(text, headers=ignored_of(body.ignored))


routes = [
    Route("/v1/load_lora_adapter", load, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
]
