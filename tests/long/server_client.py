"""A server of the bundled model on a thread of this process, and a client that may leave early or read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any

import uvicorn

from llamabatch.server.application import engine_config, make_app
from llamabatch.server.options import ServerOptions
from llamabatch.server.run import listen, uvicorn_config
from llamabatch.server.serving.serving import Serving

START_S = 120.0
END_S = 60.0

Body = dict[str, Any]


class RunningServer:
    """A `with` block in which the server answers on `port`.

    Args:
        engine: options of the engine.
        options: options of the server.
        app: an application with `state.serving`, in place of the one for the bundled model.
    """

    def __init__(self, engine: Body, app: Any = None, **options: Any) -> None:
        self._options = ServerOptions(port=0, **options)
        self.app = app or make_app(engine_config("tiny", engine), self._options)
        self.serving: Serving = self.app.state.serving
        self.port = 0
        self._server = uvicorn.Server(uvicorn_config(self.app, self._options))
        self._thread: threading.Thread | None = None
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> RunningServer:
        self._sockets = listen(self._options)
        self.port = self._sockets[0].getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": self._sockets}, name="server", daemon=True
        )
        self._thread.start()
        until(lambda: self.serving.state != "loading", START_S, "the server still loads")
        assert self.serving.state == "ready", self.serving.state
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(END_S)
        for each in self._sockets:
            each.close()
        if error is None:
            assert not self._thread.is_alive(), "the server has not ended"

    @property
    def pid(self) -> int:
        """The process id of the engine's child."""
        [pid] = self.serving.client.pids
        return pid

    def check_idle(self) -> None:
        """Waits until no call is under way, and checks that no request is left."""
        serving = self.serving
        until(lambda: not serving.n_open, END_S, "calls are still under way")

        def is_idle() -> bool:
            stats = serving.client.stats()
            return not (stats.running or stats.waiting or stats.in_flight)

        until(is_idle, END_S, "the engine still has requests")
        assert not serving.admission.n_in_flight, serving.admission.n_in_flight


def until(holds: Callable[[], bool], seconds: float, message: str) -> None:
    """Waits until `holds` returns true. Raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, message
        time.sleep(0.001)


class Call:
    """One request on a connection of its own.

    Attributes:
        status: status of the response; 0 before `head` has returned.
        headers: headers of the response, with names in lower case.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._reader = reader
        self._writer = writer

    @classmethod
    async def post(cls, port: int, path: str, body: Body, *, buffer: int | None = None, **headers: str) -> Call:
        """Sends a request.

        Args:
            buffer: size of the system's receive buffer, in bytes. With a small one, a slow reader blocks the server.
        """
        made = socket.socket()
        if buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=made, limit=2**16 if buffer is None else buffer)
        data = json.dumps(body).encode()
        more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n{more}\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        return cls(reader, writer)

    async def head(self) -> int:
        """Waits for the head of the response, and returns its status."""
        line = await self._reader.readline()
        assert line, "the connection was closed before a response"
        self.status = int(line.split()[1])
        while (line := await self._reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.strip().lower()] = value.strip()
        return self.status

    async def read(self) -> Any:
        """Reads the whole response, and returns its JSON."""
        if not self.status:
            await self.head()
        if "content-length" in self.headers:
            data = await self._reader.readexactly(int(self.headers["content-length"]))
        else:
            data = b"".join([part async for part in self._chunks()])
        self.close()
        return json.loads(data)

    async def events(self) -> AsyncIterator[Body]:
        """Yields the events of a stream, without comments and [DONE]. The stream must end with [DONE] or an error."""
        if not self.status:
            await self.head()
        assert self.status == 200, (self.status, self.headers)
        left, ended = b"", ""
        async for part in self._chunks():
            *events, left = (left + part).split(b"\n\n")
            for event in events:
                assert ended != "done", event
                if event.startswith(b":"):
                    continue
                assert event.startswith(b"data: "), event
                if event == b"data: [DONE]":
                    ended = "done"
                    continue
                document = json.loads(event[6:])
                assert not ended, event
                ended = "error" if "error" in document else ""
                yield document
        assert ended, "the stream was cut"
        assert not left, left
        self.close()

    async def raw(self, n: int) -> bytes:
        """Returns at most n bytes, as they come from the connection; empty at its end."""
        return await self._reader.read(n)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while (size := int((await self._line()).strip(), 16)) > 0:
            yield await self._reader.readexactly(size)
            await self._line()
        await self._line()

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        assert line.endswith(b"\r\n"), "the connection was cut within a response"
        return line

    def close(self) -> None:
        self._writer.close()

    def leave(self, *, reset: bool = False) -> None:
        """Closes the connection without reading on: in order, or with a reset, as if the program were killed."""
        if reset:
            made = self._writer.get_extra_info("socket")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort() if reset else self._writer.close()


class QueueIsFull(Exception):
    """The server's queue is full: status 429."""


async def text_of(port: int, body: Body, *, stream: bool) -> str:
    """Returns the text of one completion. In a stream, only the last piece may have a finish reason. Raises
    QueueIsFull."""
    call = await Call.post(port, "/v1/completions", {**body, "stream": stream})
    if await call.head() == 429:
        raise QueueIsFull(await call.read())
    if not stream:
        document = await call.read()
        assert call.status == 200, document
        return str(document["choices"][0]["text"])
    pieces, reasons = [], []
    async for event in call.events():
        assert "error" not in event, event
        for choice in event["choices"]:
            assert not reasons, "a piece came after the end"
            pieces.append(choice["text"])
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    assert len(reasons) == 1, reasons
    return "".join(pieces)
