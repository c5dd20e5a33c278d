"""An hour of mixed load on a server: streams, whole answers, clients that leave, slow readers, invalid bodies."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from tests.long.server_client import Body, Call, QueueIsFull, RunningServer, text_of
from tests.long.soak import MOST_GROWTH_HANDLES, check_flat

HOLDS = (
    "over one hour of mixed load with slow readers and clients that leave, memory, file descriptors and threads of a "
    "server stay flat; every call is answered, and nothing is left in the engine"
)
TOTAL = 1
QUICK = 1  # the test suite runs five seconds
SECONDS = 3600.0
TIMEOUT_S = 2 * SECONDS

_SAMPLE_S = 10.0
_CALLERS = 12
_ANSWER_S = 120.0  # any call must be answered within this time
_ENGINE = {"n_slots": 8, "n_ctx": 512, "n_threads": 1, "strategy": "batched", "max_queue": 64}
_WORDS = ("the", "red", "small", "house", "river", "king", "sleeps", "sees", "under", "why", "seven")
_KNOWN = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}


def case(number: int, folder: Path, seconds: float = SECONDS) -> None:
    """Runs the load. A run of fewer seconds checks its counts, and what is left behind, in the same way."""
    _soak(min(2.0, seconds), folder / "first.jsonl", number)  # makes everything that a process makes once and keeps
    before = _handles()
    samples = _soak(seconds, folder / "samples.jsonl", number)
    after = _handles()
    assert after["children"] <= before["children"], (before, after)
    assert after["threads"] <= before["threads"], (before, after)
    assert after["fds"] <= before["fds"] + MOST_GROWTH_HANDLES, (before, after)
    if seconds >= 60:
        check_flat(samples)


def _soak(seconds: float, log: Path, seed: int) -> list[dict[str, float]]:
    with RunningServer(_ENGINE, write_timeout_s=20.0) as server:
        load = _Load(server, seed, time.monotonic() + seconds)
        asyncio.run(load.run(log))
        server.check_idle()
        assert server.serving.client.stats().restarts == 0
    assert load.asked == sum(load.ended.values()), (load.asked, load.ended)
    assert len(load.ended) > (4 if seconds < 4 else 6), load.ended  # most kinds of ends have come
    return load.samples


class _Load:
    """The callers, and the number of calls by their ends."""

    def __init__(self, server: RunningServer, seed: int, until_s: float) -> None:
        self.asked = 0
        self.ended: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self._server, self._until_s = server, until_s
        self._rng = random.Random(seed)
        self._wanted = ""

    async def run(self, log: Path) -> None:
        """Runs the callers until the time is up. The first failure of a caller ends the run."""
        self._wanted = await text_of(self._server.port, _KNOWN, stream=False)
        watch = asyncio.create_task(self._watch(log))
        try:
            await asyncio.gather(*(self._caller(random.Random(self._rng.random())) for _ in range(_CALLERS)))
        finally:
            watch.cancel()

    async def _caller(self, rng: random.Random) -> None:
        actions: tuple[Callable[[random.Random], Awaitable[str]], ...] = (
            *(self._whole, self._stream, self._chat, self._known, self._leave, self._slow, self._bad, self._late),
            *(self._structured, self._many, self._dialect),
        )
        while time.monotonic() < self._until_s:
            self.asked += 1
            self.ended[await asyncio.wait_for(rng.choice(actions)(rng), _ANSWER_S)] += 1

    async def _watch(self, log: Path) -> None:
        start = time.monotonic()
        with log.open("w") as file:
            while True:
                self.samples.append({"t": round(time.monotonic() - start, 1), **_sample()})
                file.write(json.dumps({**self.samples[-1], "asked": self.asked, **self.ended}) + "\n")
                file.flush()
                await asyncio.sleep(_SAMPLE_S)

    # --- what is asked, and how it ended ------------------------------------------------------------------------------

    def _body(self, rng: random.Random, **more: object) -> Body:
        prompt = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(3, 60)))
        return {"prompt": prompt, "max_tokens": rng.randrange(1, 60), "temperature": rng.choice((0, 0.8)), **more}

    async def _post(self, body: Body, path: str = "/v1/completions") -> Call:
        return await Call.post(self._server.port, path, body)

    async def _whole(self, rng: random.Random) -> str:
        call = await self._post(self._body(rng, n=rng.choice((1, 1, 2))))
        document = await call.read()
        return self._status(call, document)

    async def _many(self, rng: random.Random) -> str:
        prompts = [self._body(rng)["prompt"] for _ in range(rng.randrange(2, 30))]
        call = await self._post(self._body(rng, prompt=prompts))
        document = await call.read()
        assert call.status != 200 or len(document["choices"]) == len(prompts)
        return self._status(call, document)

    async def _known(self, rng: random.Random) -> str:
        try:
            text = await text_of(self._server.port, _KNOWN, stream=rng.random() < 0.5)
        except QueueIsFull:  # calls with many prompts may fill the queue
            return "429"
        assert text == self._wanted, text
        return "known"

    async def _stream(self, rng: random.Random) -> str:
        call = await self._post(self._body(rng, stream=True))
        if await call.head() != 200:
            call.close()
            return self._status(call, None)
        n = sum([1 async for event in call.events() if "error" not in event])
        assert n
        return "streamed"

    async def _chat(self, rng: random.Random) -> str:
        messages = [{"role": "user", "content": self._body(rng)["prompt"]}]
        call = await self._post({"messages": messages, "max_tokens": 20}, "/v1/chat/completions")
        document = await call.read()
        return self._status(call, document)

    async def _dialect(self, rng: random.Random) -> str:
        """Sends a request to OpenAI's responses or Anthropic's messages, sometimes with a tool call."""
        prompt, schema = self._body(rng)["prompt"], {"type": "object", "properties": {"x": {"enum": [1, 2]}}}
        if rng.random() < 0.5:
            body: Body = {"input": prompt, "max_output_tokens": 20}
            tools: Body = {
                "tools": [{"type": "function", "name": "f", "parameters": schema}],
                "tool_choice": "required",
            }
            call = await self._post(body | (tools if rng.random() < 0.3 else {}), "/v1/responses")
        else:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 20}
            tools = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
            call = await self._post(body | (tools if rng.random() < 0.3 else {}), "/v1/messages")
        return self._status(call, await call.read())

    async def _structured(self, rng: random.Random) -> str:
        regex = f"[a-z]{{1,{rng.randrange(2, 20)}}}"
        call = await self._post(self._body(rng, structured_outputs={"regex": regex}))
        return self._status(call, await call.read())

    async def _leave(self, rng: random.Random) -> str:
        call = await self._post(self._body(rng, max_tokens=400, ignore_eos=True, stream=rng.random() < 0.5))
        await asyncio.sleep(rng.random() * 0.2)
        call.leave(reset=rng.random() < 0.5)
        return "left"

    async def _slow(self, rng: random.Random) -> str:
        """Reads a byte now and then for some seconds, with a small buffer. Then it reads the rest, or leaves."""
        body = self._body(rng, max_tokens=400, ignore_eos=True, stream=True, logprobs=5)
        call = await Call.post(self._server.port, "/v1/completions", body, buffer=2**15, connection="close")
        for _ in range(rng.randrange(5, 40)):
            if not await call.raw(1):
                break
            await asyncio.sleep(0.05)
        if rng.random() < 0.5:
            call.leave()
            return "slow, left"
        while await call.raw(2**16):
            await asyncio.sleep(0.001)
        call.close()
        return "slow"

    async def _bad(self, rng: random.Random) -> str:
        body = rng.choice(
            (
                self._body(rng, temperature=-1),
                self._body(rng, prompt="word " * 2000),
                self._body(rng, prompt=[10**6]),
                self._body(rng, structured_outputs={"regex": "(bad"}),
                {"messages": "none"},
            )
        )
        call = await self._post(body)
        document = await call.read()
        assert call.status == 400, (call.status, document)
        assert document["error"]["message"], document
        return "400"

    async def _late(self, rng: random.Random) -> str:
        body = self._body(rng, max_tokens=400, ignore_eos=True, deadline_s=rng.random() * 0.1)
        call = await self._post(body)
        document = await call.read()
        assert call.status in (200, 429, 504), (call.status, document)
        return self._status(call, document)

    def _status(self, call: Call, document: Body | None) -> str:
        assert call.status in (200, 429, 504), (call.status, document)
        assert call.status != 429 or 1 <= int(call.headers["retry-after"]) <= 60, call.headers
        return str(call.status)


def _handles() -> dict[str, int]:
    here = psutil.Process()
    return {
        "threads": here.num_threads(),
        "fds": here.num_fds() if hasattr(here, "num_fds") else 0,
        "children": len(here.children(recursive=True)),
    }


def _sample() -> dict[str, float]:
    """Returns figures of this process, and of its child with the most memory, which is the engine's."""
    here = psutil.Process()
    children = []
    for process in here.children():
        try:
            children.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
        except psutil.Error:  # the child ended meanwhile
            continue
    rss, threads, fds = max(children, default=(0, 0, 0))
    handles = _handles()
    return {
        "rss": here.memory_info().rss, "threads": handles["threads"], "fds": handles["fds"],
        "child_rss": rss, "child_threads": threads, "child_fds": fds,
    }  # fmt: skip


if __name__ == "__main__":  # python -m tests.long.server_soak SECONDS FOLDER: writes the samples to FOLDER
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    case(0, target, float(sys.argv[1]))
    print("flat")
