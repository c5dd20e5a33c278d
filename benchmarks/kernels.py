"""Measures step times of llama.cpp over rows and contexts, with and without our patches, beside a floor.

    python -m benchmarks.kernels [--json FILE] [--picture FILE]

A step is one llama_decode with one token for each row, with a split KV cache and sequences of equal length. Three
series take turns at each point: stock with flash attention (llama.cpp's default), stock without it, and patched with
it. On a CPU with AMX a fourth series is patched with AMX off. The fastest of some steps counts. The floor is a bound
for any kernel, the longer of two times: that of reading all weights and the rows' KV cells once at the machine's
measured bandwidth, and that of all products at the rate of the patched library's prefill. A model that fits in the
caches can be faster. At the end each library decodes the bundled model's held-out answers side by side for their
perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import stock
from benchmarks.facts import command_line, facts
from benchmarks.kernels_plot import NO_AMX, PATCHED, STOCK, STOCK_OFF, Point
from benchmarks.places import ROOT, installed_build, log_folder, synth_model
from benchmarks.process import Program, ended_by_signals, environment
from llamabatch.chat.conversation import to_tokens
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library
from llamabatch.llama.environment import OnLoad, environment_defaults
from llamabatch.llama.model import Model
from llamabatch.native_build import machine
from llamabatch.native_build.tools import main_guard
from llamabatch.planning.model_facts import ModelFacts

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (64, 512, 2048)
MODELS = ("Q8_0", "Q4_0", "tiny")
TINY_CONTEXTS = (64, 512)
SPARE_CELLS = 256
PREFILL = 512
TIMEOUT_S = 900.0
SERIES = (STOCK, STOCK_OFF, PATCHED)
HEADS = {STOCK: "stock ms", STOCK_OFF: "fa off", PATCHED: "patched", NO_AMX: "no AMX"}
HELDOUT = ROOT / "models" / "tiny" / "heldout.jsonl"


def with_best_rates(points: Sequence[Point]) -> list[Point]:
    """Returns the points of one model, with faster rates of reading and products where a step beat its floor."""
    fastest = [min(point.seconds.values()) for point in points]
    read = min(1.0, *(seconds / point.read_s for point, seconds in zip(points, fastest, strict=True)))
    multiply = min(1.0, *(seconds / point.multiply_s for point, seconds in zip(points, fastest, strict=True)))
    return [replace(point, read_s=read * point.read_s, multiply_s=multiply * point.multiply_s) for point in points]


def header(series: Sequence[str]) -> str:
    """Returns the header line of the printed points."""
    times = "".join(f"{HEADS[name]:>10}" for name in series)
    return f"{'model':6}{'context':>8}{'rows':>6}{times}{'floor':>10}{'gain':>8}"


@dataclass(frozen=True)
class Roof:
    """The rates of the machine and the sizes of a model, which set the floor.

    Attributes:
        bandwidth: bytes a second that all threads together read from memory.
        rate: operations a second in the patched library's prefill.
        kv_bytes: bytes of one token in the KV cache.
    """

    bandwidth: float
    rate: float
    weight_bytes: int
    n_params: int
    kv_bytes: int

    def read_s(self, rows: int, context: int) -> float:
        return (self.weight_bytes + rows * context * self.kv_bytes) / self.bandwidth

    def multiply_s(self, rows: int) -> float:
        return 2 * self.n_params * rows / self.rate


def model_path(name: str) -> Path:
    return resolve("tiny") if name == "tiny" else synth_model(_say, name)


def bandwidth(threads: int, megabytes: int = 512) -> float:
    """Returns the bytes a second that `threads` threads together read from memory; the best of ten tries.

    Each thread reads its part of an array that is larger than the caches. numpy has the maximum in vectors, the sum of
    integers not.
    """
    parts = np.array_split(np.ones(megabytes << 18, np.int32), threads)
    best = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(10):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - begin)
    return (megabytes << 20) / best


class Peers:
    """One child program with the model loaded for each series. The constructor raises PeerFailure if one fails."""

    def __init__(self, path: Path, sequences: int, cells: int, options: Options) -> None:
        self.programs: dict[str, Program] = {}
        self.facts: dict[str, Any] = {}
        command = [sys.executable, str(ROOT / "benchmarks" / "programs" / "steps.py")]
        for number, name in enumerate(options.series):
            measured = OnLoad(amx="off" if name == NO_AMX else None)
            ours = {key: value for key, value in os.environ.items() if key != "GGML_CPU_AMX"}
            env = environment({**ours, **environment_defaults(path.stat().st_size, measured)})
            if name in (STOCK, STOCK_OFF):
                env |= {"LLAMA_CPP_LIB_PATH": str(options.libraries), "LD_LIBRARY_PATH": str(options.libraries)}
            log = log_folder() / f"kernels-{number}.log"
            self.programs[name] = Program(name, command, env, log, lines=True)
            self.facts = self.programs[name].ask(
                {
                    "model": str(path), "sequences": sequences, "cells": cells, "threads": options.threads,
                    "flash_attention": name != STOCK_OFF,
                },
                TIMEOUT_S,
            )  # fmt: skip

    def ask(self, message: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {name: program.ask(message, TIMEOUT_S) for name, program in self.programs.items()}

    def close(self) -> None:
        for program in self.programs.values():
            program.close()


def measure(name: str, contexts: Sequence[int], rows: Sequence[int], options: Options) -> Iterator[Point]:
    """Yields all points of a model, one context after another."""
    path = model_path(name)
    _say(f"{name}: loading it {len(options.series)} times")
    peers = Peers(path, max(rows), max(contexts) + SPARE_CELLS, options)
    try:
        roof = _roof(path, peers, options)
        for context in contexts:
            _say(f"{name}: {context} tokens in each sequence")
            peers.ask({"fill": context})
            for count in rows:
                asked = [peers.ask({"rows": count, "steps": options.steps}) for _ in range(options.rounds)]
                seconds = {series: min(min(answer[series]["seconds"]) for answer in asked) for series in options.series}
                yield Point(name, context, count, seconds, roof.read_s(count, context), roof.multiply_s(count))
    finally:
        peers.close()


def _roof(path: Path, peers: Peers, options: Options) -> Roof:
    loaded = Model(path)
    try:
        numbers = ModelFacts.from_metadata(loaded.metadata, path.stat().st_size, loaded.n_vocab)
    finally:
        loaded.close()
    cells = min(PREFILL, options.most_context)
    seconds = min(peers.programs[PATCHED].ask({"fill": cells}, TIMEOUT_S)["seconds"] for _ in range(3))
    n_params = peers.facts["n_params"]
    products = 2 * (n_params - numbers.n_vocab * numbers.n_embd) * cells  # prefill computes logits of one row only
    kv_bytes = 2 * (numbers.k_values + numbers.v_values)  # 2 bytes each, f16
    return Roof(options.bandwidth, products / seconds, peers.facts["weight_bytes"], n_params, kv_bytes)


def perplexities(options: Options) -> dict[str, float]:
    """Returns the bundled model's perplexity with each library, on answers that it was not trained on."""
    path = model_path("tiny")
    model = Model(path)
    try:
        texts = list(_texts(model))
    finally:
        model.close()
    peers = Peers(path, 32, 512, options)
    try:
        sums = peers.ask({"texts": texts})
    finally:
        peers.close()
    n_tokens = sum(len(text) - prompt for prompt, text in texts)
    return {name: math.exp(-answer["sum"] / n_tokens) for name, answer in sums.items()}


def _texts(model: Model) -> Iterator[tuple[int, list[int]]]:
    """Yields (length of the question, tokens of question and answer); the model was trained on answers alone."""
    for line in HELDOUT.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        tokens = to_tokens(model, question["messages"])[1]
        answer = model.tokenize(question["answer"], add_special=False)
        yield len(tokens), [*tokens, *answer]


@dataclass(frozen=True)
class Options:
    threads: int
    steps: int
    rounds: int
    libraries: Path
    bandwidth: float
    most_context: int
    series: tuple[str, ...]


def main() -> None:
    args = _arguments()
    for path in filter(None, (args.json, args.picture)):
        path.parent.mkdir(parents=True, exist_ok=True)  # fails now, not after ten minutes
    installed_build()  # raises SetupFailure where the library is not ours
    libraries = stock.libraries(machine.make_plan("cpu"))
    series = (*SERIES, NO_AMX) if library.amx_can_be_off() else SERIES
    speed = bandwidth(args.threads)
    options = Options(args.threads, args.steps, args.rounds, libraries, speed, max(args.context), series)
    begin = time.perf_counter()
    points: list[Point] = []
    print(header(series))
    with ended_by_signals():
        for name in args.model:
            contexts = [c for c in args.context if name != "tiny" or c in TINY_CONTEXTS]
            found = with_best_rates(list(measure(name, contexts, args.rows, options)))
            points += found
            print(*found, sep="\n", flush=True)
        perplexity = perplexities(options)
    moved = perplexity[PATCHED] / perplexity[STOCK] - 1
    said = ", ".join(f"{name} {value:.5f}" for name, value in perplexity.items())
    print(f"perplexity: {said}; moved by {moved:+.4%}")
    if args.json:
        figures = {
            **facts(command_line("python -m benchmarks.kernels")), "threads": args.threads,
            "bandwidth_gb_s": round(options.bandwidth / 1e9, 2), "wall_s": round(time.perf_counter() - begin, 1),
            "perplexity": perplexity, "points": [{**asdict(point), "floor_s": point.floor_s} for point in points],
        }  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if args.picture:
        from benchmarks.kernels_plot import draw

        draw(points, series, args.picture)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=MODELS, help="quantisations of the 0.5B shape; tiny"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--context", nargs="+", type=int, default=CONTEXTS, help="tokens in each sequence")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=3, help="steps in a row")
    parser.add_argument("--rounds", type=int, default=2, help="how often each library is asked for a point")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="a .svg or .png")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main_guard(main))
