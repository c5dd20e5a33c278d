"""The first token through Ray Serve beside `llamabatch serve`, and the CPU of a piece; see docs/ray.md.

.venv-scale/bin/python -m benchmarks.ray_serve [--rounds N] [--model FILE] [--threads N] [--json FILE]

Both servers stand at once, and one of them is asked: engines without work sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import random
import statistics
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
MOST_FIRST_MS = 8.0  # later than `llamabatch serve`, at one stream
SINGLE = Workload("one stream", "tiny", (Shape(32, 8),), n_ctx=512)
STREAMS = Workload("streams", "tiny", (Shape(32, 256),), n_ctx=512)
N_FIRST = 15
N_STREAMS = 8
_PASSING = ("ProxyActor", "Ingress")  # the processes that pass a piece on, by their names
_STORE_BYTES = 200_000_000


@contextlib.contextmanager
def open_serve(model: str, engine: dict[str, Any]) -> Iterator[int]:
    """One replica behind Ray Serve, on a cluster of this machine; its port."""
    import ray
    from ray import serve

    from llamabatch.integrations.ray import serve_app

    port = free_port()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, for Ray's sockets
        ray.init(object_store_memory=_STORE_BYTES, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        try:
            serve.start(http_options={"host": HOST, "port": port})
            serve.run(serve_app(model, num_replicas=1, ray_actor_options={"num_cpus": 0.5}, **engine))
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()


def passing() -> list[psutil.Process]:
    """The processes of Serve through which pieces go."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if any(name in each.name() for name in _PASSING)]


def pieces_of(port: int, job: Job) -> int:
    """The events of one stream."""
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
    """The pieces of so many streams at once."""
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
    """First tokens in turn, each server first once; then the CPU of the processes that pass pieces on."""
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
        before = {each.pid: cpu_s(each) for each in passing()}
        pieces = at_once(ports["serve_app"], streams.jobs(random.Random(number), n_vocab))
        used = {each.name().rpartition(":")[2]: cpu_s(each) - before[each.pid] for each in passing()}
        us.append({name: 1e6 * seconds / pieces for name, seconds in used.items()} | {"pieces": pieces})
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


@click.command()
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--model", default="tiny", show_default=True, help="tiny, or synth: random weights in a 0.5B shape.")
@click.option("--threads", type=click.IntRange(min=1), help="Of each engine; default: the cores of this machine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS)
def main(n_rounds: int, model: str, threads: int | None, json_file: Path) -> None:
    """Measure Ray Serve beside `llamabatch serve`, alternating."""
    if model not in ("tiny", "synth"):
        raise click.UsageError(f"--model is {model!r}; give tiny or synth")
    env = environment(os.environ)
    with ended_by_signals(), contextlib.ExitStack() as stack:
        setup = make_setup(env, {model}, threads or Machine.here().cores, lambda text: click.echo(text, err=True))
        engine = engine_options(setup, SINGLE.n_ctx)
        about = facts.facts(facts.command_line("python -m benchmarks.ray_serve"))
        about["options"] = {"rounds": n_rounds, "model": model, "threads": setup.threads, "streams": N_STREAMS}
        beside = stack.enter_context(open_server(setup, model, engine))
        ours = stack.enter_context(open_serve(str(setup.models[model].path), engine))
        found = measure({"serve": beside.port, "serve_app": ours}, setup.models[model].n_vocab, n_rounds)
    json_file.write_text(json.dumps(about | {"parts": found}, indent=1) + "\n", encoding="utf-8")
    for line in lines({"first token": found["first token"]}):
        click.echo(line)
    for name, us in found["cpu"]["us_per_piece"].items():
        click.echo(f"{name}: {us:.0f} us of CPU a piece")
    click.echo(f"Figures: {json_file}", err=True)


if __name__ == "__main__":
    main()
