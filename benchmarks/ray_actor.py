"""Compares an actor of Ray Data with LLM.generate in one process, and two actors with two instances.

    python -m benchmarks.ray_actor [--model tiny] [--part one|two]... [--rows 2000] [--rounds 3] [--json FILE]

Each round computes the same rows both ways; the way that runs first alternates. Starts do not count: `list` measures
LLM.generate alone, and `actor` measures from the begin of the first batch, in an actor with a loaded engine, to the end
of the last batch. `overall_s` is the time of the whole dataset, including the start of the actors and their loading.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import facts
from llamabatch import LLM, SamplingParams
from llamabatch.planning.machine import Machine

MOST_SLOWER = 0.03
"""The largest allowed share by which one actor may take longer than the list."""


PARTS = {"one": 1, "two": 2}
"""The number of actors, and of the list's instances, by part."""


def prompts_of(n_rows: int) -> list[str]:
    """Returns prompts of about 10 tokens that differ from their beginning on."""
    return [f"{i} guests came to the inn, and told:" for i in range(n_rows)]


def of_list(model: str, prompts: list[str], params: SamplingParams, **options: Any) -> dict[str, float]:
    """Returns seconds and generated tokens of LLM.generate."""
    with LLM(model, isolate=True, **options) as llm:
        llm.generate(prompts[:2], params)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(len(each.token_ids) for each in outputs)}


def of_actors(
    model: str, prompts: list[str], params: SamplingParams, n_actors: int, **options: Any
) -> dict[str, float]:
    """Returns seconds and generated tokens of Ray Data with `n_actors` actors, from the first batch to the last."""
    import pyarrow
    import ray

    from llamabatch.integrations import ray as over_ray

    plain = over_ray._Actor

    class Timed(plain):  # type: ignore[misc,valid-type]
        """Loads the engine before the first batch, and adds the begin and end times to each batch."""

        def __init__(self, generate: Any) -> None:
            super().__init__(generate)
            generate._llm().generate(prompts[:2], params)

        def __call__(self, batch: Any) -> Any:
            begin = time.time()
            made = super().__call__(batch)
            end = time.time()
            return made.append_column("begin", [[begin] * len(made)]).append_column("end", [[end] * len(made)])

    output = {"text": "made", "n_tokens": "tokens", "error": "error"}
    dataset = ray.data.from_arrow(pyarrow.table({"id": list(range(len(prompts))), "prompt": prompts}))
    over_ray._Actor = Timed  # type: ignore[misc]
    start = time.perf_counter()
    try:
        made = over_ray.generate(
            *(dataset, model, params), prompt="{{ prompt }}", output=output, id="id", chat=False, concurrency=n_actors,
            **options,
        ).to_pandas()  # fmt: skip
    finally:
        over_ray._Actor = plain  # type: ignore[misc]
    overall = time.perf_counter() - start
    if made["error"].notna().any() or sorted(made["id"]) != list(range(len(prompts))):
        raise click.ClickException(f"rows failed or are missing: {made['error'].dropna().unique()[:3]}")
    seconds = float(made["end"].max() - made["begin"].min())
    return {"seconds": seconds, "tokens": int(made["tokens"].sum()), "overall_s": overall}


def measure(
    model: str,
    parts: Sequence[str],
    n_rows: int,
    n_tokens: int,
    n_rounds: int,
    n_slots: int,
    threads: int,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Returns for each part its rounds, the median ratio of times, and the least and largest ratio.

    `save` gets the result so far after each round.
    """
    import ray

    prompts = prompts_of(n_rows)
    params = SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # short, for Ray's sockets
        ray.init(
            num_cpus=threads + 2, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False,
            _temp_dir=folder,
        )  # fmt: skip
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            for name in parts:
                n = PARTS[name]
                if n > threads:
                    click.echo(f"{name}: {n} engines need {n} threads, and there is {threads}; left out", err=True)
                    continue
                engine = {"n_slots": n_slots, "n_threads": threads // n}
                rounds: list[dict[str, Any]] = []
                for number in range(n_rounds):
                    ways = {
                        "list": lambda engine=engine, n=n: of_list(model, prompts, params, instances=n, **engine),
                        "actor": lambda engine=engine, n=n: of_actors(model, prompts, params, n, **engine),
                    }
                    order = list(ways) if number % 2 == 0 else list(ways)[::-1]
                    made = {way: ways[way]() for way in order}
                    rounds.append(made | {"ratio": made["actor"]["seconds"] / made["list"]["seconds"]})
                    click.echo(f"{name}, round {number + 1}: {_line(made)}, {rounds[-1]['ratio']:.3f}", err=True)
                    ratios = [each["ratio"] for each in rounds]
                    found[name] = {
                        "rounds": rounds, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)
                    }  # fmt: skip
                    save(found)
        finally:
            ray.shutdown()
    return found


def _line(made: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{way} {made[way]['tokens'] / made[way]['seconds']:,.0f} tokens/s" for way in ("list", "actor"))


@click.command()
@click.option("--model", default="tiny", show_default=True, help="A GGUF file; llamabatch synth makes one.")
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, help="Actors; default: both.")
@click.option("--rows", type=click.IntRange(min=1), default=2000, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Of each row.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--slots", type=click.IntRange(min=1), default=32, show_default=True, help="Of each engine.")
@click.option("--threads", type=click.IntRange(min=1), help="Of all engines; default: the cores of this machine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    model: str,
    parts: tuple[str, ...],
    rows: int,
    tokens: int,
    rounds: int,
    slots: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Measure one actor against LLM.generate, and two against two instances, alternating."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    threads = threads or Machine.here().cores
    about = facts.facts(facts.command_line("python -m benchmarks.ray_actor"))
    about["options"] = {"rows": rows, "tokens": tokens, "rounds": rounds, "slots": slots, "threads": threads}
    about["options"]["model"] = Path(model).name

    def save(found: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(about | {"parts": found}, indent=1) + "\n", encoding="utf-8")

    found = measure(model, parts or tuple(PARTS), rows, tokens, rounds, slots, threads, save)
    for name, each in found.items():
        target = f"; target: at most {1 + MOST_SLOWER:.2f}" if name == "one" else ""
        spread = f"{each['least']:.3f} to {each['most']:.3f}"
        click.echo(f"{name}: {each['ratio']:.3f} times the time of the list ({spread}){target}")


if __name__ == "__main__":
    main()
