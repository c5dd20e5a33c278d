"""Output to the terminal (tables and wrapped sentences), and the files of a report."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from llamabatch.errors import InputError, SetupError
from llamabatch.utils.paths import shown

if TYPE_CHECKING:
    from rich.style import Style

T = TypeVar("T")
_LEAST_WIDTH = 20
_PLAIN_WIDTH = 200  # width of the console on a file or pipe, large enough for rows of tables
_READER_WIDTH = 80  # widest table in a file or pipe, unless COLUMNS gives another width; wider tables are split
_PICTURES = (".png", ".svg", ".pdf")
_LABEL = re.compile(r" *\S[^:]*: {2,}")  # a label, as in "rows:   7 ok"; wrapped lines start below the 7


class Stdout(Console):
    """A console that raises BrokenPipeError if the reader of stdout has gone. rich's own class ends the process."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this method while it handles a BrokenPipeError


def console() -> Console:
    """Returns a console on stdout, as wide as its terminal. Characters that stdout cannot encode become "?"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    terminal = Stdout()
    return terminal if terminal.is_terminal else Stdout(width=_PLAIN_WIDTH)


def sentence(console: Console, text: str, style: str | Style = "") -> None:
    """Prints text. Wraps it between words on a terminal only, because elsewhere a program may read the lines."""
    shown = wrapped(text, console.width) if console.is_terminal else text
    console.print(Text(shown, style), soft_wrap=True)


def new_table(*heads: str, left: int = 1) -> Table:
    """Returns a table without rows. The first `left` columns are for texts, all others for figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right", no_wrap=True)
    return table


def print_table(console: Console, table: Table, lead: int = 1) -> None:
    """Prints a table. Splits its columns into several tables with the same first columns if the console is too narrow.

    In a file or a pipe, these tables are at most 80 (or COLUMNS) characters wide, and no line is wrapped.

    Args:
        lead: number of first columns. Each of these tables repeats them.
    """
    width = console.width
    if isinstance(console, Stdout) and not console.is_terminal:
        width = min(width, _reader_width())
    shown = list(range(lead))
    for index in range(lead, len(table.columns)):
        if len(shown) > lead and not _fits(console, _part(table, [*shown, index]), width):
            _print_part(console, table, shown)
            shown = list(range(lead))
        shown.append(index)
    _print_part(console, table, shown)


def _print_part(console: Console, table: Table, indices: list[int]) -> None:
    part = _part(table, indices)
    if not _fits(console, part, console.width):
        for column in part.columns:
            column.no_wrap = False
    console.print(part)


def _reader_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return max(_LEAST_WIDTH, int(columns)) if columns.isdecimal() else _READER_WIDTH


def _fits(console: Console, table: Table, width: int) -> bool:
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum <= width


def _part(table: Table, indices: list[int]) -> Table:
    part = Table(box=table.box, pad_edge=table.pad_edge, collapse_padding=table.collapse_padding)
    columns = [table.columns[index] for index in indices]
    for column in columns:
        part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    for row, *cells in zip(table.rows, *(column.cells for column in columns), strict=True):
        part.add_row(*cells, style=row.style, end_section=row.end_section)
    return part


def for_terminal(text: str, stream: TextIO) -> str:
    """Returns text for a stream, wrapped between words if the stream is a terminal."""
    try:
        return wrapped(text, os.get_terminal_size(stream.fileno()).columns) if stream.isatty() else text
    except (OSError, ValueError):  # a stream without a file
        return text


def wrapped(text: str, width: int) -> str:
    """Wraps each line between words. A word that is longer than a line is not split, so that paths can be copied."""
    width = max(_LEAST_WIDTH, width or 80)
    lines = text.split("\n")
    labels = {match.end() for line in lines if (match := _LABEL.match(line)) and match.end() <= width // 3}
    return "\n".join(_wrapped(line, width, labels) for line in lines)


def _is_label(start: str) -> bool:
    return start.endswith(" ") and start.rstrip().endswith(":")


def _wrapped(line: str, width: int, labels: set[int]) -> str:
    """Wraps one line. `labels`: the lengths of all labels (see _LABEL) in the text."""
    if len(line) <= width:
        return line
    indent = len(line) - len(line.lstrip(" "))
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * next((n for n in labels if _is_label(line[:n])), indent),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def check_targets(json_file: Path | None, plot_file: Path | None) -> None:
    """Checks that a JSON file and a picture can be written, before the long measurement starts.

    Raises:
        InputError: the folder is missing or not writable, the file is a directory, or the kind of picture is unknown.
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


def write_json(content: dict[str, Any] | list[Any], file: Path | None) -> None:
    """Writes JSON to a file, or to stdout for "-". Writes nothing for None."""
    if file is None:
        return
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


def write_plot(module: str, subject: object, file: Path | None) -> None:
    """Draws the picture of a subject with the function `figure` of a module. Draws nothing if `file` is None.

    The module is imported only here, because matplotlib is optional and takes a second to import.
    """
    if file is not None:
        from llamabatch.utils.plotting import save

        figure = import_module(module).figure
        save(lambda: figure(subject), file)


def write_report(
    report: T,
    json_file: Path | None,
    plot_file: Path | None,
    *,
    show: Callable[[T, Console], None],
    document: Callable[[T], dict[str, Any]],
    plot: str,
) -> None:
    """Writes JSON and picture to their files, and then the tables to stdout. If JSON goes to stdout, prints no tables.

    The files are written first, because a closed stdout would otherwise lose the measurement.

    Args:
        plot: the module of the picture, as for write_plot.
    """
    write_json(document(report), json_file)
    write_plot(plot, report, plot_file)
    if str(json_file) != "-":
        show(report, console())
