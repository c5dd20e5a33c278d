"""Measures first tokens through Ray Serve beside `llamabatch serve`, and the CPU time of a streamed piece; docs/ray.md.

.venv-scale/bin/python -m benchmarks.ray_serve [--proxy haproxy|python]... [--rounds N] [--model NAME] [--threads N]

Both servers run at once, but only one gets requests at a time, since an engine without work sleeps. Ray chooses its
proxy when it is imported, so each proxy is measured in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import facts
from benchmarks.peers.servers import HOST, free_port
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.programs.cpu import cpu_s
from benchmarks.server_http import body_of, first_token_s
from benchmarks.serving import engine_options, lines, make_setup, open_server, target
from benchmarks.workloads import Job, Shape, Workload
from llamabatch.planning.machine import Machine

RESULTS = Path(__file__).resolve().parent / "results" / "ray-serve.json"
MOST_FIRST_MS = 8.0  # largest delay of a first token behind `llamabatch serve`, with one stream
SINGLE = Workload("one stream", "tiny", (Shape(32, 8),), n_ctx=512)
STREAMS = Workload("streams", "tiny", (Shape(32, 256),), n_ctx=512)
N_FIRST = 15
N_STREAMS = 8
N_TIMES = 8  # repetitions, since the system counts CPU time in ticks of 10 ms
PROXIES = {
    "haproxy": {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # the cluster need not drain at its end
    },
    "python": {},
}
_PASSING = ("ProxyActor", "haproxy", "Ingress")  # parts of the names of processes that forward pieces
_STORE_BYTES = 200_000_000


@contextlib.contextmanager
def open_serve(model: str, engine: dict[str, Any]) -> Iterator[int]:
    """Starts one replica behind Ray Serve, on a cluster of this machine; yields its port."""
    import ray
    from ray import serve

    from llamabatch.integrations.ray import serve_app

    port = free_port()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, for Ray's sockets
        ray.init(object_store_memory=_STORE_BYTES, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        try:
            serve.start(http_options={"host": HOST, "port": port})
            options = {"no_key": True}  # behind HAProxy the server sees no addresses of callers
            replica = {"num_cpus": 0.5}
            serve.run(serve_app(model, num_replicas=1, ray_actor_options=replica, server_options=options, **engine))
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()


def passing_s() -> dict[str, float]:
    """Returns the CPU seconds of Serve's processes that forward pieces, by kind of process."""
    used: dict[str, float] = {}
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            for name in _PASSING:
                if name in each.name():
                    used[name] = used.get(name, 0.0) + cpu_s(each)
    return used


def pieces_of(port: int, job: Job) -> int:
    """Runs one stream and returns the number of its events."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body_of(job)), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise PeerFailure(f"HTTP {response.status}: {text[:300].decode('utf-8', 'replace')}")
    finally:
        connection.close()
    return text.count(b"\n\n")


def at_once(port: int, jobs: list[Job]) -> int:
    """Runs all jobs as streams at once and returns the number of their pieces."""
    found: list[int] = []
    threads = [threading.Thread(target=lambda job=job: found.append(pieces_of(port, job))) for job in jobs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if len(found) != len(jobs):
        raise PeerFailure(f"{len(jobs) - len(found)} of {len(jobs)} streams failed")
    return sum(found)


def measure(ports: dict[str, int], n_vocab: int, n_rounds: int) -> dict[str, Any]:
    """Measures first tokens of both servers in turn, then the CPU time of the processes that forward pieces."""
    firsts: dict[str, list[float]] = {name: [] for name in ports}
    many = dataclasses.replace(SINGLE, shapes=SINGLE.shapes * N_FIRST)
    for number in range(-1, n_rounds):  # the first round is not counted
        for name in list(ports)[:: 1 if number % 2 else -1]:
            connection = http.client.HTTPConnection(HOST, ports[name], timeout=60)
            jobs = many.jobs(random.Random(f"{name}-{number}"), n_vocab)
            seconds = [first_token_s(connection, job) for job in jobs]
            connection.close()
            if number >= 0:
                firsts[name].append(1000 * statistics.median(seconds))
    later = statistics.median(mine - theirs for mine, theirs in zip(*reversed(firsts.values()), strict=True))
    medians = {name: statistics.median(values) for name, values in firsts.items()}
    streams = dataclasses.replace(STREAMS, shapes=STREAMS.shapes * N_STREAMS)
    us = []
    for number in range(n_rounds):
        before = passing_s()
        drawn = random.Random(number)
        pieces = sum(at_once(ports["serve_app"], streams.jobs(drawn, n_vocab)) for _ in range(N_TIMES))
        us.append({name: 1e6 * (s - before[name]) / pieces for name, s in passing_s().items()} | {"pieces": pieces})
    return {
        "first token": {
            "median_ms": medians,
            "rounds_ms": firsts,
            "targets": {"later, ms": target(later, at_most=MOST_FIRST_MS)},
        },
        "cpu": {
            "us_per_piece": {name: statistics.median(each[name] for each in us) for name in us[0] if name != "pieces"},
            "rounds": us,
        },
    }


def of_proxy(proxy: str, n_rounds: int, model: str, threads: int) -> dict[str, Any]:
    """Returns the figures behind one proxy. A process may call it only once."""
    env = environment(os.environ)
    os.environ.update(PROXIES[proxy])
    with contextlib.ExitStack() as stack:
        setup = make_setup(env, {model}, threads, lambda text: click.echo(text, err=True))
        engine = engine_options(setup, SINGLE.n_ctx)
        beside = stack.enter_context(open_server(setup, model, engine))
        ours = stack.enter_context(open_serve(str(setup.models[model].path), engine))
        return measure({"serve": beside.port, "serve_app": ours}, setup.models[model].n_vocab, n_rounds)


def in_child(proxy: str, n_rounds: int, model: str, threads: int) -> dict[str, Any]:
    """Runs of_proxy in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "found.json"
        command = [
            *(sys.executable, "-m", "benchmarks.ray_serve", "--proxy", proxy, "--rounds", str(n_rounds)),
            *("--model", model, "--threads", str(threads), "--json", str(made)),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            if process.wait():
                raise PeerFailure(f"the measurement behind {proxy} ended with exit code {process.returncode}")
        finally:
            process.terminate()
            process.wait()
        found: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))["parts"][proxy]
        return found


@click.command()
@click.option("--proxy", "proxies", type=click.Choice(list(PROXIES)), multiple=True, help="Of Serve; default: both.")
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--model", default="tiny", show_default=True, help="tiny, or synth: random weights in a 0.5B shape.")
@click.option("--threads", type=click.IntRange(min=1), help="Of each engine; default: the cores of this machine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS)
def main(proxies: tuple[str, ...], n_rounds: int, model: str, threads: int | None, json_file: Path) -> None:
    """Measure Ray Serve beside `llamabatch serve`, alternating."""
    if model not in ("tiny", "synth"):
        raise click.UsageError(f"--model is {model!r}; give tiny or synth")
    threads = threads or Machine.here().cores
    about = facts.facts(facts.command_line("python -m benchmarks.ray_serve"))
    about["options"] = {"rounds": n_rounds, "model": model, "threads": threads, "streams": N_STREAMS, "times": N_TIMES}
    way = of_proxy if len(proxies) == 1 else in_child
    with ended_by_signals():
        parts = {proxy: way(proxy, n_rounds, model, threads) for proxy in proxies or PROXIES}
    json_file.write_text(json.dumps(about | {"parts": parts}, indent=1) + "\n", encoding="utf-8")
    for proxy, found in parts.items():
        for line in lines({f"first token, {proxy}": found["first token"]}):
            click.echo(line)
        for name, us in found["cpu"]["us_per_piece"].items():
            click.echo(f"{proxy}, {name}: {us:.0f} us of CPU a piece")
    click.echo(f"Figures: {json_file}", err=True)


if __name__ == "__main__":
    main()
