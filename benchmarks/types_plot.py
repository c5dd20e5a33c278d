"""The picture of benchmarks/types.py: a row of panels for each shape, a panel for each point, two bars a type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.ik import NAME as IK
from benchmarks.plot import STYLE
from llamabatch.utils.format import significant
from llamabatch.utils.plotting import INK, THEIRS, save, tidy, tint
from llamabatch.utils.plotting import OURS as ORANGE

OURS, STOCK = "ours", "stock"
ROWS, PROMPT = (1, 8, 32), 1500
POINTS = (*(f"{n} rows" for n in ROWS), "prompt")


def tokens_per_s(cell: dict[str, Any], point: str, side: str) -> float:
    tokens = PROMPT if point == "prompt" else int(point.split()[0])
    return float(tokens / cell["seconds"][point][side])


def gain(cell: dict[str, Any], point: str, side: str = STOCK) -> float:
    """Returns the ratio of our speed to that of another side."""
    return float(cell["seconds"][point][side] / cell["seconds"][point][OURS])


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture in the format that the suffix of `path` names."""
    save(lambda: figure(cells), path, style=STYLE)


def figure(cells: Sequence[dict[str, Any]]) -> Figure:
    """Returns the figure. It has only the title if nothing was measured."""
    shapes = list(dict.fromkeys(cell["shape"] for cell in cells))
    most = max((sum(cell["shape"] == shape for cell in cells) for shape in shapes), default=0)
    fig = Figure(figsize=(13, 0.9 + (0.8 + 0.22 * most) * max(1, len(shapes))), layout="constrained")
    fig.suptitle("Tokens/s of each type of weights, and times of stock llama.cpp", x=0.01, ha="left", fontsize=11)
    for row, shape in enumerate(shapes):
        chosen = [cell for cell in cells if cell["shape"] == shape][::-1]  # the first one on top
        for column, point in enumerate(POINTS):
            axes = fig.add_subplot(len(shapes), len(POINTS), row * len(POINTS) + column + 1)
            _panel(axes, chosen, point)
            axes.set_title(f"{shape}, {point}".replace("1 rows", "1 row"), loc="left")
            if column:
                axes.set_yticklabels([])
            if row == column == 0:
                axes.legend(frameon=False, fontsize=8, loc="lower right")
    return fig


def _panel(axes: Any, cells: Sequence[dict[str, Any]], point: str) -> None:
    places = range(len(cells))
    ours, theirs = ([tokens_per_s(cell, point, side) for cell in cells] for side in (OURS, STOCK))
    axes.barh(places, ours, color=tint(ORANGE, 0.2), height=0.75, label="llamabatch")
    axes.barh(places, theirs, color=THEIRS, height=0.3, label="stock")
    fork = {at: tokens_per_s(cell, point, IK) for at, cell in enumerate(cells) if IK in cell["seconds"][point]}
    if fork:
        axes.plot([*fork.values()], [*fork], "|", color=INK, markersize=9, markeredgewidth=1.5, label=IK)
    for at, cell in enumerate(cells):
        axes.annotate(
            f"{significant(ours[at])}, {gain(cell, point):.2f} x", (max(ours[at], theirs[at], fork.get(at, 0)), at),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5,
        )  # fmt: skip
    axes.set_yticks(places, [cell["type"] for cell in cells])
    axes.set_xlim(0, 1.45 * max([*ours, *theirs, *fork.values()]))
    axes.tick_params(axis="y", length=0)
    tidy(axes)
