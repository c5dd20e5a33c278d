"""The share of greedy texts that part between strategies on the bundled model, and the gaps of their two best logits.

\b
    python -m benchmarks.equality -n 2000 --json benchmarks/results/equality-tiny.json
    python -m benchmarks.equality --bits -n 10000 --json benchmarks/results/equal-bits.json

With --bits, the program compares the bits of logits of requests that run alone and together, for each type of weights
(benchmarks/equal_bits.py). It continues the JSON file if that file has the same versions and environment.

Without --bits, the prompts are random token ids, where the model is least sure, and the held-out questions, the usual
input. Each prompt runs alone in a sequential engine first; then all prompts run together in each of WAYS. The largest
gap sets the bound of the rule of equality (docs/design/sampling-and-equality.md, tests/model/conftest.py).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import equal_bits, facts
from llamabatch import LLM, EngineConfig, RequestOutput, SamplingParams
from llamabatch.chat.conversation import to_tokens
from llamabatch.chat.messages import Conversation
from llamabatch.engine.resolve_config import plan
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context, DecodeCode
from llamabatch.llama.library import load
from llamabatch.llama.model import Model
from llamabatch.native_build.tools import cache_dir, make_folder
from llamabatch.request.adapters import AdapterSet
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Call, ScheduledSpan
from llamabatch.tools.synth import SHAPES

HELDOUT = Path(__file__).parents[1] / "models" / "tiny" / "heldout.jsonl"
GREEDY = SamplingParams(temperature=0, max_tokens=48)
SWITCHES = ("GGML_CPU_AMX", "GGML_CPU_TILED_MM")  # environment variables that choose kernels
WAYS: dict[str, dict[str, object]] = {
    "interleaved, 16 slots": {"strategy": "interleaved", "n_slots": 16},
    "batched, 4 slots": {"strategy": "batched", "n_slots": 4},
    "batched, 32 slots": {"strategy": "batched", "n_slots": 32},
    "batched, unified": {"strategy": "batched", "n_slots": 32, "kv": "unified"},
    "batched, n_ubatch 16": {"strategy": "batched", "n_slots": 16, "n_batch": 64, "n_ubatch": 16},
    "batched, other attention": {"strategy": "batched", "n_slots": 16},
}


def prompts(kind: str, n: int, llm: LLM, size: int) -> list[list[int]]:
    """Returns n lists of token ids; `size` is the size of the vocabulary."""
    rng = random.Random(7)
    if kind == "random ids":
        return [[rng.randrange(300, size - 300) for _ in range(rng.randrange(4, 200))] for _ in range(n)]
    questions = [json.loads(line)["messages"] for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    chosen = [questions[i % len(questions)] for i in range(n)]
    return [list(output.prompt_token_ids) for output in llm.chat(chosen, SamplingParams(temperature=0, max_tokens=1))]


class LogitGap:
    """Computes the distance between the two best logits after a text that runs alone."""

    def __init__(self, adapters: Mapping[str, str | os.PathLike[str]] | None = None) -> None:
        config = EngineConfig("tiny", n_slots=1)
        self._model = Model(resolve("tiny"), config)
        resolved = plan(config, self._model.path).config
        self._context = Context(self._model, resolved, 1)
        self._batch = Batch(load(), resolved.n_batch)
        self.n_vocab = self._model.n_vocab
        for name, path in (adapters or {}).items():
            self._model.adapters.load(name, path)

    def __call__(self, token_ids: tuple[int, ...], adapters: AdapterSet = ()) -> float:
        sequence = Sequence(Request("gap", token_ids), self._model.vocabulary, 10**6)
        self._context.clear(0)
        self._context.set_adapters(adapters)
        struct, _ = self._batch.fill(Call((ScheduledSpan(sequence, 0, 0, len(token_ids), True),)))
        if self._context.decode(struct) is not DecodeCode.OK:
            raise RuntimeError("llama_decode failed")
        second, best = np.partition(self._context.logits(1)[0], -2)[-2:]
        return float(best - second)

    def prompt(self, conversation: Conversation) -> tuple[int, ...]:
        """The tokens of a conversation."""
        return to_tokens(self._model, conversation)[1]

    def close(self) -> None:
        self._context.close()
        self._model.close()


def parting(one: RequestOutput, other: RequestOutput) -> int:
    """Returns the index of the first output token in which both outputs differ."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one.token_ids), len(other.token_ids)))


def gaps(got: list[RequestOutput], wanted: list[RequestOutput], gap: LogitGap) -> list[float]:
    """Returns the gap of the two best logits where the texts part, for each pair of outputs that differ."""
    found = []
    for one, other in zip(got, wanted, strict=True):
        if one.token_ids != other.token_ids:
            found.append(gap((*one.prompt_token_ids, *one.token_ids[: parting(one, other)])))
    return found


def count_bits(number: int, json_path: Path | None, shape: str, types: list[str], folder: Path) -> None:
    """Compares `number` requests for each type of weights, and prints a table."""
    now = facts.facts(facts.command_line("python -m benchmarks.equality"))
    now["environment"] = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    kept = equal_bits.load(json_path)
    same = all(kept["facts"][name] == now[name] for name in ("versions", "environment")) if kept else False
    document = {"facts": now, "shapes": kept["shapes"] if same else {}}
    found = document["shapes"].setdefault(shape, {})
    n_vocab = equal_bits.shape_of(shape).n_vocab
    table = Table("type", "requests", "rows", "requests that differ", "the plan says")
    for kind in types:

        def save(result: dict[str, Any], kind: str = kind) -> None:
            found[kind] = result
            equal_bits.store(json_path, document)

        model = equal_bits.model_of(folder, shape, kind)
        result = equal_bits.count(model, n_vocab, number, found.get(kind, {}), save)
        table.add_row(kind, *(f"{result[name]:,}" for name in ("requests", "rows", "differ")), result["plan"])
    Console().print(table)


@click.command(help=__doc__)
@click.option("-n", "--number", default=2000, show_default=True, help="prompts of each kind; with --bits of each type")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--bits", is_flag=True, help="count rows of logits whose bits differ")
@click.option(
    "--shape", type=click.Choice([equal_bits.SMALL, *SHAPES]), default=equal_bits.SMALL, show_default=True,
    help="of the model, for --bits",
)  # fmt: skip
@click.option("--types", default=",".join(equal_bits.TYPES), show_default=True, help="types of weights, for --bits")
@click.option("--models", "folder", type=click.Path(file_okay=False, path_type=Path), help="folder to keep models in")
def main(number: int, json_path: Path | None, bits: bool, shape: str, types: str, folder: Path | None) -> None:
    if bits:
        kinds = types.split(",")
        if unknown := [kind for kind in kinds if kind not in equal_bits.TYPES]:
            raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(equal_bits.TYPES)}", param_hint="--types")
        count_bits(number, json_path, shape, kinds, folder or make_folder(cache_dir() / "equal-bits"))
        return
    gap = LogitGap()
    rows: list[dict[str, Any]] = []
    for kind in ("random ids", "questions"):
        with LLM("tiny", strategy="sequential") as llm:
            asked = prompts(kind, number, llm, gap.n_vocab)
            wanted = llm.generate(asked, GREEDY)
            other = "off" if llm.plan.config.flash_attn == "on" else "on"
        for name, options in WAYS.items():
            if "attention" in name:
                options = {**options, "flash_attn": other}
            with LLM("tiny", **options) as llm:  # type: ignore[arg-type]
                found = gaps(llm.generate(asked, GREEDY), wanted, gap)
            rows.append({"prompts": kind, "way": name, "n": number, "differ": len(found), "gaps": sorted(found)})
    gap.close()
    table = Table("prompts", "way", "outputs", "equal", "largest gap")
    for row in rows:
        equal, largest = 1 - row["differ"] / row["n"], max(row["gaps"], default=0.0)
        table.add_row(row["prompts"], row["way"], str(row["n"]), f"{equal:.2%}", f"{largest:.3f}")
    Console().print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
