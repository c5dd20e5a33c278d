"""Common parts of the pictures: style, title, axes.

The colours are from Okabe and Ito's palette, which people with any colour vision can distinguish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

INK = "#333333"
PALE = "#E3E3E3"
OURS = "#D55E00"
THEIRS = "#777777"


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


def save(figure: Callable[[], Figure], path: Path, *, dpi: int = 140, style: dict[str, Any] = STYLE) -> None:
    """Draws a figure into a file. The ending of the name determines the kind of picture."""
    with rc_context(style):
        figure().savefig(path, dpi=dpi, facecolor="white")


def titled(
    title: str, width: float, height: float, *, wspace: float, hspace: float | None = None, h_pad: float = 0.07
) -> Figure:
    """Returns an empty figure with a title. wspace, hspace and h_pad are arguments of ConstrainedLayoutEngine."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=h_pad, wspace=wspace, hspace=hspace)
    fig = Figure(figsize=(width, height), layout=layout)
    fig.suptitle(title, x=0.012, ha="left", size=15, weight="bold")
    return fig


def doublings(ax: Any, counts: Sequence[int]) -> None:
    """Makes the x axis logarithmic, with a tick for each count."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(n) for n in counts])
    ax.xaxis.set_minor_formatter(NullFormatter())


def tint(color: str, share: float = 0.55) -> str:
    """Returns a colour "#rrggbb" mixed with a share of white from 0 to 1."""
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def tidy(ax: Any) -> None:
    """Adds a grid, writes plain numbers at the ticks of logarithmic axes, and hides the upper and right frame."""
    ax.grid(color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for axis, log in ((ax.xaxis, ax.get_xscale() == "log"), (ax.yaxis, ax.get_yscale() == "log")):
        if log and not axis.get_major_locator().__class__.__name__.startswith("Fixed"):
            axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
