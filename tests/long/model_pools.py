"""A pool of three models has room for two. It gets random requests, loads, unloads, sleeps and kills over HTTP."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil

from llamabatch.server.application import engine_config, make_pool_app
from llamabatch.server.options import ServerOptions
from llamabatch.server.pool.model_pool import ModelPool
from llamabatch.server.pool.options import PoolOptions
from llamabatch.server.pool.specs import spec_of
from tests.long.server_client import Body, Call, RunningServer, until

HOLDS = (
    "a server of three models, two of which fit, takes requests, loads, unloads, sleeps, clients that leave and kills "
    "of engines at random: each request has its whole text once, what is loaded fits, and no child is left"
)
TOTAL = 100
QUICK = 1

_EVENTS = 30
_TOKENS = 24
_NAMES = ("red", "blue", "green")
_MOST_LOADED = 2
_SPARE = 1.1  # factor on the sum of the plans


def case(number: int, folder: Path) -> None:
    """Runs a random history of _EVENTS events."""
    del folder
    rng = random.Random(number)
    engine = {"n_slots": 4, "n_ctx": 256, "n_threads": 1, "strategy": "batched"}
    specs = [spec_of(engine_config("tiny", engine), ServerOptions(served_model_names=name), 0.3) for name in _NAMES]
    room = int(specs[0].bytes[0] * (_MOST_LOADED + 0.5))
    options = PoolOptions((room,), sleep_idle_s=rng.choice([None, 0.0, 0.5]), in_order=rng.random() < 0.3)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with RunningServer({}, make_pool_app(specs, ServerOptions(), options)) as server:
        asyncio.run(asyncio.wait_for(_History(server, rng, room).run(), 300))
    until(lambda: {each.pid for each in psutil.Process().children(recursive=True)} <= before, 30, "a child is left")


class _History:
    def __init__(self, server: RunningServer, rng: random.Random, room: int) -> None:
        self._port = server.port
        self._pool: ModelPool = server.app.state.serving
        self._rng = rng
        self._room = room
        self._known: dict[str, str] = {}

    async def run(self) -> None:
        work: list[asyncio.Task[None]] = []
        for _ in range(_EVENTS):
            kind = self._rng.choices([self._ask, self._leave, self._load, self._unload, self._kill], [20, 3, 2, 3, 2])[
                0
            ]
            work.append(asyncio.ensure_future(kind(self._rng.choice(_NAMES))))
            await asyncio.sleep(self._rng.choice([0.0, 0.0, 0.05, 0.4]))
            self._check_memory()
        await asyncio.gather(*work)

    def _check_memory(self) -> None:
        """Checks that the children of loaded models take no more memory than the sum of their plans allows."""
        pids = [
            pid for model in self._pool.models if model.state == "loaded" and model.serving._client is not None
            for pid in model.serving._client.pids
        ]  # fmt: skip
        assert len(pids) <= _MOST_LOADED
        taken = 0
        for pid in pids:
            try:
                taken += psutil.Process(pid).memory_info().rss
            except psutil.NoSuchProcess:  # this child was killed
                continue
        assert taken <= self._room * _SPARE, (taken, self._room)

    async def _ask(self, name: str) -> None:
        prompt = " ".join(self._rng.choice(("sea", "cat", "moon")) for _ in range(3))
        body: Body = {"model": name, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        if self._rng.random() < 0.5:
            found = await self._post("/v1/completions", body)
            assert found["model"] == name
            text = found["choices"][0]["text"]
        else:
            call = await Call.post(self._port, "/v1/completions", {**body, "stream": True})
            events = [event async for event in call.events()]
            assert {event["model"] for event in events} == {name}
            text = "".join(choice["text"] for event in events for choice in event["choices"])
        assert self._known.setdefault(prompt, text) == text

    async def _leave(self, name: str) -> None:
        call = await Call.post(self._port, "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 200})
        await asyncio.sleep(self._rng.choice([0.0, 0.1, 0.6]))
        call.leave()

    async def _load(self, name: str) -> None:
        assert await self._post("/models/load", {"model": name}) == {"success": True}

    async def _unload(self, name: str) -> None:
        if self._rng.random() < 0.5:
            assert await self._post("/models/unload", {"model": name}) == {"success": True}
        else:
            keep = self._rng.choice([0, "0s", 0.2, math.inf])
            found = await self._post(
                "/api/generate", {"model": name, "prompt": "", "stream": False, "keep_alive": str(keep)}
            )
            assert found["done"] is True

    async def _kill(self, name: str) -> None:
        model = self._pool.find(name)
        client: Any = model.serving._client
        for pid in client.pids if client is not None and model.state == "loaded" else ():
            os.kill(pid, signal.SIGKILL)

    async def _post(self, path: str, body: Body) -> Any:
        call = await Call.post(self._port, path, body)
        document = await call.read()
        assert call.status == 200, (call.status, document)
        return document
