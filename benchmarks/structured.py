"""Compares constrained requests with unconstrained ones: 32 in one batch, in alternating rounds.

    python -m llamabatch synth llama-3.2-1b /tmp/1b.gguf
    python -m benchmarks.structured /tmp/1b.gguf --json benchmarks/results/structured.json

All requests of a round have the same form and generate the same number of tokens. Free requests ignore
end-of-generation tokens; constrained ones have forms that are too long to end. The ratio compares generated tokens/s,
constrained over free, within a round. The interval is a 95 % interval of the median ratio (order statistics). Random
weights sample random tokens, so strings and whitespace are much longer than a trained model's.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from llamabatch import LLM, SamplingParams
from llamabatch.planning.cpu import cpu_name

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any] | None] = {
    "free": None,
    "JSON records": {"json": {"type": "array", "items": RECORD, "minItems": 10_000}},
    "regex": {"regex": r"([a-z]{1,12}( [0-9]{1,5})?[.,] ){10000}"},
    "Lark": {
        "grammar": """
        start: line{10000}
        line: NAME " = " (NUMBER | NAME) "\\n"
        NAME: /[a-z]+( [a-z]+)*/
        NUMBER: /-?[0-9]+/
    """
    },
}


def tokens_per_s(llm: LLM, form: dict[str, Any] | None, rows: int, n_tokens: int, rng: random.Random) -> float:
    """Returns the generated tokens/s of one round, with `rows` new prompts of 32 random tokens."""
    prompts = [[rng.randrange(300, 1000) for _ in range(32)] for _ in range(rows)]  # ordinary in every vocabulary
    params = SamplingParams(
        structured_outputs=form,
        ignore_eos=form is None,
        max_tokens=n_tokens,
        temperature=1.0,
        seed=rng.randrange(2**32),
    )
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, errors="return")
    seconds = time.perf_counter() - start
    wrong = [out.error or out.text for out in outputs if len(out.token_ids) != n_tokens]
    if wrong:
        raise click.ClickException(f"a request ended early: {wrong[0][:200]}")
    return rows * n_tokens / seconds


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns an interval of the median by order statistics; the whole range of fewer than eight ratios."""
    ordered, n = sorted(ratios), len(ratios)
    cut = max(0, int(n / 2 - 0.98 * n**0.5))
    return ordered[cut], ordered[n - 1 - cut]


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.argument("model")
@click.option("--rows", default=32, show_default=True, help="Requests in a batch.")
@click.option("--tokens", default=64, show_default=True, help="Tokens that each generates.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
def main(model: str, rows: int, tokens: int, rounds: int, path: Path | None) -> None:
    rng = random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in FORMS}
    with LLM(model, strategy="batched", n_slots=rows, n_ctx=tokens + 32) as llm:
        for form in FORMS.values():  # warm-up: compiles forms, grows the context, builds graphs
            tokens_per_s(llm, form, rows, 4, rng)
        for _ in range(rounds):
            for name, form in FORMS.items():
                speeds[name].append(tokens_per_s(llm, form, rows, tokens, rng))
        plan = {"n_threads": llm.plan.config.n_threads, "n_slots": llm.plan.config.n_slots}
    table = Table(title=f"{rows} requests of {tokens} tokens, {Path(model).name}, {cpu_name()}", title_justify="left")
    for heading in ("form", "tokens/s", "of free", "interval"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    results = {}
    for name, each in speeds.items():
        ratios = [one / free for one, free in zip(each, speeds["free"], strict=True)]
        low, high = interval(ratios)
        results[name] = {"tokens_per_s": each, "ratio": statistics.median(ratios), "interval": [low, high]}
        table.add_row(
            name, f"{statistics.median(each):.1f}", f"{statistics.median(ratios):.3f}", f"{low:.3f}..{high:.3f}"
        )
    Console().print(table)
    if path is not None:
        machine = {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()}
        facts = {"machine": machine, "model": Path(model).name, "rows": rows, "tokens": tokens, **plan}
        path.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
