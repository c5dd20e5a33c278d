"""Loads, waits and unloads of a ModelPool, on a loop whose clock skips idle time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from llamabatch.errors import MemoryPlanError
from llamabatch.server.http.errors import ApiError
from llamabatch.server.pool import routes
from llamabatch.server.pool.model_pool import ModelPool, PooledModel
from llamabatch.server.pool.options import PoolOptions

LOAD_S = 2.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock skips idle time. Raises RuntimeError if all tasks wait forever."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:
            self._scheduled = sorted(each for each in self._scheduled if not each._cancelled)
            if not self._scheduled:
                raise RuntimeError("everybody waits for ever")
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


class FakeServing:
    """The parts of a Serving that a pool calls. `fails` has the errors of the next loads."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.names = (name,)
        self.config = SimpleNamespace(adapters=())
        self.state = "failed"
        self.fails: list[Exception] = []
        self.parts: list[Any] = []
        self._log = log

    @property
    def client(self) -> Any:
        raise self.unavailable()

    def start(self) -> Future[None]:
        done: Future[None] = Future()
        error = self.fails.pop(0) if self.fails else None
        end = (lambda: done.set_result(None)) if error is None else (lambda: done.set_exception(error))
        asyncio.get_running_loop().call_later(LOAD_S, end)
        self._log.append(f"+{self.names[0]}")
        return done

    async def aclose(self) -> None:
        self._log.append(f"-{self.names[0]}")
        await asyncio.sleep(0.1)

    async def drain(self, seconds: float) -> None:
        self._log.append(f"drain {self.names[0]}")

    def unavailable(self) -> ApiError:
        return ApiError(503, "the server ends")


class House:
    """A pool of models a, b, c… of the given bytes. `log` has their loads (+a) and unloads (-a)."""

    def __init__(self, *sizes: int, free: int = 100, **options: Any) -> None:
        self.log: list[str] = []
        self.pool = ModelPool(PoolOptions((free,), **options))
        for name, size in zip("abcdefgh", sizes, strict=False):
            spec = SimpleNamespace(bytes=(size,), on_startup=False, sleep_idle_s=None)
            self.pool.models.append(PooledModel(spec, FakeServing(name, self.log), None))

    def __getitem__(self, name: str) -> PooledModel:
        return self.pool.find(name)

    async def ask(
        self, name: str, seconds: float = 1.0, loads: bool | None = None, keep_s: float | None = None
    ) -> float:
        """Uses a model for some seconds, as a request does. Returns the time of the end."""
        async with self.pool.using(self[name], loads, keep_s=keep_s):
            assert self[name].state == "loaded"
            await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    def begin(self, name: str, seconds: float = 1.0) -> asyncio.Task[float]:
        return asyncio.ensure_future(self.ask(name, seconds))

    @property
    def states(self) -> dict[str, str]:
        return {model.name: model.state for model in self.pool.models}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        found = loop.run_until_complete(work)
        loop.run_until_complete(asyncio.sleep(1))  # time for unloads that have begun
        return found
    finally:
        loop.close()


def test_a_request_loads_its_model_once():
    async def work() -> None:
        house = House(10, 10)
        assert house.states == {"a": "unloaded", "b": "unloaded"}
        ends = await asyncio.gather(house.ask("a"), house.ask("a"), house.ask("a", 3.0))
        assert ends == [LOAD_S + 1, LOAD_S + 1, LOAD_S + 3]
        assert await house.ask("a") == LOAD_S + 4
        assert house.log == ["+a"]

    run(work())


@pytest.mark.parametrize(("sizes", "options"), [((10, 10, 10), {"max_loaded": 2}), ((50, 50, 40), {})])
def test_the_model_that_is_idle_longest_is_unloaded(sizes, options):
    async def work() -> None:
        house = House(*sizes, **options)
        for name in "abac":
            await house.ask(name)
        assert house.log == ["+a", "+b", "-b", "+c"]
        assert house.states == {"a": "loaded", "b": "unloaded", "c": "loaded"}

    run(work())


def test_models_that_fit_together_stay():
    async def work() -> None:
        house = House(30, 30, 40)
        for name in "abcabc":
            await house.ask(name)
        assert house.log == ["+a", "+b", "+c"]

    run(work())


def test_a_busy_model_is_not_unloaded_and_its_requests_are_gathered():
    async def work() -> None:
        house = House(60, 60)
        await house.ask("a")
        long = house.begin("a", 10.0)
        await asyncio.sleep(0)
        waiting = house.begin("b")
        await asyncio.sleep(LOAD_S - 0.5)
        gathered = house.begin("a", 0.1)  # within the time of a load, so it runs at once
        assert await gathered == pytest.approx(3 + LOAD_S - 0.4)
        await asyncio.sleep(1.0)
        late = house.begin("a", 0.1)  # waits behind the request for b
        await asyncio.sleep(0.5)
        assert not late.done()
        assert await long == 13.0
        assert await waiting < await late
        assert house.log == ["+a", "-a", "+b", "-b", "+a"]

    run(work())


def test_in_order_a_busy_model_takes_no_further_request_at_once():
    async def work() -> None:
        house = House(60, 60, in_order=True)
        await house.ask("a")
        long = house.begin("a", 4.0)
        await asyncio.sleep(0)
        waiting, late = house.begin("b"), house.begin("a", 0.1)
        assert await long < await waiting < await late

    run(work())


def test_requests_for_one_model_share_one_place():
    async def work() -> None:
        house = House(10, 10, 10, max_loaded=2)
        await house.ask("a")
        await house.ask("b")
        busy = house.begin("a", 5.0)
        await asyncio.sleep(0)
        await asyncio.gather(*(house.ask("c") for _ in range(3)))
        await busy
        assert house.states == {"a": "loaded", "b": "unloaded", "c": "loaded"}

    run(work())


def test_a_client_that_leaves_costs_no_model_its_place():
    async def work() -> None:
        house = House(10, 10, max_loaded=1)
        await house.ask("a")
        busy = house.begin("a", 30.0)
        await asyncio.sleep(0)
        leaving = house.begin("b")
        await asyncio.sleep(LOAD_S + 1)
        queued = house.begin("a", 0.1)
        await asyncio.sleep(1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await queued < await busy
        assert house.states == {"a": "loaded", "b": "unloaded"}
        assert house.log == ["+a"]

    run(work())


def test_a_load_that_fails_refuses_those_who_wait_and_is_tried_again():
    async def work() -> None:
        house = House(10)
        house["a"].serving.fails.append(OSError("no such file"))
        for answer in await asyncio.gather(house.ask("a"), house.ask("a"), return_exceptions=True):
            assert isinstance(answer, ApiError)
            assert (answer.status, answer.code) == (503, "model_failed")
            assert "no such file" in str(answer)
        assert house["a"].error is not None
        await house.ask("a")
        assert house["a"].error is None

    run(work())


def test_a_load_that_does_not_fit_after_all_unloads_what_is_idle():
    async def work() -> None:
        house = House(10, 10, 10)
        await house.ask("a")
        await house.ask("b")
        house["c"].serving.fails += [MemoryPlanError("too much")] * 2
        await house.ask("c")
        assert house.states == {"a": "unloaded", "b": "unloaded", "c": "loaded"}
        house["a"].serving.fails += [MemoryPlanError("too much")] * 2
        with pytest.raises(ApiError, match="too much"):
            await house.ask("a")
        assert house.states == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}

    run(work())


def test_idle_models_sleep_and_requests_wake_them():
    async def work() -> None:
        house = House(10, 10, sleep_idle_s=5.0)
        await house.ask("a", 8.0)
        await house.ask("b")
        assert house.pool.left_s(house["b"]) == 5.0
        await asyncio.sleep(4.9)
        assert house.states == {"a": "sleeping", "b": "loaded"}
        await asyncio.sleep(0.5)
        assert house.states == {"a": "sleeping", "b": "sleeping"}
        await house.ask("a")
        for _ in range(6):
            async with house.pool.using(house["a"], looks=True, holds=False):
                await asyncio.sleep(0.95)
        await asyncio.sleep(0.1)
        assert house.states == {"a": "sleeping", "b": "sleeping"}
        await house.ask("a")
        await house.ask("a", keep_s=math.inf)
        await asyncio.sleep(1000)
        assert house.states == {"a": "loaded", "b": "sleeping"}
        assert house.pool.left_s(house["a"]) is None
        await house.ask("a", keep_s=0)
        await asyncio.sleep(0.5)
        assert house.states == {"a": "sleeping", "b": "sleeping"}
        await house.ask("a", keep_s=300)  # the wish of the request before must not hold for this one
        await asyncio.sleep(0.5)
        assert house.states == {"a": "loaded", "b": "sleeping"}

    run(work())


@pytest.mark.parametrize("in_order", [False, True])
def test_a_look_that_loads_a_model_holds_nobody_up(in_order):
    async def work() -> None:
        house = House(10, 10, max_loaded=1, in_order=in_order, sleep_idle_s=50.0)
        await house.ask("b")
        done = asyncio.Event()

        async def look() -> None:
            async with house.pool.using(house["a"], looks=True, holds=False):
                await done.wait()  # for example a page that stays open

        looking = asyncio.ensure_future(look())
        await asyncio.sleep(0.1)
        await asyncio.wait_for(house.ask("b"), 20)
        done.set()
        await looking
        async with house.pool.using(house["a"], looks=True, holds=False):
            pass
        await asyncio.sleep(51)
        assert house.states == {"a": "sleeping", "b": "unloaded"}

    run(work())


def test_a_wish_to_keep_a_model_holds_until_the_next_one():
    async def work() -> None:
        house = House(10, 10, sleep_idle_s=5.0)
        house["b"].spec.sleep_idle_s = 20.0
        await house.ask("a", keep_s=math.inf)
        await house.ask("b")
        await asyncio.sleep(19)
        assert house.states == {"a": "loaded", "b": "loaded"}
        await house.ask("a")
        await asyncio.sleep(6)
        assert house.states == {"a": "sleeping", "b": "sleeping"}

    run(work())


def test_of_the_models_of_the_start_those_are_loaded_that_fit():
    async def work() -> None:
        house = House(60, 50, 30)
        for model in house.pool.models:
            model.spec.on_startup = True
        await asyncio.wrap_future(house.pool.start())
        assert house.log == ["+a", "+c"]

    run(work())


def test_unload_waits_for_running_requests_and_later_ones_load_again():
    async def work() -> None:
        house = House(10)
        await house.ask("a")
        running = house.begin("a", 5.0)
        await asyncio.sleep(0)
        unloading = asyncio.ensure_future(house.pool.unload(house["a"]))
        await asyncio.sleep(0)
        late = house.begin("a")
        await unloading
        assert running.done()
        await late
        assert house.log == ["+a", "-a", "+a"]
        await house.pool.unload(house["a"])
        await house.pool.unload(house["a"])
        assert house.states == {"a": "unloaded"}

    run(work())


def test_without_autoload_only_load_loads():
    async def work() -> None:
        house = House(10, autoload=False)
        with pytest.raises(ApiError, match="a is not loaded; POST /models/load") as refused:
            await house.ask("a")
        assert refused.value.status == 400
        house.pool.load(house["a"])
        house.pool.load(house["a"])
        await asyncio.sleep(LOAD_S)
        await house.ask("a")
        await house.pool.unload(house["a"])
        await house.ask("a", loads=True)
        assert house.log == ["+a", "-a", "+a"]

    run(work())


def test_models_of_the_start_are_loaded_before_the_pool_is_ready():
    async def work() -> None:
        house = House(10, 10, 10, sleep_idle_s=5.0)
        for name in "ab":
            house[name].spec.on_startup = True
        house["b"].serving.fails.append(OSError("gone"))
        started = house.pool.start()
        assert house.pool.start() is started
        assert house.pool.state == "loading"
        await asyncio.wrap_future(started)
        assert house.pool.state == "ready"
        assert house.states == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        await asyncio.sleep(9.0)
        assert house.states["a"] == "sleeping"

    run(work())


def test_at_the_end_those_who_wait_are_refused_and_all_is_freed():
    async def work() -> None:
        house = House(60, 60)
        await house.ask("a")
        running = house.begin("a", 3.0)
        await asyncio.sleep(0)
        waiting = house.begin("b")
        await asyncio.sleep(0.5)
        await house.pool.drain(1.0)
        assert house.pool.state == "draining"
        for refused in (waiting, house.begin("a"), house.begin("b")):
            with pytest.raises(ApiError, match="the server is shutting down"):
                await refused
        await running
        await house.pool.aclose()
        assert house.log == ["+a", "drain a", "-a", "-b"]

    run(work())


def test_names_aliases_and_adapters():
    async def work() -> None:
        house = House(10, 10)
        a, b = house["a"], house["b"]
        a.serving.names = ("a", "first")
        b.serving.config.adapters = (("extra", "x.gguf"),)
        find = house.pool.find
        assert [find(name) for name in (None, "a", "first", "b", "extra")] == [a, a, a, b, b]
        with pytest.raises(ApiError, match="the model 'c' does not exist; served are a, b"):
            find("c")
        assert ModelPool(PoolOptions((1,)), takes_any=True).models == []

    run(work())


@pytest.mark.parametrize("seed", range(60))
def test_random_histories(seed):
    """Each request ends once, and loaded models always fit.

    No request waits longer than the work before it and two loads of each other model.
    """

    async def work() -> None:
        rng = random.Random(seed)
        sizes = [rng.randrange(10, 60) for _ in range(rng.randrange(2, 6))]
        most = rng.choice([0, 1, 2, 3])
        idle = rng.choice([None, None, 0.0, 3.0])
        house = House(*sizes, max_loaded=most, sleep_idle_s=idle, in_order=rng.random() < 0.3)
        names = [model.name for model in house.pool.models]
        loop, waits = asyncio.get_running_loop(), []

        async def request() -> str:
            began = loop.time()
            name, seconds = rng.choice(names), rng.choice([0.0, 0.1, 1.0, 4.0])
            try:
                async with house.pool.using(house[name]):
                    waits.append(loop.time() - began)
                    assert house[name].state == "loaded"
                    loaded = [
                        model for model in house.pool.models if model.state != "unloaded" and model.state != "sleeping"
                    ]
                    assert sum(model.spec.bytes[0] for model in loaded) <= 100
                    assert not most or len(loaded) <= most
                    await asyncio.sleep(seconds)
            except ApiError:
                return "refused"
            except asyncio.CancelledError:
                return "left"
            return "answered"

        requests = []
        for _ in range(120):
            requests.append(asyncio.ensure_future(request()))
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.05, 0.5, 3.0]))
            happening = rng.random()
            if happening < 0.1:
                rng.choice(requests).cancel()
            elif happening < 0.15:
                requests.append(asyncio.ensure_future(house.pool.unload(house[rng.choice(names)])))
            elif happening < 0.2:
                house[rng.choice(names)].serving.fails.append(rng.choice([OSError("x"), MemoryPlanError("y")]))
            elif happening < 0.22:
                house.pool.load(house[rng.choice(names)])
        answers = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 10_000)
        assert all(
            answer in ("answered", "refused", "left", None) or isinstance(answer, asyncio.CancelledError)
            for answer in answers
        )
        assert answers.count("answered") >= 40
        assert max(waits) <= 2 * (2 * LOAD_S + 4.0) * len(names) + 10
        assert all(model.n_users == 0 for model in house.pool.models)

    run(work())


def test_the_model_of_a_form_is_a_field_of_it():
    boundary = b"--x\r\nContent-Disposition: form-data; name="
    body = boundary + b'"model"\r\n\r\near\r\n' + boundary + b'"file"; filename="a.wav"\r\n\r\n\x00\xff\r\n--x--\r\n'
    headers = [(b"content-type", b"multipart/form-data; boundary=x")]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def read() -> tuple[Any, Any]:
        found, again = await routes._read(HttpRequest({"type": "http", "headers": headers}), receive)
        return found, await again()

    assert asyncio.run(read()) == ({"model": "ear"}, {"type": "http.request", "body": body, "more_body": False})
