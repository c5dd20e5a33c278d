"""BodyLimits, a plain ASGI middleware that limits the bytes of bodies."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from llamabatch.server.http.errors import ApiError, retry_after
from llamabatch.server.http.security import App, Message, Receive, Scope, Send, own_path
from llamabatch.utils.format import file_size

_CLOSE = {"Connection": "close"}  # headers of a refusal: the unread rest of the body must not be parsed as a request


class BodyLimits:
    """Limits the bytes of each body, with or without a content-length, and of all bodies in memory together.

    Above a limit, the `receive` of the application raises ApiError 413 or 503. A body counts in the total until its
    response starts, because the body has become tokens by then.

    Args:
        max_bytes: limit for one body.
        max_total_bytes: limit for all bodies together.
        by_path: limits in place of max_bytes, by path (without the root path). Bodies of these paths do not count in
            max_total_bytes, because they are written to disk as they arrive.
    """

    def __init__(
        self, app: App, max_bytes: int, max_total_bytes: int, by_path: Mapping[str, int] | None = None
    ) -> None:
        self.n_bytes = 0
        self._app = app
        self._max = max_bytes
        self._max_total = max_total_bytes
        self._by_path = dict(by_path or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._max_of(scope)
        is_kept = own_path(scope) not in self._by_path
        held = 0

        def release() -> None:
            nonlocal held
            self.n_bytes -= held
            held = 0

        async def bounded_receive() -> Message:
            nonlocal held, most
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                if size > most:
                    raise self._too_large(scope)
                if is_kept and self.n_bytes + size > self._max_total:
                    raise ApiError(
                        503,
                        f"the server is receiving {file_size(self.n_bytes)} of request bodies, and the limit is "
                        f"{file_size(self._max_total)}; try again later",
                        headers={**retry_after(None), **_CLOSE},
                    )
                most -= size
                if is_kept:
                    held += size
                    self.n_bytes += size
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                release()
            await send(message)

        declared = _content_length(scope)
        if declared is not None and declared > most:
            await self._too_large(scope).response(scope)(scope, receive, send)
            return
        try:
            await self._app(scope, bounded_receive, watched_send)
        finally:
            release()

    def _max_of(self, scope: Scope) -> int:
        if not self._by_path:
            return self._max
        return self._by_path.get(own_path(scope), self._max)

    def _too_large(self, scope: Scope) -> ApiError:
        most = self._max_of(scope)
        return ApiError(
            413,
            f"the body has more than {file_size(most)} ({most:,} bytes), which is the limit here",
            headers=_CLOSE,
        )


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            with contextlib.suppress(ValueError):  # the HTTP parser refuses other values
                return int(value)
    return None
