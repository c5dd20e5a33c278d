"""Clients of a server leave while they wait, in prefill or in decode, streamed or not. Other texts stay the same."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tests.long.server_client import Body, Call, RunningServer, text_of

HOLDS = (
    "1,000 clients leave a server at random, 50 in each case (while they wait, in prefill, decoding; streamed or not): "
    "the others' texts are unchanged, and no slot, call or stream is left"
)
TOTAL = 20
QUICK = 1

_LEAVERS = 50
_AT_ONCE = 16  # leaving clients at once; with the watchers, they need more than the slots
_SLOTS = 6
_ENGINE = {"n_slots": _SLOTS, "n_ctx": 1024, "n_threads": 1, "strategy": "batched"}
_WATCHED = (
    {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0},
    {"prompt": "The sea is", "max_tokens": 60, "temperature": 0.8, "seed": 5},
    {"prompt": "Two and two", "max_tokens": 24, "temperature": 0, "stop": ["zebra"]},
    {"prompt": "A cat", "max_tokens": 50, "temperature": 1.0, "seed": 9, "repetition_penalty": 1.1},
)


def case(number: int, folder: Path) -> None:
    """Runs fifty clients that leave. The number draws them."""
    with RunningServer(_ENGINE) as server:
        asyncio.run(_run(server, random.Random(number)))
        server.check_idle()
        assert server.serving.client.stats().errors == 0


async def _run(server: RunningServer, rng: random.Random) -> None:
    wanted = [await text_of(server.port, body, stream=False) for body in _WATCHED]
    left = asyncio.Event()
    watchers = [
        asyncio.create_task(_watch(server.port, body, text, left, stream=stream))
        for body, text in zip(_WATCHED, wanted, strict=True)
        for stream in (False, True)
    ]
    gate = asyncio.Semaphore(_AT_ONCE)
    try:
        leavers = (_leave(server.port, random.Random(rng.random()), gate) for _ in range(_LEAVERS))
        await asyncio.wait_for(asyncio.gather(*leavers), 240)
    finally:
        left.set()
    seen = await asyncio.wait_for(asyncio.gather(*watchers), 120)
    assert all(seen), seen


async def _watch(port: int, body: Body, wanted: str, left: asyncio.Event, *, stream: bool) -> int:
    """Asks for one text again and again, until all clients have left. Returns the number of calls."""
    n = 0
    while not left.is_set() or not n:
        text = await text_of(port, body, stream=stream)
        assert text == wanted, (body, stream, text, wanted)
        n += 1
    return n


async def _leave(port: int, rng: random.Random, gate: asyncio.Semaphore) -> None:
    """Runs one client with a short or long prompt. It leaves at once, after a while, or after some pieces."""
    async with gate:
        stream, reset = rng.random() < 0.6, rng.random() < 0.5
        words = rng.choice((3, 3, 700))
        prompt = " ".join(rng.choice(("sea", "cat", "moon", "king")) for _ in range(words))
        path = "/v1/completions"
        asked: Body = {"prompt": prompt}
        if words < 10 and rng.random() < 0.3:
            path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
        body = {"max_tokens": 300, "ignore_eos": True, "seed": rng.randrange(2**31), "n": rng.choice((1, 1, 2))}
        call = await Call.post(port, path, {**asked, **body, "stream": stream})
        if stream and rng.random() < 0.6:
            pieces = rng.randrange(1, 40)
            async for event in call.events():
                assert "error" not in event, event
                pieces -= 1
                if not pieces:
                    break
        else:
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.05, 0.2)) * rng.random())
        call.leave(reset=reset)
