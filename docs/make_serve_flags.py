"""Writes docs/serve_flags.md: the flags of llama-server and vLLM, and their meaning in `llamabatch serve`.

`python docs/make_serve_flags.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llamabatch.cli.flag_table import LLAMA, MANY, VLLM, Row
from llamabatch.cli.serve_flags import ROWS, meaning

PAGE = Path(__file__).with_name("serve_flags.md")
_HEAD = """# Flags of llama-server and vLLM

`llamabatch serve` understands the flags of llama-server and of `vllm serve`, so that a start script works with the
program name changed. A flag becomes options of ours, is accepted with a line that says why it has no effect, or is
refused with what to do instead; "always so" is what happens without the flag, too. `_` may stand for `-`, and
`--name=value` for `--name value`. [Serve](serve.md#flags-of-other-servers) has the differences that no flag shows.
(`python docs/make_serve_flags.py` writes this page.)
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for program in (LLAMA, VLLM):
        rows = [row for row in ROWS if row.program == program]
        parts += [f"## {program}", "", *_table(rows, program == LLAMA), ""]
    return "\n".join(parts).rstrip() + "\n"


def _table(rows: Iterable[Row], has_variables: bool) -> list[str]:
    merged: dict[tuple[str, str], list[Row]] = {}  # rows of one meaning share a line, unless they have variables
    for row in rows:
        merged.setdefault((meaning(row), row.env), []).append(row)
    head = ["| flag | variable | here |", "|---|---|---|"] if has_variables else ["| flag | here |", "|---|---|"]
    lines = []
    for (told, env), several in merged.items():
        names = ", ".join(_names(row) for row in several)
        cells = [names, ", ".join(f"`{name}`" for name in env.split()), told] if has_variables else [names, told]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return [*head, *lines]


def _names(row: Row) -> str:
    value = {0: "", MANY: " …"}.get(row.takes, " N")
    shown = [f"`{name}{value if name == row.names[-1] else ''}`" for name in row.names]
    return ", ".join([*shown, *(f"`{name}`" for name in row.negatives)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
