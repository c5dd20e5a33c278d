"""The time line of a picture: requests over slots, a panel a strategy, all on one clock."""

from __future__ import annotations

import heapq
from typing import Any

from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from llamabatch.checks import counted
from llamabatch.compare.figures import seconds
from llamabatch.compare.report import Report, Row
from llamabatch.compare.style import INK, PALE, color, tint
from llamabatch.request import RequestOutput

_MAGNIFIED_BELOW = 0.4  # of the time axis: what ends sooner leaves room for a magnified copy of itself
_ONE_LANE, _MANY_LANES = 1.0, 2.6  # heights of panels


def shown(report: Report) -> list[Row]:
    """The rows that get a panel; auto does as the strategy it chose, which has one already."""
    measured = [row for row in report.rows if row.measurement is not None]
    names = {row.strategy for row in measured}
    return [row for row in measured if row.chosen not in names]


def heights(rows: list[Row]) -> list[float]:
    return [_ONE_LANE if _n_lanes(row) == 1 else _MANY_LANES for row in rows]


def draw(axes: list[Any], rows: list[Row]) -> None:
    """One panel for each row, top down."""
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
        note = f"{_slots(row)}, done in {seconds(row.wall_s)}"
        if lanes > 1 and share < _MAGNIFIED_BELOW:
            _magnified(ax, row, lanes, share, note)
        else:
            _note(ax, note, share)
    axes[-1].set_xlabel("seconds since all prompts were handed over")
    _head(axes[0], rows)


def _head(ax: Any, rows: list[Row]) -> None:
    """What is seen, and how to read it."""
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
    """A lane for each (start, end): the lowest that is free, as the engine leases its slots."""
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
    """From admission to the last token."""
    return [(output.timings.queued_s or 0.0, output.timings.token_times_s[-1]) for output in _good(row)]


def _n_lanes(row: Row) -> int:
    return max(lanes_of(_spans(row)), default=0) + 1


def _bars(ax: Any, row: Row, lanes: int) -> None:
    """Two bars a request: the dark one until its first token, the light one until its last."""
    spans = _spans(row)
    base = color(row)
    edge = 0.5 if 1 < lanes <= 32 and len(spans) <= 200 else 0.2  # the white between neighbours
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


def _note(ax: Any, text: str, share: float) -> None:
    """Beside the bars where there is room, else above them."""
    if share < 0.84:
        ax.text(share + 0.01, 0.5, text, transform=ax.transAxes, va="center", color=INK)
    else:
        place = {"xycoords": "axes fraction", "xytext": (0, 3), "textcoords": "offset points"}
        ax.annotate(text, (1, 1), ha="right", va="bottom", color=INK, size="small", **place)


def _magnified(ax: Any, row: Row, lanes: int, share: float, note: str) -> None:
    left = max(share + 0.1, 0.36)
    inset = ax.inset_axes([left, 0.0, 1 - left, 0.86])
    _bars(inset, row, lanes)
    inset.set_xlim(0, row.wall_s)
    inset.set_xticks([])
    inset.spines["bottom"].set_visible(False)
    ax.text(left, 0.9, f"{note}; magnified {1 / share * (1 - left):.1f} times", transform=ax.transAxes, size="small")
    for y in (0.0, 0.86):  # lines from the small copy to the large one
        ax.plot([share, left], [0.0 if y == 0.0 else 1.0, y], transform=ax.transAxes, color="#999999", lw=0.8, ls=":")
