"""Endpoints whose errors have llama-server's shape."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as HttpRequest

Endpoint = Callable[[HttpRequest], Awaitable[Any]]


def in_dialect(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with errors as llama-server writes them."""

    @functools.wraps(endpoint)
    async def call(request: HttpRequest) -> Any:
        request.scope["llamabatch.dialect"] = "llama_server"
        return await endpoint(request)

    return call
