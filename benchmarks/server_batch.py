"""Measures the gaps between streamed tokens of clients while a batch runs beside them; part of `make bench-server`.

    python -m benchmarks.server_batch [--shape 0.5b|tiny] [--quick] [--rounds N] [--json FILE]

Rounds without and with a batch take turns. Each round measures the gaps between two tokens as clients see them over
HTTP (median, p95, p99 and the longest), and the tokens a second of the clients and of the batch. Before all rounds the
batch runs alone.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import facts
from benchmarks.peers.base import SAMPLING, Setup
from benchmarks.peers.servers import HOST
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.serving import Server, engine_options, lines, make_setup, open_server, target
from llamabatch.engine.stats import percentile
from llamabatch.planning.machine import Machine

RESULTS = Path(__file__).resolve().parent / "results" / "server-batch.json"
MOST_RATIO = 1.2
"""The largest allowed ratio of the gaps' 99th percentile beside a batch to that without one."""
_PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Beside:
    """Clients that ask again as soon as they have their answer, and a batch that lasts longer than all rounds.

    Attributes:
        model: name of the model in the setup.
        people: number of clients.
        turns: requests of each client in a round.
        tokens: tokens of each answer to a client.
        lines: lines of the batch.
        words: words of each prompt of the batch.
        batch_tokens: tokens of each answer of the batch.
        alone_s: least seconds that the batch runs alone.
    """

    model: str
    n_slots: int = 16
    n_ctx: int = 1024
    people: int = 2
    turns: int = 6
    tokens: int = 128
    lines: int = 20_000
    words: int = 60
    batch_tokens: int = 100
    alone_s: float = 10.0

    def shorter(self) -> Beside:
        return dataclasses.replace(self, turns=2, tokens=self.tokens // 2, alone_s=4.0)


BESIDE = {"0.5b": Beside("synth"), "tiny": Beside("tiny")}


def ask(port: int, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> dict[str, Any]:
    """Sends a request and returns the JSON of the answer. Raises PeerFailure for any status but 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_PATIENCE_S)
    try:
        connection.request(method, path, body, {"Content-Type": kind} if body else {})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise PeerFailure(f"{method} {path}: HTTP {response.status}: {data[:300].decode('utf-8', 'replace')}")
    found: dict[str, Any] = json.loads(data)
    return found


def gaps_of(connection: http.client.HTTPConnection, prompt: str, tokens: int) -> list[float]:
    """Returns the seconds between the pieces of one streamed answer, without the first piece."""
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True, **SAMPLING}
    body["return_token_ids"] = True  # so that each step sends an event, even in the middle of a character
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise PeerFailure(f"HTTP {response.status}: {response.read(300).decode('utf-8', 'replace')}")
    times: list[float] = []
    while line := response.readline():
        if line.startswith(b"data: {") and b'"token_ids":[' in line:
            times.append(time.perf_counter())
    return [late - early for early, late in itertools.pairwise(times[1:])]


def interactive(port: int, beside: Beside, turns: int, name: str) -> list[float]:
    """Runs all clients and returns their gaps. Raises PeerFailure if a client fails."""
    gaps: list[float] = []
    failures: list[BaseException] = []

    def one(person: int) -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout=_PATIENCE_S)
        try:
            for turn in range(turns):
                prompt = f"Question {name}-{person}-{turn}: tell me a long story."
                gaps.extend(gaps_of(connection, prompt, beside.tokens))
        except (PeerFailure, OSError, http.client.HTTPException) as failure:
            failures.append(failure)
        finally:
            connection.close()

    threads = [threading.Thread(target=one, args=(person,)) for person in range(beside.people)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise PeerFailure(f"a client failed: {failures[0]}")
    return gaps


class Batch:
    """A batch that runs during a `with` block and is cancelled at its end."""

    def __init__(self, port: int, beside: Beside) -> None:
        self._port = port
        story = " ".join(f"word{i}" for i in range(beside.words))
        body = {"max_tokens": beside.batch_tokens, "ignore_eos": True, **SAMPLING}
        common = {"method": "POST", "url": "/v1/completions"}
        self._lines = [
            json.dumps({"custom_id": str(i), **common, "body": {"prompt": f"{i} {story}", **body}})
            for i in range(beside.lines)
        ]
        self._id = ""

    def __enter__(self) -> Batch:
        edge = "edge-of-a-part"
        parts = (
            f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
            f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n',
            "\n".join(self._lines),
            f"\r\n--{edge}--\r\n",
        )
        file = ask(self._port, "POST", "/v1/files", "".join(parts).encode(), f"multipart/form-data; boundary={edge}")
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self._id = ask(self._port, "POST", "/v1/batches", json.dumps(asked).encode())["id"]
        self._wait_while("validating")
        if (status := self._status()) != "in_progress":
            raise PeerFailure(f"the batch is {status}")
        return self

    def __exit__(self, *exc: object) -> None:
        ask(self._port, "POST", f"/v1/batches/{self._id}/cancel")
        self._wait_while("cancelling", "finalizing")

    @property
    def done(self) -> int:
        """The number of lines that have an answer."""
        return int(ask(self._port, "GET", f"/v1/batches/{self._id}")["request_counts"]["completed"])

    def _status(self) -> str:
        return str(ask(self._port, "GET", f"/v1/batches/{self._id}")["status"])

    def _wait_while(self, *statuses: str) -> None:
        until = time.monotonic() + _PATIENCE_S
        while self._status() in statuses:
            if time.monotonic() > until:
                raise PeerFailure(f"the batch is {' or '.join(statuses)} for {_PATIENCE_S:g} s")
            time.sleep(0.05)


def one_round(server: Server, beside: Beside, name: str, *, with_batch: bool) -> dict[str, Any]:
    """Returns the gaps in milliseconds, and the tokens a second of the clients and of the batch."""
    if not with_batch:
        return _counted(server, beside, name, None)
    with Batch(server.port, beside) as batch:
        interactive(server.port, beside, 1, f"{name}-first")  # the engine learns the cost of the batch's rows
        return _counted(server, beside, name, batch)


def _counted(server: Server, beside: Beside, name: str, batch: Batch | None) -> dict[str, Any]:
    before, lines_before, began = server.generated(), batch.done if batch else 0, time.perf_counter()
    gaps = interactive(server.port, beside, beside.turns, name)
    wall_s = time.perf_counter() - began
    mine = beside.people * beside.turns * beside.tokens
    found = {
        "gaps_ms": percentiles_ms(gaps),
        "gaps": len(gaps),
        "wall_s": wall_s,
        "client_tokens_per_s": mine / wall_s,
        "batch_tokens_per_s": max(0, server.generated() - before - mine) / wall_s if batch else 0.0,
    }
    return found | ({"batch_lines_per_s": (batch.done - lines_before) / wall_s} if batch else {})


def percentiles_ms(gaps: Sequence[float]) -> dict[str, float]:
    """Returns median, p95, p99 and the longest of `gaps` (seconds) in milliseconds. Raises PeerFailure without gaps."""
    if not gaps:
        raise PeerFailure("a round has brought no two tokens")
    return {name: 1000 * (percentile(gaps, percent) or 0.0) for name, percent in _PERCENTILES.items()}


def alone(server: Server, beside: Beside) -> dict[str, float]:
    """Returns lines and tokens a second of a batch that runs alone, for `alone_s` seconds and one line a slot at least.

    All slots begin together, so a shorter time might contain only prefill or only decode.
    """
    with Batch(server.port, beside) as batch:
        until = time.monotonic() + _PATIENCE_S
        while not batch.done:
            if time.monotonic() > until:
                raise PeerFailure(f"the batch has no line after {_PATIENCE_S:g} s")
            time.sleep(0.05)
        before, lines_before, began = server.generated(), batch.done, time.perf_counter()
        wall_s, n_lines = 0.0, 0
        while wall_s < beside.alone_s or n_lines < beside.n_slots:
            if wall_s > _PATIENCE_S:
                raise PeerFailure(f"the batch has {n_lines} lines after {_PATIENCE_S:g} s")
            time.sleep(0.05)
            tokens, n_lines, wall_s = (
                server.generated() - before,
                batch.done - lines_before,
                time.perf_counter() - began,
            )
    return {"tokens_per_s": tokens / wall_s, "lines_per_s": n_lines / wall_s}


def measure(setup: Setup, beside: Beside, n_rounds: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures the batch alone, then rounds without and with it; their order alternates.

    Args:
        folder: folder for the server's data.
    """
    engine = engine_options(setup, beside.n_ctx, beside.n_slots) | {"instances": 1}
    found: dict[str, list[dict[str, Any]]] = {"alone": [], "beside a batch": []}
    loads: list[float] = []
    with open_server(setup, beside.model, engine, ("--data-dir", str(folder / "batches"))) as server:
        batch_alone = alone(server, beside)
        say(f"the batch alone: {batch_alone['tokens_per_s']:,.0f} tokens/s")
        interactive(server.port, beside, 1, "warm-up")
        for number in range(n_rounds):
            loads.append(psutil.getloadavg()[0])
            for way in found if number % 2 == 0 else reversed(found):
                result = one_round(server, beside, f"{number}-{way}", with_batch=way != "alone")
                found[way].append(result)
                say(f"batch, round {number + 1}, clients {way}: p99 {result['gaps_ms']['p99']:,.2f} ms")
    about = {"shape": dataclasses.asdict(beside), "options": engine, "load_averages": loads}
    return summary(found) | {"batch_alone": batch_alone} | about | {"rounds": found}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns medians over rounds, and for each round the ratios of the gaps with a batch to those without."""
    gaps = {
        way: {name: statistics.median(each["gaps_ms"][name] for each in results) for name in _PERCENTILES}
        for way, results in found.items()
    }
    ratios = {
        name: [
            after["gaps_ms"][name] / before["gaps_ms"][name]
            for before, after in zip(found["alone"], found["beside a batch"], strict=True)
        ]
        for name in _PERCENTILES
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    speeds = {
        way: {
            name: statistics.median(each[name] for each in results)
            for name in ("client_tokens_per_s", "batch_tokens_per_s")
        }
        for way, results in found.items()
    }
    return {
        "gaps_ms": gaps,
        "ratios": medians,
        "round_ratios": ratios,
        "tokens_per_s": speeds,
        "targets": {"p99 of the gaps, beside a batch / alone": target(medians["p99"], at_most=MOST_RATIO)},
    }


@click.command()
@click.option("--shape", type=click.Choice(list(BESIDE)), default="0.5b", show_default=True)
@click.option("--quick", is_flag=True, help="Shorter and fewer rounds: about a minute.")
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1), help="Default: 5, quick 2.")
@click.option("--threads", type=click.IntRange(min=1), help="Of the engine; default: the cores of this machine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS)
def main(shape: str, quick: bool, n_rounds: int | None, threads: int | None, json_file: Path) -> None:
    """Measure the gaps of a server's clients without and with a batch beside them, alternating."""
    n_rounds = n_rounds or (2 if quick else 5)

    def say(text: str) -> None:
        click.echo(text, err=True)

    beside = BESIDE[shape].shorter() if quick else BESIDE[shape]
    with ended_by_signals(), tempfile.TemporaryDirectory() as name:
        setup = make_setup(environment(os.environ), {beside.model}, threads or Machine.here().cores, say)
        about = facts.facts(facts.command_line("python -m benchmarks.server_batch"))
        about["options"] = {"rounds": n_rounds, "quick": quick, "threads": setup.threads}
        try:
            found = measure(setup, beside, n_rounds, Path(name), say)
        except PeerFailure as failure:
            raise click.ClickException(f"{shape}: {failure}") from None
    json_file.write_text(json.dumps(about | {"parts": {shape: found}}, indent=1) + "\n", encoding="utf-8")
    for line in lines({shape: found}):
        click.echo(line)
    say(f"Figures: {json_file}")


if __name__ == "__main__":
    main()
