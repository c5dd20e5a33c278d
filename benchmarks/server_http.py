"""Measures the server over HTTP beside the library and llama-server: `make bench-server`; see docs/benchmarks.md.

python -m benchmarks.server_http [--quick] [--part NAME]... [--rounds N] [--json FILE]
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import facts, report, rounds, server_batch
from benchmarks.grid import Remembered
from benchmarks.peers.base import SAMPLING, Peer, Setup
from benchmarks.peers.child import PROGRAMS, ChildSession, Ours
from benchmarks.peers.servers import HOST, LlamaServer, OurServer, remembered, search_flags
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.programs.cpu import cpu_s
from benchmarks.serving import Server, engine_options, lines, make_setup, open_server, target
from benchmarks.workloads import N_SLOTS, WORKLOADS, Job, Shape, Workload
from llamabatch.planning.machine import Machine

RESULTS = Path(__file__).resolve().parent / "results" / "server-http.json"
PARTS = ("tiny", "0.5b", "first token", "idle", "batch", "llama-server")
BESIDE_LLAMA_SERVER = ("burst", "ragged", "shared prefix")
MOST_CPU_US = 25.0  # CPU time a token of the server's process, without its child, the engine
MOST_FIRST_MS = 2.0  # largest delay of a first token behind the library's, with one stream
LEAST_OF_LIBRARY = 0.97  # least share of the library's speed, in the part "llama-server"
_WAYS = ("list", "streamed", "http")
_IDLE_CONNECTIONS = 1000
_LOAD_TIMEOUT_S = 300


@dataclass(frozen=True)
class Load:
    """Requests that run as one list, and the same requests through 32 streams, all to their end.

    A measurement of fixed length would count the prompts of requests that it cuts off, but not their tokens.

    Attributes:
        at_least: least speed over HTTP, as a share of the list's.
        most_cpu_us: most CPU microseconds a token of the server's process; None if steps are so slow that the ticks of
            the server's clock between steps cost more than the tokens.
    """

    name: str
    workload: Workload
    n_requests: int
    at_least: float
    most_cpu_us: float | None

    def shorter(self) -> Load:
        return dataclasses.replace(self, n_requests=max(N_SLOTS, self.n_requests // 4))


def _load(name: str, model: str, shape: Shape, n_requests: int, at_least: float, most_cpu_us: float | None) -> Load:
    return Load(name, Workload(name, model, (shape,), n_ctx=512), n_requests, at_least, most_cpu_us)


LOADS = {
    "tiny": (
        _load("tiny, 64 tokens", "tiny", Shape(32, 64), 1024, 0.75, MOST_CPU_US),
        _load("tiny, 256 tokens", "tiny", Shape(32, 256), 256, 0.75, MOST_CPU_US),
    ),
    "0.5b": (_load("0.5B, 128 tokens", "synth", Shape(64, 128), 96, 0.97, None),),
}
SINGLE = Workload("one stream", "tiny", (Shape(32, 8),), n_ctx=512)
_N_FIRST = 15


def _open_server(setup: Setup, workload: Workload) -> contextlib.AbstractContextManager[Server]:
    return open_server(setup, workload.model, engine_options(setup, workload.n_ctx))


@contextlib.contextmanager
def open_library(setup: Setup, workload: Workload) -> Iterator[ChildSession]:
    """Starts LLM(isolate=True) with the server's options, in a child program."""
    start = {
        "model": str(setup.models[workload.model].path), "engine": engine_options(setup, workload.n_ctx),
        "sampling": SAMPLING,
    }  # fmt: skip
    session = ChildSession("library", PROGRAMS / "ladder.py", start, setup)
    try:
        yield session
    finally:
        session.close()


def wrk(port: int, bodies: Path, n_requests: int) -> tuple[float, float]:
    """Sends the requests of a file over 32 connections with wrk. Returns the seconds, and wrk's CPU seconds.

    Raises:
        PeerFailure: a request failed, or wrk is not installed.
    """
    program = shutil.which("wrk")
    if program is None:
        raise PeerFailure("wrk is not installed (Debian's package wrk)")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            *(program, "-t1", f"-c{N_SLOTS}", f"-d{_LOAD_TIMEOUT_S}s", f"--timeout={_LOAD_TIMEOUT_S}s"),
            *("-s", str(PROGRAMS / "streams.lua"), f"http://{HOST}:{port}/v1/completions", "--", str(bodies)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * _LOAD_TIMEOUT_S,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if done.returncode != 0 or line is None:
        raise PeerFailure(f"wrk ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    micros, n_answered, n_errors = map(int, line.split()[1:])
    if n_errors or n_answered != n_requests:
        raise PeerFailure(f"{n_answered} of {n_requests} requests were answered, {n_errors} failed")
    return micros / 1e6, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def over_http(server: Server, jobs: Sequence[Job], folder: Path) -> dict[str, Any]:
    """Runs one round of wrk and returns its figures. The server's engine counts the tokens."""
    bodies = folder / "bodies.jsonl"
    bodies.write_text("".join(json.dumps(body_of(job)) + "\n" for job in jobs), encoding="utf-8")
    own, engine = server.process, server.children
    tokens, used, engine_used = server.generated(), cpu_s(own), sum(map(cpu_s, engine))
    wall_s, client_s = wrk(server.port, bodies, len(jobs))
    return {
        "tokens": server.generated() - tokens,
        "wall_s": wall_s,
        "cpu_s": cpu_s(own) - used,
        "engine_cpu_s": sum(map(cpu_s, engine)) - engine_used,
        "client_cpu_s": client_s,
    }


def body_of(job: Job) -> dict[str, Any]:
    return {"prompt": job.prompt, "max_tokens": job.generate, "ignore_eos": True, "stream": True, **SAMPLING}


def in_library(session: ChildSession, way: str, jobs: Sequence[Job]) -> dict[str, Any]:
    message = {"way": way, "jobs": [dataclasses.asdict(job) for job in jobs], "at_once": N_SLOTS}
    return session._program.ask(message, _LOAD_TIMEOUT_S)


def measure_load(setup: Setup, load: Load, n_rounds: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures list, streamed and HTTP in turn; each round begins with another one."""
    n_vocab = setup.models[load.workload.model].n_vocab
    many = dataclasses.replace(load.workload, shapes=load.workload.shapes * load.n_requests)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    loads: list[float] = []
    with open_library(setup, load.workload) as library, _open_server(setup, load.workload) as server:
        options = library.facts["options"]
        in_library(library, "list", many.jobs(random.Random(-1), n_vocab)[:N_SLOTS])
        over_http(server, many.jobs(random.Random(-2), n_vocab)[:N_SLOTS], folder)
        for number in range(n_rounds):
            loads.append(psutil.getloadavg()[0])
            for at in range(len(_WAYS)):
                way = _WAYS[(at + number) % len(_WAYS)]
                jobs = many.jobs(random.Random(f"{load.name}-{number}"), n_vocab)
                if way == "http":
                    result = over_http(server, jobs, folder)
                else:
                    result = in_library(library, way, jobs)
                found[way].append(result)
                say(f"{load.name}, round {number + 1}, {way}: {result['tokens'] / result['wall_s']:,.0f} tokens/s")
    return summary(load, found) | {"options": options, "load_averages": loads, "rounds": found}


def summary(load: Load, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns medians of speeds and of CPU times a token, and ratios to the list of the same round."""
    if not all(each["tokens"] for results in found.values() for each in results):
        raise PeerFailure("a round has brought no token")
    speeds = {way: [each["tokens"] / each["wall_s"] for each in results] for way, results in found.items()}
    ratios = {
        way: statistics.median(mine / theirs for mine, theirs in zip(speeds[way], speeds["list"], strict=True))
        for way in _WAYS[1:]
    }
    cpu_us = {
        way: {
            name.removesuffix("_s"): statistics.median(1e6 * each[name] / each["tokens"] for each in results)
            for name in ("cpu_s", "engine_cpu_s", "client_cpu_s")
            if name in results[0]
        }
        for way, results in found.items()
    }
    targets = {"http / list": target(ratios["http"], at_least=load.at_least)}
    if load.most_cpu_us is not None:
        targets["server cpu, us a token"] = target(cpu_us["http"]["cpu"], at_most=load.most_cpu_us)
    return {
        "tokens_per_s": {way: statistics.median(values) for way, values in speeds.items()},
        "ratios": ratios,
        "cpu_us_per_token": cpu_us,
        "targets": targets,
    }


def first_token_s(connection: http.client.HTTPConnection, job: Job) -> float:
    """Returns the seconds from the request to the first event of its stream."""
    body = json.dumps(body_of(job)).encode()
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise PeerFailure(f"HTTP {response.status}: {response.read(300).decode('utf-8', 'replace')}")
    line = response.readline()
    seconds = time.perf_counter() - began
    if not line.startswith(b"data: {"):
        raise PeerFailure(f"the stream begins with {line[:100]!r}")
    response.read()
    return seconds


def measure_first(setup: Setup, n_rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures the first token of one stream at a time, over HTTP and in the library in turn."""
    n_vocab = setup.models[SINGLE.model].n_vocab
    many = dataclasses.replace(SINGLE, shapes=SINGLE.shapes * _N_FIRST)
    found: dict[str, list[float]] = {"library": [], "http": []}
    with open_library(setup, SINGLE) as library, _open_server(setup, SINGLE) as server:
        connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
        for number in range(-1, n_rounds):  # the first round is not counted
            for way in ("library", "http") if number % 2 else ("http", "library"):
                jobs = many.jobs(random.Random(f"first-{way}-{number}"), n_vocab)
                if way == "http":
                    seconds = [first_token_s(connection, job) for job in jobs]
                else:
                    seconds = in_library(library, "first", jobs)["first_s"]
                if number >= 0:
                    found[way].append(1000 * statistics.median(seconds))
        connection.close()
    later = statistics.median(mine - theirs for mine, theirs in zip(found["http"], found["library"], strict=True))
    say(f"first token: {later:+.2f} ms over HTTP")
    medians = {way: statistics.median(values) for way, values in found.items()}
    return {"median_ms": medians, "rounds_ms": found, "targets": {"later, ms": target(later, at_most=MOST_FIRST_MS)}}


def measure_idle(setup: Setup, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures memory and CPU time of a server with 1,000 connections that stay open after one request each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _IDLE_CONNECTIONS + 100
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    with _open_server(setup, SINGLE) as server, contextlib.ExitStack() as stack:
        process = server.process

        def look() -> dict[str, float]:
            before = cpu_s(process)
            time.sleep(seconds)
            return {"rss_bytes": process.memory_info().rss, "cpu_share": (cpu_s(process) - before) / seconds}

        look()
        without = look()
        asked = f"GET /livez HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        sockets = []
        for _ in range(_IDLE_CONNECTIONS):
            each = stack.enter_context(socket.create_connection((HOST, server.port), timeout=30))
            each.sendall(asked)
            sockets.append(each)
        for each in sockets:
            if not each.recv(4096).startswith(b"HTTP/1.1 200"):
                raise PeerFailure("a connection was refused")
        beside = look()
        n_open = sum(each.status == "ESTABLISHED" for each in process.net_connections("tcp"))
    kib = (beside["rss_bytes"] - without["rss_bytes"]) / 1024 / _IDLE_CONNECTIONS
    say(f"{_IDLE_CONNECTIONS} idle connections: {kib:.1f} KiB each, {beside['cpu_share']:.2%} of a core")
    return {
        "connections": _IDLE_CONNECTIONS, "still_open": n_open, "seconds": seconds,
        "without": without, "beside": beside, "kib_each": kib,
    }  # fmt: skip


def measure_peers(
    setup: Setup, workloads: Sequence[Workload], best: Remembered, n_rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures library, server and llama-server in turn on the same workloads, not streamed.

    Args:
        best: flags of the stock llama-server, which also runs with its defaults.
    """
    peers: list[Peer] = [
        Ours(options={"isolate": True}),
        OurServer(),
        LlamaServer(report.STOCK, stock=True),
        LlamaServer(report.STOCK_BEST, best, stock=True),
        LlamaServer(report.PATCHED),
    ]
    return beside_llama_server(
        workloads, rounds.run(setup, workloads, peers, n_rounds, say=say, after_round=lambda _: None)
    )


def beside_llama_server(workloads: Sequence[Workload], series: Sequence[rounds.Series]) -> dict[str, Any]:
    """Returns all speeds, and targets of our server's ratio to the stock llama-server, as a share of the library's."""
    found: dict[str, Any] = {}
    for workload in workloads:
        rows = {row.peer: row for row in series if row.workload == workload.name}
        speeds = {name: [result.tokens_per_s for result in row.results] for name, row in rows.items()}
        entry: dict[str, Any] = {
            "requests": workload.outline(),
            "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items() if values},
            "rounds": speeds,
            "failures": {name: row.failure for name, row in rows.items() if row.failure},
            "flags": {name: row.results[-1].facts.get("flags") for name, row in rows.items() if row.results},
            "targets": {},
        }
        measured = {name: values for name, values in speeds.items() if rows[name].failure is None}
        for theirs in (report.STOCK, report.STOCK_BEST):
            if {theirs, report.OURS, OurServer.name} <= measured.keys():
                reached = _median_ratio(measured[report.OURS], measured[theirs])
                over_theirs = _median_ratio(measured[OurServer.name], measured[theirs])
                goal = target(over_theirs, at_least=LEAST_OF_LIBRARY * reached)
                entry["targets"][f"serve / {theirs}"] = goal
        found[workload.name] = entry
    return found


def _median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


@click.command()
@click.option("--quick", is_flag=True, help="Shorter and fewer rounds: about three minutes.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this; repeatable.")
@click.option(
    "--workload", "names", multiple=True, type=click.Choice(BESIDE_LLAMA_SERVER), help="Of llama-server; repeatable."
)
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1), help="Default: 5, quick 2.")
@click.option("--threads", type=click.IntRange(min=1), help="Of every engine; default: the cores of this machine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS)
def main(
    quick: bool,
    parts: tuple[str, ...],
    names: tuple[str, ...],
    n_rounds: int | None,
    threads: int | None,
    json_file: Path,
) -> None:
    """Measure the server beside the library and llama-server, alternating."""
    env = environment(os.environ)
    parts, n_rounds = parts or PARTS, n_rounds or (2 if quick else 5)

    def say(text: str) -> None:
        click.echo(text, err=True)

    found: dict[str, Any] = {}
    with ended_by_signals(), tempfile.TemporaryDirectory() as name:
        cores = threads or Machine.here().cores
        setup = make_setup(env, {"tiny", "synth"}, cores, say, with_peers="llama-server" in parts)
        about = facts.facts(facts.command_line("python -m benchmarks.server_http"))
        about["options"] = {"rounds": n_rounds, "quick": quick, "threads": setup.threads, "streams": N_SLOTS}

        def run(part: str, measure: Callable[[], dict[str, Any]]) -> None:
            """Measures a part and writes the file at once. A failure takes the place of the part's figures."""
            try:
                found[part] = measure()
            except PeerFailure as failure:
                say(f"{part}: failed, {failure}")
                found[part] = {"failure": str(failure)}
            json_file.write_text(json.dumps(about | {"parts": found}, indent=1) + "\n", encoding="utf-8")

        for load in itertools.chain.from_iterable(LOADS[part] for part in parts if part in LOADS):
            one = load.shorter() if quick else load
            run(load.name, lambda one=one: measure_load(setup, one, n_rounds, Path(name), say))  # type: ignore[misc]
        if "first token" in parts:
            run("first token", lambda: measure_first(setup, n_rounds, say))
        if "idle" in parts:
            run("idle", lambda: measure_idle(setup, 2.0 if quick else 5.0, say))
        if "batch" in parts:
            beside = server_batch.BESIDE["0.5b"].shorter() if quick else server_batch.BESIDE["0.5b"]
            run("batch", lambda: server_batch.measure(setup, beside, n_rounds, Path(name), say))
        if "llama-server" in parts:
            best = remembered(setup, stock=True)
            for workload in map(WORKLOADS.__getitem__, names or BESIDE_LLAMA_SERVER):
                if not quick:
                    search_flags(setup, [workload], best, say, stock=True)
                cut = workload if workload.name == "burst" else workload.cut()
                run(
                    f"llama-server, {cut.name}",
                    lambda cut=cut: measure_peers(setup, [cut], best, min(n_rounds, 3), say),  # type: ignore[misc]
                )
    for line in lines(found):
        click.echo(line)
    say(f"Figures: {json_file}")


if __name__ == "__main__":
    main()
