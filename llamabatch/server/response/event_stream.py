"""Server-sent events: a response that streams the outputs of a RequestStream. Each list of outputs becomes one body
part, or several parts if the list takes long to write.

uvicorn's `send` waits while a slow reader's socket is full. Meanwhile, the RequestStream joins new outputs.
Comments keep a silent connection open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from llamabatch.request.outputs import SequenceOutput
from llamabatch.server.http.errors import ApiError, keep_error
from llamabatch.server.serving.dispatcher import RequestStream
from llamabatch.server.serving.serving import Serving

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_AT_ONCE = 64  # maximum number of outputs in one call on a worker thread
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer events
)
_MEDIA = b"text/event-stream; charset=utf-8"
EVENT_STREAM_HEAD: Mapping[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", _MEDIA), *_HEADERS],
}


class Chunks(Protocol):
    """Writes the events of one response. Calls may come on any thread, one at a time."""

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        """True if `feed` would delay other requests too long on the event loop. `feed` then runs on a worker thread."""

    def end_takes_long(self) -> bool:
        """True if `end` would delay other requests too long on the event loop."""

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """Returns the events of outputs; the result may be empty."""

    def end(self) -> Iterable[bytes]:
        """Returns the events after the last output, in parts."""

    def error(self, error: ApiError) -> bytes:
        """Returns the event of an error. It is the last event of the stream."""


class EventStream:
    """An ASGI response of events. The head waits for the first event, so that an earlier error can set the status.

    Args:
        serving: the Serving. Its worker threads write large events.
        stream: the outputs.
        chunks: turns outputs into events.
        ping_s: after this many seconds without an event, a comment is sent, preceded by the head if needed; 0: never.
        headers: additional response headers.
    """

    media = _MEDIA

    def __init__(
        self,
        serving: Serving,
        stream: RequestStream,
        chunks: Chunks,
        ping_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._serving = serving
        self._stream = stream
        self._chunks = chunks
        self._ping_s = ping_s
        self._more = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self._sent_s = 0.0  # loop.time() of the last body part or poke
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        stream, chunks = self._stream, self._chunks
        is_started = False

        async def send_part(body: bytes) -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                await self._start(send)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._sent_s = loop.time()

        self._sent_s = loop.time()
        self._set_timer(loop)
        try:
            try:
                last = b""
                async for outputs in stream:
                    if not outputs:
                        await send_part(self.idle())
                        continue
                    if not chunks.takes_long(outputs):
                        last = chunks.feed(outputs)
                    else:
                        for start in range(0, len(outputs), _AT_ONCE):
                            if last:
                                await send_part(last)
                            last = await self._serving.on_thread(chunks.feed, outputs[start : start + _AT_ONCE])
                    if not stream.done:
                        if last:
                            await send_part(last)
                            last = b""
                    elif not chunks.end_takes_long():
                        last += b"".join(chunks.end())
                    else:
                        parts = iter(chunks.end())
                        while part := await self._serving.on_thread(next, parts, b""):
                            if last:
                                await send_part(last)
                            last = part
            except Exception as error:
                if not is_started:
                    raise
                failure = ApiError.of(error)
                keep_error(scope, failure)
                last = self._chunks.error(failure)
            if not is_started:
                await self._start(send)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            if self._timer is not None:
                self._timer.cancel()
            stream.abort()

    def idle(self) -> bytes:
        """Returns the bytes (at least one) to send when a poked stream has no outputs."""
        return PING

    async def _start(self, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", self.media), *_HEADERS, *self._more],
            }
        )

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ping_s > 0:
            self._timer = loop.call_at(self._sent_s + self._ping_s, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Pokes a silent stream. A stream has only one timer, because a timer for each token would be slow."""
        if loop.time() - self._sent_s >= self._ping_s * 0.99:
            self._stream.poke()
            self._sent_s = loop.time()
        self._set_timer(loop)
