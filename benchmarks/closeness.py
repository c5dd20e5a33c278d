"""Measures how near each type of weights is to F32, with our build of llama.cpp and with stock, on a trained model.

    python -m benchmarks.closeness [smollm2|gemma3] [--types Q8_0,Q4_K_M] [--kilobytes N] [--json FILE]

The method is that of `llama-perplexity --kl-divergence`: the text is cut into chunks of 512 tokens, and the second half
of each chunk counts. Each token of that half gives the KL divergence of its probabilities from those of the F32 model
on stock, whether the likeliest token is the same, and the loss. "prompt" computes a chunk in one pass. "rows" computes
the first eight chunks side by side, one token of each in a step, as generated text is, since steps with few rows use
other kernels.

The rule: the mean divergence is at most 1.05 times stock's, or both are below 0.001. The likeliest token equals that of
F32 no less often than with stock, and the loss is no higher, both within three standard errors of the paired
differences. Two figures describe the tail: the quantiles of the divergence; and the share of 1,000 random swaps of rows
between ours and stock in which the 99.9 % quantiles are at least as far apart.

The text is the documentation of this checkout. With `--answers`, the program instead asks questions with greedy
decoding. It counts the answers that equal stock's to the last token, and those of the others that first differ where
the two best logits are nearly equal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import stock, trained
from benchmarks.facts import command_line, facts
from benchmarks.places import ROOT, installed_build, log_folder
from benchmarks.process import Program, ended_by_signals, environment
from llamabatch.chat.conversation import to_tokens
from llamabatch.config import EngineConfig
from llamabatch.llama.environment import environment_defaults
from llamabatch.llama.model import Model
from llamabatch.native_build import machine
from llamabatch.native_build.tools import main_guard, require_space

PROGRAM = Path(__file__).parent / "programs" / "logits.py"
TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0"),
    *("IQ4_NL", "IQ4_XS"),
)
CHUNK, FIRST = 512, 256
SIDE_BY_SIDE, STEPS = 8, 255  # with fewer rows chance decides the ratio: 1.07 with 512 rows, 0.98 with 2,040
MOST = 1.05  # largest ratio of our mean divergence to stock's
ALIKE = 1e-3  # two mean divergences below this count as equal
ERRORS = 3.0  # standard errors by which ours may be worse than stock
TIMEOUT_S = 3600.0
NEAR = 0.15  # largest gap of two logits that counts as a tie; the bound of docs/design/sampling-and-equality.md
LENGTH = 64  # tokens of an answer, at most
QUESTIONS = (
    "What is the capital of France?",
    "What is the largest planet?",
    "Name three colours.",
    "What is 2 plus 2?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to French.",
    "What do bees make?",
    "Write one sentence about the sea.",
    "How many days has a week?",
    "What is water made of?",
    "Give me a recipe for tea.",
    "Why is the sky blue?",
    "What is a prime number?",
    "Write a short poem about rain.",
    "What does a baker do?",
    "Explain gravity to a child.",
    "What is the opposite of hot?",
    "List four fruits.",
    "Who was Albert Einstein?",
    "What is Python used for?",
)
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


def text(n_bytes: int) -> str:
    """Returns the first `n_bytes` bytes of the documentation."""
    parts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(parts).encode()[:n_bytes].decode(errors="ignore")


def chunks_of(path: Path, n_bytes: int) -> list[list[int]]:
    """Returns the whole chunks of the text. Each begins with BOS if the model has that token."""
    model = Model(path, EngineConfig(str(path)), vocab_only=True)
    try:
        tokens = model.tokenize(text(n_bytes), add_special=False)
        bos = [] if model.vocabulary.bos is None else [model.vocabulary.bos]
    finally:
        model.close()
    size = CHUNK - len(bos)
    return [[*bos, *tokens[at : at + size]] for at in range(0, len(tokens) - size + 1, size)]


class Side:
    """A child program with one library, ours or stock, and one model."""

    def __init__(self, is_stock: bool, path: Path, threads: int) -> None:
        name = "stock" if is_stock else "ours"
        env = environment({**os.environ, **environment_defaults(path.stat().st_size)})
        if is_stock:
            libraries = str(stock.libraries(machine.make_plan("cpu")))
            env |= {"LLAMA_CPP_LIB_PATH": libraries, "LD_LIBRARY_PATH": libraries}
        log = log_folder() / f"closeness-{name}.log"
        self._program = Program(name, [sys.executable, str(PROGRAM)], env, log, lines=True)
        given = {"model": str(path), "threads": threads, "cells": CHUNK, "sequences": SIDE_BY_SIDE}
        self.n_vocab = int(self._program.ask(given, TIMEOUT_S)["n_vocab"])

    def keep(self, chunks: Sequence[Sequence[int]], path: Path) -> None:
        self._program.ask({"chunks": chunks, "first": FIRST, "keep": str(path)}, TIMEOUT_S)

    def compare(self, chunks: Sequence[Sequence[int]], base: Path, rows: int = 0) -> dict[str, Any]:
        """Compares with `base` as programs/logits.py describes; returns each figure as an array."""
        shape = (len(chunks), len(chunks[0]) - 1 - FIRST, self.n_vocab)
        asked = [chunk[: FIRST + STEPS + 1] for chunk in chunks[:SIDE_BY_SIDE]] if rows else chunks
        message = {"chunks": asked, "first": FIRST, "base": str(base), "shape": shape, "base_first": FIRST}
        answer = self._program.ask({**message, "rows": rows}, TIMEOUT_S)
        return {name: np.array(values) for name, values in answer.items()}

    def answer(self, prompt: Sequence[int], ends: Sequence[int]) -> dict[str, Any]:
        return self._program.ask({"prompt": prompt, "greedy": LENGTH, "ends": ends}, TIMEOUT_S)

    def close(self) -> None:
        self._program.close()


def answers(path: Path, threads: int) -> dict[str, Any]:
    """Returns the greedy answers of ours and of stock to QUESTIONS, asked through the model's chat template."""
    model = Model(path, EngineConfig(str(path)), vocab_only=True)
    sides: list[Side] = []
    try:
        sides += [Side(False, path, threads), Side(True, path, threads)]
        found: list[dict[str, Any]] = []
        for question in QUESTIONS:
            prompt = to_tokens(model, [{"role": "user", "content": question}])[1]
            ours, theirs = (side.answer(prompt, model.eog_ids) for side in sides)
            parts = [a != b for a, b in zip(ours["tokens"], theirs["tokens"], strict=False)]
            at = parts.index(True) if any(parts) else None
            found.append(
                {
                    "question": question,
                    "ours": model.detokenize(ours["tokens"]),
                    "stock": model.detokenize(theirs["tokens"]),
                    "parts_at": at,
                    "gaps": None if at is None else [ours["gaps"][at], theirs["gaps"][at]],
                }
            )
    finally:
        for side in sides:
            side.close()
        model.close()
    apart = [min(each["gaps"]) for each in found if each["gaps"] is not None]
    n_near = sum(gap < NEAR for gap in apart)
    return {"asked": len(found), "equal": len(found) - len(apart), "near_ties": n_near, "near": NEAR, "answers": found}


def verdict(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of ours and of stock for the same rows, and whether the rule holds."""
    n = len(ours["losses"])
    loss, same = ours["losses"] - theirs["losses"], ours["same"] - theirs["same"]
    loss_error, same_error = (float(each.std() / np.sqrt(n)) for each in (loss, same))
    means = {name: float(each["divergences"].mean()) for name, each in (("ours", ours), ("stock", theirs))}
    ratio = means["ours"] / means["stock"] if means["stock"] > 0 else 1.0
    holds = {
        "divergence": ratio <= MOST or max(means.values()) < ALIKE,
        "top": bool(same.mean() >= -ERRORS * same_error),
        "loss": bool(loss.mean() <= ERRORS * loss_error),
    }
    return {
        "rows": n,
        "mean_divergence": means,
        "ratio": ratio,
        "same_top": {"ours": float(ours["same"].mean()), "stock": float(theirs["same"].mean()), "error": same_error},
        "perplexity": {
            name: float(np.exp(each["losses"].mean())) for name, each in (("ours", ours), ("stock", theirs))
        },
        "loss_difference": {"mean": float(loss.mean()), "error": loss_error},
        "quantiles": {
            name: [float(value) for value in np.quantile(each["divergences"], QUANTILES)]
            for name, each in (("ours", ours), ("stock", theirs))
        },
        "tail_by_chance": _by_chance(ours["divergences"], theirs["divergences"]),
        "holds": holds,
    }


def _by_chance(ours: Any, theirs: Any, q: float = 0.999, n: int = 1000) -> float:
    """Returns the share of `n` random swaps of rows that move the `q` quantiles at least as far apart as measured."""
    rng = np.random.default_rng(0)
    seen = abs(np.quantile(ours, q) - np.quantile(theirs, q))
    pairs = np.stack([ours, theirs])
    further = 0
    for _ in range(n):
        swap = rng.random(len(ours)) < 0.5
        a, b = np.where(swap, pairs[1], pairs[0]), np.where(swap, pairs[0], pairs[1])
        further += bool(abs(np.quantile(a, q) - np.quantile(b, q)) >= seen)
    return further / n


def line(kind: str, what: str, found: dict[str, Any]) -> str:
    mean, same, ppl, quantiles = found["mean_divergence"], found["same_top"], found["perplexity"], found["quantiles"]
    fails = [name for name, holds in found["holds"].items() if not holds]
    return (
        f"{kind:8}{what:8}{mean['ours']:10.5f}{mean['stock']:10.5f}{found['ratio']:7.3f}"
        f"{same['ours']:9.4f}{same['stock']:8.4f}{ppl['ours']:10.4f}{ppl['stock']:10.4f}"
        f"{quantiles['ours'][3]:9.4f}{quantiles['stock'][3]:8.4f}{found['tail_by_chance']:7.3f}  {', '.join(fails)}"
    )


HEAD = (
    f"{'type':8}{'as':8}{'KL ours':>10}{'stock':>10}{'ratio':>7}{'top ours':>9}{'stock':>8}"
    f"{'ppl ours':>10}{'stock':>10}{'99.9 %':>9}{'stock':>8}{'chance':>7}  fails"
)


@click.command()
@click.argument("name", type=click.Choice(list(trained.MODELS)), default="smollm2")
@click.option("--types", default=",".join(TYPES), show_default=True)
@click.option("--kilobytes", type=click.IntRange(8, 1000), default=50, show_default=True, help="of text")
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--answers", "asks", is_flag=True, help="Ask questions instead, in the model's own type of weights.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path))
def main(name: str, types: str, kilobytes: int, threads: int, asks: bool, path: Path | None) -> None:
    """Compare types of weights of a trained model with its F32 values. Exit code 1 where the rule does not hold."""
    installed_build()  # raises SetupFailure where the library is not ours
    if asks:
        with ended_by_signals():
            told = answers(trained.model(name), threads)
        click.echo(f"{told['asked']} answers: {told['equal']} equal, {told['near_ties']} part at near ties")
        if path is not None:
            _write(path, name, told)
        return
    exact = trained.quantized(name, "F32")
    chunks = chunks_of(exact, kilobytes * 1000)
    found: dict[str, dict[str, Any]] = {}
    with ended_by_signals(), tempfile.TemporaryDirectory(dir=trained.folder(), prefix="closeness-") as place:
        base = Path(place) / "base"
        reference = Side(True, exact, threads)
        try:
            require_space(base.parent, 4 * reference.n_vocab * len(chunks) * (CHUNK - 1 - FIRST) / 1e9 + 1)
            reference.keep(chunks, base)
        finally:
            reference.close()
        click.echo(HEAD)
        for kind in types.split(","):
            found[kind] = {}
            figures: list[dict[str, Any]] = []
            for is_stock in (False, True):
                side = Side(is_stock, trained.quantized(name, kind), threads)
                try:
                    figures.append(
                        {"prompt": side.compare(chunks, base), "rows": side.compare(chunks, base, SIDE_BY_SIDE)}
                    )
                finally:
                    side.close()
            for what in ("prompt", "rows"):
                found[kind][what] = verdict(figures[0][what], figures[1][what])
                click.echo(line(kind, what, found[kind][what]))
            if path is not None:
                rule = {"most_ratio": MOST, "alike": ALIKE, "errors": ERRORS, "quantiles": QUANTILES}
                _write(path, name, {"kilobytes": kilobytes, "chunks": len(chunks), "rule": rule, "types": found})
    if not all(all(each["holds"].values()) for shapes in found.values() for each in shapes.values()):
        sys.exit(1)


def _write(path: Path, name: str, found: dict[str, Any]) -> None:
    command = command_line("python -m benchmarks.closeness").replace(str(path), path.name)
    document = {**facts(command), "model": name, "wheels": trained.MODELS[name].requirements, **found}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main_guard(main))
