"""Sends many large bodies at once, and measures how long the server answers nobody else.

    python -m benchmarks.bodies [--count 30] [--megabytes 18] [--rounds 3] [--json FILE]

A child process sends all bodies at once to `llamabatch serve` with the bundled model. Meanwhile this process asks
`/livez` a hundred times a second, first with an idle engine, then with an engine whose slots all generate. The figures
of each kind of body are the longest wait for /livez, the growth of the server process's memory (without its child, the
engine) up to its peak, and the statuses that the senders got.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks import facts
from benchmarks.peers.servers import HOST
from benchmarks.process import ended_by_signals, environment
from benchmarks.serving import Server, make_setup, open_server
from llamabatch.planning.machine import Machine
from llamabatch.server.options import ServerOptions

RESULTS = Path(__file__).resolve().parent / "results" / "bodies.json"
MOST_MS = {"idle": 100, "busy": 250}
"""The longest allowed wait for an answer of /livez, in ms, by the state of the engine."""
MOST_GROWTH_MB = 200
_TEXT = "Once upon a time there was a little girl. "
_SLOTS = 4
_EACH_S = 0.01

# HOST PORT PATH COUNT FILE: sends the file COUNT times at once, and prints how often each status came
_SENDER = """
import collections, concurrent.futures, http.client, json, sys
host, port, path, count, file = sys.argv[1:]
body = open(file, "rb").read()

def send(_):
    connection = http.client.HTTPConnection(host, int(port), timeout=300)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except OSError as error:  # answered, and closed, before the body was sent
        return type(error).__name__
    finally:
        connection.close()

with concurrent.futures.ThreadPoolExecutor(int(count)) as senders:
    print(json.dumps(collections.Counter(senders.map(send, range(int(count))))))
"""


def kinds(size: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns a path and a body of about `size` bytes for each kind of body."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    user = {"role": "user", "content": "hello"}
    schema = {"type": "object", "properties": {f"n{i}": {"type": "string"} for i in range(size // 30)}}
    function = {"description": _TEXT * 20, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(size // 1000)]
    return {
        "one text": (chat, {"messages": [{**user, "content": _TEXT * (size // len(_TEXT))}]}),
        "escapes": (chat, {"messages": [{**user, "content": 'é\n"\\' * (size // 12)}]}),
        "messages": (chat, {"messages": [user] * (size // 40)}),
        "token ids": (text, {"prompt": [100] * (size // 5)}),
        "prompts": (text, {"prompt": ["hello there"] * (size // 15)}),
        "tools": (chat, {"messages": [user], "tools": tools}),
        "grammar": (chat, {"messages": [user], "grammar": 'root ::= "a"\n' * (size // 16)}),
        "schema": (chat, {"messages": [user], "guided_json": schema}),
    }


@contextlib.contextmanager
def generating(port: int, count: int) -> Iterator[None]:
    """Runs `count` clients until the `with` block ends; each asks for long answers, one after another."""
    is_over = threading.Event()
    body = json.dumps({"prompt": "Once upon", "max_tokens": 1500, "ignore_eos": True, "stream": True})

    def ask() -> None:
        while not is_over.is_set():
            connection = http.client.HTTPConnection(HOST, port, timeout=300)
            with contextlib.suppress(OSError):
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                while not is_over.is_set() and response.read1(65536):
                    time.sleep(0.05)  # leaves the cores to the server
            connection.close()

    clients = [threading.Thread(target=ask) for _ in range(count)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


def memory(server: Server, key: str) -> float:
    """Returns a figure of /proc (VmRSS, VmHWM) for the server's own process, in MB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    return float(status.split(f"{key}:")[1].split()[0]) / 1000


def measure(server: Server, path: str, body: bytes, count: int) -> dict[str, Any]:
    """Sends one kind of body `count` times at once and returns its figures."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = memory(server, "VmRSS")
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        command = [sys.executable, "-c", _SENDER, HOST, str(server.port), path, str(count), file.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
            waits = []
            probe = http.client.HTTPConnection(HOST, server.port, timeout=60)
            while sender.poll() is None:
                began = time.perf_counter()
                probe.request("GET", "/livez")
                probe.getresponse().read()
                waits.append(1000 * (time.perf_counter() - began))
                time.sleep(_EACH_S)
            probe.close()
            assert sender.stdout is not None
            statuses = json.load(sender.stdout)
    waits.sort()
    return {
        "livez_max_ms": round(waits[-1], 1),
        "livez_p99_ms": round(waits[int(0.99 * len(waits))], 1),
        "growth_mb": round(memory(server, "VmHWM") - before),
        "statuses": statuses,
    }


@click.command()
@click.option("--count", type=click.IntRange(1), default=30, show_default=True, help="Bodies at once.")
@click.option("--megabytes", type=click.IntRange(1), default=18, show_default=True, help="Of each of them.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS, show_default="…")
def main(count: int, megabytes: int, rounds: int, path: Path) -> None:
    """Measure how long large bodies silence the server, and what memory they take. Needs Linux."""
    about = facts.facts(facts.command_line("python -m benchmarks.bodies"))
    found: dict[str, dict[str, list[dict[str, Any]]]] = {state: collections.defaultdict(list) for state in MOST_MS}
    with ended_by_signals():
        setup = make_setup(environment(os.environ), {"tiny"}, Machine.here().cores, click.echo)
        for number in range(rounds):
            for state in MOST_MS:
                with (
                    open_server(setup, "tiny", {"n_slots": _SLOTS, "n_ctx": 2048}) as server,
                    generating(server.port, _SLOTS if state == "busy" else 0),
                ):
                    for name, (route, body) in kinds(megabytes * 10**6).items():
                        result = measure(server, route, json.dumps(body).encode(), count)
                        found[state][name].append(result)
                        click.echo(f"round {number + 1}, {state}, {name}: {json.dumps(result)}")
    summary = {
        state: {
            "most_ms": most_ms,
            "livez_max_ms": max(each["livez_max_ms"] for all_of in found[state].values() for each in all_of),
            "livez_max_ms_median": statistics.median(
                each["livez_max_ms"] for all_of in found[state].values() for each in all_of
            ),
            "growth_mb": max(each["growth_mb"] for all_of in found[state].values() for each in all_of),
            "most_growth_mb": MOST_GROWTH_MB,
        }
        for state, most_ms in MOST_MS.items()
    }
    bytes_at_once = ServerOptions().max_bodies_bytes
    document = {**about, "count": count, "megabytes": megabytes, "max_bodies_bytes": bytes_at_once, "summary": summary}
    path.write_text(json.dumps({**document, "kinds": found}, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
