"""The picture of a benchmark: a panel for each workload, a bar for each peer, a dot for each round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import (
    LIMIT,
    LOOP,
    OURS,
    PATCHED,
    PATCHED_BEST,
    STOCK,
    STOCK_BEST,
    median_gap,
    median_tps,
)
from benchmarks.rounds import Series
from llamabatch.utils.format import seconds, significant
from llamabatch.utils.plotting import INK, save

STYLE = {
    "font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.edgecolor": "#AAAAAA", "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "svg.fonttype": "none",
}  # fmt: skip
# Okabe and Ito's palette, as in llamabatch/tools/compare/plot.py
_COLORS = {
    OURS: "#D55E00", STOCK_BEST: "#0072B2", STOCK: "#56B4E9", PATCHED_BEST: "#009E73", PATCHED: "#8CCFBB",
    LOOP: "#777777", LIMIT: "#DDDDDD",
}  # fmt: skip
_OTHER = "#CC79A7"
_COLUMNS = 3


def draw(series: Sequence[Series], title: str, path: Path) -> None:
    """Writes the picture in the format that the suffix of `path` names."""
    save(lambda: figure(series, title), path, style=STYLE)


def figure(series: Sequence[Series], title: str) -> Figure:
    """Returns the figure. It has only the title if nothing was measured."""
    workloads = list(dict.fromkeys(row.workload for row in series if row.results))
    columns = min(_COLUMNS, max(1, len(workloads)))
    lines = -(-len(workloads) // columns)
    fig = Figure(figsize=(5.2 * columns, 0.8 + 2.9 * max(1, lines)), layout="constrained")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    for at, workload in enumerate(workloads):
        axes = fig.add_subplot(lines, columns, at + 1)
        _panel(axes, workload, [row for row in series if row.workload == workload and row.results])
    return fig


def _panel(axes: Any, workload: str, rows: list[Series]) -> None:
    rows = sorted(rows, key=lambda row: median_tps(row) or 0.0)
    medians = [median_tps(row) or 0.0 for row in rows]
    axes.barh([row.peer for row in rows], medians, color=[_COLORS.get(row.peer, _OTHER) for row in rows], height=0.7)
    for at, (row, middle) in enumerate(zip(rows, medians, strict=True)):
        speeds = [result.tokens_per_s for result in row.results]
        axes.plot(speeds, [at] * len(speeds), "o", color=INK, markersize=2.5, alpha=0.6)
        gap = median_gap(row)
        note = significant(middle) + (f", p95 gap {seconds(gap)}" if gap else "")
        axes.annotate(note, (max([middle, *speeds]), at), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_title(workload, loc="left")
    axes.set_xlabel("generated tokens/s")
    axes.set_xlim(0, 1.5 * max(medians))
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
