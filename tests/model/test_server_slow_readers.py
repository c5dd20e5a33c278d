"""Clients that read a stream slowly or not at all block no other client and no slot.
tests/unit/server/test_dispatcher.py tests the memory."""

import asyncio
import contextlib
import socket

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from tests.long.server_client import Call, RunningServer, text_of
from tests.waiting import PATIENCE_S, until_soon

PATH = "/v1/completions"
ENGINE = {"n_slots": 8, "n_ctx": 1024, "n_threads": 1, "strategy": "batched"}
LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "n": 2}
# With logprobs, pieces are not joined, so there are more of them than the buffers on the way can store.
RICH = LONG | {"logprobs": 5}
SHORT = {"prompt": "The sea is", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
BUFFER = 4096  # bytes of the system's buffers on each side: a slow reader blocks the connection after some pieces


def tight(server):
    """Gives the server's side of new connections a small buffer as well."""
    for each in server._sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)


async def slow_reader(port, is_enough):
    """Starts a stream, and reads a byte now and then until `is_enough` is set. Returns the call."""
    call = await Call.post(port, PATH, {**RICH, "stream": True}, buffer=BUFFER, connection="close")
    await call.head()
    while not is_enough.is_set():
        assert await call.raw(1)
        await asyncio.sleep(0.1)
    return call


@pytest.mark.timed
def test_a_slow_reader_holds_up_no_other_stream_and_no_slot():
    async def run(server):
        port, serving = server.port, server.serving
        wanted = await text_of(port, SHORT, stream=False)
        is_enough = asyncio.Event()
        reader = asyncio.create_task(slow_reader(port, is_enough))
        await until_soon(lambda: serving.n_open)
        [stream] = serving._open
        for _ in range(2):
            assert await text_of(port, SHORT, stream=True) == wanted
        await until_soon(lambda: not serving.client.stats().running, "it holds a slot")
        assert not stream.done, "nothing has held it up"
        is_enough.set()
        call = await reader
        data = b""
        while part := await asyncio.wait_for(call.raw(2**16), 20):
            data += part
        call.close()
        assert data.count(b'"finish_reason":"length"') == 2
        assert b"data: [DONE]" in data

    with RunningServer(ENGINE) as server:
        tight(server)
        asyncio.run(run(server))
        server.check_idle()


@pytest.mark.timed
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_is_given_up(stream):
    more = {"stream": True, "logprobs": 5} if stream else {"logprobs": 5, "n": 4}

    async def run(server):
        call = await Call.post(server.port, PATH, {**LONG, **more}, buffer=BUFFER)
        await until_soon(lambda: server.serving.client.stats().submitted, "it never began")
        await until_soon(lambda: not server.serving.n_open, "it is still there")
        # after a whole answer, only the keep-alive timer closes the connection
        await until_soon(lambda: not server._server.server_state.connections, "it is still connected")
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := await asyncio.wait_for(call.raw(2**16), PATIENCE_S):
                data += part
        call.leave()
        assert b"data: [DONE]" not in data
        assert len(data) < 2**18, "it was not cut"

    with RunningServer(ENGINE, write_timeout_s=0.2) as server:
        tight(server)
        asyncio.run(run(server))
        server.check_idle()
