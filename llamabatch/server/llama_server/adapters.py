"""/lora-adapters: the adapters, and the scales that apply to requests without adapters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.request.adapters import MAX_SCALE
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server.dialect import in_dialect
from llamabatch.server.request.body import Json
from llamabatch.server.request.json_body import read_json
from llamabatch.server.request.reading import adapter_ids
from llamabatch.server.response.answer import json_response
from llamabatch.server.serving.adapters import files_of
from llamabatch.server.serving.serving import Serving, serving_of
from llamabatch.utils.checks import show


def adapter_documents(serving: Serving) -> list[Json]:
    """Returns llama-server's list of adapters. The id of an adapter is its index."""
    scales, files = serving.options.default_adapters, files_of(serving)
    return [
        {"id": place, "name": name, "path": files.path(name), "scale": float(scales.get(name, 0.0))}
        for place, name in enumerate(adapter_ids(serving))
    ]


def read_scales(given: object, names: list[str]) -> dict[str, float]:
    """Reads a list of ids and scales. Returns the scales by adapter name, without scales of 0. Raises ApiError.

    Args:
        names: the names of the adapters in the order of their ids.
    """
    if not isinstance(given, list):
        raise ApiError(400, f"the body is {show(given)}; give a list of objects with id and scale")
    found: dict[str, float] = {}
    for place, each in enumerate(given):
        if not isinstance(each, dict) or not each.keys() >= {"id", "scale"}:
            raise ApiError(400, f"[{place}] is {show(each)}; give an object with id and scale")
        number, scale = each["id"], each["scale"]
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(names):
            known = f"0 to {len(names) - 1}" if names else "none, as no adapter is loaded"
            raise ApiError(400, f"[{place}].id is {show(number)}; known ids are {known}")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= MAX_SCALE:
            raise ApiError(400, f"[{place}].scale is {show(scale)}; give a number from -{MAX_SCALE} to {MAX_SCALE}")
        if scale:
            found[names[number]] = float(scale)
    return found


async def list_adapters(request: HttpRequest) -> Any:
    """Lists the adapters."""
    serving = serving_of(request)
    serving.check_ready()
    return json_response(adapter_documents(serving))


async def set_scales(request: HttpRequest) -> Any:
    """Sets the scales of the adapters for later requests without adapters."""
    serving = serving_of(request)
    serving.check_ready()
    data = b'{"adapters":' + await request.body() + b"}"  # in an object, because read_json refuses a list
    body = read_json(data, request.headers)
    if len(body) > 1:
        raise ApiError(400, "the body is no JSON: there is text after the list")
    scales = read_scales(body["adapters"], adapter_ids(serving))
    serving.set_options(default_adapters=scales)
    return json_response({"success": True})


routes = [
    Route("/lora-adapters", in_dialect(list_adapters), methods=["GET"]),
    Route("/lora-adapters", in_dialect(set_scales), methods=["POST"]),
]
