"""/props: the model, its chat template, and the default settings of requests."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.client.front_client import slots_of
from llamabatch.media.prompt import MARK, media_kinds
from llamabatch.planning.profile_store import library_id
from llamabatch.request.media import IMAGE, SOUND
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server.dialect import in_dialect
from llamabatch.server.llama_server.settings import generation_settings
from llamabatch.server.request.body import Json
from llamabatch.server.request.json_body import read_json
from llamabatch.server.request.reading import check_model
from llamabatch.server.response.answer import json_response
from llamabatch.server.serving.serving import Serving, serving_of
from llamabatch.utils.checks import show
from llamabatch.utils.version import __version__


def props_document(serving: Serving) -> Json:
    """Returns the response of GET /props."""
    model, config, options = serving.model, serving.plan.config, serving.options
    media = media_kinds(model)
    params = SamplingParams.from_options(**{"max_tokens": None, **options.sampling})
    settings = generation_settings(params, model, n_predict=params.max_tokens)
    template = options.chat_template or model.chat_template or ""
    return {
        "default_generation_settings": {
            "id": 0,
            "id_task": -1,
            "n_ctx": config.n_ctx,
            "speculative": config.speculate != "off",
            "is_processing": False,
            "params": settings,
        },
        "total_slots": slots_of(config),
        "model_alias": serving.names[0],
        "model_path": model.path.name,  # only the name: callers need not know this machine's folders
        "modalities": {"vision": IMAGE in media, "video": False, "audio": SOUND in media},
        "media_marker": MARK,
        "endpoint_slots": options.slots,
        "endpoint_props": options.props,
        "endpoint_metrics": True,
        "chat_template": template,
        "chat_template_caps": {},
        "bos_token": model.special_token("bos"),
        "eos_token": model.special_token("eos"),
        "build_info": f"llamabatch {__version__}, llama.cpp of llama-cpp-python {library_id()}",
        "is_sleeping": False,
    }


def read_props(body: Json, serving: Serving) -> dict[str, Any]:
    """Returns the new default values of SamplingParams. A null in the body removes a default.

    Raises:
        ApiError: a name is unknown.
    """
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    for name in body:
        if name not in names:
            raise ApiError(
                400, f"there is no setting {show(name)}; give fields of SamplingParams, as temperature", param=name
            )
    merged = {**serving.options.sampling, **body}
    return {name: value for name, value in merged.items() if value is not None}


async def props(request: HttpRequest) -> Any:
    """Returns the properties of the server and its model."""
    serving = serving_of(request)
    serving.check_ready()
    check_model(request.query_params.get("model") or None, serving)
    return json_response(await serving.on_thread(props_document, serving))


async def set_props(request: HttpRequest) -> Any:
    """Changes the default settings of later requests."""
    serving = serving_of(request)
    if not serving.options.props:
        raise ApiError(501, "this server does not let POST /props change its settings; start it with --props")
    serving.check_ready()
    body = read_json(await request.body(), request.headers)
    sampling = read_props(body, serving)
    SamplingParams.from_options(**sampling)  # raises for a value outside its range
    serving.set_options(sampling=sampling)
    return json_response({"success": True})


routes = [
    Route("/props", in_dialect(props), methods=["GET"]),
    Route("/props", in_dialect(set_props), methods=["POST"]),
]
