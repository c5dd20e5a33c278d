"""Draws the pictures of docs/architecture.md as SVG: `python docs/make_pictures.py`.

The rooms and their arrows come from the imports of the code; tests/unit/project/test_pictures.py holds the committed
files to this module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llamabatch"
IMAGES = ROOT / "docs" / "images"
SERVER = PACKAGE / "server"
FILES = ("errors", "options", "openapi", "vertex", "application", "run")  # rooms of one file

INK, PALE, LINE = "#1f2933", "#f4f6f8", "#9aa5b1"
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito
STYLE = "font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def room_of(module: str, package: Path = PACKAGE) -> str | None:
    """The room of a dotted module within a package: a folder, or a file that stands beside the folders; None for what
    is no room."""
    parts = module.split(".")
    place = len(package.relative_to(ROOT).parts)
    if parts[:place] != list(package.relative_to(ROOT).parts) or len(parts) <= place:
        return None
    room = parts[place]
    return room if (package / room / "__init__.py").exists() or room in FILES else None


def rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Room -> the rooms of the package that its files import, function-level imports included."""
    edges: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts), package)
        if own is None or own == "bundled":
            continue
        edges.setdefault(own, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            found = (room_of(name, package) for name in named)
            edges[own] |= {room for room in found if room not in (None, own, "bundled")}  # type: ignore[misc]
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


def sentence(room: str, package: Path = PACKAGE) -> str:
    """The beginning of the room's docstring, up to its first full stop or colon."""
    path = package / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else package / f"{room}.py").read_text(encoding="utf-8")))
    first = " ".join((text or "").split())
    for mark in (". ", ": ", "; ", ", "):
        first = first.split(mark)[0]
    return first.rstrip(".")


def rooms_picture(
    package: Path = PACKAGE, title: str = "The rooms of llamabatch and their imports", margin: int = 20
) -> str:
    """A box a room, the rooms that import nothing at the bottom; lines may pass in the margins."""
    edges = rooms(package)
    depth = depths(edges)
    rows: dict[int, list[str]] = {}
    for room in sorted(edges, key=lambda name: (name in ("errors", "config"), name)):
        rows.setdefault(max(depth.values()) - depth[room], []).append(room)
    width, height, step, top = 960, 44, 70, 20
    at: dict[str, tuple[float, float, float]] = {}
    for level, names in rows.items():
        box_width = min(290.0, (width - 60 - 2 * margin) / len(names) - 20)
        gap = min(110.0, (width - 2 * margin - len(names) * box_width) / max(1, len(names) - 1))  # lines pass in it
        for i, name in enumerate(names):
            middle = width / 2 + (i - (len(names) - 1) / 2) * (box_width + gap)
            at[name] = (middle - box_width / 2, top + step * level, box_width)
    parts, taken = [], []
    for room, other in direct(edges):
        (x1, y1, w1), (x2, y2, w2) = at[room], at[other]
        between = [(x, w) for x, y, w in at.values() if y1 < y < y2]
        lane = free_lane(between, taken, x2 + w2 / 2)
        if between:
            taken.append(lane)
        parts.append(connection(x1 + w1 / 2, y1 + height, x2 + w2 / 2, y2, lane if between else None, step - height))
    for name, (x, y, w) in at.items():
        parts.append(box(x, y, w, height, name, sentence(name, package), ORANGE if name == "llama" else INK))
    bottom = top + step * len(rows) + 24
    note = "An arrow goes from a room to one that it imports; arrows that a longer way implies are left out."
    parts.append(text(width / 2, bottom - 12, note, size=12, color="#52606d"))
    return svg(width, bottom, parts, title)


def server_picture() -> str:
    """The same of the server."""
    return rooms_picture(SERVER, "The rooms of the server and their imports", margin=70)


def free_lane(boxes: list[tuple[float, float]], taken: list[float], wanted: float) -> float:
    """The x nearest to `wanted` where a vertical line meets none of the boxes (x, width) and no other line."""
    free = [
        x
        for x in range(20, 941, 4)
        if all(not left - 14 < x < left + w + 14 for left, w in boxes) and all(abs(x - other) >= 12 for other in taken)
    ]
    return min(free, key=lambda x: abs(x - wanted))


def connection(x1: float, y1: float, x2: float, y2: float, lane: float | None, gap: float) -> str:
    """An arrow from (x1, y1) down to (x2, y2); past the boxes between on a vertical line at `lane`."""

    def curve(fx: float, fy: float, tx: float, ty: float) -> str:
        bend = (ty - fy) / 2
        return f"C{fx:.0f} {fy + bend:.0f} {tx:.0f} {ty - bend:.0f} {tx:.0f} {ty:.0f}"

    if lane is None:
        way = curve(x1, y1, x2, y2)
    else:
        way = f"{curve(x1, y1, lane, y1 + gap)} V{y2 - gap:.0f} {curve(lane, y2 - gap, x2, y2)}"
    return (
        f'<path d="M{x1:.0f} {y1:.0f} {way}" fill="none" stroke="{LINE}" stroke-width="1.3" marker-end="url(#arrow)"/>'
    )


def threads_picture() -> str:
    """Callers, the engine's thread and llama.cpp, from left to right."""
    width, height = 960, 400
    parts = [
        frame(20, 30, 250, 340, "threads of your program"),
        *(box(40, 62 + 74 * i, 210, 56, name, what, INK) for i, (name, what) in enumerate(CALLERS)),
        frame(330, 30, 290, 340, "the thread that owns the engine"),
        box(350, 62, 250, 44, "CommandQueue", "submit, abort, questions", INK),
        *(box(350, 130 + 62 * i, 250, 48, name, what, BLUE) for i, (name, what) in enumerate(STEP)),
        box(350, 316, 250, 44, "sinks", "new tokens, finished outputs", GREEN),
        frame(680, 30, 260, 340, "llama.cpp: no other thread calls it"),
        box(700, 130, 220, 48, "llama_batch", "a row a token, with its seq id", ORANGE),
        box(700, 192, 220, 48, "llama_decode", "a pass over the weights", ORANGE),
        box(700, 254, 220, 48, "logits", "of the output rows", ORANGE),
        arrow(270, 84, 350, 84),
        text(300, 76, "requests", size=11, color="#52606d"),
        arrow(350, 338, 270, 338),
        text(300, 330, "outputs", size=11, color="#52606d"),
        arrow(600, 204, 700, 154),
        arrow(810, 178, 810, 192),
        arrow(810, 240, 810, 254),
        arrow(700, 278, 600, 228),
        arrow(475, 106, 475, 130),
        arrow(475, 178, 475, 192),
        arrow(475, 240, 475, 254),
        arrow(475, 302, 475, 316),
    ]
    return svg(width, height, parts, "Threads, engine and llama.cpp")


CALLERS = (
    ("LLM.generate, .chat", "any number of threads"),
    ("LLM.stream", "tokens as they come"),
    ("AsyncLLM", "an event loop"),
    ("jobs, tools", "rows of a file"),
)
STEP = (
    ("Scheduler.schedule", "decide: pure Python"),
    ("ModelRunner.run", "compute and sample"),
    ("Scheduler.update", "apply: text, ends, free slots"),
)


def slots_picture() -> str:
    """A line a slot of a split KV cache, with what one step finds and computes there."""
    width, height, cells, left, cell = 960, 402, 40, 150, 19
    parts = [text(left, 24, "n_ctx cells a slot: what one request may use", size=13, anchor="start")]
    for i, (name, shared, own, row, why) in enumerate(SLOTS):
        y = 40 + 54 * i
        parts.append(text(left - 12, y + 18, name, size=13, anchor="end"))
        for c in range(cells):
            fill = (CACHED if name.endswith("cached") else BLUE) if c < shared else GREEN if c < shared + own else PALE
            if row and shared + own <= c < shared + own + row:
                fill = DUMMY if name.endswith("free") else ORANGE
            parts.append(
                f'<rect x="{left + c * cell}" y="{y}" width="{cell - 2}" height="24" fill="{fill}" stroke="{LINE}" '
                f'stroke-width="0.6"/>'
            )
        parts.append(text(left, y + 40, why, size=12, anchor="start", color="#52606d"))
    for i, (color, name) in enumerate(LEGEND):
        x = 30 + 155 * i
        parts.append(f'<rect x="{x}" y="376" width="14" height="14" fill="{color}" stroke="{LINE}"/>')
        parts.append(text(x + 20, 388, name, size=12, anchor="start"))
    return svg(width, height, parts, "Slots and cells of a split KV cache")


# A slot: its name, cells of a prefix, cells of its own, rows of this step, and what the step does there.
SLOTS = (
    ("slot 0, decode", 16, 9, 1, "a prefix, then its own tokens; one row in the decode call"),
    ("slot 1, decode", 16, 14, 1, "the prefix was copied from slot 0; one row in the same call"),
    ("slot 2, free", 0, 0, 1, "a hole between two decoding slots: a dummy row keeps the call in one pass"),
    ("slot 3, decode", 0, 21, 1, "above the hole; without the dummy row, its row would cost a second pass"),
    ("slot 4, prefill", 0, 10, 8, "a chunk of its prompt, in a call of its own after the decode call"),
    ("slot 5, cached", 20, 0, 0, "finished; its cells serve the next request that begins with the same tokens"),
)
CACHED, DUMMY = "#a6cfe8", "#F0E442"
LEGEND = (
    (BLUE, "copied prefix"),
    (GREEN, "own tokens"),
    (ORANGE, "rows of this step"),
    (DUMMY, "dummy row"),
    (CACHED, "prefix cache"),
    (PALE, "empty cells"),
)


def box(x: float, y: float, w: float, h: float, name: str, what: str, color: str) -> str:
    middle = x + w / 2
    fit = max(8, int(w / 5.8))
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


PICTURES = {
    "rooms.svg": rooms_picture,
    "server_rooms.svg": server_picture,
    "threads.svg": threads_picture,
    "slots.svg": slots_picture,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
