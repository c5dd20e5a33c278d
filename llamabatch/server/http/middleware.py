"""Middlewares of every request. They shape errors, make refusals readable for clients, handle the root path, and cancel
handlers whose client has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from llamabatch.server.http.errors import SCOPE_SHAPE, ErrorShape
from llamabatch.server.http.security import own_path

_DROPS_S = 3.0  # the rest of a refused body is read and dropped for this many seconds


class ErrorShapes:
    """A middleware that sets the shape of errors by the path. It runs before routing, so unknown paths have a shape.

    Args:
        by_path: shapes by path. A shape also applies to all paths below its path.
        prefix: removed from paths that begin with the prefix.
    """

    def __init__(self, app: Any, by_path: Mapping[str, ErrorShape], prefix: str = "") -> None:
        self._app = app
        self._by_path = by_path
        self._prefix = prefix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            path = own_path(scope, self._prefix)
            for first, shape in self._by_path.items():
                if f"{path}/".startswith(f"{first}/"):
                    scope[SCOPE_SHAPE] = shape
        await self._app(scope, receive, send)


class RefusesReadably:
    """A middleware that reads and drops the rest of a body for some seconds before a response closes the connection.

    If the connection closed while the client still sends, the client would see a reset instead of the response. A
    request with `Expect: 100-continue` passes unchanged, because its client waits before it sends the body.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if not names & {b"content-length", b"transfer-encoding"} or b"expect" in names:
            await self._app(scope, receive, send)
            return
        is_whole = closes = drops = False

        async def watched_receive() -> Any:
            nonlocal is_whole
            message = await receive()
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def watched_send(message: Any) -> None:
            nonlocal closes, drops
            if message["type"] == "http.response.start":
                closes = any(name.lower() == b"connection" and value == b"close" for name, value in message["headers"])
            elif closes and not is_whole and not message.get("more_body", False):
                drops = True
                message = {**message, "more_body": True}
            await send(message)

        async def drop() -> None:
            while not is_whole:
                await watched_receive()

        await self._app(scope, watched_receive, watched_send)
        if drops:  # the wait comes after self._app has returned, so it is not in the measured time of the request
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(drop(), _DROPS_S)
            await send({"type": "http.response.body", "body": b""})


class RootPath:
    """A middleware that accepts all paths with and without a prefix, because a proxy may remove or keep the prefix."""

    def __init__(self, app: Any, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._prefix and scope["type"] == "http":
            path, root = own_path(scope), str(scope.get("root_path", "")) + self._prefix
            if not f"{path}/".startswith(f"{self._prefix}/"):
                scope = {**scope, "path": root + path}
            scope = {**scope, "root_path": root}
        await self._app(scope, receive, send)


class EndsWithItsClient:
    """A middleware that cancels the handler of a POST request, streamed or not, when the client disconnects.

    Without this middleware, a handler that waits for the engine would notice the disconnect only when it sends. The
    middleware watches for the disconnect only after the whole body has been read, because `receive` returns the body
    and the disconnect.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        client = _Client(receive)
        handler = asyncio.ensure_future(self._app(scope, client.receive, send))
        client.handler = handler
        try:
            await asyncio.shield(handler)
        except asyncio.CancelledError:
            handler.cancel()  # a shutdown cancels this task, but not the shielded handler
            with contextlib.suppress(asyncio.CancelledError):
                await handler
            if not client.has_left:
                raise
        finally:
            client.stop()


class _Client:
    """The receiving side of a request.

    Attributes:
        handler: the task to cancel when the client leaves.
        has_left: True after the client has left.
    """

    def __init__(self, receive: Any) -> None:
        self.handler: asyncio.Future[Any] | None = None
        self.has_left = False
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    async def receive(self) -> Any:
        """Receives a message for the handler."""
        if self._watch is not None:  # the body is complete, so the next message is the disconnect
            await asyncio.shield(self._watch)
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.has_left = True
        elif not message.get("more_body", False):
            self._watch = asyncio.ensure_future(self._look())
        return message

    def stop(self) -> None:
        """Stops the watch, since the response is complete."""
        if self._watch is not None:
            self._watch.cancel()

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.handler is not None and not self.handler.done():
            self.has_left = True
            self.handler.cancel()
