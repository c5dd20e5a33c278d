"""Where a report goes: the terminal or JSON on stdout, a picture."""

from __future__ import annotations

from pathlib import Path

from llamabatch.compare.output import console, write_json
from llamabatch.planning.report import Report, document
from llamabatch.planning.table import show


def write(report: Report, as_json: bool, plot_file: Path | None) -> None:
    """The tables, or the document, to stdout; the picture to its file."""
    if as_json:
        write_json(document(report), Path("-"))
    else:
        show(report, console())
    if plot_file is not None:
        from llamabatch.planning.plot import draw  # matplotlib is optional, and takes a second to import

        draw(report, plot_file)
