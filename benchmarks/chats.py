"""Measures second turns of more chats than slots, with and without `cache_ram`, and after the engine was killed.

    python -m benchmarks.chats [--chats 64] [--tokens 2000] [--slots 8] [--turns 2] [--json FILE]

Each chat consists of random tokens; each turn adds 48 tokens of a question and 16 of an answer. There are as many
callers as slots; they ask for the next turn of the chats in random order, each for one chat at a time. The model is the
0.5B shape of llamabatch synth. The figures of the turns after the first are the computed prompt tokens over the new
ones, and the time from the call to the first token. In the cases "killed", SIGKILL ends the engine's process before
each later turn, some seconds after the turn before, with `cache_disk` and without.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks import places
from benchmarks.facts import command_line, facts
from llamabatch import LLM, SamplingParams

QUESTION, ANSWER = 48, 16
READING_S = 3.0


def measure(model: Path, chats: int, tokens: int, slots: int, turns: int, **options: Any) -> dict[str, Any]:
    """Returns the figures of the turns after the first, for one engine with these options."""
    rng = random.Random(f"chats-{chats}-{tokens}")
    texts = [[rng.randrange(1000, 100_000) for _ in range(tokens)] for _ in range(chats)]
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    first_s, computed, new = [], [], []
    n_ctx = tokens + turns * (QUESTION + ANSWER)
    with (
        LLM(str(model), n_slots=slots, n_ctx=n_ctx, instances=1, strategy="batched", **options) as llm,
        ThreadPoolExecutor(slots) as callers,
    ):
        for turn in range(turns):
            if turn and "isolate" in options:
                _kill(llm)
            order = rng.sample(range(chats), chats)
            outputs = list(callers.map(lambda chat: llm.generate([texts[chat]], params)[0], order))
            for chat, output in zip(order, outputs, strict=True):
                if turn:
                    first_s.append(output.timings.ttft_s or 0.0)
                    computed.append(len(texts[chat]) - output.num_cached_tokens)
                    new.append(QUESTION + 1)  # 1: the last token of an answer is not in the cache
                texts[chat] += [*output.token_ids, *(rng.randrange(1000, 100_000) for _ in range(QUESTION))]
        stats, cache_ram = llm.stats(), llm.plan.config.cache_ram
    return {
        "cache_ram_mib": cache_ram,
        "used_mib": round(stats.cache_ram_bytes / 2**20),
        "disk_mib": round(stats.cache_disk_bytes / 2**20),
        "computed_over_new": round(sum(computed) / sum(new), 3),
        "first_token_p50_ms": round(1000 * statistics.median(first_s)),
        "first_token_mean_ms": round(1000 * statistics.fmean(first_s)),
        "preemptions": stats.preemptions,
    }


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
@click.option("--model", type=click.Path(path_type=Path), help="Another model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write the report.")
def main(chats: int, tokens: int, slots: int, turns: int, model: Path | None, path: Path | None) -> None:
    """Measure second turns of many chats on few slots."""
    file = model or places.synth_model(click.echo)
    report = facts(command_line("python -m benchmarks.chats"))
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, dict[str, Any]] = {
            "cache_ram auto": {},
            "cache_ram 0": {"cache_ram": 0},
            "cache_disk, killed": {"cache_disk": folder, "isolate": True},
            "killed": {"isolate": True},
        }
        for name, options in kinds.items():
            report[name] = measure(file, chats, tokens, slots, turns, **options)
            click.echo(f"{name}: {json.dumps(report[name])}")
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
