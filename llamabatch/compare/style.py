"""Colours of a picture: Okabe and Ito's palette, which people with any colour vision tell apart."""

from __future__ import annotations

from llamabatch.compare.report import Row

INK = "#333333"
PALE = "#E3E3E3"
OURS = "#D55E00"
THEIRS = "#777777"

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
    """The same one for a strategy everywhere."""
    return _COLORS.get(row.strategy, INK)


def tint(color: str, share: float = 0.55) -> str:
    """A colour mixed with white; `share` of it is white."""
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
