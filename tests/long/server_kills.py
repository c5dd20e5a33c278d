"""The child with a server's engine is killed while 32 streams are open. Each client gets its whole text once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

from llamabatch.request.outputs import SequenceOutput
from tests.long.server_client import Body, Call, RunningServer

HOLDS = (
    "the engine of a server is killed by SIGKILL, SIGSEGV or SIGABRT with 32 streams open: all get the texts of an "
    "undisturbed run, no piece twice and none lost"
)
TOTAL = 100
QUICK = 1

_N = 32
_TOKENS = 200
_ENGINE = {"n_slots": _N, "n_ctx": 512, "n_threads": 1, "strategy": "batched"}
_WORDS = ("sea", "cat", "moon", "king", "house", "bread", "river", "stone")


def case(number: int, folder: Path) -> None:
    """Kills the child once. Signals take turns, and the number draws the moment."""
    with RunningServer(_ENGINE) as server:
        asyncio.run(_run(server, number))
        server.check_idle()
        assert server.serving.client.stats().restarts == 1


async def _run(server: RunningServer, number: int) -> None:
    rng = random.Random(number)
    bodies = [_body(rng, at) for at in range(_N)]
    wanted = await asyncio.wait_for(asyncio.gather(*(_texts(server.port, body) for body in bodies)), 120)
    killer = _Killer(server, _N * rng.randrange(3, _TOKENS - 20), number)
    found = await asyncio.wait_for(asyncio.gather(*(_texts(server.port, body) for body in bodies)), 240)
    assert killer.has_killed
    for body, one, other in zip(bodies, wanted, found, strict=True):
        assert one == other, (body, one, other)


def _body(rng: random.Random, at: int) -> Body:
    prompt = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(3, 20)))
    more: Body = {"temperature": 0} if at % 2 else {"temperature": 0.8, "seed": rng.randrange(2**31)}
    n = 2 if at % 8 == 0 else 1
    return {"prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True, "n": n, **more}


class _Killer:
    """Kills the child when so many tokens have come in all streams together. One message may have several tokens."""

    def __init__(self, server: RunningServer, n_tokens: int, number: int) -> None:
        [self._dispatcher] = server.serving._dispatchers.values()
        self.has_killed = False
        self._left = n_tokens
        self._pid = server.pid
        self._signal = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)[number % 3]
        self._sink, self._dispatcher.sink = self._dispatcher.sink, self._take

    def _take(self, outputs: list[SequenceOutput]) -> None:
        self._left -= sum(len(output.token_ids) for output in outputs)
        if self._left <= 0 and not self.has_killed:
            os.kill(self._pid, self._signal)
            self.has_killed = True
        self._sink(outputs)


async def _texts(port: int, body: Body) -> list[str]:
    """Returns the texts of all continuations of a stream, which must be complete."""
    call = await Call.post(port, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    pieces: list[list[str]] = [[] for _ in range(body["n"])]
    ended: set[int] = set()
    usage = None
    async for event in call.events():
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            assert choice["index"] not in ended, "a piece came after the end"
            pieces[choice["index"]].append(choice["text"])
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] == "length", choice
                ended.add(choice["index"])
    assert len(ended) == body["n"]
    assert usage is not None
    assert usage["completion_tokens"] == body["n"] * _TOKENS, usage
    return ["".join(each) for each in pieces]
