"""Prints the figures of the last `make test-agents` for docs/agents.md: python -m tests.agents.figures"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import dropwhile

from tests.server.__main__ import ROOT

MEASURED = ROOT / "build" / "test-agents.json"
RESULTS = ROOT / "benchmarks" / "results" / "agents.json"
PAGE = ROOT / "docs" / "agents.md"
_HEAD = (
    "| program | bytes of the first request | its tokens | computed of the second request "
    "| computed of the next conversation's first request |\n"
    "|---|---|---|---|---|\n"
)


def table(figures: Mapping[str, Mapping[str, int]]) -> str:
    """Returns the figures of all programs as a table of Markdown."""
    rows = (
        f"| {title} | {each['first_request_bytes']:,} | {each['first_request_tokens']:,} "
        f"| {_share(each, 'second_request')} | {_share(each, 'next_conversation')} |\n"
        for title, each in figures.items()
    )
    return _HEAD + "".join(rows)


def _share(figures: Mapping[str, int], name: str) -> str:
    computed, tokens = figures[f"{name}_computed"], figures[f"{name}_tokens"]
    return f"{computed:,} of {tokens:,} ({computed / tokens:.1%})"


def main() -> None:
    figures = json.loads(MEASURED.read_text())
    before, after = PAGE.read_text().split(_HEAD)
    rest = "".join(dropwhile(lambda line: line.startswith("|"), after.splitlines(keepends=True)))
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(before + table(figures) + rest)


if __name__ == "__main__":
    main()
