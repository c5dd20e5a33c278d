"""The picture of benchmarks/kernels.py: step times over rows, a panel for each model and context, the floor in grey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from benchmarks.plot import STYLE
from llamabatch.utils.plotting import save

STOCK, STOCK_OFF, PATCHED, NO_AMX = "stock", "stock, no flash attention", "patched", "patched, no AMX"
_COLORS = (
    "#0072B2",
    "#56B4E9",
    "#D55E00",
    "#009E73",
)  # Okabe and Ito's palette, as in llamabatch/tools/compare/plot.py
_MARKS = ("o", "s", "^", "v")
_TICKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Point:
    """Seconds of a step with each library, and the least seconds of reading (`read_s`) and products (`multiply_s`)."""

    model: str
    context: int
    rows: int
    seconds: dict[str, float]
    read_s: float
    multiply_s: float

    @property
    def floor_s(self) -> float:
        return max(self.read_s, self.multiply_s)

    def __str__(self) -> str:
        times = "".join(f"{1000 * seconds:10.2f}" for seconds in self.seconds.values())
        gain = self.seconds[STOCK] / self.seconds[PATCHED]
        return f"{self.model:6}{self.context:8}{self.rows:6}{times}{1000 * self.floor_s:10.2f}{gain:8.2f}"


def draw(points: Sequence[Point], series: Sequence[str], path: Path) -> None:
    """Writes the picture in the format that the suffix of `path` names."""
    save(lambda: figure(points, series), path, style=STYLE)


def figure(points: Sequence[Point], series: Sequence[str]) -> Figure:
    models = list(dict.fromkeys(point.model for point in points))
    contexts = sorted({point.context for point in points})
    fig = Figure(figsize=(3.6 * max(1, len(contexts)), 0.9 + 2.8 * max(1, len(models))), layout="constrained")
    fig.suptitle("Milliseconds of a decode step", x=0.01, ha="left", fontsize=11)
    for at, model in enumerate(models):
        for column, context in enumerate(contexts):
            chosen = [point for point in points if (point.model, point.context) == (model, context)]
            if chosen:
                axes = fig.add_subplot(len(models), len(contexts), at * len(contexts) + column + 1)
                _panel(axes, chosen, series)
                axes.set_title(f"{model}, {context:,} tokens", loc="left")
                if at == column == 0:
                    axes.legend(frameon=False, fontsize=8)
    return fig


def _panel(axes: Any, points: Sequence[Point], series: Sequence[str]) -> None:
    rows = [point.rows for point in points]
    for name, color, mark in zip(series, _COLORS, _MARKS, strict=False):
        times = [1000 * point.seconds[name] for point in points]
        axes.plot(rows, times, mark + "-", color=color, label=name, markersize=3, linewidth=1.2)
    floor = [1000 * point.floor_s for point in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.fill_between(rows, floor, min(floor) / 2, color="#DDDDDD", label="floor", linewidth=0)
    axes.set_ylim(bottom=min(floor) / 2)
    axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("rows")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
