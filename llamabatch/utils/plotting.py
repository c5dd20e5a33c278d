"""Style of the pictures. Colours are of Okabe and Ito's palette, which people with any colour vision tell apart."""

from __future__ import annotations

from typing import Any

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


def tint(color: str, share: float = 0.55) -> str:
    """A colour as "#rrggbb", mixed with a share of white from 0 to 1."""
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def tidy(ax: Any) -> None:
    """Gives axes a grid, plain numbers at the ticks (also of logarithmic axes), and no upper and right frame."""
    ax.grid(color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for axis, log in ((ax.xaxis, ax.get_xscale() == "log"), (ax.yaxis, ax.get_yscale() == "log")):
        if log and not axis.get_major_locator().__class__.__name__.startswith("Fixed"):
            axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
