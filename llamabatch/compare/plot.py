"""The picture of a comparison: throughput against latency, batch sizes, and requests over slots."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Ellipse
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from llamabatch.checks import counted
from llamabatch.compare import timeline
from llamabatch.compare.figures import significant, times
from llamabatch.compare.measure import BASELINE
from llamabatch.compare.report import REFERENCE, Report, Row, Sweep
from llamabatch.compare.style import INK, PALE, color, tint

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#AAAAAA",
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "svg.fonttype": "none",
}
_LOG_FROM = 4.0  # largest over smallest figure: above this an axis is logarithmic


def draw(report: Report, path: Path) -> None:
    """Writes the picture; its kind follows from the ending of the name."""
    with rc_context(STYLE):
        figure(report).savefig(path, dpi=140, facecolor="white")


def figure(report: Report) -> Figure:
    """Strategies on the left, their time lines on the right; nothing but a title if nothing was measured."""
    panels = timeline.shown(report)
    heights = timeline.heights(panels)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.07, wspace=0.03)
    fig = Figure(figsize=(16, max(7.5, 1.6 + 0.72 * sum(heights))), layout=layout)
    _title(fig, report)
    if not panels:
        return fig
    halves: Any = fig.subfigures(1, 2, width_ratios=[1, 1.25])
    left, right = halves
    if report.sweep is None:
        upper, lower = left.subplots(2, 1, gridspec_kw={"height_ratios": [1.7, 1]})
        _scatter(upper, report)
        _finished(lower, report)
    else:
        upper, middle, lower = left.subplots(3, 1, gridspec_kw={"height_ratios": [2.6, 1, 1]})
        _scatter(upper, report)
        _by_size(middle, lower, report.sweep)
    axes = right.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    timeline.draw(list(axes[:, 0]), panels)
    return fig


def _title(fig: Figure, report: Report) -> None:
    n = len(report.workload.prompts)
    fig.suptitle(
        f"{report.model}: {counted(n, 'prompt')} at once on {report.machine.summary}",
        x=0.012,
        ha="left",
        size=15,
        weight="bold",
    )
    if report.advice is not None:
        fig.supxlabel(
            "\n".join(textwrap.wrap(report.advice.sentence, 170)), x=0.012, ha="left", size=11.5, style="italic"
        )


# --- throughput against latency -------------------------------------------------------------------------------------


def _scatter(ax: Any, report: Report) -> None:
    """A point a strategy, with a line to its p95."""
    rows = [row for row in report.rows if row.measured and row.latency.p50]
    if not rows:
        return
    ax.set_title(_finding(rows))
    for setter, values in (
        (ax.set_xscale, [at for row in rows for at in (row.latency.p50, row.latency.p95) if at]),
        (ax.set_yscale, [row.tokens_per_s for row in rows]),
    ):
        if max(values) / min(values) > _LOG_FROM:
            setter("log")
    for row in rows:
        p50, p95 = row.latency.p50 or 0.0, row.latency.p95 or 0.0
        ax.plot([p50, p95], [row.tokens_per_s] * 2, color=color(row), lw=2.5, alpha=0.35, solid_capstyle="round")
        face = "none" if row.strategy == "auto" else color(row)
        size = 260 if row.strategy == "auto" else 110  # a ring around the point of what it chose
        ax.scatter([p50], [row.tokens_per_s], s=size, facecolor=face, edgecolor=color(row), linewidth=1.6, zorder=3)
    ax.margins(x=0.12, y=0.16)
    _ideal_corner(ax)
    _label(ax, rows)
    ax.set_xlabel("latency of a request in seconds: point p50, line to p95")
    ax.set_ylabel("generated tokens/s")
    tidy(ax)


def _finding(rows: list[Row]) -> str:
    """The title: the fastest, against what people do today."""
    best = max(rows, key=lambda row: row.tokens_per_s)
    today = next((row for row in rows if row.strategy in (BASELINE, REFERENCE)), rows[0])
    if best.tokens_per_s < 1.05 * today.tokens_per_s:
        return f"Nothing makes more tokens/s than {today.name}"
    return f"{best.name}: {times(best.tokens_per_s / today.tokens_per_s)} × the tokens/s of {today.name}"


def _ideal_corner(ax: Any) -> None:
    for radius in (0.15, 0.3, 0.45):
        corner = Ellipse((0, 1), 2 * radius, 2 * radius, transform=ax.transAxes, color="#F0E442", alpha=0.13, lw=0)
        ax.add_patch(corner)
    ax.text(0.012, 0.985, "ideal:\nmuch, soon", transform=ax.transAxes, va="top", size="small", style="italic")


def _label(ax: Any, rows: list[Row]) -> None:
    """Names in a column at the right, in the order of the points and apart from each other."""
    to_axes = ax.transData + ax.transAxes.inverted()
    ax.autoscale_view()
    at = {row.name: float(to_axes.transform((row.latency.p50, row.tokens_per_s))[1]) for row in rows}
    ordered = sorted(rows, key=lambda row: at[row.name])
    for row, y in zip(ordered, spread_out([at[row.name] for row in ordered], 0.058), strict=True):
        ax.annotate(
            f"{row.name}: {significant(row.tokens_per_s)}/s",
            xy=(row.latency.p50, row.tokens_per_s),
            xytext=(1.025, y),
            textcoords="axes fraction",
            va="center",
            color=color(row),
            weight="bold",
            arrowprops={
                "arrowstyle": "-",
                "color": color(row),
                "lw": 0.7,
                "alpha": 0.6,
                "shrinkB": 6,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def spread_out(places: list[float], gap: float) -> list[float]:
    """Rising places from 0 to 1, moved as little as needs be to lie `gap` apart.

    Isotonic regression of places[i] - i * gap: neighbours that would come too close move about their common middle.
    """
    groups: list[tuple[float, int]] = []  # (mean, members)
    for number, place in enumerate(places):
        groups.append((place - number * gap, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (low, n), (high, m) = groups[-2:]
            groups[-2:] = [((low * n + high * m) / (n + m), n + m)]
    bases = [mean for mean, members in groups for _ in range(members)]
    highest = 1.0 - gap * max(0, len(places) - 1)
    return [max(0.0, min(base, highest)) + number * gap for number, base in enumerate(bases)]


# --- requests done over time ----------------------------------------------------------------------------------------


def _finished(ax: Any, report: Report) -> None:
    """How many requests were done by when: steep is fast, early is soon."""
    for row in report.rows:
        if row.measurement is None or row.strategy == "auto":
            continue
        done = sorted(output.timings.total_s for output in row.measurement.outputs if output.error is None)
        counts = list(range(len(done) + 1))
        ax.step([0.0, *done], counts, where="post", color=color(row), lw=2)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_title("Requests done over time")
    ax.set_xlabel("seconds since all prompts were handed over")
    ax.set_ylabel("requests done")
    tidy(ax)


# --- batch sizes ----------------------------------------------------------------------------------------------------


def _by_size(upper: Any, lower: Any, sweep: Sweep) -> None:
    """Throughput above, latency below, over the number of slots; the knee in both."""
    rows = [row for row in sweep.rows if row.measured]
    if not rows:
        return
    slots = [row.n_slots for row in rows]
    base = color(rows[0])
    upper.plot(slots, [row.tokens_per_s for row in rows], "o-", color=base, lw=2)
    first = rows[0]
    linear = [first.tokens_per_s * n / first.n_slots for n in slots]
    upper.plot(slots, linear, ":", color="#999999", lw=1.3)
    upper.set_ylim(0, 1.22 * max(row.tokens_per_s for row in rows))
    upper.set_ylabel("tokens/s")
    upper.set_title(_paying(sweep.knee, slots))
    lower.fill_between(
        slots,
        [row.latency.p50 or 0 for row in rows],
        [row.latency.p95 or 0 for row in rows],
        color=tint(base, 0.7),
        lw=0,
    )
    lower.plot(slots, [row.latency.p50 or 0 for row in rows], "o-", color=base, lw=2)
    lower.set_ylim(bottom=0)
    lower.set_ylabel("latency, s\np50 to p95")
    lower.set_xlabel("slots of the batched strategy (dotted: if each slot were as fast as one alone)")
    for ax in (upper, lower):
        ax.set_xscale("log", base=2)
        ax.set_xticks(slots, [str(n) for n in slots])
        ax.xaxis.set_minor_formatter(NullFormatter())
        if sweep.knee:
            ax.axvline(sweep.knee, color=INK, lw=1, ls="--")
        tidy(ax)
    upper.tick_params(labelbottom=False)
    if sweep.knee:
        upper.annotate(" knee", (sweep.knee, 1), xycoords=("data", "axes fraction"), va="top", style="italic")


def _paying(knee: int | None, slots: list[int]) -> str:
    if len(slots) == 1:
        return f"{counted(slots[0], 'slot')}, the only number that was measured"
    if knee == slots[-1]:
        return f"More slots pay, up to {knee}, the most that were tried"
    return f"More slots pay up to {knee}" if knee != slots[0] else f"More slots than {knee} do not pay"


# --- details --------------------------------------------------------------------------------------------------------


def tidy(ax: Any) -> None:
    """Plain numbers at the ticks, also on logarithmic axes, and no frame where no axis is."""
    ax.grid(color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for axis, log in ((ax.xaxis, ax.get_xscale() == "log"), (ax.yaxis, ax.get_yscale() == "log")):
        if log and not axis.get_major_locator().__class__.__name__.startswith("Fixed"):
            axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
