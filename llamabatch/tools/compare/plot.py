"""Draws a comparison: throughput against latency, batch sizes, and time lines of the slots."""

from __future__ import annotations

import heapq
import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Patch
from matplotlib.transforms import offset_copy

from llamabatch.request.outputs import RequestOutput
from llamabatch.tools.compare.measure import BASELINE
from llamabatch.tools.compare.report import REFERENCE, Report, Row, Sweep
from llamabatch.utils.checks import counted
from llamabatch.utils.format import seconds, significant, times
from llamabatch.utils.plotting import INK, OURS, PALE, THEIRS, doublings, tidy, tint, titled

_COLORS = {
    "baseline": THEIRS,
    "sequential": "#0072B2",
    "length-sorted": "#56B4E9",
    "interleaved": "#CC79A7",
    "static": "#E69F00",
    "batched": OURS,
    "multi-instance": "#009E73",
    "auto": "#000000",
}


def color(row: Row) -> str:
    """Returns the color of the row's strategy, the same in all panels."""
    return _COLORS.get(row.strategy, INK)


_LOG_FROM = 4.0  # an axis is logarithmic if its largest figure is more than this multiple of its smallest


def figure(report: Report) -> Figure:
    """Draws strategies on the left and their time lines on the right. If nothing was measured, draws only the title."""
    panels = shown(report)
    heights = lane_heights(panels)
    title = f"{report.model}: {counted(len(report.workload.prompts), 'prompt')} at once on {report.machine.summary}"
    fig = titled(title, 16, max(7.5, 1.6 + 0.72 * sum(heights)), wspace=0.03)
    if report.advice is not None:
        advice = "\n".join(textwrap.wrap(report.advice.sentence, 170))
        fig.supxlabel(advice, x=0.012, ha="left", size=11.5, style="italic")
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
    draw_timeline(list(axes[:, 0]), panels)
    return fig


def _scatter(ax: Any, report: Report) -> None:
    """Draws a point for each strategy at its median latency, with a line to its p95."""
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
        size = 260 if row.strategy == "auto" else 110  # "auto" is a ring around the point of its chosen strategy
        ax.scatter([p50], [row.tokens_per_s], s=size, facecolor=face, edgecolor=color(row), linewidth=1.6, zorder=3)
    ax.margins(x=0.12, y=0.16)
    _ideal_corner(ax)
    _label(ax, rows)
    ax.set_xlabel("latency of a request in seconds: point p50, line to p95")
    ax.set_ylabel("generated tokens/s")
    tidy(ax)


def _finding(rows: list[Row]) -> str:
    """Returns a title that compares the fastest strategy with the baseline."""
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


_TO_POINT = {"arrowstyle": "-", "lw": 0.7, "alpha": 0.6, "shrinkB": 6, "relpos": (0, 0.5)}


def _label(ax: Any, rows: list[Row]) -> None:
    """Writes the names in a column at the right, in the order of the points, without overlaps."""
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
            arrowprops={"color": color(row), **_TO_POINT},
            annotation_clip=False,
        )


def spread_out(places: list[float], gap: float) -> list[float]:
    """Returns rising numbers from 0 to 1 that are at least `gap` apart and as close as possible to the rising `places`.

    This is the isotonic regression of places[i] - i * gap. Neighbours that are too close move apart around their common
    middle.
    """
    groups: list[tuple[float, int]] = []  # (mean of places[i] - i * gap, number of places)
    for number, place in enumerate(places):
        groups.append((place - number * gap, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (low, n), (high, m) = groups[-2:]
            groups[-2:] = [((low * n + high * m) / (n + m), n + m)]
    bases = [mean for mean, members in groups for _ in range(members)]
    highest = 1.0 - gap * max(0, len(places) - 1)
    return [max(0.0, min(base, highest)) + number * gap for number, base in enumerate(bases)]


def _finished(ax: Any, report: Report) -> None:
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


def _by_size(upper: Any, lower: Any, sweep: Sweep) -> None:
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
    p50, p95 = [row.latency.p50 or 0 for row in rows], [row.latency.p95 or 0 for row in rows]
    lower.fill_between(slots, p50, p95, color=tint(base, 0.7), lw=0)
    lower.plot(slots, p50, "o-", color=base, lw=2)
    lower.set_ylim(bottom=0)
    lower.set_ylabel("latency, s\np50 to p95")
    lower.set_xlabel("slots of the batched strategy (dotted: if each slot were as fast as one alone)")
    for ax in (upper, lower):
        doublings(ax, slots)
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


_MAGNIFIED_BELOW = 0.4  # if a row ends before this share of the time axis, a magnified copy fits next to its bars
_ONE_LANE, _MANY_LANES = 1.0, 2.6  # heights of a panel with one lane, and with several


def shown(report: Report) -> list[Row]:
    """Returns the rows that get a panel. The row "auto" gets none if its chosen strategy has a panel."""
    measured = [row for row in report.rows if row.measurement is not None]
    names = {row.strategy for row in measured}
    return [row for row in measured if row.chosen not in names]


def lane_heights(rows: list[Row]) -> list[float]:
    return [_ONE_LANE if _n_lanes(row) == 1 else _MANY_LANES for row in rows]


def draw_timeline(axes: list[Any], rows: list[Row]) -> None:
    """Draws one panel for each row, top down."""
    end = max(row.wall_s for row in rows)
    for ax, row in zip(axes, rows, strict=True):
        lanes = _n_lanes(row)
        _bars(ax, row, lanes)
        ax.set_xlim(0, end * 1.005)
        ax.set_ylabel(row.name, rotation=0, ha="right", va="center", color=color(row), weight="bold", labelpad=8)
        ax.tick_params(labelbottom=ax is axes[-1])
        ax.grid(axis="x", color=PALE, linewidth=0.8)
        ax.set_axisbelow(True)
        share = row.wall_s / end
        caption = f"{_slots(row)}, done in {seconds(row.wall_s)}"
        if lanes > 1 and share < _MAGNIFIED_BELOW:
            _magnified(ax, row, lanes, share, caption)
        else:
            _caption(ax, caption, share)
    axes[-1].set_xlabel("seconds since all prompts were handed over")
    _head(axes[0], rows)


def _head(ax: Any, rows: list[Row]) -> None:
    first, last = (choose(rows, key=lambda row: row.wall_s) for choose in (min, max))
    title = f"{first.name} is through with {len(_good(first))} requests in {seconds(first.wall_s)}"
    ax.set_title(title + (f", {last.name} in {seconds(last.wall_s)}" if last is not first else ""), pad=30)
    ax.legend(
        handles=[
            Patch(color="#666666", label="a request, from its slot to its first token"),
            Patch(color=tint("#666666"), label="from its first token to its last"),
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=offset_copy(ax.transAxes, ax.figure, x=-6, y=9, units="points"),
        ncols=2,
        frameon=False,
        borderaxespad=0,
    )


def _slots(row: Row) -> str:
    slots = counted(row.n_slots, "slot")
    if row.instances > 1:
        return f"{row.instances} × {slots}"
    return slots


def lanes_of(spans: list[tuple[float, float]]) -> list[int]:
    """Returns the lane of each span (start, end). A span gets the lowest free lane, as a request gets its slot."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = [0] * len(spans)
    for number in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[number]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        lanes[number] = lane
        heapq.heappush(busy, (end, lane))
    return lanes


def _good(row: Row) -> list[RequestOutput]:
    assert row.measurement is not None
    outputs = row.measurement.outputs
    return [output for output in outputs if output.error is None and output.timings.ttft_s is not None]


def _spans(row: Row) -> list[tuple[float, float]]:
    """Returns when each successful request was admitted and got its last token, in seconds since submission."""
    return [(output.timings.queued_s or 0.0, output.timings.token_times_s[-1]) for output in _good(row)]


def _n_lanes(row: Row) -> int:
    return max(lanes_of(_spans(row)), default=0) + 1


def _bars(ax: Any, row: Row, lanes: int) -> None:
    """Draws two bars for each request: a dark bar until its first token, a light bar until its last."""
    spans = _spans(row)
    base = color(row)
    edge = 0.5 if 1 < lanes <= 32 and len(spans) <= 200 else 0.2  # width of the white line around a bar
    for output, (start, end), lane in zip(_good(row), spans, lanes_of(spans), strict=True):
        first = output.timings.ttft_s or start
        place = (lane + 0.08, 0.84)
        ax.broken_barh([(start, first - start)], place, facecolor=base, edgecolor="white", linewidth=edge)
        ax.broken_barh([(first, end - first)], place, facecolor=tint(base), edgecolor="white", linewidth=edge)
    ax.set_ylim(lanes, 0)
    ax.set_yticks([])
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(PALE)


def _caption(ax: Any, text: str, share: float) -> None:
    if share < 0.84:
        ax.text(share + 0.01, 0.5, text, transform=ax.transAxes, va="center", color=INK)
    else:
        place = {"xycoords": "axes fraction", "xytext": (0, 3), "textcoords": "offset points"}
        ax.annotate(text, (1, 1), ha="right", va="bottom", color=INK, size="small", **place)


def _magnified(ax: Any, row: Row, lanes: int, share: float, caption: str) -> None:
    left = max(share + 0.1, 0.36)
    inset = ax.inset_axes([left, 0.0, 1 - left, 0.86])
    _bars(inset, row, lanes)
    inset.set_xlim(0, row.wall_s)
    inset.set_xticks([])
    inset.spines["bottom"].set_visible(False)
    ax.text(left, 0.9, f"{caption}; magnified {1 / share * (1 - left):.1f} times", transform=ax.transAxes, size="small")
    for y in (0.0, 0.86):  # two dotted lines connect the bars with their magnified copy
        ax.plot([share, left], [0.0 if y == 0.0 else 1.0, y], transform=ax.transAxes, color="#999999", lw=0.8, ls=":")
