"""Where a report goes: the terminal, a JSON file, a picture. Targets are checked before hours of measuring."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from llamabatch.compare.document import document
from llamabatch.compare.report import Report
from llamabatch.compare.table import show
from llamabatch.errors import InputError, SetupError
from llamabatch.paths import shown
from llamabatch.stdout import Stdout

_PICTURES = (".png", ".svg", ".pdf")
_PLAIN_WIDTH = 200  # a file or a pipe has no width: tables take what they need


def check(json_file: Path | None, plot_file: Path | None) -> None:
    """Finds out early that a target cannot be written.

    Raises:
        InputError: its folder is missing or closed, it is a directory, or the picture's kind is unknown.
        SetupError: a picture needs matplotlib, which is not installed.
    """
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is None or (option == "--json" and str(path) == "-"):
            continue
        folder = path.parent
        if path.is_dir() or not folder.is_dir():
            wrong = "is a directory" if path.is_dir() else f"cannot be made: there is no directory {shown(folder)}"
            raise InputError(f"{option} {shown(path)} {wrong}; give the name of a file in a directory that exists")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputError(f"{option} {shown(path)} cannot be written: permission denied")
    if plot_file is None:
        return
    if plot_file.suffix.lower() not in _PICTURES:
        raise InputError(f"--plot {shown(plot_file)} has no ending of a picture; allowed are {', '.join(_PICTURES)}")
    if find_spec("matplotlib") is None:
        raise SetupError("--plot needs matplotlib, which is not installed; run: pip install 'llamabatch[tools]'")


def write(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    """The table to stdout, unless JSON goes there; JSON and picture to their files."""
    if str(json_file) != "-":
        show(report, console())
    write_json(document(report), json_file)
    if plot_file is not None:
        from llamabatch.compare.plot import draw  # matplotlib is optional, and takes a second to import

        draw(report, plot_file)


def write_json(content: dict[str, Any], file: Path | None) -> None:
    """To a file, to stdout if that is "-", nowhere if None."""
    if file is None:
        return
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


def console() -> Console:
    """stdout, as wide as its terminal."""
    terminal = Stdout()
    return terminal if terminal.is_terminal else Stdout(width=_PLAIN_WIDTH)
