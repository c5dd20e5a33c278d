"""Measures second turns of more chats than slots, with and without `cache_ram`, after the engine was killed, and of
servers: ours and the stock llama-server.

    python -m benchmarks.chats [--chats 64] [--tokens 2000] [--slots 8] [--turns 2] [--answer 16] [--case NAME]
        [--json FILE]

Each chat consists of random tokens; each turn adds 48 tokens of a question and the tokens of an answer. There are as
many callers as slots; they ask for the next turn of the chats in random order, each for one chat at a time. The model
is the 0.5B shape of llamabatch synth. The figures of the turns after the first are the computed prompt tokens over the
new ones, and the time from the call to the first token. In the cases "killed", SIGKILL ends the engine's process before
each later turn, some seconds after the turn before, with `cache_disk` and without.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks import places
from benchmarks.facts import command_line, facts
from benchmarks.model_pool import running
from benchmarks.peers.servers import free_port
from llamabatch import LLM, SamplingParams
from llamabatch.planning.machine import Machine

QUESTION = 48
READING_S = 3.0
_REQUEST_S = 3600.0
OURS, STOCK = "llamabatch serve", "llama-server, stock"
_IN_PROCESS: dict[str, dict[str, Any]] = {
    "cache_ram auto": {},
    "cache_ram 0": {"cache_ram": 0},
    "cache_disk, killed": {"cache_disk": "", "isolate": True},  # "": a temporary folder
    "killed": {"isolate": True},
}
CASES = (*_IN_PROCESS, OURS, STOCK)


class Answer(NamedTuple):
    """An answer: its tokens, the seconds to the first one, and how many tokens of the prompt were computed."""

    token_ids: list[int]
    first_s: float
    computed: int


class Chats:
    """The chats of a run, and the figures of their turns.

    Args:
        tokens: the length of each chat's first turn.
        turns: how many turns each chat has.
        answer: tokens of each answer.
    """

    def __init__(self, chats: int, tokens: int, slots: int, turns: int, answer: int) -> None:
        self._rng = random.Random(f"chats-{chats}-{tokens}")
        self._texts = [[self._rng.randrange(1000, 100_000) for _ in range(tokens)] for _ in range(chats)]
        self.slots, self.turns, self.answer = slots, turns, answer
        self.n_ctx = tokens + turns * (QUESTION + answer)

    def run(self, ask: Callable[[list[int]], Answer], before_turn: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Returns the figures of the turns after the first. `before_turn` is called before each of them."""
        first_s, computed, new = [], [], []
        numbers = range(len(self._texts))
        with ThreadPoolExecutor(self.slots) as callers:
            for turn in range(self.turns):
                if turn:
                    before_turn()
                order = self._rng.sample(numbers, len(numbers))
                for chat, answer in zip(order, callers.map(lambda chat: ask(self._texts[chat]), order), strict=True):
                    if turn:
                        first_s.append(answer.first_s)
                        computed.append(answer.computed)
                        new.append(QUESTION + 1)  # 1: the last token of an answer is not in the cache
                    question = [self._rng.randrange(1000, 100_000) for _ in range(QUESTION)]
                    self._texts[chat] = [*self._texts[chat], *answer.token_ids, *question]
        return {
            "computed_over_new": round(sum(computed) / sum(new), 3),
            "first_token_p50_ms": round(1000 * statistics.median(first_s)),
            "first_token_mean_ms": round(1000 * statistics.fmean(first_s)),
        }


def measure(model: Path, chats: Chats, **options: Any) -> dict[str, Any]:
    """Returns the figures of an engine in this process with these options."""
    params = SamplingParams(temperature=0, max_tokens=chats.answer, ignore_eos=True)
    sizes: dict[str, Any] = {"n_slots": chats.slots, "n_ctx": chats.n_ctx, "instances": 1, "strategy": "batched"}
    with LLM(str(model), **sizes, **options) as llm:

        def ask(text: list[int]) -> Answer:
            [output] = llm.generate([text], params)
            return Answer(list(output.token_ids), output.timings.ttft_s or 0.0, len(text) - output.num_cached_tokens)

        found = chats.run(ask, (lambda: _kill(llm)) if "isolate" in options else lambda: None)
        stats, cache_ram = llm.stats(), llm.plan.config.cache_ram
    return {
        **found,
        "cache_ram_mib": cache_ram,
        "used_mib": round(stats.cache_ram_bytes / 2**20),
        "disk_mib": round(stats.cache_disk_bytes / 2**20),
        "preemptions": stats.preemptions,
    }


def measure_server(name: str, model: Path, chats: Chats) -> dict[str, Any]:
    """Returns the figures of a server, over HTTP. llama-server keeps 8 GiB of prompts in main memory by default."""
    port, threads = free_port(), str(Machine.here().cores)
    common = ["-m", str(model), "--port", str(port)]
    if name == OURS:
        sizes = ["--n-slots", str(chats.slots), "--n-ctx", str(chats.n_ctx)]
        command = [sys.executable, "-m", "llamabatch", "serve", *common, *sizes]
    else:
        stock = places.stock_programs(click.echo)
        if stock is None:
            raise click.ClickException(f"{STOCK} is not built")
        sizes = ["-np", str(chats.slots), "-c", str(chats.slots * chats.n_ctx), "-t", threads, "-tb", threads]
        command = [str(stock / "llama-server"), *common, *sizes]

    def ask(text: list[int]) -> Answer:
        # Not a stream: llama-server's streams leave out tokens that end within a character.
        body = {"prompt": text, "n_predict": chats.answer, "ignore_eos": True, "temperature": 0, "return_tokens": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), headers)
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
            answer = json.load(response)
        first_s = time.perf_counter() - began - answer["timings"]["predicted_ms"] / 1000
        if len(answer["tokens"]) != chats.answer:
            raise click.ClickException(f"{len(answer['tokens'])} tokens came, not {chats.answer}")
        return Answer(answer["tokens"], first_s, answer["timings"]["prompt_n"])

    with running(command, port, places.log_folder() / "chats.log"):
        return chats.run(ask)


def _kill(llm: LLM) -> None:
    """Kills the engine's process, as a crash would; returns when a new process has replaced it."""
    time.sleep(READING_S)
    restarts = llm.stats().restarts
    os.kill(llm._client.pids[0], signal.SIGKILL)
    while llm.stats().restarts == restarts:
        time.sleep(0.1)


@click.command()
@click.option("--chats", type=click.IntRange(1), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(64), default=2000, show_default=True, help="Tokens of a first turn.")
@click.option("--slots", type=click.IntRange(1), default=8, show_default=True)
@click.option("--turns", type=click.IntRange(2), default=2, show_default=True)
@click.option("--answer", type=click.IntRange(1), default=16, show_default=True, help="Tokens of an answer.")
@click.option("--case", "cases", type=click.Choice(CASES), multiple=True, help="Only this case; may be repeated.")
@click.option("--model", type=click.Path(path_type=Path), help="Another model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write the report.")
def main(
    chats: int,
    tokens: int,
    slots: int,
    turns: int,
    answer: int,
    cases: tuple[str, ...],
    model: Path | None,
    path: Path | None,
) -> None:
    """Measure second turns of many chats on few slots."""
    file = model or places.synth_model(click.echo)
    report = facts(command_line("python -m benchmarks.chats"))
    for name in cases or CASES:
        texts = Chats(chats, tokens, slots, turns, answer)
        with tempfile.TemporaryDirectory() as folder:
            if name in _IN_PROCESS:
                options = dict(_IN_PROCESS[name])
                if "cache_disk" in options:
                    options["cache_disk"] = folder
                report[name] = measure(file, texts, **options)
            else:
                report[name] = measure_server(name, file, texts)
        click.echo(f"{name}: {json.dumps(report[name])}")
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
