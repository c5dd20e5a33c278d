"""Measures requests with pictures at several concurrencies, and talkers beside pictures, ours and llama-server's.

    python -m benchmarks.pictures [--pictures 136] [--rounds 2] [--json FILE]

The model is the 0.5B shape of llamabatch synth with an encoder of the size of CLIP ViT-B/16 in LLaVA's form, both with
random weights: 196 tokens a picture. Each request shows one picture and gets 16 tokens.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image

from benchmarks import places
from benchmarks.facts import command_line, facts
from benchmarks.model_pool import running
from llamabatch.planning.machine import Machine
from llamabatch.tools.synth.projectors import PROJECTORS, write_projector

SHAPE = PROJECTORS["clip-b16"]
N_EMBD, SLOTS, N_CTX, GENERATED = 896, 16, 512, 16
CONCURRENCY = (1, 4, 16)
TALKERS, TALK = 8, 128
OURS, STOCK = "llamabatch serve", "llama-server"
_REQUEST_S = 900.0


def commands(model: Path, mmproj: Path, port: int, threads: int, stock: Path | None) -> dict[str, list[str]]:
    """Returns the command lines of the servers by name."""
    common = ["--mmproj", str(mmproj), "--port", str(port)]
    ours = [sys.executable, "-m", "llamabatch", "serve", str(model), *common, "--n-slots", str(SLOTS)]
    ours += ["--n-ctx", str(N_CTX), "--n-threads", str(threads), "--n-threads-batch", str(threads)]
    theirs = ["-m", str(model), *common, "-np", str(SLOTS), "-c", str(SLOTS * N_CTX), "-t", str(threads), "--no-webui"]
    return {OURS: ours} if stock is None else {OURS: ours, STOCK: [str(stock), *theirs]}


def picture(seed: int) -> str:
    """Returns a random picture as a data: address."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((320, 240)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(port: int, content: Any, max_tokens: int = GENERATED) -> float:
    """Sends a request and returns its seconds."""
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
        answer = json.load(response)
    if answer["usage"]["completion_tokens"] != max_tokens:
        raise click.ClickException(f"{answer['usage']} tokens came, not {max_tokens}")
    return time.monotonic() - began


def shown(address: str, text: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": text}]


def of_all(port: int, contents: list[Any], callers: int) -> float:
    """Sends all requests, `callers` at a time, and returns the seconds of all together."""
    began = time.monotonic()
    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(lambda content: ask(port, content), contents))
    return time.monotonic() - began


def stream_gaps(port: int, seed: int) -> list[float]:
    """Returns the seconds between the tokens of one streamed text."""
    body = {
        "messages": [{"role": "user", "content": f"Number {seed}"}],
        "max_tokens": TALK,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times = []
    with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def talk(port: int, pictures: list[str]) -> dict[str, float]:
    """Returns the gaps of talkers, alone and beside requests that show one picture after another."""
    found = {}
    for name, beside in (("plain", []), ("beside", pictures)):
        with ThreadPoolExecutor(TALKERS + 1) as pool:
            began = time.monotonic()
            talkers = [pool.submit(stream_gaps, port, seed) for seed in range(TALKERS)]
            time.sleep(0.5)
            for each in beside:
                if all(talker.done() for talker in talkers):
                    break
                ask(port, shown(each, "What is it?"), 1)
            gaps = [gap for talker in talkers for gap in talker.result()]
            found[f"{name}_s"] = round(time.monotonic() - began, 2)
        found[f"{name}_median_ms"] = round(1000 * statistics.median(gaps), 1)
        found[f"{name}_longest_ms"] = round(1000 * max(gaps), 1)
    return found


def measure(port: int, n_pictures: int, seed: int) -> dict[str, Any]:
    """Returns the figures of one server in one round."""
    rng = random.Random(seed)
    found: dict[str, Any] = {}
    for callers in CONCURRENCY:
        contents = [shown(picture(rng.getrandbits(32)), "What is it?") for _ in range(n_pictures)]
        found[f"pictures_{callers}_s"] = round(of_all(port, contents, callers), 1)
    one = picture(rng.getrandbits(32))
    found["one_picture_s"] = round(of_all(port, [shown(one, f"Question {n}?") for n in range(SLOTS)], SLOTS), 2)
    found |= talk(port, [picture(rng.getrandbits(32)) for _ in range(20)])
    return found


@click.command()
@click.option("--pictures", default=136, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--port", default=8792, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(pictures: int, rounds: int, port: int, json_file: Path | None) -> None:
    """Measure requests with pictures."""
    model, stock = places.synth_model(click.echo), places.stock_programs(click.echo)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="llamabatch-pictures-") as place:
        mmproj = Path(place) / "mmproj.gguf"
        write_projector(mmproj, SHAPE, N_EMBD)
        server = None if stock is None else stock / "llama-server"
        servers = commands(model, mmproj, port, Machine.here().cores, server)
        for number in range(rounds):
            for name, command in servers.items() if number % 2 == 0 else reversed(servers.items()):
                with running(command, port, places.log_folder() / "pictures.log"):
                    ask(port, "Hello")
                    figures = measure(port, pictures, number)
                found.setdefault(name, []).append(figures)
                click.echo(f"{name:18} {figures}")
    if json_file is not None:
        settings = {"pictures": pictures, "slots": SLOTS, "generated": GENERATED, "talkers": TALKERS, "talk": TALK}
        document = {**facts(command_line("python -m benchmarks.pictures")), **settings, "servers": found}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
