"""Turns an HTTP request into the body of an endpoint: reads the bytes, checks the fields, and finds the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from llamabatch.chat.conversation import template_variables
from llamabatch.chat.formats import reasoning_of
from llamabatch.errors import ConfigError
from llamabatch.media.prompt import media_kinds
from llamabatch.server.http.errors import model_not_found
from llamabatch.server.request.body import Json, Rules, timeout_of
from llamabatch.server.request.json_body import SCOPE_BODY, Pause, read_json
from llamabatch.server.serving.serving import Serving

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

B = TypeVar("B")
G = TypeVar("G")

_ON_LOOP = 2**16  # bytes; a larger body is parsed on a worker thread
_LARGE = 2**20  # bytes; larger bodies are parsed one at a time


async def read_body(request: HttpRequest, serving: Serving, read: Callable[[Json, Rules], B]) -> B:
    """Reads the body of a request.

    Args:
        read: the reader of the endpoint. It makes the body from the JSON object and the rules.

    Raises:
        ApiError: the model is not available, the body is not JSON, or a field is refused.
    """
    serving.check_ready()
    # The parts are read one by one, because request.body() would keep the bytes in memory while the answer streams. A
    # list of parts would need twice the memory when the parts are joined.
    data = bytearray()
    async for part in request.stream():
        data += part
    headers = request.headers
    rules = rules_of(serving, timeout_of(headers))
    known: Json | None = request.scope.pop(SCOPE_BODY, None)

    def parse() -> B:
        return read(read_json(data, headers) if known is None else known, rules)

    def parse_in_steps() -> B:
        pause = Pause()
        value = read_json(data, headers, pause) if known is None else known
        pause()
        return read(value, rules)

    if len(data) <= _ON_LOOP:
        return parse()
    return await (serving.on_thread(parse) if len(data) <= _LARGE else serving.in_turn(parse_in_steps))


def rules_of(serving: Serving, timeout_s: float | None = None) -> Rules:
    """Returns the server's rules for bodies."""
    options, config = serving.options, serving.plan.config
    template = options.chat_template or serving.model.chat_template
    return Rules(
        strict=options.strict,
        max_logprobs=options.max_logprobs,
        trust_templates=options.trust_request_chat_template,
        sampling=options.sampling,
        template=options.chat_template,
        template_kwargs=options.chat_template_kwargs,
        enable_thinking=options.enable_thinking,
        verbose=options.log_level == "debug",
        timeout_s=timeout_s,
        variables=_variables_of(template),
        thinks=reasoning_of(template, config.reasoning_tags, config.reasoning_format) is not None,
        media=media_kinds(serving.model),
        addresses=bool(serving.model.media_sources),
        slot_files=options.slot_save_path is not None,
    )


@functools.lru_cache(4)
def _variables_of(template: str | None) -> frozenset[str] | None:
    """Returns the variables of a template; None: there is no template, or a broken one (each chat then fails)."""
    try:
        return None if template is None else template_variables(template)
    except ConfigError:
        return None


def with_model(body: G, serving: Serving) -> G:
    """Returns a Generation or PooledBody with its adapters. A body without adapters may give the name of an adapter as
    its model. If it does not, the server's default adapters apply.

    Raises:
        ApiError: 404: neither a model nor an adapter has the name in the body.
    """
    given: Any = body
    if given.adapters is not None or given.lora is not None:
        check_model(given.model, serving)
        return body
    loaded = serving.client.adapters
    if given.model is not None and given.model in loaded and given.model not in serving.names:
        return replace(given, adapters={given.model: 1.0})  # type: ignore[no-any-return]
    check_model(given.model, serving)
    default = serving.options.default_adapters
    return replace(given, adapters=dict(default)) if default else body


def check_model(name: str | None, serving: Serving) -> None:
    """Raises ApiError (404) if neither a model nor an adapter has this name. With any_model, or without
    served_model_names, the server accepts every name."""
    named = serving.options.served_model_names
    takes_any = not named or serving.options.any_model
    if name is not None and not takes_any and name not in named and name not in serving.client.adapters:
        raise model_not_found(name, [*named, *serving.client.adapters])


def adapter_ids(serving: Serving) -> list[str]:
    """Returns the names of the loaded adapters. The index of a name is the adapter's id in llama-server's API. Adapters
    from the start of the server come before adapters that were loaded later."""
    loaded = serving.client.adapters
    first = [name for name, _ in serving.plan.config.adapters if name in loaded]
    return first + [name for name in loaded if name not in first]
