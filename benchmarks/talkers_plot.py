"""The picture of benchmarks/talkers.py: the talkers' gaps over the long prompts' first tokens, a curve for each server.

python -m benchmarks.talkers_plot FILE.json PICTURE
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure

from benchmarks import report
from benchmarks.talkers_curve import Point, read
from llamabatch.utils.plotting import OURS, save, tidy

_PANELS = {"p99_gap_s": "99 of 100 gaps are shorter", "max_gap_s": "The longest gap"}
_CURVES = {
    report.OURS: (OURS, "o", "llamabatch, prefill_share"),
    report.STOCK: ("#0072B2", "s", "llama-server, stock, -b and -ub"),
}


def draw(points: Sequence[Point], machine: str, path: Path) -> None:
    """Writes the picture in the format that the suffix of `path` names."""
    save(lambda: figure(points, machine), path)


def figure(points: Sequence[Point], machine: str) -> Figure:
    """Returns two panels with logarithmic axes, ms over seconds. Points nearer to the lower left corner are better."""
    fig = Figure(figsize=(10.4, 4.4), layout="constrained")
    fig.suptitle(f"Two prompts of 1,500 tokens beside eight talkers, {machine}", x=0.01, ha="left", fontsize=11)
    axes: Any = None
    for at, (name, title) in enumerate(_PANELS.items()):
        axes = fig.add_subplot(1, len(_PANELS), at + 1, sharey=axes)
        for server, (color, mark, label) in _CURVES.items():
            _curve(axes, [point for point in points if point.server == server], name, color, mark, label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        tidy(axes)
        axes.margins(0.16)
        axes.set_title(title)
        axes.set_xlabel("first token of the long prompts, seconds")
        axes.set_ylabel("gap between a talker's tokens, ms")
        if at == 0 and points:
            axes.legend(frameon=False, fontsize=8.5)
    return fig


def _curve(axes: Any, points: Sequence[Point], name: str, color: str, mark: str, label: str) -> None:
    points = sorted(points, key=lambda point: point.value)
    if not points:
        return
    first, gaps = [point.first_s for point in points], [1000 * point.gaps[name] for point in points]
    axes.plot(first, gaps, mark + "-", color=color, label=label, markersize=5, linewidth=1.4)
    for point, x, y in zip(points, first, gaps, strict=True):
        text = f"{point.value:g}"
        axes.annotate(text, (x, y), xytext=(6, 5), textcoords="offset points", color=color, fontsize=8.5)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("picture", type=click.Path(path_type=Path, dir_okay=False))
def main(file: Path, picture: Path) -> None:
    """Draw the curves of FILE into PICTURE."""
    draw(*read(file), picture)


if __name__ == "__main__":
    main()
