"""The server as a program: signals, draining, addresses, and models that cannot be loaded."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from tests.waiting import PATIENCE_S, until

# serves like `llamabatch serve`, with options of the test and the URL on stdout
PROGRAM = """
import json, sys
from llamabatch.errors import LlamaBatchError
from llamabatch.server.application import engine_config
from llamabatch.server.options import ServerOptions
from llamabatch.server.run import serve
from llamabatch.utils import interrupts
model, engine, server, interrupts.SAME_S = sys.argv[1], *map(json.loads, sys.argv[2:])
try:
    serve(engine_config(model, engine), ServerOptions(**server), lambda urls: print(urls[0], flush=True))
except LlamaBatchError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@contextlib.contextmanager
def server(model="tiny", *, wait=True, server=None, same_s=1, **engine):
    """Starts a server in a process of its own. Yields the process and a client. Signals within `same_s` seconds count
    as one."""
    options = {"port": 0, **(server or {})}
    engine = {"n_slots": 4, "n_ctx": 1024, "n_threads": 1} | engine
    command = [sys.executable, "-c", PROGRAM, model, *map(json.dumps, (engine, options, same_s))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        if not url:
            yield process, None
            return
        with httpx.Client(base_url=url, timeout=30) as client:
            if wait:
                until(lambda: client.get("/readyz").status_code == 200)
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def children(process):
    """Returns the process ids of the children of a process."""
    command = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def body(**more):
    return {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True, "seed": 1} | more


class Stream(threading.Thread):
    """Reads a stream on a thread. If the stream is cut, `data` ends without [DONE]."""

    def __init__(self, client, asked):
        super().__init__()
        self._client = client
        self._asked = asked
        self.begun = threading.Event()
        self.data = ""
        self.start()

    def run(self):
        with (
            contextlib.suppress(httpx.HTTPError),
            self._client.stream("POST", "/v1/completions", json=self._asked) as response,
        ):
            for piece in response.iter_text():
                self.data += piece
                self.begun.set()

    @property
    def text(self):
        events = [line[6:] for line in self.data.split("\n\n") if line.startswith("data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_streams_end_and_takes_no_new_work(number, steps):
    long = body(max_tokens=100)
    with server() as (process, client):
        whole = client.post("/v1/completions", json=long | {"stream": False}).json()["choices"][0]["text"]
        pids = children(process)
        with steps.held(5):
            stream = Stream(client, long)
            assert stream.begun.wait(PATIENCE_S)
            process.send_signal(number)
            until(lambda: client.get("/readyz").status_code == 503)
            refused = client.post("/v1/completions", json=body())
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert stream.is_alive()
        stream.join(PATIENCE_S)
        assert stream.text == whole
        assert stream.data.endswith("data: [DONE]\n\n")
        assert process.wait(20) == 0
        until(lambda: all(map(gone, pids)))
        assert process.stderr.read() == ""


def test_what_does_not_end_in_time_is_ended_with_an_error(steps):
    with server(server={"drain_s": 0.2}, n_slots=1) as (process, client), steps.each_takes(0.02):
        streams = [Stream(client, body(max_tokens=900, seed=number)) for number in range(12)]
        until(lambda: any(stream.begun.is_set() for stream in streams))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        for stream in streams:
            stream.join(PATIENCE_S)
        ended = [stream for stream in streams if not stream.data.endswith("data: [DONE]\n\n")]
        assert ended
        assert all("shutting down" in stream.data for stream in ended if stream.begun.is_set())


def test_a_second_signal_ends_at_once(steps):
    with server(n_slots=1, same_s=0) as (process, client), steps.each_takes(0.02):
        pids = children(process)
        streams = [Stream(client, body(max_tokens=900, seed=number)) for number in range(12)]
        until(lambda: any(stream.begun.is_set() for stream in streams))
        process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/readyz").status_code == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        until(lambda: all(map(gone, pids)))
        for stream in streams:
            stream.join(PATIENCE_S)


def test_a_signal_that_comes_twice_and_to_the_engine_too_is_one(steps):
    long = body(max_tokens=100)
    with server(same_s=3600) as (process, client):
        whole = client.post("/v1/completions", json=long | {"stream": False}).json()["choices"][0]["text"]
        pids = children(process)
        with steps.held(5):
            stream = Stream(client, long)
            assert stream.begun.wait(PATIENCE_S)
            for pid in pids:  # systemd with KillMode=control-group signals every process
                os.kill(pid, signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/readyz").status_code == 503)
            process.send_signal(signal.SIGTERM)  # `timeout` signals the process and then its group
            assert children(process) == pids
        assert process.wait(20) == 0
        stream.join(PATIENCE_S)
        assert stream.text == whole
        until(lambda: all(map(gone, pids)))


def test_a_signal_while_it_loads_ends_it():
    with server(wait=False) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_model_that_cannot_be_loaded_ends_the_program_with_its_error(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really" * 100)
    with server(str(tmp_path / "broken.gguf"), wait=False) as (process, _):
        assert process.wait(30) == 1
        assert "ModelFileError" in process.stderr.read()
