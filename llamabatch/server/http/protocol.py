"""uvicorn's HTTP protocol with limits on heads, times and connections.

By default, uvicorn with httptools limits none of these. A head may have any length and take any time, and a connection
stays open even if its client never sends or never reads.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llamabatch.server.http.counts import HttpCounts
from llamabatch.server.http.errors import ApiError, retry_after
from llamabatch.server.options import ServerOptions
from llamabatch.utils.checks import counted
from llamabatch.utils.system import limits, set_limits

logger = logging.getLogger(__name__)

_LEAST_RATE = 16 * 2**10  # bytes a second; a body that arrives at least this fast may take longer than body_timeout_s
_IDLE, _HEAD, _BODY, _BUSY = "idle", "head", "body", "busy"
_LOOK_S, _LOOK_AGAIN_S = 0.05, 1.0  # seconds between two checks of a half-closed client: at first, and later
_PER_HEADER = 4  # bytes of a header without its name and value: ": " and the end of the line


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, with limits. `bounded` makes a class with the values of ServerOptions.

    Each connection has one timer, with three limits in turn. An idle connection (before or between requests) may last
    keep_alive_s. The head may take header_timeout_s from its first byte. Then the body may take body_timeout_s plus 1 s
    for each 16 KiB. A running request has no limit, except write_timeout_s for a client that does not read.
    """

    options: ServerOptions
    counts: HttpCounts
    malformed: MalformedLog

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._phase = _IDLE
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # all bytes received since the head began
        self._measured = 0  # bytes of the head that the parser has read
        self._body_bytes = 0
        self._body_from_s = 0.0
        self._refusal: ApiError | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = self.options.max_connections
        if len(self.connections) > most:
            message = f"all {most:,} connections are in use; try again"
            self._refuse(ApiError(503, message, headers=retry_after(None)))
            return
        try:
            self._enter(_IDLE)
        except BaseException:  # without a timer the connection could stay open for ever
            transport.abort()
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._enter(_BUSY)
            self._stop_write_timer()
        finally:  # super() must always run, because it tells the request that its client has left
            super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True if the connection stays open although the client sends no more. The client has either left or
        still waits for its response (a half-closed connection). To tell the two apart, _look_for_reader sends bytes: a
        client that has left resets the connection."""
        cycle = self.cycle
        if self._phase != _BUSY or cycle is None or cycle.response_complete or self.scope["http_version"] == "1.0":
            return False
        if self.transport.get_extra_info("sslcontext") is not None:  # asyncio has no half-closed TLS
            return False
        cycle.keep_alive = False
        self._look_for_reader(cycle)
        return True

    def _look_for_reader(self, cycle: RequestResponseCycle, wait_s: float = _LOOK_S) -> None:
        """Sends interim responses, which clients ignore (RFC 9110, 15.2), until the response begins. If the client has
        left, its machine answers with a reset, which ends the connection."""
        if cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self.loop.call_later(wait_s, self._look_for_reader, cycle, _LOOK_AGAIN_S)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():  # the connection is refused, but not closed yet
            return
        if self._phase == _IDLE:
            self._enter(_HEAD)
        if self._phase == _HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        # The parser calls on_header only at the end of a header. Without this check a value could be endless.
        if self._phase == _HEAD and self._head_bytes > self.options.max_header_bytes:
            self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._measured = 0
        if self._phase == _BUSY:  # the client has sent a second request before the response to the first
            self._enter(_HEAD)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._measure(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.options.max_headers:
            most = self.options.max_headers
            self._fail(ApiError(431, f"the request has more than {most} headers, which is the limit here"))
        self._measure(len(name) + len(value) + _PER_HEADER)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.__class__ = CycleWithoutChunks
        self._enter(_BODY)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # The response may have been complete before the body, for example if a request without a key was refused.
        self._enter(_IDLE if self.cycle is None or self.cycle.response_complete else _BUSY)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase == _BUSY and not self.pipeline and self.cycle.response_complete:
            self._enter(_IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.options.write_timeout_s, self._on_write_timeout)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        """Closes the connection once the server has drained. A request whose body is still arriving gets 503."""
        if self._phase == _BODY and self.cycle is not None and not self.cycle.response_started:
            self._refuse(ApiError(503, "the server is shutting down", headers=retry_after(None)))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Sends an error response after the parser has failed or `_fail` has stopped it."""
        if self._refusal is None:
            self.malformed.add(self.loop)
        self._refuse(self._refusal or ApiError(400, "this is no HTTP request"))

    def _enter(self, phase: str) -> None:
        """Sets the phase and its timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._phase = phase
        if phase == _BUSY:
            return
        if phase == _IDLE:
            self._head_bytes = 0
            seconds = self.options.keep_alive_s
        elif phase == _HEAD:
            self._head_bytes = 0
            seconds = self.options.header_timeout_s
        else:
            self._body_bytes = 0
            self._body_from_s = self.loop.time()
            seconds = self.options.body_timeout_s
        self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        options = self.options
        if self._phase == _IDLE:
            self.transport.close()
        elif self._phase == _HEAD:
            self._refuse(ApiError(408, f"the head of the request took more than {options.header_timeout_s:g} s"))
        else:
            allowed = options.body_timeout_s + self._body_bytes / _LEAST_RATE
            left = self._body_from_s + allowed - self.loop.time()
            if left > 0:
                self._timer = self.loop.call_later(left, self._on_timeout)
            else:
                self._refuse(ApiError(408, f"the body of the request took more than {allowed:.0f} s"))

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        logger.info("a client has not read its answer for %g s; its request ends", self.options.write_timeout_s)
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _measure(self, n_bytes: int) -> None:
        self._measured += n_bytes
        if self._measured > self.options.max_header_bytes:
            self._fail(self._head_too_large())

    def _head_too_large(self) -> ApiError:
        most = self.options.max_header_bytes
        return ApiError(431, f"the head of the request has more than {most:,} bytes, which is the limit here")

    def _fail(self, refusal: ApiError) -> None:
        """Raises the error that stops the parser. uvicorn then calls send_400_response."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def _refuse(self, error: ApiError) -> None:
        """Sends an error and closes the connection. Sends no error if a response has begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or (not cycle.response_started and not self.pipeline):
            body = json.dumps(error.to_openai()).encode()
            head = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
            fields = {**error.headers, "Content-Type": "application/json", "Content-Length": len(body)}
            fields["Connection"] = "close"
            head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            self.transport.write(head.encode("latin-1") + b"\r\n" + body)
            if cycle is None or cycle.response_complete:  # if a cycle is open, RequestLog counts its request
                self.counts.add_unread(error.status)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the application must not write after this error
            cycle.message_event.set()
        self._enter(_BUSY)
        self.transport.close()


class CycleWithoutChunks(RequestResponseCycle):
    """Sends a body of unknown length without chunks, for HTTP/1.0. The end of the connection ends the body."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length and self.scope["method"] != "HEAD":
            self.expected_content_length = len(message.get("body", b""))  # otherwise uvicorn's length check would raise
        await super().send(message)


class MalformedLog:
    """Logs one line for all malformed requests within a second. Belongs to one event loop."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, loop: asyncio.AbstractEventLoop) -> None:
        """Counts a malformed request."""
        self._count += 1
        if self._count == 1:
            loop.call_later(1.0, self._write)

    def _write(self) -> None:
        count, self._count = self._count, 0
        logger.info("%s within a second that were not HTTP", counted(count, "request"))


def bounded(options: ServerOptions, counts: HttpCounts) -> type[BoundedProtocol]:
    """Returns the protocol class of a server, for uvicorn's `http`."""
    own = {"options": options, "counts": counts, "malformed": MalformedLog()}
    return type("BoundedProtocol", (BoundedProtocol,), own)


def allow_open_files(n_connections: int) -> None:
    """Increases the soft limit of open files for `n_connections` connections, as far as the hard limit allows."""
    soft, hard = limits("RLIMIT_NOFILE")
    wanted = n_connections + 256
    if soft is None or soft >= wanted:
        return
    reached = wanted if hard is None else min(wanted, hard)
    set_limits("RLIMIT_NOFILE", reached, hard)
    if reached < wanted:
        logger.warning(
            "%s files may be open, which is fewer than max_connections, %s; raise `ulimit -n`",
            f"{reached:,}",
            f"{n_connections:,}",
        )
