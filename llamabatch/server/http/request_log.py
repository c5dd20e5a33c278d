"""RequestLog, a middleware that gives each request an id, counts requests, and logs failures or all requests.

The line of a failure has id, name of the key, method, path, status, code and reason. If all requests are logged, each
also has a line with client, name of the key, method, path, status and seconds. No line has parts of a body, a query or
a header, except X-Request-Id. Error messages of statuses below 500 are not logged, because they may quote a body, a
query or a header.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from llamabatch.server.http.counts import HttpCounts
from llamabatch.server.http.errors import CLIENT_CLOSED, SCOPE_ERRORS, ApiError
from llamabatch.server.http.ids import current_id, random_hex
from llamabatch.server.http.keys import SCOPE_KEY
from llamabatch.server.http.security import App, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)
_access_logger = logging.getLogger("llamabatch.server.access")

_HEADER = b"x-request-id"
_HEADERS = (_HEADER, b"request-id")  # response headers with the id; Anthropic's client reads the second one
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # valid request ids from callers
_FIELD = re.compile(r"[A-Za-z_]{1,40}")
_LONGEST_PATH = 200  # maximum number of characters of a path in the log
_NOT_READY = ("model_loading", "model_restarting", "model_draining", "model_not_loaded")
_WAITS = (429, 503, 504)  # statuses caused by load, not by a fault


class RequestLog:
    """The outermost middleware. It logs and counts requests.

    An exception becomes an error response here, so that no other log shows the text of the exception. The id of a
    request comes from its header X-Request-Id, or is random. The response has the id in X-Request-Id and Request-Id.

    Args:
        counts: counts each request when the request ends.
        access: True: each request has a log line, not only each failure.
    """

    def __init__(self, app: App, counts: HttpCounts, access: bool = False) -> None:
        self._app = app
        self._counts = counts
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _id_of(scope)
        current_id.set(request_id.decode())
        errors: list[ApiError] = []
        scope[SCOPE_ERRORS] = errors
        scope[SCOPE_KEY] = []
        status = 0  # 0 until the response begins
        began_s = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = ((name, request_id) for name in _HEADERS)
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            errors.append(ApiError.of(error))
            if status:
                raise ConnectionAbortedError("the response was cut; the log says where") from None
            await errors[-1].response(scope)(scope, receive, watched)
        finally:
            took_s = time.perf_counter() - began_s
            self._counts.add(scope, status, took_s)
            if self._access:
                client = scope.get("client") or ("-",)
                who = " ".join((client[0], *scope[SCOPE_KEY]))  # the name of a key, never a key
                _access_logger.info("%s %s %s %s %.3f s", who, scope["method"], _shown_path(scope), status, took_s)
            if status >= 400 or errors:
                _write(request_id.decode(), scope, status, errors[-1] if errors else None)


def _write(request_id: str, scope: Scope, status: int, error: ApiError | None) -> None:
    failed = status if error is None else error.status
    level = logging.WARNING if failed >= 500 and failed not in _WAITS else logging.INFO
    if failed == CLIENT_CLOSED or _is_poll(scope, error):
        level = logging.DEBUG
    named = f" of {scope[SCOPE_KEY][0]}" if scope[SCOPE_KEY] else ""
    parts: list[Any] = [status if failed == status or not status else f"{status}, then {failed}"]
    if error is not None and error.code:
        parts.append(error.code)
    if error is not None and failed >= 500:
        parts.append(error.message)
    elif error is not None and error.param and _FIELD.fullmatch(error.param):  # the message may quote values
        parts.append(f"the field {error.param}")
    reason = ": ".join(map(str, parts))
    logger.log(level, "request %s%s failed: %s %s: %s", request_id, named, scope["method"], _shown_path(scope), reason)


def _shown_path(scope: Scope) -> str:
    """Returns the beginning of the path, without line breaks."""
    return str(scope["path"])[:_LONGEST_PATH].encode("unicode_escape").decode()


def _is_poll(scope: Scope, error: ApiError | None) -> bool:
    """True for a GET or HEAD that found the server not ready. Load balancers send many such requests, and the log has
    the server's state in other lines."""
    return scope["method"] in ("GET", "HEAD") and error is not None and error.code in _NOT_READY


def _id_of(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == _HEADER and _ID.fullmatch(value):
            return bytes(value)
    return random_hex(8).encode()
