"""Compares the speed of the wheel's portable build of llama.cpp with that of the build for this CPU.

    python -m benchmarks.wheel FOLDER [--rounds N] [--threads N] [--json FILE] MODEL...

FOLDER is a package `llamabatch_llama`, installed or from an unpacked wheel. The build for this CPU is the installed
llama_cpp that `make setup` built. The builds take turns, with a new child process for each round. The child measures
llama_decode for 1, 8 and 32 sequences at once, and for a prompt of 128 tokens. The program prints the least times of
all rounds, since other processes can only make a time longer: milliseconds by the clock, and milliseconds of CPU time
of all threads, which other processes hardly change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import facts
from llamabatch.planning import binding_choice

ROWS = (1, 8, 32)
PROMPT = 128
_SECONDS = 1.5  # for each kind of step, in each round
_CHILD = "import sys; from benchmarks.wheel import measure; measure(sys.argv[1], int(sys.argv[2]))"


def measure(model_file: str, threads: int) -> None:
    """Prints the least milliseconds of each kind of step as JSON; runs in a child process."""
    from llamabatch.llama import library

    llama = library.load(Path(model_file).stat().st_size)
    model_params = llama.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(os.fsencode(model_file), model_params)
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = max(ROWS) * 256, max(ROWS), False
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = threads
    context = llama.llama_init_from_model(model, params)
    memory = llama.llama_get_memory(context)

    def step(rows: int, tokens: int) -> tuple[float, float]:
        llama.llama_memory_clear(memory, True)
        batch = llama.llama_batch_init(rows * tokens, 0, 1)
        batch.n_tokens = rows * tokens
        for place in range(rows * tokens):
            row, position = divmod(place, tokens)
            batch.token[place], batch.pos[place] = 300 + place % 500, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = int(position == tokens - 1)
        start, cpu_start = time.perf_counter(), time.process_time()
        status = llama.llama_decode(context, batch)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        llama.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {rows} rows of {tokens} tokens")
        return seconds * 1e3, cpu_seconds * 1e3

    fastest = {}
    for name, rows, tokens in [*((f"{rows} rows", rows, 1) for rows in ROWS), ("prompt", 1, PROMPT)]:
        until = time.perf_counter() + _SECONDS
        times = [step(rows, tokens) for _ in range(3)]
        while time.perf_counter() < until:
            times.append(step(rows, tokens))
        clock, cpu = zip(*times, strict=True)
        fastest[name], fastest[f"{name}, CPU"] = min(clock), min(cpu)
    print(json.dumps(fastest))


def sides(package: Path) -> dict[str, Path]:
    """Returns the packages of the wheel's build and of the build for this CPU."""
    native = binding_choice.installed(binding_choice.FOREIGN)
    if native is None or (binding_choice.read_marker(native / "lib") or {}).get("variants"):
        raise click.ClickException("the build for this CPU is not installed: run make setup")
    return {"wheel": package.resolve(), "native": native}


def fastest(builds: dict[str, Path], model: Path, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Returns the least milliseconds of each build for each kind of step."""
    found: dict[str, dict[str, float]] = {name: {} for name in builds}
    for number in range(rounds):
        for name in sorted(builds, reverse=bool(number % 2)):
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, str(model), str(threads)],
                env={**os.environ, binding_choice.VARIABLE: str(builds[name])},
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            for kind, milliseconds in json.loads(done.stdout.splitlines()[-1]).items():
                found[name][kind] = min(milliseconds, found[name].get(kind, milliseconds))
    return found


@click.command()
@click.argument("package", metavar="FOLDER", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="For the figures.")
def main(package: Path, models: tuple[Path, ...], rounds: int, threads: int, json_file: Path | None) -> None:
    """Time the steps of the build in FOLDER and of the one for this CPU, in turn."""
    builds = sides(package)
    shown = Table("model", "step", "wheel, ms", "native, ms", "speed of the wheel")
    results: dict[str, Any] = {}
    for model in models:
        found = fastest(builds, model, rounds, threads)
        results[model.name] = {
            kind: {"wheel_ms": ours, "native_ms": found["native"][kind], "ratio": found["native"][kind] / ours}
            for kind, ours in found["wheel"].items()
        }
        for kind, row in results[model.name].items():
            shown.add_row(model.name, kind, f"{row['wheel_ms']:.3f}", f"{row['native_ms']:.3f}", f"{row['ratio']:.2f}")
    Console().print(shown)
    if json_file is not None:
        document = {**facts.facts("python -m benchmarks.wheel FOLDER MODEL..."), "rounds": rounds}
        json_file.write_text(json.dumps({**document, "threads": threads, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
