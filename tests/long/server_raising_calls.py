"""One call in the code of a server raises. Each client gets an answer, and the next requests are answered as usual."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.long.server_client import Body, Call, RunningServer
from tests.workers.raising_worker import ERRORS, PACKAGE, Fault

HOLDS = (
    "any call in the layers of a server raises once, an Exception or not: each request has its text, an error or a "
    "closed connection, none waits, and the next requests have their texts"
)
TOTAL = 1000
QUICK = 20

_ANSWER_S = 30.0
_LAYER = "server/"
# Left out: if this call raises, uvloop leaves the connection open and never reads from it.
_NO_PROTOCOL = "server/http/protocol.py:BoundedProtocol.__init__"
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ENGINE = {"n_slots": 4, "n_ctx": 256, "n_threads": 1, "strategy": "batched", "isolate": False}
_CHAT = {"messages": [{"role": "user", "content": "Two and two"}], "max_tokens": 8, "temperature": 0}
_CALLS: tuple[tuple[str, Body], ...] = (
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}),
    ("/v1/completions", {"prompt": ["The sea is", "A cat"], "max_tokens": 8, "temperature": 0, "stream": True}),
    ("/v1/chat/completions", {**_CHAT, "n": 2, "seed": 3, "logprobs": True, "deadline_s": 60}),
    ("/v1/chat/completions", {**_CHAT, "stream": True, "structured_outputs": {"regex": "[a-z]{3,5}"}}),
)


class Odd(BaseException):
    """An error that no `except Exception` catches."""


class ServerFault(Fault):
    """A Fault in the code of the server. Of a coroutine, only the first step counts as a call."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: dict[int, FrameType] = {}

    def arm(self, *asked: Any) -> None:
        self._frames.clear()
        super().arm(*asked)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or not self.is_armed or code.co_flags & _GENERATORS:
            return
        name = code.co_filename[len(PACKAGE) + 1 :]
        if not code.co_filename.startswith(PACKAGE) or not name.startswith(_LAYER):
            return
        if code.co_flags & inspect.CO_COROUTINE:
            if id(frame) in self._frames:
                return
            self._frames[id(frame)] = frame
        self.count(f"{name}:{getattr(code, 'co_qualname', code.co_name)}")


def case(number: int, folder: Path) -> None:
    """Lets one call raise. A fixed random order chooses the call."""
    server, fault, wanted = _server()
    calls = points()
    name, nth = calls[number % len(calls)]
    error = random.Random(number).choice([*ERRORS.values(), Odd])
    _profile(server, fault)
    fault.arm(name, nth, error)
    try:
        found = asyncio.run(_answers(server.port))
        fault.is_armed = False
        for answer, text in zip(found, wanted, strict=True):
            assert answer == text or answer.startswith("error"), answer
        again = asyncio.run(_answers(server.port))
        assert again == wanted, again
        server.check_idle()
    except AssertionError as failed:
        close()
        raise AssertionError(f"{error.__name__} in call {nth} of {name}: {failed}") from failed
    except asyncio.TimeoutError:
        close()
        raise AssertionError(f"{error.__name__} in call {nth} of {name}: a caller waits for ever") from None
    finally:
        fault.is_armed = False


async def _answers(port: int) -> list[str]:
    calls = (_answer(port, path, body) for path, body in _CALLS)
    return await asyncio.wait_for(asyncio.gather(*calls), _ANSWER_S)


async def _answer(port: int, path: str, body: Body) -> str:
    """Returns the texts of the answer, or "error" and its kind."""
    call = await Call.post(port, path, body)
    try:
        if not body.get("stream"):
            document = await call.read()
            return _texts(document["choices"]) if call.status == 200 else f"error {call.status}"
        if await call.head() != 200:
            return f"error {call.status}"
        choices = []
        async for event in call.events():
            if "error" in event:
                return "error in a stream"
            choices += event["choices"]
        return _texts(choices)
    except json.JSONDecodeError:  # the server could make no answer, so uvicorn sent its own
        assert call.status == 500, call.status
        return "error 500"
    except (ConnectionError, AssertionError, asyncio.IncompleteReadError) as failed:  # the server cut the connection
        return f"error: {failed}"
    finally:
        call.close()


def _texts(choices: list[Body]) -> str:
    texts: dict[int, str] = {}
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or choice
        texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("text") or said.get("content") or "")
    return repr(sorted(texts.items()))


_servers: list[tuple[RunningServer, ServerFault, list[str]]] = []


def _server() -> tuple[RunningServer, ServerFault, list[str]]:
    """Returns the server of all cases, its Fault, and the texts that it gives. Starts it if needed."""
    if not _servers:
        server = RunningServer(_ENGINE, threads=1)
        server.__enter__()
        _servers.append((server, ServerFault(), asyncio.run(_answers(server.port))))
    return _servers[0]


def close() -> None:
    """Ends the server."""
    while _servers:
        _servers.pop()[0].__exit__(None, None, None)


def _profile(server: RunningServer, fault: ServerFault | None) -> None:
    """Sets the profile function of the server's threads. Python removes a profile function that has raised."""
    serving: Any = server.serving
    [loop] = serving._dispatchers
    loop.call_soon_threadsafe(sys.setprofile, fault)
    client: Any = serving.client.inner
    client.ask(lambda engine: sys.setprofile(fault)).result(_ANSWER_S)
    for pool in (serving._workers, serving._aborting):
        pool.submit(sys.setprofile, fault).result(_ANSWER_S)


@functools.cache
def points() -> list[tuple[str, int]]:
    """Returns the calls, as (function, number of the call), in which the Fault may raise while requests are processed.

    Of each function, these are the first, the second and the middle call. The order depends only on their names.
    """
    server, fault, _ = _server()
    _profile(server, fault)
    fault.arm()
    asyncio.run(_answers(server.port))
    fault.is_armed = False
    del fault.seen[_NO_PROTOCOL]
    found = [(name, nth) for name, n in fault.seen.items() for nth in {1, 2, (n + 1) // 2} if nth <= n]
    return sorted(found, key=lambda point: random.Random(repr(point)).random())
