"""The growth of the gaps between streamed tokens of a server's clients while a batch runs beside them.

    python -m benchmarks.server_batch --model MODEL.gguf

Prints the 99th percentile of the time between two tokens, as clients see it over HTTP, without and with a batch, in
turns, and their ratio; the claim is at most 1.2. Beside that: what the batch gets done meanwhile, and alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from llamabatch.engine.stats import percentile

LIMIT = 1.2
_PATIENCE_S = 600.0
_SERVER = """
import sys, json
from llamabatch.server.application import engine_config
from llamabatch.server.options import ServerOptions
from llamabatch.server.run import serve
model, folder, engine = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
serve(engine_config(model, engine), ServerOptions(port=0, data_dir=folder), lambda urls: print(urls[0], flush=True))
"""


@dataclass(frozen=True)
class Round:
    """p99 of the gaps in seconds, gaps, and lines of the batch a second."""

    p99_s: float
    n_gaps: int
    lines_per_s: float


def gaps_of(client: httpx.Client, number: int, max_tokens: int) -> list[float]:
    """Seconds between the pieces of one streamed answer, the first one aside."""
    body = {
        "messages": [{"role": "user", "content": f"Question {number}: tell me a long story."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    times: list[float] = []
    with client.stream("POST", "/v1/chat/completions", json=body, timeout=_PATIENCE_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [late - early for early, late in itertools.pairwise(times[1:])]


def interactive(url: str, people: int, turns: int, max_tokens: int, round_number: int) -> list[float]:
    """Gaps of callers that ask again as soon as they have their answer."""
    gaps: list[float] = []

    def one(person: int) -> None:
        with httpx.Client(base_url=url) as client:
            for turn in range(turns):
                gaps.extend(gaps_of(client, 10_000 * round_number + 100 * person + turn, max_tokens))

    threads = [threading.Thread(target=one, args=(person,)) for person in range(people)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gaps


class Batch:
    """A batch that is larger than the round; a context manager, which cancels it."""

    def __init__(self, client: httpx.Client, n_lines: int, prompt_words: int, max_tokens: int) -> None:
        self._client = client
        story = " ".join(f"word{i}" for i in range(prompt_words))
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"{i} {story}", "max_tokens": max_tokens, "ignore_eos": True},
            }
            for i in range(n_lines)
        ]
        self._content = "\n".join(map(json.dumps, lines)).encode()

    def __enter__(self) -> Batch:
        files = {"file": ("in.jsonl", self._content)}
        file = self._client.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status().json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self._id = self._client.post("/v1/batches", json=asked).raise_for_status().json()["id"]
        until = time.monotonic() + _PATIENCE_S
        while self.state()["status"] == "validating" and time.monotonic() < until:
            time.sleep(0.05)
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.post(f"/v1/batches/{self._id}/cancel")
        until = time.monotonic() + _PATIENCE_S
        while self.state()["status"] in ("cancelling", "finalizing") and time.monotonic() < until:
            time.sleep(0.05)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(f"/v1/batches/{self._id}").raise_for_status().json()
        return found

    @property
    def done(self) -> int:
        return int(self.state()["request_counts"]["completed"])


def measure(url: str, client: httpx.Client, args: argparse.Namespace, number: int, *, with_batch: bool) -> Round:
    """One round."""
    if not with_batch:
        gaps = interactive(url, args.people, args.turns, args.tokens, number)
        return Round(percentile(gaps, 99) or 0.0, len(gaps), 0.0)
    with Batch(client, args.lines, args.prompt, args.batch_tokens) as batch:
        interactive(url, args.people, 1, args.tokens, number)  # the cost of the batch's rows is learnt
        before, start = batch.done, time.monotonic()
        gaps = interactive(url, args.people, args.turns, args.tokens, number)
        lines_per_s = (batch.done - before) / (time.monotonic() - start)
    return Round(percentile(gaps, 99) or 0.0, len(gaps), lines_per_s)


def alone(client: httpx.Client, args: argparse.Namespace) -> float:
    """Lines a second of a batch with nothing beside it, over a few seconds."""
    with Batch(client, args.lines, args.prompt, args.batch_tokens) as batch:
        while not batch.done:
            time.sleep(0.05)
        before, start = batch.done, time.monotonic()
        time.sleep(args.alone_s)
        return (batch.done - before) / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--people", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6, help="requests of each in a round")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, help="of the engine; the default is the engine's own")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--lines", type=int, default=20_000, help="of the batch")
    parser.add_argument("--prompt", type=int, default=60, help="words of each of its prompts")
    parser.add_argument("--batch-tokens", type=int, default=100, help="tokens of each of its answers")
    parser.add_argument("--alone-s", type=float, default=10.0, help="seconds of the batch alone")
    args = parser.parse_args()
    options = {"n_slots": args.slots, "n_ctx": args.ctx, "instances": 1}
    engine = json.dumps(options if args.threads is None else options | {"n_threads": args.threads})
    found: dict[bool, list[Round]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _SERVER, args.model, str(Path(folder) / "data"), engine]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=_PATIENCE_S) as client:
                while client.get("/readyz").status_code != 200 and server.poll() is None:
                    time.sleep(0.1)
                lines_alone = alone(client, args)
                for number in range(args.rounds):
                    for with_batch in (False, True):
                        found[with_batch].append(measure(url, client, args, number, with_batch=with_batch))
        finally:
            server.terminate()
            server.wait()
    ratios = [b.p99_s / a.p99_s for a, b in zip(found[False], found[True], strict=True)]
    print(
        json.dumps(
            {
                "p99_ms": {
                    "alone": round(1000 * statistics.median(each.p99_s for each in found[False]), 3),
                    "with a batch": round(1000 * statistics.median(each.p99_s for each in found[True]), 3),
                },
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(each, 3) for each in ratios],
                "limit": LIMIT,
                "gaps": found[True][0].n_gaps,
                "batch_lines_per_s": {
                    "alone": round(lines_alone, 2),
                    "beside": round(statistics.median(each.lines_per_s for each in found[True]), 3),
                },
            }
        )
    )


if __name__ == "__main__":
    main()
