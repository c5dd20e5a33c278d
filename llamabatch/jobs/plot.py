"""The picture of a job: speed and slots over time, latencies, lengths, finish reasons."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from llamabatch.jobs.stats import Point
from llamabatch.jobs.summary import Summary
from llamabatch.utils.checks import counted
from llamabatch.utils.format import duration, significant
from llamabatch.utils.histogram import Quantiles
from llamabatch.utils.plotting import INK, OURS, tidy, tint, titled

_BLUE, _GREEN, _PINK, _GREY = "#0072B2", "#009E73", "#CC79A7", "#777777"
_REASONS = {"stop": _GREEN, "length": _BLUE, "embedded": _PINK, "failed": OURS}
_BINS = 40
_UNITS = ((1.0, 1.0, "s"), (600.0, 60.0, "min"), (7200.0, 3600.0, "h"), (259200.0, 86400.0, "d"))


def figure(summary: Summary) -> Figure:
    """Returns the picture of a job: curves over time above, distributions below."""
    counts = summary.counts
    title = f"{summary.model}: {counted(counts.ok + counts.failed, 'row')} in {duration(summary.run_s)}"
    fig = titled(title, 14, 9, h_pad=0.09, wspace=0.05, hspace=0.03)
    axes: Any = fig.subplot_mosaic(
        [["speed"] * 3, ["slots"] * 3, ["latency", "lengths", "reasons"]], height_ratios=[1.25, 0.75, 1.35]
    )
    points = summary.timeline.points
    per_unit, unit = _unit(points[-1].at_s if points else 0.0)
    _speed(axes["speed"], summary, per_unit)
    _slots(axes["slots"], summary, per_unit)
    axes["slots"].set_xlabel(f"{unit} since the engine was ready")
    axes["speed"].sharex(axes["slots"])
    axes["speed"].tick_params(labelbottom=False)
    if len(points) > 1:
        axes["slots"].set_xlim(0, points[-1].at_s / per_unit)
    latencies = {"first token": (counts.ttft_s, OURS), "inter-token": (counts.inter_token_s, _GREEN)}
    _histograms(axes["latency"], latencies | {"whole row": (counts.total_s, _BLUE)}, _plain_seconds)
    axes["latency"].set_title("Latency, from a row's slot on")
    axes["latency"].set_ylabel("share of each")
    lengths = {"prompt": (counts.prompt_lengths, _GREY), "output": (counts.output_lengths, OURS)}
    _histograms(axes["lengths"], lengths, lambda value: f"{value:,.0f}")
    axes["lengths"].set_title("Length in tokens")
    _reasons(axes["reasons"], summary)
    return fig


def _unit(span_s: float) -> tuple[float, str]:
    return [(seconds_each, name) for least, seconds_each, name in _UNITS if span_s >= least or name == "s"][-1]


def rates(points: list[Point], most: int = 160) -> tuple[list[float], list[float]]:
    """Divides the time into about `most` equal spans. Returns the end of each span, and the tokens per second in the
    span."""
    every = max(1, len(points) // most)
    kept = [Point(0.0, 0, 0, 0), *points[::every]]
    if points and kept[-1] is not points[-1]:
        kept.append(points[-1])
    pairs = [(a, b) for a, b in itertools.pairwise(kept) if b.at_s > a.at_s]
    return [b.at_s for _, b in pairs], [(b.tokens - a.tokens) / (b.at_s - a.at_s) for a, b in pairs]


def _speed(ax: Any, summary: Summary, per_unit: float) -> None:
    at_s, speeds = rates(summary.timeline.points)
    mean = summary.per_second(summary.counts.generated_tokens)
    ax.set_title(f"{significant(mean)} generated tokens/s")
    if at_s:
        at = [t / per_unit for t in at_s]
        ax.fill_between(at, speeds, step="pre", color=tint(OURS, 0.8), lw=0)
        ax.step(at, speeds, where="pre", color=OURS, lw=1.6)
        ax.axhline(mean, color=INK, lw=1, ls="--")
        ax.annotate(" mean", (1, mean), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
    ax.set_ylim(0, 1.1 * max([*speeds, mean, 1.0]))
    ax.set_ylabel("tokens/s")
    tidy(ax)


def _slots(ax: Any, summary: Summary, per_unit: float) -> None:
    points = summary.timeline.points
    use = summary.timeline.slot_use
    slots = counted(summary.slots, "slot")
    ax.set_title(f"{slots}{f', {use:.0%} of them in use' if use is not None else ''}")
    at = [point.at_s / per_unit for point in points]
    running = [point.running for point in points]
    ax.fill_between(at, running, step="post", color=tint(_BLUE, 0.75), lw=0)
    ax.step(at, running, where="post", color=_BLUE, lw=1.4)
    ax.axhline(summary.slots, color=INK, lw=1, ls="--")
    ax.set_ylim(0, 1.12 * summary.slots)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_ylabel("rows at once")
    tidy(ax)


def _histograms(ax: Any, named: dict[str, tuple[Quantiles, str]], text_of: Callable[[float], str]) -> None:
    """Draws a histogram of shares for each name, over one logarithmic axis. The legend shows the medians."""
    shown = {name: (figures, color) for name, (figures, color) in named.items() if figures.n}
    values = [value for figures, _ in shown.values() for value, _ in figures.classes()]
    if not values:
        ax.text(0.5, 0.5, "nothing was generated", transform=ax.transAxes, ha="center", color=_GREY)
        ax.set_axis_off()
        return
    low, high = min(values) / 1.05, max(values) * 1.05
    edges = [low * (high / low) ** (i / _BINS) for i in range(_BINS + 1)]
    for name, (figures, color) in shown.items():
        at, counts = zip(*figures.classes(), strict=True)
        weights = [count / figures.n for count in counts]
        label = f"{name}: median {text_of(figures.at(50) or 0.0)}"
        ax.hist(at, edges, weights=weights, histtype="stepfilled", color=tint(color, 0.7), alpha=0.75)
        ax.hist(at, edges, weights=weights, histtype="step", color=color, lw=1.6, label=label)
    ax.set_xscale("log")
    tidy(ax)
    ax.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low < 100 else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value)))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.tick_params(axis="x", labelsize="small")
    ax.set_ylim(top=1.35 * ax.get_ylim()[1])
    ax.legend(frameon=False, fontsize="small", loc="upper left")


def _plain_seconds(value: float) -> str:
    """Returns a time as the short label of a tick: 5 ms, 20.4 ms, 1 s."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _reasons(ax: Any, summary: Summary) -> None:
    counts = summary.counts
    bars = dict(counts.reasons.most_common())
    embedded = counts.tasks["embedding"]
    bars |= {name: n for name, n in (("embedded", embedded), ("failed", counts.failed)) if n}
    ax.set_title("How rows ended")
    names = list(bars)[::-1]
    widths = [bars[name] for name in names]
    ax.barh(names, widths, color=[_REASONS.get(name, _GREY) for name in names], height=0.6)
    for at, width in enumerate(widths):
        ax.annotate(f" {width:,}", (width, at), va="center")
    ax.set_xlim(0, 1.2 * max([*widths, 1]))
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    tidy(ax)
    ax.grid(axis="y", visible=False)
