"""Server-sent events: a response that streams what a RequestStream brings, one body part for all of a wake-up.

uvicorn's `send` waits while a slow reader's socket is full; what comes meanwhile is joined in the RequestStream.
Comments keep a connection open that carries nothing for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from llamabatch.request.outputs import SequenceOutput
from llamabatch.server.errors import ApiError, note
from llamabatch.server.hub import RequestStream

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold pieces back
)


class Chunks(Protocol):
    """Writes the events of one response."""

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """The events of outputs; may be empty."""

    def end(self) -> bytes:
        """The events after the last output."""

    def error(self, error: ApiError) -> bytes:
        """The event of an error, after which the stream ends."""


class EventStream:
    """An ASGI response. Its head goes out with the first event, so that an error before that one has a status.

    Args:
        stream: the outputs.
        chunks: turns them into events.
        ping_s: seconds without an event after which a comment is sent, which also sends the head; 0: never.
        headers: further ones.
    """

    def __init__(
        self, stream: RequestStream, chunks: Chunks, ping_s: float = 0.0, headers: Mapping[str, str] | None = None
    ) -> None:
        self._stream = stream
        self._chunks = chunks
        self._ping_s = ping_s
        self._more = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self._sent_s = 0.0  # the loop's time of the last body part
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        stream, feed = self._stream, self._chunks.feed
        is_started = False
        self._sent_s = loop.time()
        self._set_timer(loop)
        try:
            try:
                last = b""
                async for outputs in stream:
                    body = feed(outputs) if outputs else self.idle()
                    if stream.done:
                        last = body + self._chunks.end()
                        break
                    if not body:
                        continue
                    if not is_started:
                        is_started = True
                        await self._start(send)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._sent_s = loop.time()
            except Exception as error:
                if not is_started:
                    raise
                failure = ApiError.of(error)
                note(scope, failure)
                last = self._chunks.error(failure)
            if not is_started:
                await self._start(send)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            if self._timer is not None:
                self._timer.cancel()
            stream.abort()

    def idle(self) -> bytes:
        """The events of a moment without outputs, after a `poke`; not empty."""
        return PING

    async def _start(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self._more]})

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ping_s > 0:
            self._timer = loop.call_at(self._sent_s + self._ping_s, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer a stream, not one a token: it looks when the last event was sent."""
        if loop.time() - self._sent_s >= self._ping_s * 0.99:
            self._stream.poke()
            self._sent_s = loop.time()
        self._set_timer(loop)
