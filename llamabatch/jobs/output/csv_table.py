"""After the last row of a job, makes a CSV file from the lines of the job. On resume, turns the file back into lines.

A text is written as it is, null as an empty cell, and any other value as JSON. Cells with a separator, a quote or a
line end are quoted. Records that are read back and written again give the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.columns import BEHIND, OPENAI, Columns, record_of
from llamabatch.jobs.output.records import lines_of

_TEXTS = ("id", "finish_reason", "reasoning", "error")
_MOST_CELL = 2**30  # maximum number of characters in a cell


def write(source: Path, start: int, columns: Columns, delimiter: str, target: BinaryIO) -> None:
    """Writes a file of lines as a table. Raises OSError."""
    text = io.StringIO(newline="")
    # csv.writer quotes a cell that has a character of the line terminator. With "\r\n" as the terminator, cells with \r
    # or \n are quoted. flush_row ends each row with "\n".
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\r\n")
    names = columns.names

    def flush_row(cells: list[str]) -> None:
        writer.writerow(cells)
        row = text.getvalue()
        text.seek(0)
        text.truncate()
        target.write(row[:-2].encode("utf-8", "replace") + b"\n")

    flush_row(list(names))
    for line in lines_of(source, start):
        record = json.loads(line.content)
        flush_row([_cell(record.get(name)) for name in names])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def records(path: Path, source: BinaryIO, delimiter: str, answer: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a table that `write` made.

    Args:
        path: the name for messages.
        answer: the name of the column with the generated text.

    Raises:
        ConfigError: no job wrote the table, or the table is damaged.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _MOST_CELL))
    text = io.TextIOWrapper(source, encoding="utf-8", newline="")
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        is_openai = tuple(header) == OPENAI
        if not is_openai and (header[:2] != ["row", "id"] or answer not in header or header[-1] != "error"):
            raise ConfigError(f"{path} is not the output of a job; give another name")
        known = (*BEHIND, "row", "id", "finish_reason", "error", answer)
        own = () if is_openai else tuple(name for name in header if name not in known)
        for cells in rows:
            if len(cells) != len(header):
                raise ConfigError(f"{path} is damaged: line {rows.line_num} has {len(cells)} cells")
            values = dict(zip(header, cells, strict=True))
            if is_openai:
                made = {name: _openai_value(name, cell) for name, cell in values.items()}
            else:
                texts = (*own, *_TEXTS, answer)
                made = {name: _text(cell) if name in texts else _json(cell) for name, cell in values.items()}
                made[answer] = values[answer]  # an empty cell means "" here, because an answer is never null
            yield record_of(made, "openai" if is_openai else "flat", own)
    except (csv.Error, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no CSV of a job, or is damaged ({error}); give another name") from error
    finally:
        text.detach()  # otherwise `text` would close `source`


def _openai_value(name: str, cell: str) -> Any:
    return _json(cell) if name in ("response", "error") else _text(cell)


def _text(cell: str) -> str | None:
    return cell or None


def _json(cell: str) -> Any:
    return json.loads(cell) if cell else None
