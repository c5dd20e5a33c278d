"""The table of docs/models.md: architectures, grouped by the findings of tests/archs/case.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.archs.case import SHARED

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by `make test-archs ARGS=--write` -->", "<!-- end of the table -->"
_HEAD = (
    "| kind | architectures | shares prefixes | guesses | ragged passes | equal bits |",
    "|---|---|---|---|---|---|",
)
_KINDS = ("attention", "latent attention", "window", "hybrid", "recurrent", "refused")
_REASONS = {  # a part of the engine's reason -> the words for a cell of the table
    "recurrent state": "state",
    "sliding window": "window",
    "attends over a window": "window",
    "latent attention": "latent attention",
    "linear attention": "linear attention",
    "attention to chosen blocks": "sparse attention",
    "is no multiple of": "head size",
    "cannot generate text": "",
}

Row = tuple[str, ...]


def failures(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each model that killed its process, and for each way that wrote other texts than alone."""
    found = [f"{name} killed its process: {each['dead']}" for name, each in results.items() if "dead" in each]
    for name, each in results.items():
        found += [f"{name}, {way}: {why}" for way, why in each.get("wrong", {}).items()]
    return found


def lines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the table."""
    rows: dict[Row, set[str]] = {}
    for name, found in results.items():
        if "dead" not in found:
            rows.setdefault(_row(found), set()).add(name.rpartition("-")[0])
    ordered = sorted(rows.items(), key=lambda item: (_KINDS.index(item[0][0]), -len(item[1]), item[0]))
    return [*_HEAD, *(f"| {row[0]} | {', '.join(sorted(names))} | {' | '.join(row[1:])} |" for row, names in ordered)]


def _row(found: Mapping[str, Any]) -> Row:
    if found["refused"]:
        return ("refused", "-", "-", "-", "-")
    bits = found["equal_bits"]
    return (
        found["kind"],
        f"{found['shares']} of {SHARED}",
        "yes" if found["guesses"] is True else _because(found["guesses"]),
        "yes" if found["ragged"] else "no",
        "yes" if bits.startswith("equal bits: yes") else _because(bits),
    )


def _because(sentence: str) -> str:
    return f"no: {next((words for part, words in _REASONS.items() if part in sentence), sentence)}"


def committed() -> list[str]:
    """Returns the lines of the table that the document has now."""
    return _table().group(1).splitlines()


def write(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces the table in the document."""
    text, table = DOCUMENT.read_text(encoding="utf-8"), _table()
    DOCUMENT.write_text(text[: table.start(1)] + "\n".join(lines(results)) + text[table.end(1) :], encoding="utf-8")


def _table() -> re.Match[str]:
    found = re.search(f"{re.escape(BEGIN)}\n+(.*?)\n+{re.escape(END)}", DOCUMENT.read_text(encoding="utf-8"), re.S)
    assert found, f"{DOCUMENT} has no table between {BEGIN} and {END}"
    return found
