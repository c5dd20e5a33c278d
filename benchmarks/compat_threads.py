"""One script of 16 threads with llama_cpp.Llama behind a lock, and with llamabatch.compat.Llama: alternating rounds.

    python -m benchmarks.compat_threads --json benchmarks/results/compat-threads.json

Both scripts differ only in the import and the lock. Each thread takes the next prompt and calls the model; options that
the script does not set have the defaults of llama_cpp.Llama. llama_cpp.Llama is measured with its default number of
threads, half of the cores, and with all cores. Both libraries run the same build of llama.cpp. The bundled model
answers questions in chats; the model of random weights continues texts. The ratio compares the medians of completion
tokens/s.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import facts, places
from llamabatch.compat import Llama
from llamabatch.gguf.resolve import resolve

QUESTIONS = Path(__file__).resolve().parents[1] / "models" / "tiny" / "heldout.jsonl"
TEXTS = Path(__file__).with_name("prompts-64.txt")
OURS, LOCKED, LOCKED_ALL = "compat.Llama", "llama_cpp.Llama, lock", "llama_cpp.Llama, lock, all cores"

Script = Callable[[Any, str], dict[str, Any]]


def chat(llama: Any, prompt: str) -> dict[str, Any]:
    """Makes one call to the bundled model."""
    answer: dict[str, Any] = llama.create_chat_completion([{"role": "user", "content": prompt}], max_tokens=32)
    return answer


def complete(llama: Any, prompt: str) -> dict[str, Any]:
    """Makes one call to the model of random weights."""
    answer: dict[str, Any] = llama(prompt, max_tokens=32)
    return answer


def tokens_per_s(script: Script, llama: Any, lock: Any, prompts: list[str], threads: int) -> float:
    """Completion tokens a second of one round."""

    def call(prompt: str) -> int:
        with lock:
            n_tokens: int = script(llama, prompt)["usage"]["completion_tokens"]
            return n_tokens

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(call, prompts))
    return total / (time.perf_counter() - start)


def measure(path: Path, script: Script, prompts: list[str], threads: int, rounds: int) -> dict[str, list[float]]:
    """Returns tokens/s of each side, round by round; in each round another side runs first."""
    import llama_cpp  # the peer; llamabatch uses only its low-level part

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, list[float]] = {OURS: [], LOCKED: [], LOCKED_ALL: []}
    with contextlib.ExitStack() as stack:
        theirs = [
            stack.enter_context(contextlib.closing(llama_cpp.Llama(str(path), n_threads=n, verbose=False)))
            for n in (None, cores)
        ]
        ours = stack.enter_context(Llama(str(path), verbose=False))
        sides: list[tuple[str, Any, Any]] = [(OURS, ours, contextlib.nullcontext())]
        sides += [(name, each, threading.Lock()) for name, each in zip((LOCKED, LOCKED_ALL), theirs, strict=True)]
        for _, llama, lock in sides:  # warm-up: the first calls grow contexts and build graphs
            tokens_per_s(script, llama, lock, prompts[:4], threads)
        for number in range(rounds):
            for name, llama, lock in (*sides[number % 3 :], *sides[: number % 3]):
                found[name].append(tokens_per_s(script, llama, lock, prompts, threads))
    return found


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.option("--threads", default=16, show_default=True, help="Threads that call at once.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
def main(threads: int, rounds: int, path: Path | None) -> None:
    questions = [json.loads(line)["messages"][-1]["content"] for line in QUESTIONS.read_text("utf-8").splitlines()]
    texts = TEXTS.read_text("utf-8").splitlines()
    synth = places.synth_model(click.echo)
    workloads: list[tuple[str, Path, Script, list[str]]] = [
        ("tiny", resolve("tiny"), chat, questions[:96]),
        (synth.stem, synth, complete, texts[:threads]),
    ]
    table = Table("model", "side", "tokens/s", f"{OURS} is", title=f"{threads} threads", title_justify="left")
    results = {}
    for model, file, script, prompts in workloads:
        found = measure(file, script, prompts, threads, rounds)
        medians = {name: statistics.median(each) for name, each in found.items()}
        results[model] = {
            name: {"tokens_per_s": each, "ratio": medians[OURS] / medians[name]} for name, each in found.items()
        }
        for name, median in medians.items():
            table.add_row(model, name, f"{median:,.1f}", f"{medians[OURS] / median:.2f} x")
    Console().print(table)
    if path is not None:
        known = facts.facts(facts.command_line("benchmarks.compat_threads"))
        document = {**known, "threads": threads, "rounds": rounds, "results": results}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
