"""A server's engine dies. The sender of the request that killed it gets an error, all others get their texts."""

import asyncio
import contextlib
import os
import signal
import threading

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import httpx
import uvicorn

from llamabatch.client.connect import with_front_client
from llamabatch.client.process_client import ChildClient
from llamabatch.client.restart_policy import RestartPolicy
from llamabatch.server.application import engine_config, make_app
from llamabatch.server.run import uvicorn_config
from tests.long.server_client import Call, RunningServer, text_of
from tests.waiting import PATIENCE_S, until
from tests.workers.poisoned_worker import POISON

PATH = "/v1/completions"
ENGINE = {"n_slots": 8, "n_ctx": 512, "n_threads": 1, "strategy": "batched"}
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


class CrashingServer(RunningServer):
    """A server whose child runs another program, or has another restart policy."""

    def __init__(self, engine, program="llamabatch.client.worker", policy=None, **options):
        super().__init__(engine, **options)
        more = {} if policy is None else {"policy": policy}

        def connect(config):
            return with_front_client(ChildClient(config, program, **more), config.max_queue)

        self.app = make_app(engine_config("tiny", engine), self._options, connect)
        self.serving = self.app.state.serving
        self._server = uvicorn.Server(uvicorn_config(self.app, self._options))

    @property
    def supervisor(self):
        [found] = self.serving.client.inner._children
        return found

    def get(self, path):
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=30)


def test_the_request_that_kills_the_engine_is_named_to_its_sender_alone():
    bodies = [{**LONG, "prompt": f"{word} upon a time", "max_tokens": 120} for word in ("Once", "Twice", "Never")]
    poison = {"prompt": [*POISON, 300, 301], "max_tokens": 10}

    async def run(port):
        alone = [await text_of(port, body, stream=False) for body in bodies]
        calls = [text_of(port, body, stream=stream) for body in bodies for stream in (True, False)]
        culprits = [await Call.post(port, PATH, {**poison, "stream": stream}) for stream in (False, True)]
        texts = await asyncio.wait_for(asyncio.gather(*calls), 120)
        assert texts == [text for text in alone for _ in range(2)]
        return [(await culprit.read(), culprit) for culprit in culprits]

    with CrashingServer(ENGINE, "tests.workers.poisoned_worker") as server:
        for document, call in asyncio.run(run(server.port)):
            assert call.status == 500
            assert document["error"]["code"] == "engine_crash"
            assert "2 times while it computed this request alone, at last with SIGSEGV" in document["error"]["message"]
        server.check_idle()
        stats = server.serving.client.stats()
        assert (stats.errors, stats.aborted) == (2, 0)
        assert server.get("/livez").status_code == 200


def test_all_are_answered_once_the_engine_is_given_up_and_it_is_started_again_without_a_call(monkeypatch, steps):
    policy = RestartPolicy(most=1, retry_s=2.0)
    now = 0.0  # the supervisor's clock

    async def run(server):
        with steps.each_takes(0.05):
            whole = [await Call.post(server.port, PATH, LONG) for _ in range(3)]
            streams = [await Call.post(server.port, PATH, {**LONG, "stream": True}) for _ in range(3)]
            waiting = [await Call.post(server.port, PATH, {**LONG, "n": 8, "stream": each}) for each in (False, True)]
            for stream in streams:
                await stream.head()
            await asyncio.to_thread(kill_all, server)
        return [await asyncio.wait_for(answer(call), 30) for call in (*whole, *streams, *waiting)]

    async def answer(call):
        """Returns the status, and the error code of a stream that had begun."""
        if not call.status and await call.head() != 200:
            call.close()
            return call.status, None
        found = [event["error"] async for event in call.events() if "error" in event]
        return call.status, found[0]["code"]

    with CrashingServer(ENGINE, policy=policy) as server:
        monkeypatch.setattr(server.supervisor, "_clock", lambda: now)
        answers = asyncio.run(run(server))
        assert answers[:7] == [*[(503, None)] * 3, *[(200, "service_unavailable")] * 3, (503, None)]
        assert answers[7][0] in (200, 503)
        assert server.get("/livez").status_code == 503
        for refused in (server.get("/readyz"), server.get("/health")):
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 2
            assert "the engine has ended: the engine process ended" in refused.json()["error"]["message"]
        assert server.serving.n_open == 0
        now = 2.0
        until(lambda: server.serving.state == "ready", "no other engine was started")
        assert asyncio.run(text_of(server.port, {**LONG, "max_tokens": 4}, stream=False))
        assert server.get("/livez").status_code == 200
        assert server.get("/readyz").status_code == 200
        server.check_idle()


def test_the_server_says_that_it_is_not_ready_while_the_engine_is_replaced_and_takes_requests(monkeypatch):
    go_on = threading.Event()
    with CrashingServer(ENGINE) as server:
        start = server.supervisor._start_child
        monkeypatch.setattr(server.supervisor, "_start_child", lambda *a: go_on.wait(PATIENCE_S) and start(*a))
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: server.get("/health").status_code == 503, "the server says that it is ready")
        assert server.get("/livez").status_code == 200
        go_on.set()
        assert asyncio.run(text_of(server.port, {**LONG, "max_tokens": 4}, stream=False))
        assert server.get("/health").json() == {"status": "ok"}
        restarts = [line for line in server.get("/metrics").text.splitlines() if "engine_restarts_total{" in line]
        assert restarts[0].endswith(" 1.0")


def kill_all(server):
    """Kills children until the client starts no more of them."""
    client = server.serving.client

    def given_up():
        for pid in client.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return client.outage

    until(given_up)


def test_a_running_request_that_misses_its_deadline_has_its_text_and_an_error(steps):
    body = {**LONG, "deadline_s": 0.5, "n": 2}

    async def run(port):
        whole = await Call.post(port, PATH, body)
        document = await whole.read()
        assert whole.status == 504
        assert document["error"]["code"] == "deadline_exceeded"
        stream = await Call.post(port, PATH, {**body, "stream": True})
        events = [event async for event in stream.events()]
        assert stream.status == 200
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        assert "generated" in events[-1]["error"]["message"]
        return "".join(choice["text"] for event in events[:-1] for choice in event["choices"] if not choice["index"])

    with RunningServer(ENGINE) as server:
        with steps.each_takes(0.02):
            text = asyncio.run(run(server.port))
        assert text
        assert asyncio.run(text_of(server.port, {**LONG, "max_tokens": 60}, stream=False)).startswith(text[:60])
        server.check_idle()
