"""The response stream of a request during the load of its model. SSE comments keep the stream open until the model
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from llamabatch.server.http.errors import ApiError, error_body
from llamabatch.server.http.security import Scope, Send, own_path
from llamabatch.server.request.body import Json
from llamabatch.server.response.event_stream import EVENT_STREAM_HEAD
from llamabatch.server.response.json_text import dump

_PATHS = ("/chat/completions", "/completions", "/completion", "/infill", "/messages", "/responses")
_NAMED = ("/messages", "/responses")  # streams whose events have names


def is_event_stream(path: str, body: Json) -> bool:
    """Returns True if the response is a stream of server-sent events."""
    return body.get("stream") is True and path.endswith(_PATHS)


class WaitingStream:
    """A response that can start before its model is loaded.

    The head of the response is sent with the first comment. The response of the model then continues the stream, and an
    error becomes an event.

    Args:
        send: the server's `send`.
        words: returns one line of text: the reason why the request waits.
        every_s: seconds between two comments; 0: no comments.
    """

    def __init__(self, scope: Scope, send: Send, words: Callable[[], str], every_s: float) -> None:
        self._scope = scope
        self._send = send
        self._words = words
        self._every_s = every_s
        self._failed: bytearray | None = None
        self.has_begun = False

    async def until(self, entering: Awaitable[Any]) -> None:
        """Waits for the model, and sends comments during the wait. Raises any error of `entering`."""
        task = asyncio.ensure_future(entering)
        try:
            while not (await asyncio.wait({task}, timeout=self._every_s or None))[0]:
                if not self.has_begun:
                    self.has_begun = True
                    await self._send(dict(EVENT_STREAM_HEAD))
                await self._part(f": {self._words()}\n\n".encode())
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        await task

    async def send(self, message: Any) -> None:
        """Sends a message of the model's application. If the stream has begun, leaves out the head of the response, and
        turns an error response into an event."""
        if not self.has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._failed = None if message["status"] == 200 else bytearray()
        elif self._failed is None:
            await self._send(message)
        else:
            self._failed += message.get("body", b"")
            if not message.get("more_body", False):
                await self._part(self._event(bytes(self._failed)), ends=True)

    async def fail(self, error: ApiError) -> None:
        """Ends the stream with the event of an error. The head of the stream must have been sent."""
        await self._part(self._event(dump(error_body(error, self._scope)).encode()), ends=True)

    def _event(self, document: bytes) -> bytes:
        name = b"event: error\n" if own_path(self._scope).endswith(_NAMED) else b""
        return name + b"data: " + document + b"\n\n"

    async def _part(self, body: bytes, *, ends: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not ends})
