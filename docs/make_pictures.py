"""Draws the pictures of docs/architecture.md as SVG; the rooms come from the code's own imports, so that it stays true.

python docs/make_pictures.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llamabatch"
IMAGES = ROOT / "docs" / "images"

INK, PALE, LINE = "#1f2933", "#f4f6f8", "#9aa5b1"
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito
STYLE = "font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


# --- rooms and imports ------------------------------------------------------------------------------------------


def room_of(module: str) -> str | None:
    """The room of a dotted module; None for what is no room."""
    parts = module.split(".")
    if parts[0] != "llamabatch" or len(parts) < 2:
        return None
    return parts[1] if (PACKAGE / parts[1] / "__init__.py").exists() or parts[1] in ("errors", "config") else None


def rooms() -> dict[str, set[str]]:
    """Room -> the rooms that its files import, function-level imports included."""
    edges: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own is None or own == "models":
            continue
        edges.setdefault(own, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            edges[own] |= {room for room in map(room_of, named) if room not in (None, own, "models")}  # type: ignore[misc]
    return edges


def depths(edges: dict[str, set[str]]) -> dict[str, int]:
    """The longest way down from each room."""
    known: dict[str, int] = {}

    def depth(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((depth(other) for other in edges[room]), default=-1)
        return known[room]

    for room in edges:
        depth(room)
    return known


def direct(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no longer way implies."""
    reach: dict[str, set[str]] = {}

    def all_below(room: str) -> set[str]:
        if room not in reach:
            reach[room] = set(edges[room]).union(*(all_below(other) for other in edges[room]))
        return reach[room]

    return [
        (room, other)
        for room, others in sorted(edges.items())
        for other in sorted(others)
        if not any(other in all_below(between) for between in others - {other})
    ]


def sentence(room: str) -> str:
    """The beginning of the room's docstring, up to its first full stop or colon."""
    path = PACKAGE / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else PACKAGE / f"{room}.py").read_text(encoding="utf-8")))
    first = " ".join((text or "").split())
    for mark in (". ", ": ", "; ", ", "):
        first = first.split(mark)[0]
    return first.rstrip(".")


def rooms_picture() -> str:
    edges = rooms()
    depth = depths(edges)
    rows: dict[int, list[str]] = {}
    for room in sorted(edges, key=lambda name: (name in ("errors", "config"), name)):
        rows.setdefault(depth[room], []).append(room)
    width, box_height, row_height, top = 960, 44, 66, 20
    height = top + row_height * len(rows) + 30
    at: dict[str, tuple[float, float, float]] = {}
    for level, names in rows.items():
        box_width = min(330.0, (width - 40) / len(names) - 20)
        for i, name in enumerate(names):
            x = width * (i + 0.5) / len(names) - box_width / 2
            at[name] = (x, top + row_height * (max(rows) - level), box_width)
    parts = []
    for room, other in direct(edges):
        (x1, y1, w1), (x2, y2, w2) = at[room], at[other]
        sx, sy, tx, ty = x1 + w1 / 2, y1 + box_height, x2 + w2 / 2, y2
        bend = (ty - sy) / 2
        parts.append(
            f'<path d="M{sx:.0f} {sy:.0f} C{sx:.0f} {sy + bend:.0f} {tx:.0f} {ty - bend:.0f} {tx:.0f} {ty:.0f}" '
            f'fill="none" stroke="{LINE}" stroke-width="1.2" marker-end="url(#arrow)"/>'
        )
    for name, (x, y, w) in at.items():
        native = name == "llama"
        parts.append(box(x, y, w, box_height, name, sentence(name), ORANGE if native else INK))
    note = "An arrow goes from a room to one that it imports; arrows that a longer way implies are left out."
    parts.append(text(width / 2, height - 8, note, size=12, color="#52606d"))
    return svg(width, height, parts, "The rooms of llamabatch and their imports")


# --- thread, engine, llama.cpp ----------------------------------------------------------------------------------


def threads_picture() -> str:
    width, height = 960, 400
    parts = [
        frame(20, 30, 250, 340, "threads of your program"),
        *(box(40, 62 + 74 * i, 210, 56, name, what, INK) for i, (name, what) in enumerate(CALLERS)),
        frame(330, 30, 290, 340, "the thread that owns the engine"),
        box(350, 62, 250, 44, "CommandQueue", "submit, abort, questions", INK),
        *(box(350, 130 + 62 * i, 250, 48, name, what, BLUE) for i, (name, what) in enumerate(STEP)),
        box(350, 316, 250, 44, "sinks", "new tokens, finished outputs", GREEN),
        frame(680, 30, 260, 340, "llama.cpp, no other thread calls it"),
        box(700, 130, 220, 48, "llama_batch", "one row a token, seq ids", ORANGE),
        box(700, 192, 220, 48, "llama_decode", "one pass over the weights", ORANGE),
        box(700, 254, 220, 48, "logits", "the rows that are outputs", ORANGE),
        arrow(250, 84, 350, 84),
        arrow(600, 216, 700, 154),
        arrow(810, 178, 810, 192),
        arrow(810, 240, 810, 254),
        arrow(700, 278, 600, 226),
        arrow(475, 106, 475, 130),
        arrow(475, 178, 475, 192),
        arrow(475, 240, 475, 254),
        arrow(475, 302, 475, 316),
        arrow(350, 338, 250, 312),
    ]
    return svg(width, height, parts, "Threads, engine and llama.cpp")


CALLERS = (
    ("LLM.generate", "any number of threads"),
    ("LLM.stream", "tokens as they come"),
    ("AsyncLLM", "an event loop"),
    ("jobs, tools", "rows of a file"),
)
STEP = (
    ("Scheduler.schedule", "decide: pure Python"),
    ("ModelRunner.run", "compute and sample"),
    ("Scheduler.update", "apply: text, ends, free slots"),
)


# --- slots and cells --------------------------------------------------------------------------------------------


def slots_picture() -> str:
    width, height = 960, 330
    cells, left, cell = 40, 150, 19
    rows: tuple[tuple[str, int, int, str], ...] = (
        ("slot 0, decode", 16, 9, "a prefix, then its own tokens; one row this step"),
        ("slot 1, decode", 16, 14, "the prefix was copied from slot 0"),
        ("slot 2, free", 0, 0, "a hole between running slots: a dummy row keeps one pass"),
        ("slot 3, prefill", 0, 12, "a chunk of its prompt, in a call of its own"),
        ("slot 4, cached", 20, 0, "finished; its cells wait for a request that begins alike"),
    )
    parts = [text(left, 24, "n_ctx cells a slot: what one request may use", size=13, anchor="start")]
    for i, (name, shared, own, why) in enumerate(rows):
        y = 40 + 54 * i
        parts.append(text(left - 12, y + 18, name, size=13, anchor="end"))
        for c in range(cells):
            fill = BLUE if c < shared else GREEN if c < shared + own else PALE
            if name.endswith("cached") and c < shared:
                fill = "#a6cfe8"
            parts.append(
                f'<rect x="{left + c * cell}" y="{y}" width="{cell - 2}" height="24" fill="{fill}" stroke="{LINE}" '
                f'stroke-width="0.6"/>'
            )
        parts.append(text(left, y + 40, why, size=12, anchor="start", color="#52606d"))
    legend = ((BLUE, "cells of a shared prefix"), (GREEN, "cells of its own"), (PALE, "empty cells"))
    for i, (color, name) in enumerate(legend):
        x = left + 220 * i
        parts.append(f'<rect x="{x}" y="308" width="14" height="14" fill="{color}" stroke="{LINE}"/>')
        parts.append(text(x + 22, 320, name, size=12, anchor="start"))
    return svg(width, height, parts, "Slots and cells of a split KV cache")


# --- SVG --------------------------------------------------------------------------------------------------------


def box(x: float, y: float, w: float, h: float, name: str, what: str, color: str) -> str:
    middle = x + w / 2
    fit = max(8, int(w / 6.4))
    what = what if len(what) <= fit else what[: fit - 1].rsplit(" ", 1)[0] + " …"
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h}" rx="6" fill="white" stroke="{color}" '
        f'stroke-width="1.6"/>'
        + text(middle, y + h / 2 - 2, name, size=14, color=color, bold=True)
        + text(middle, y + h / 2 + 14, what, size=11, color="#52606d")
    )


def frame(x: float, y: float, w: float, h: float, title: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="10" fill="{PALE}" stroke="{LINE}" stroke-dasharray="4 3"/>'
        + text(x + w / 2, y - 8, title, size=13, color="#52606d")
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.4" marker-end="url(#arrow)"/>'


def text(
    x: float, y: float, words: str, *, size: int, anchor: str = "middle", color: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>'
        f"{escape(words)}</text>"
    )


def svg(width: int, height: int, parts: Iterable[str], title: str) -> str:
    marker = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" style="{STYLE}">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{marker}\n{body}\n</svg>\n'
    )


PICTURES = {"rooms.svg": rooms_picture, "threads.svg": threads_picture, "slots.svg": slots_picture}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
