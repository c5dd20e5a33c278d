"""If a client leaves at any time, its request ends within two steps, and no other request ends."""

import asyncio
import json

import pytest

from llamabatch.engine.engine import Engine
from llamabatch.server import app
from tests.waiting import PATIENCE_S, until_soon

LONG = "word " * 700  # several prefill steps


class Counted:
    """Counts steps, and records the number of steps before each abort."""

    def __init__(self, monkeypatch):
        self.count = 0
        self.aborts = []
        step, abort = Engine.step, Engine.abort

        def counted(engine):
            self.count += 1
            return step(engine)

        def noted(engine, request_id, *rest):
            self.aborts.append(self.count)
            return abort(engine, request_id, *rest)

        monkeypatch.setattr(Engine, "step", counted)
        monkeypatch.setattr(Engine, "abort", noted)


class Client:
    """A client that sends one request over ASGI, and may leave."""

    def __init__(self, application, body, path="/v1/completions"):
        self.status = None
        self.body = b""
        self.first = asyncio.Event()  # set when the first piece is there
        self._leaving = asyncio.Event()
        self._given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(application(scope, self._receive, self._send))

    def leave(self):
        self._leaving.set()

    async def _receive(self):
        if self._given:
            return self._given.pop()
        await self._leaving.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            if message["body"]:
                self.first.set()


def run(story, **options):
    """Makes an application, waits until its model is loaded, and runs `story` with it."""

    async def told():
        application = app("tiny", isolate=False, n_ctx=1024, instances=1, n_threads=1, **options)
        serving = application.state.serving
        async with application.router.lifespan_context(application):
            await until_soon(lambda: serving.state == "ready", "it is never ready")
            await story(application, serving)
            await until_soon(lambda: serving.n_open == 0, "a call is left open")

    asyncio.run(told())


def body(stream, **more):
    return {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": stream, "seed": 1} | more


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "prefill", "decoding"])
def test_it_frees_its_place_within_two_steps(monkeypatch, steps, stream, when):
    async def story(application, serving):
        counted, stats, other = Counted(monkeypatch), serving.client.stats, None
        with steps.held(most := {"waiting": 1, "prefill": 2, "decoding": 5}[when]):
            if when == "waiting":
                other = Client(application, body(False, max_tokens=60))
                await until_soon(lambda: stats().running == 1, "the other one never runs")
            client = Client(application, body(stream, prompt=LONG if when == "prefill" else "Once upon a time"))
            await until_soon(lambda: counted.count > most, "it never begins")
            await until_soon(lambda: stats().waiting == (when == "waiting"))
            assert stats().generated_tokens == {"waiting": 1, "prefill": 0, "decoding": 5}[when]
            at = counted.count
            client.leave()
            await asyncio.wait_for(client.task, PATIENCE_S)
        await until_soon(lambda: counted.aborts, "it is never aborted")
        assert counted.aborts[0] - at <= 2
        await until_soon(lambda: stats().aborted == 1, "it never ends")
        assert stats().running + stats().waiting == (0 if other is None else 1)
        steps.let_go()
        if other is not None:
            await other.task
            assert other.status == 200
            assert json.loads(other.body)["usage"]["completion_tokens"] == 60

    with steps.held(20):  # again with a held step, so that the other request still runs
        run(story, n_slots=1, n_batch=64, prefill_budget=64)


@pytest.mark.parametrize("stream", [False, True])
def test_the_texts_of_the_others_are_unchanged(stream, steps):
    texts = {}

    async def story(application, serving):
        for leaves in (False, True):
            clients = [Client(application, body(stream, seed=number, max_tokens=40)) for number in range(6)]
            if leaves:
                clients[2].leave()
                await until_soon(lambda: serving.client.stats().generated_tokens > 20, "nothing runs")
                clients[4].leave()
            await asyncio.gather(*(client.task for client in clients))
            texts[leaves] = [text_of(client.body, stream) for client in clients]
        assert [texts[True][i] for i in (0, 1, 3, 5)] == [texts[False][i] for i in (0, 1, 3, 5)]

    with steps.each_takes(0.01):
        run(story, n_slots=6)


def text_of(data, stream):
    if not stream:
        return json.loads(data)["choices"][0]["text"] if data else None
    events = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_a_handler_that_is_cancelled_ends_its_request(steps):
    async def story(application, serving):
        with steps.held(3):
            client = Client(application, body(True))
            await asyncio.wait_for(client.first.wait(), PATIENCE_S)
            client.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client.task
        await until_soon(lambda: serving.client.stats().aborted == 1, "it never ends")

    run(story, n_slots=2)
