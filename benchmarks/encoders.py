"""Measures encoder passes over pictures, with the weights as they are stored and in the layouts of the CPU's kernels.

    python -m benchmarks.encoders [--rounds 3] [--shape NAME] [--json FILE]

The encoders have random weights. The two layouts take turns with the same pictures. The figures are the median seconds
of a pass, and the relative distance of its embeddings to those of the same weights in 32 bits.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import places
from benchmarks.facts import command_line, facts
from benchmarks.pictures import N_EMBD, SHAPE
from llamabatch import LLM
from llamabatch.llama import library
from llamabatch.llama.projector import Projector
from llamabatch.media.pictures import read_picture
from llamabatch.planning.machine import Machine
from llamabatch.request.media import Media
from llamabatch.tools.synth.projectors import PROJECTORS, ProjectorShape, write_projector

SHAPES = {
    "CLIP ViT-B/16, 224 pixels": SHAPE,
    "a tile of SmolVLM-256M, 512 pixels": replace(SHAPE, kind="gemma3", image_size=512, n_merge=4),
    "Gemma 3, 896 pixels": PROJECTORS["gemma-3"],
}
TYPES = ("F16", "BF16", "Q8_0")


def passes(projector: Projector, media: list[Media]) -> tuple[list[float], Any]:
    """Returns the seconds of each picture, and the embeddings of the first one."""
    seconds, rows = [], []
    for each in media:
        began = time.perf_counter()
        found = projector.embeddings(each, 0)
        seconds.append(time.perf_counter() - began)
        assert found is not None
        rows.append(found.rows)
    return seconds, rows[0]


def measure(model: Any, folder: Path, shape: ProjectorShape, weights: str, rounds: int) -> dict[str, Any]:
    path = folder / "mmproj.gguf"
    write_projector(path, shape, N_EMBD, weights=weights)
    options: dict[str, Any] = {"n_embd": N_EMBD, "n_threads": Machine.here().cores, "use_gpu": False}
    rng = np.random.default_rng(0)
    size = (shape.image_size, shape.image_size, 3)
    media = [read_picture(rng.integers(0, 256, size, dtype=np.uint8)) for _ in range(rounds + 1)]
    found: dict[str, list[float]] = {"stored": [], "repacked": []}
    rows: dict[str, Any] = {}
    projectors = {
        name: Projector(path, library.load(), model.handle, repacks=name == "repacked", **options) for name in found
    }
    for number, each in enumerate(media):  # the first picture is a warm-up
        for name in sorted(found, reverse=bool(number % 2)):
            seconds, own = passes(projectors[name], [each])
            if number:
                found[name] += seconds
            else:
                rows[name] = own
    for projector in projectors.values():
        projector.close()
    write_projector(path, shape, N_EMBD, weights=weights, widened=True)
    exact = Projector(path, library.load(), model.handle, **options)
    _, wanted = passes(exact, media[:1])
    exact.close()
    far = {name: float(np.linalg.norm(own - wanted) / np.linalg.norm(wanted)) for name, own in rows.items()}
    return {
        **{f"{name}_s": round(statistics.median(seconds), 3) for name, seconds in found.items()},
        **{f"{name}_from_f32": float(f"{distance:.2g}") for name, distance in far.items()},
    }


@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), help="Only this; may be repeated.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(rounds: int, shapes: tuple[str, ...], json_file: Path | None) -> None:
    """Measure encoder passes with stored and with repacked weights."""
    report: dict[str, Any] = facts(command_line("python -m benchmarks.encoders"))
    with LLM(str(places.synth_model(click.echo)), n_slots=1, n_ctx=64) as llm, tempfile.TemporaryDirectory() as folder:
        model = llm._client.model
        for name in shapes or SHAPES:
            for weights in TYPES:
                found = measure(model, Path(folder), SHAPES[name], weights, rounds)
                report.setdefault("passes", []).append({"shape": name, "weights": weights, **found})
                click.echo(f"{name}, {weights}: {json.dumps(found)}")
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
