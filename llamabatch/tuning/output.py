"""Where a report goes: the terminal, a JSON file, a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llamabatch.compare.output import console
from llamabatch.tuning.report import Report, document
from llamabatch.tuning.table import show


def write(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    """The table to stdout, unless JSON goes there; JSON and picture to their files."""
    if str(json_file) != "-":
        show(report, console())
    if json_file is not None:
        text = json.dumps(document(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        if str(json_file) == "-":
            sys.stdout.write(text)
        else:
            json_file.write_text(text, encoding="utf-8")
    if plot_file is not None:
        from llamabatch.tuning.plot import draw  # matplotlib is optional, and takes a second to import

        draw(report, plot_file)
