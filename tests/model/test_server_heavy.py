"""Heavy requests neither block the event loop of a server nor fill its memory.

Two times are measured that do not depend on other programs of the machine: the CPU time of each callback of the loop,
and the CPU time of the whole process between two turns of the loop. The second shows threads that block all others.
"""

import concurrent.futures
import contextlib
import functools
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.waiting import until

# Serves like `llamabatch serve`, with the URL on stdout. SECONDS is the CPU time of the longest callback so far.
PROGRAM = """
import asyncio, json, sys, time
sys.modules["uvloop"] = None  # its callbacks cannot be watched
from llamabatch.server.application import engine_config
from llamabatch.server.options import ServerOptions
from llamabatch.server.run import serve

longest, silent = [0.0, ""], [0.0]
run = asyncio.Handle._run

def watched(handle):
    before = time.thread_time()
    try:
        run(handle)
    finally:
        seconds = time.thread_time() - before
        if seconds > longest[0]:
            longest[:] = seconds, repr(handle)[:300]

asyncio.Handle._run = watched

async def turn():
    while True:
        before = time.process_time()
        await asyncio.sleep(0.005)
        silent[0] = max(silent[0], time.process_time() - before)

def started(urls):
    turns.append(asyncio.get_running_loop().create_task(turn()))
    print(urls[0], flush=True)

def told():
    for line in sys.stdin:
        print(json.dumps([*longest, *silent]), flush=True)
        longest[:], silent[:] = (0.0, ""), (0.0,)

import threading
turns = []
threading.Thread(target=told, daemon=True).start()
options = ServerOptions(port=0, max_logprobs=int(sys.argv[1]), max_bodies_bytes=2**27)
serve(engine_config("tiny", {"n_slots": 4, "n_ctx": 2048, "n_threads": 1}), options, started)
"""

TEXT = "Once upon a time there was a little girl. "
LONG = TEXT * 100_000  # 4 MB
MESSAGES = [{"role": "user", "content": "Tell me a story"}]
USUAL = {"ignore_eos": True, "seed": 1}
ANSWER = USUAL | {"max_tokens": 200}
TWICE = b'{"a":{' + b",".join(b'"n%d":0' % i for i in range(6000)) + b',"n5999":0}}'
NAMES = b'{"metadata":{' + b",".join(b'"n%d":0' % i for i in range(700_000)) + b"}}"
NESTED = b'{"prompt":[' + b"[1]," * 2_000_000 + b"[1]]}"

# status, path, body
HEAVY = [
    (400, "/v1/chat/completions", ANSWER | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1024}),
    (400, "/v1/completions", ANSWER | {"prompt": "a", "logprobs": -1}),
    (400, "/completion", ANSWER | {"prompt": "a", "n_probs": 1024, "stream": True}),
    (200, "/v1/chat/completions", ANSWER | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 4}),
    (200, "/v1/chat/completions",
     ANSWER | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 4, "stream": True}),
    (200, "/v1/completions", ANSWER | {"prompt": [TEXT] * 4, "logprobs": 20, "echo": True}),
    (200, "/v1/completions", ANSWER | {"prompt": [TEXT] * 4, "logprobs": 20, "echo": True, "stream": True}),
    (200, "/completion", ANSWER | {"prompt": TEXT * 30, "n_probs": 20}),
    (200, "/completion", ANSWER | {"prompt": TEXT * 30, "n_probs": 20, "stream": True}),
    (200, "/v1/responses", USUAL | {"input": TEXT, "top_logprobs": 20, "max_output_tokens": 200}),
    (200, "/v1/responses", USUAL | {"input": TEXT, "top_logprobs": 20, "max_output_tokens": 200, "stream": True}),
    (400, "/v1/chat/completions", ANSWER | {"messages": MESSAGES, "model": "m" * 8_000_000, "n": 64, "stream": True}),
    (400, "/v1/completions", ANSWER | {"prompt": "a", "model": "m" * 60_000}),
    (400, "/v1/messages", ANSWER | {"messages": MESSAGES, "model": "m" * 1_000_000}),
    (400, "/v1/responses", USUAL | {"input": "a", "user": "u" * 1_000_000}),
    (400, "/v1/responses", USUAL | {"input": "a", "metadata": {"a": "u" * 1_000_000}}),
    (400, "/v1/chat/completions", TWICE),
    (413, "/v1/completions", NESTED),
    (413, "/v1/chat/completions", NAMES),
    (400, "/v1/completions", ANSWER | {"prompt": LONG}),
    (400, "/v1/completions", ANSWER | {"prompt": LONG, "overflow": "truncate"}),
    (400, "/v1/completions", ANSWER | {"prompt": [TEXT * 40] * 3000}),
    (400, "/v1/chat/completions", ANSWER | {"messages": [{"role": "user", "content": LONG}]}),
    (400, "/v1/messages", ANSWER | {"messages": [{"role": "user", "content": LONG}]}),
    (400, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    (400, "/v1/responses", USUAL | {"input": "hi", "instructions": LONG}),
    (400, "/completion", ANSWER | {"prompt": LONG}),
    (400, "/infill", ANSWER | {"input_prefix": LONG, "input_suffix": LONG}),
    (400, "/tokenize", {"content": LONG, "with_pieces": True}),
    (200, "/tokenize", {"content": TEXT * 20_000, "with_pieces": True}),
    (200, "/detokenize", {"tokens": [100] * 500_000}),
]  # fmt: skip


def memory(process):
    """Returns the peak memory of the server's own process, in bytes."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@contextlib.contextmanager
def server(max_logprobs):
    """Yields the process, a client, and a function that returns the longest callback and turn since its last call."""
    command = [sys.executable, "-c", PROGRAM, str(max_logprobs)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            url = process.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=120) as client:
                until(lambda: client.get("/readyz").status_code == 200)

                def longest():
                    process.stdin.write("\n")
                    process.stdin.flush()
                    return json.loads(process.stdout.readline())

                send(client, (200, "/v1/chat/completions", USUAL | {"messages": MESSAGES, "max_tokens": 5}))
                longest()
                yield process, client, longest
        finally:
            process.kill()


def send(client, case):
    status, path, body = case
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with client.stream("POST", path, content=data) as answer:
        start = b""
        for part in answer.iter_bytes():
            start = start or part[:300]
    return status, answer.status_code, path, start


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_thirty_heavy_requests_hold_nobody_up():
    with server(max_logprobs=20) as (process, client, longest):
        before = memory(process)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for expected, status, *rest in pool.map(functools.partial(send, client), HEAVY):
                assert status == expected or (rest[0] == "/infill" and status == 501), rest
        seconds, what, _ = longest()
        grown = memory(process) - before
    print(f"{seconds:.3f} s, {grown / 1e6:.0f} MB, {what}")  # benchmarks/bodies.py measures the seconds
    assert grown < 200e6


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_many_logprobs_holds_nobody_up(stream):
    """All logprobs come in one message. Making objects of them would block all threads for a second."""
    body = USUAL | {"prompt": "a", "max_tokens": 50, "n": 16, "logprobs": 1024, "stream": stream}
    with server(max_logprobs=-1) as (process, client, longest):
        before = memory(process)
        _, status, *rest = send(client, (200, "/v1/completions", body))
        assert status == 200, rest
        *_, silent = longest()
        grown = memory(process) - before
    print(f"{silent:.3f} s, {grown / 1e6:.0f} MB")
    assert grown < 200e6
