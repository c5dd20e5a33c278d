"""Where a report goes: the terminal, a JSON file, a picture."""

from __future__ import annotations

from pathlib import Path

from llamabatch.compare.output import console, write_json
from llamabatch.tuning.report import Report, document
from llamabatch.tuning.table import show


def write(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    """The table to stdout, unless JSON goes there; JSON and picture to their files."""
    if str(json_file) != "-":
        show(report, console())
    write_json(document(report), json_file)
    if plot_file is not None:
        from llamabatch.tuning.plot import draw  # matplotlib is optional, and takes a second to import

        draw(report, plot_file)
