"""Measures microseconds to sample one row: the compiled helper, numpy, and llama.cpp's own chain called from Python.

    python benchmarks/sampling.py [--json FILE] [--rows 8] [--rounds 9]

The logits are random, normal with a standard deviation of 3, about that of a trained model. All samplers use one core
and take turns; the best round counts. llama.cpp's time includes the copy of the row into its candidates, since its
chain needs that copy.
"""

from __future__ import annotations

import ctypes
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from llamabatch import SamplingParams
from llamabatch.llama.library import load
from llamabatch.planning.cpu import cpu_name
from llamabatch.sampling import native, numpy_sampler
from llamabatch.sampling.defaults import FilledParams, fill
from llamabatch.sampling.sampler import SamplerState
from llamabatch.sampling.token_counts import TokenCounts

VOCABULARIES = {"1k": 1_120, "32k": 32_000, "152k": 152_064}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
N_PENALISED = 512  # tokens that penalties look at
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k 40, top_p 0.95": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.0},
    "the same, with penalties": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.0, **PENALTIES},
    "min_p 0.05 alone": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "top_p 0.95 alone": {"temperature": 0.7, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
    "temperature alone": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


class Chain:
    """llama.cpp's own samplers for one set of parameters."""

    def __init__(self, params: FilledParams, n_vocab: int, history: list[int]) -> None:
        self._lib = lib = load()
        self._handle = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        links = []
        if params.penalised:
            penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            links.append(lib.llama_sampler_init_penalties(n_vocab, len(history), *penalties))
        if params.greedy:
            links.append(lib.llama_sampler_init_greedy())
        else:
            if params.top_k > 0:
                links.append(lib.llama_sampler_init_top_k(params.top_k))
            if params.top_p < 1:
                links.append(lib.llama_sampler_init_top_p(params.top_p, 1))
            if params.min_p > 0:
                links.append(lib.llama_sampler_init_min_p(params.min_p, 1))
            links += [lib.llama_sampler_init_temp(params.temperature), lib.llama_sampler_init_dist(1)]
        for link in links:
            lib.llama_sampler_chain_add(self._handle, link)
        for token_id in history:
            lib.llama_sampler_accept(self._handle, token_id)
        self._data = (lib.llama_token_data * n_vocab)()
        self._view = np.ctypeslib.as_array(self._data)
        self._ids = np.arange(n_vocab)

    def sample(self, row: np.ndarray) -> int:
        self._view["id"], self._view["logit"] = self._ids, row
        array = self._lib.llama_token_data_array(data=self._data, size=len(row), selected=-1, sorted=False)
        self._lib.llama_sampler_apply(self._handle, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def close(self) -> None:
        self._lib.llama_sampler_free(self._handle)


def measure(n_vocab: int, options: dict[str, Any], n_rows: int, rounds: int) -> dict[str, float]:
    """Returns microseconds a row, by sampler."""
    rows = np.random.default_rng(n_vocab).normal(0, 3, (n_rows, n_vocab)).astype(np.float32)
    params = fill(SamplingParams(**options))
    history = [int(i) for i in np.random.default_rng(0).integers(0, n_vocab, N_PENALISED)] if params.penalised else []
    counts = TokenCounts() if params.penalised else None
    for token_id in history:
        assert counts is not None
        counts.add(token_id)
    draws = [SamplerState(params, seed, counts=counts) for seed in range(n_rows)]
    chain = Chain(params, n_vocab, history)
    ways: dict[str, Callable[[], object]] = {
        "numpy": lambda: [numpy_sampler.sample_row(row, draw) for row, draw in zip(rows, draws, strict=True)],
        "llama.cpp": lambda: [chain.sample(row) for row in rows],
    }
    if native.available():
        ways = {"compiled": lambda: native.sample_rows(rows, draws, 1), **ways}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, sample in ways.items():
            start = time.perf_counter()
            sample()
            best[name] = min(best[name], time.perf_counter() - start)
    chain.close()
    return {name: seconds / n_rows * 1e6 for name, seconds in best.items()}


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
@click.option("--rows", default=32, show_default=True, help="Rows in a step.")
@click.option("--rounds", default=9, show_default=True)
def main(path: Path | None, rows: int, rounds: int) -> None:
    load()
    if not native.available():
        click.echo(f"The compiled helper is {native.why_not()}.", err=True)
    table = Table(title=f"microseconds a row, {rows} rows a step, one core: {cpu_name()}", title_justify="left")
    for heading in ("vocabulary", "sampling", "compiled", "numpy", "llama.cpp"):
        table.add_column(heading, justify="left" if heading in ("vocabulary", "sampling") else "right")
    results = []
    for vocabulary, n_vocab in VOCABULARIES.items():
        for case, options in CASES.items():
            figures = measure(n_vocab, options, rows, rounds)
            cells = [
                f"{figures[sampler]:.3g}" if sampler in figures else ""
                for sampler in ("compiled", "numpy", "llama.cpp")
            ]
            table.add_row(vocabulary, case, *cells)
            results.append({"vocabulary": n_vocab, "case": case, "options": options, "us_per_row": figures})
    Console().print(table)
    if path is not None:
        machine = {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()}
        text = json.dumps({"machine": machine, "rows": rows, "rounds": rounds, "results": results}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
