"""Measures a server that may load only one of its two models at a time, beside the stock llama-server's router. With
--fit, measures three models that are all loaded, beside one model that gets all requests.

    python -m benchmarks.model_pool [--fit] [--requests 200] [--callers 16] [--rounds 3] [--json FILE]

The models are names of one file, the 0.5B shape of llamabatch synth.
Each caller sends a request of 64 + 32 tokens to a random model, waits for the answer, and sends the next. The program
prints the seconds of all requests together, the number of loads, and the median, 95th percentile and longest time of a
request from its call to its end.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks import places
from benchmarks.facts import command_line, facts
from llamabatch.planning.machine import Machine

NAMES = ("one", "other", "third")
PROMPT, GENERATED, SLOTS, N_CTX = 64, 32, 16, 256
_START_S, _REQUEST_S = 60.0, 600.0
OURS, FIFO, ROUTER = "llamabatch serve", "llamabatch serve --models-fifo", "llama-server's router"
ALONE = "llamabatch serve, one model"


def commands(folder: Path, port: int, threads: int, router: Path | None, *, fit: bool) -> dict[str, list[str]]:
    """Returns the command lines of the servers by name."""
    common = ["--models-dir", str(folder), "--models-max", str(len(NAMES)) if fit else "1", "--port", str(port)]
    ours = [sys.executable, "-m", "llamabatch", "serve", *common, "--n-slots", str(SLOTS), "--n-ctx", str(N_CTX)]
    ours += ["--n-threads", str(threads), "--n-threads-batch", str(threads)]
    theirs = ["-np", str(SLOTS), "-c", str(SLOTS * N_CTX), "-t", str(threads), "--no-webui"]
    found = {OURS: ours, ALONE: ours} if fit else {OURS: ours, FIFO: [*ours, "--models-fifo"]}
    return found if router is None else found | {ROUTER: [str(router), *common, *theirs]}


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Starts a server; the `with` block begins when the server answers, and the server ends with the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (OSError, urllib.error.URLError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise click.ClickException(f"{command[0]} did not start (log: {log})") from None
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def measure(
    port: int, requests: int, callers: int, seed: int, names: Sequence[str], *, warm: bool
) -> tuple[list[float], float]:
    """Sends the requests. Returns the seconds of each and of all together. With `warm`, loads all models first."""
    rng = random.Random(seed)
    jobs = [
        {
            "model": rng.choice(names),
            "prompt": [rng.randrange(1000, 100_000) for _ in range(PROMPT)],
            "n_predict": GENERATED,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
        }
        for _ in range(requests)
    ]

    def ask(job: dict[str, Any]) -> float:
        began = time.monotonic()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", json.dumps(job).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
            answer = json.load(response)
        if answer["tokens_predicted"] != GENERATED:
            raise click.ClickException(f"{answer['tokens_predicted']} tokens came, not {GENERATED}")
        return time.monotonic() - began

    if warm:
        for name in names:
            ask({**jobs[0], "model": name})
    began = time.monotonic()
    with ThreadPoolExecutor(callers) as pool:
        seconds = list(pool.map(ask, jobs))
    return seconds, time.monotonic() - began


def loads(log: Path) -> int:
    """Returns the number of model loads in a server's log."""
    return len(re.findall(r"is loaded after|spawning server instance with name=", log.read_text(errors="replace")))


@click.command()
@click.option("--fit", is_flag=True, help="Three models that are all loaded.")
@click.option("--requests", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--callers", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--port", default=8791, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(fit: bool, requests: int, callers: int, rounds: int, port: int, json_file: Path | None) -> None:
    """Measure requests for two models that take turns, or for three that are loaded."""
    names = NAMES if fit else NAMES[:2]
    model = places.synth_model(click.echo)
    stock = places.stock_programs(click.echo)
    threads = Machine.here().cores
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="llamabatch-pool-") as place:
        for name in names:
            (Path(place) / f"{name}.gguf").symlink_to(model)
        servers = commands(Path(place), port, threads, None if stock is None else stock / "llama-server", fit=fit)
        for number in range(rounds):
            for name, command in servers.items() if number % 2 == 0 else reversed(servers.items()):
                log = places.log_folder() / "model-pool.log"
                with running(command, port, log):
                    asked = names[:1] if name == ALONE else names
                    seconds, all_s = measure(port, requests, callers, number, asked, warm=fit)
                    seconds.sort()
                figures = {
                    "all_s": round(all_s, 1),
                    "loads": loads(log),
                    "median_s": round(statistics.median(seconds), 2),
                    "p95_s": round(seconds[int(0.95 * (len(seconds) - 1))], 2),
                    "longest_s": round(seconds[-1], 2),
                }
                found.setdefault(name, []).append(figures)
                click.echo(f"{name:34} {figures}")
                shutil.copy(log, log.with_suffix(f".{number}.log"))
    if json_file is not None:
        settings = {"requests": requests, "callers": callers, "slots": SLOTS, "prompt": PROMPT, "generated": GENERATED}
        document = {**facts(command_line("python -m benchmarks.model_pool")), **settings, "servers": found}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
