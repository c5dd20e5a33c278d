"""Draws a tuning report: step times by rows, and the gain."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from llamabatch.tools.tune.report import CHOSEN, Report
from llamabatch.tools.tune.table import workload
from llamabatch.utils.format import significant
from llamabatch.utils.plotting import INK, OURS, THEIRS, doublings, tidy, tint, titled

_ROOM_FOR_TEXT = 0.2  # if a bar is shorter than this share of the width, its figure is next to the bar, not inside


def figure(report: Report) -> Figure:
    """Draws three panels: tokens/s at the top left, step times below them, and the gain on the right."""
    fig = titled(f"{report.profile.model}: tuned on {report.machine.summary}", 14, 7, wspace=0.04)
    halves: Any = fig.subfigures(1, 2, width_ratios=[1.25, 1])
    upper, lower = halves[0].subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.3, 1]})
    _throughput(upper, report)
    _steps(lower, report)
    _gain(halves[1].subplots(), report)
    return fig


def _throughput(ax: Any, report: Report) -> None:
    rows = [stair.rows for stair in report.stairs]
    ax.plot(rows, [stair.tokens_per_s for stair in report.stairs], "o-", color=OURS, lw=2)
    best = report.best_rows
    at_best = next(stair for stair in report.stairs if stair.rows == best)
    what = "make the most of a pass"
    if report.latency is not None:
        what = f"keep {report.latency.limit_ms:g} ms between tokens at p95"
    ax.set_title(f"{best} rows {what}: {significant(at_best.tokens_per_s)} tokens/s")
    ax.set_ylabel("decoded tokens/s")
    ax.set_ylim(0, 1.15 * max(stair.tokens_per_s for stair in report.stairs))
    _by_rows(ax, best)


def _steps(ax: Any, report: Report) -> None:
    """Draws step times as stairs, because one more row costs either nothing or as much as a whole group of rows."""
    rows = [stair.rows for stair in report.stairs]
    steps = [stair.step_ms for stair in report.stairs]
    ax.step(rows, steps, where="pre", color=tint(OURS), lw=2)
    ax.plot(rows, steps, "o", color=OURS)
    tallest = max(steps)
    if report.latency is not None:
        gaps, limit = [gap.p95_ms for gap in report.latency.gaps], report.latency.limit_ms
        ax.plot(rows, gaps, "^-", color=THEIRS, lw=1.2)
        ax.text(rows[-1], gaps[-1], "between tokens, p95 ", ha="right", va="bottom", color=THEIRS)
        ax.axhline(limit, color=INK, lw=1, ls=":")
        ax.text(rows[0], limit, f"{limit:g} ms", va="bottom", color=INK)
        tallest = max(*gaps, *steps, limit if limit < 3 * max(gaps) else 0.0)
    ax.set_ylim(0, 1.15 * tallest)
    doublings(ax, rows)
    ax.set_ylabel("ms a step")
    ax.set_xlabel("rows: sequences that one pass over the weights serves")
    _by_rows(ax, report.best_rows)


def _by_rows(ax: Any, best: int) -> None:
    ax.axvline(best, color=INK, lw=1, ls="--")
    tidy(ax)


def _gain(ax: Any, report: Report) -> None:
    """Draws two bars for each workload, scaled so that the longer bar has length 1. There is no common scale, since the
    tokens/s of the workloads differ by orders of magnitude."""
    names = report.gain.measures[::-1]
    medians = [report.gain.choice.median(label) for label in (report.gain.choice.default, CHOSEN)]
    for at, name in enumerate(names):
        count = report.many if name.endswith("many") else 1
        speeds = [count * 1000 / figures[name] for figures in medians]
        for speed, offset, color in zip(speeds, (-0.19, 0.19), (THEIRS, OURS), strict=True):
            share = speed / max(speeds)
            inside = share > _ROOM_FOR_TEXT
            ax.barh(at - offset, share, height=0.34, color=color)
            ax.text(
                0.01 if inside else share + 0.01, at - offset, f"{significant(speed)}/s", va="center",
                color="white" if inside else color, weight="bold",
            )  # fmt: skip
        ax.text(1.02, at, f"{significant(report.speed_up(name))} ×", va="center", weight="bold", size=12)
    ax.set_yticks(range(len(names)), [_wrapped(workload(name, report.many)) for name in names])
    ax.set_xticks([])
    ax.set_xlim(0, 1.15)
    ax.set_title("Chosen, against llama.cpp's defaults (grey)")
    tidy(ax)
    ax.grid(visible=False)


def _wrapped(text: str) -> str:
    return text.replace(", beside", ",\nbeside")
