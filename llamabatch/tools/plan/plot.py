"""Draws a plan: memory against slots, with a line for each context length."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from llamabatch.planning.memory import PROCESS_BYTES
from llamabatch.planning.plan import MEMORY_SHARE
from llamabatch.tools.plan.report import Report, Row
from llamabatch.tools.plan.table import slots
from llamabatch.utils.plotting import INK, OURS, THEIRS, doublings, tidy, tint, titled

_GIB = 2**30
_MOST_LINES = 6
_APART = 0.03  # smallest distance between two labels, as a share of the axis
_PARTS = ("#0072B2", "#56B4E9", OURS, "#E69F00", "#F0E442", "#009E73", "#CC79A7", "#999999")


def figure(report: Report) -> Figure:
    """Draws memory by slots and context length on the left, and the parts of this memory on the right."""
    fig = titled(f"{report.model}: memory of an engine", 14, 6.5, wspace=0.06)
    left, right = fig.subplots(1, 2, width_ratios=[2.1, 1])
    _slots(left, report)
    _parts(right, report)
    return fig


def _slots(ax: Any, report: Report) -> None:
    rows = _chosen(report)
    free = report.machine.available_bytes / _GIB
    most = min(
        256,
        max(8, *(2 * row.most_slots for row in rows if row.most_slots < 128), report.requested.config.n_slots),
    )
    top = 1.25 * max(free, report.total_bytes / _GIB)
    counts = [2**power for power in range(most.bit_length() + 1) if 2**power <= 2 * most]
    named: list[tuple[int, float]] = []  # the ends of those lines that have a label
    for position, row in sorted(enumerate(rows), key=lambda pair: pair[1].n_ctx != report.requested.config.n_ctx):
        requested = row.n_ctx == report.requested.config.n_ctx
        colour = OURS if requested else tint(INK, 0.25 + 0.45 * (1 - position / max(1, len(rows) - 1)))
        base = row.memory.total - max(1, row.slots) * row.slot_bytes
        sizes = [(base + n * row.slot_bytes) / _GIB for n in counts]
        shown = [(n, size) for n, size in zip(counts, sizes, strict=True) if size <= top] or [(counts[0], sizes[0])]
        ax.plot(
            [n for n, _ in shown], [size for _, size in shown], "o-", color=colour, lw=2.6 if requested else 1.6,
            ms=4, zorder=3 if requested else 2,
        )  # fmt: skip
        if any(n == shown[-1][0] and abs(size - shown[-1][1]) < _APART * top for n, size in named):
            continue
        named.append(shown[-1])
        ax.annotate(
            f"{row.n_ctx:,}", shown[-1], xytext=(0, 6), textcoords="offset points", ha="center", color=colour,
            weight="bold" if requested else None, annotation_clip=False,
        )  # fmt: skip
    for share, text in ((1.0, "all that is free"), (MEMORY_SHARE, "half: what auto takes")):
        ax.axhline(free * share, color=THEIRS, lw=1, ls="--")
        ax.text(counts[0], free * share, f"{text}: {free * share:.2f} GiB ", va="bottom", color=THEIRS)
    doublings(ax, counts)
    ax.set_xlim(counts[0] * 0.9, counts[-1] * 1.15)
    ax.set_ylim(0, top)
    ax.set_xlabel("slots: requests at once; a line for each n_ctx, tokens that one may use")
    ax.set_ylabel("memory in GiB")
    ax.set_title(_finding(report))
    tidy(ax)


def _finding(report: Report) -> str:
    config = report.requested.config
    if not report.fits:
        return f"{slots(config)} of {config.n_ctx:,} tokens do not fit"
    beyond = config.instances * report.memory.cache_ram / _GIB
    of_it = f", {beyond:.2f} of it for prefixes beyond the slots" if beyond else ""
    return f"{slots(config)} of {config.n_ctx:,} tokens fit: {report.total_bytes / _GIB:.2f} GiB{of_it}"


def _chosen(report: Report) -> list[Row]:
    """Returns a few rows: the requested context length and lengths around it."""
    requested = next(i for i, row in enumerate(report.rows) if row.n_ctx == report.requested.config.n_ctx)
    start = max(0, min(requested - _MOST_LINES // 2, len(report.rows) - _MOST_LINES))
    return list(report.rows[start : start + _MOST_LINES])


def _parts(ax: Any, report: Report) -> None:
    need, n = report.memory, report.requested.config.instances
    times = f", {n} engines" if n > 1 else ""
    parts = [
        ("weights", need.weights + sum(gpu.weights for gpu in need.gpus)),
        ("repacked copies", need.copies),
        (f"KV cache{times}", n * (need.kv_cache + sum(gpu.kv_cache for gpu in need.gpus))),
        (f"buffers{times}", n * (need.compute + sum(gpu.compute for gpu in need.gpus))),
        (f"prefixes beyond the slots{times}", n * need.cache_ram),
        ("draft model", n * need.draft),
        ("projector", need.projector),
        ("vocabulary and process", need.vocabulary + PROCESS_BYTES),
    ]
    shown = [(name, size / 2**20, colour) for (name, size), colour in zip(parts, _PARTS, strict=True) if size]
    for position, (_, size, colour) in enumerate(reversed(shown)):
        ax.barh(position, size, color=colour, height=0.62, zorder=4)  # above the white background of the label
        label = ax.text(size, position, f" {size:,.0f} MiB", va="center", color=INK)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    ax.set_yticks(range(len(shown)), [name for name, _, _ in reversed(shown)])
    ax.set_xlim(0, 1.3 * max(size for _, size, _ in shown))
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_xlabel("MiB")
    ax.set_title("The parts of the sum")
    tidy(ax)
