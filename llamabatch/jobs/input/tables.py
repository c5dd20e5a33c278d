"""Tables: each row of a CSV or Parquet file becomes the plain line that a template makes of it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from llamabatch.errors import ConfigError, InputError, SetupError
from llamabatch.jobs.input.jsonl import Problem, Record, lines, too_long, without_mark
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.rows import ReadOptions
from llamabatch.utils.checks import counted, nearest, show

DEFAULT_TEMPLATE = "{prompt}"

_DELIMITERS = {"csv": ",", "tsv": "\t"}
_BATCH_ROWS = 256
MAX_CHARS = 2**20

_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]+\}|[{}]")


def csv_rows(source: Source, stream: BinaryIO, options: ReadOptions) -> Iterator[Record]:
    """The rows of a CSV file in UTF-8. Empty rows at the end are ignored.

    Its first row names the columns. Values are separated by commas (tabs in .tsv); a value with a separator, a quote
    or a line's end in it is in double quotes, with its own ones doubled.
    """
    table, n_empty = _Csv(source, stream, options), 0
    while (record := table.next_record()) is not None:
        if isinstance(record, list) and not record:
            n_empty += 1
            continue
        for _ in range(n_empty):
            yield Problem("this row is empty")
        n_empty = 0
        yield record if isinstance(record, Problem) else table.line(record)


class _Csv:
    """The parser of one file; the constructor reads its header."""

    def __init__(self, source: Source, stream: BinaryIO, options: ReadOptions) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), options.max_line_bytes))  # our own limit is for the whole row
        self._lines = _CsvLines(source.name, stream, options.max_line_bytes)
        self._records = csv.reader(self._lines, delimiter=_DELIMITERS[source.kind], strict=True)
        header = self.next_record()
        if isinstance(header, Problem):
            raise InputError(f"{source.name}, the row with the columns' names: {header.error}")
        self._header = header or []
        if not self._header:
            raise InputError(f"{source.name} has no columns; their names stand in its first row")
        for name in self._header:
            if self._header.count(name) > 1:
                raise InputError(f"{source.name} has two columns {show(name)}")
        self._rows = _RowLines(source.name, self._header, options)

    def next_record(self) -> list[str] | Problem | None:
        """The values of the next row; None at the end."""
        self._lines.start()
        try:
            return next(self._records, None)
        except (csv.Error, _BadText) as error:
            return Problem(f"this is no row of CSV: {error}")

    def line(self, values: list[str]) -> Record:
        if len(values) != len(self._header):
            n, named = len(values), len(self._header)
            return Problem(f"this row has {counted(n, 'value')}; the first row names {counted(named, 'column')}")
        return self._rows.line(dict(zip(self._header, values, strict=True)))


class _BadText(Exception):
    """A line that must not reach the parser."""


class _CsvLines(Iterator[str]):
    """Lines for the CSV parser, with an error for a row that becomes too long. It goes on after an error."""

    def __init__(self, name: str, stream: BinaryIO, limit: int) -> None:
        self._name = name
        self._lines = lines(stream, limit)
        self._limit = limit
        self._size = 0
        self._first = True

    def start(self) -> None:
        """Begins a row."""
        self._size = 0

    def __next__(self) -> str:
        line = next(self._lines)
        if isinstance(line, Problem):
            raise _BadText(line.error)
        if self._first:
            line = without_mark(self._name, line)
            self._first = False
        self._size += len(line)
        if self._size > self._limit + 2:
            raise _BadText(too_long(self._size, self._limit).error)
        if b"\0" in line:
            raise _BadText("it holds a zero byte")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise _BadText(f"byte {error.start + 1} of a line is 0x{line[error.start]:02x}, no UTF-8") from error


def parquet(source: Source, options: ReadOptions) -> Iterator[Record]:
    """The rows of a Parquet file, a few hundred at a time, with the wanted columns alone."""
    with _parquet_file(source) as file:
        rows = _RowLines(source.name, file.schema_arrow.names, options)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=list(rows.columns))
        while True:
            try:
                batch = next(batches, None)
                found = None if batch is None else batch.to_pylist()
            except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
                yield Problem(f"the file is damaged, and nothing can be read from here on: {error}")
                return
            if found is None:
                return
            for values in found:
                yield rows.line(values)


def _parquet_file(source: Source) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SetupError('Parquet files need pyarrow: pip install "llamabatch[parquet]"') from error
    if source.path is None or source.is_stream:
        raise InputError(f"{source.name} is a stream; a Parquet file must be one on a disk")
    try:
        return pq.ParquetFile(source.path)
    except (OSError, ValueError) as error:
        raise InputError(f"{source.name} cannot be read as a Parquet file: {error}") from error


def check_csv(source: Source, stream: BinaryIO, options: ReadOptions) -> None:
    """Reads the header. Raises ConfigError: template or id column do not fit it; InputError: there is none."""
    _Csv(source, stream, options)


def check_parquet(source: Source, options: ReadOptions) -> None:
    """Reads the schema. Raises as check_csv; SetupError without pyarrow."""
    with _parquet_file(source) as file:
        _RowLines(source.name, file.schema_arrow.names, options)


def check_template(options: ReadOptions) -> Template:
    """The template of tables. Raises ConfigError."""
    return Template(DEFAULT_TEMPLATE if options.template is None else options.template)


class _RowLines:
    """The values of a row, and the plain line that is made of them."""

    def __init__(self, name: str, columns: Sequence[str], options: ReadOptions) -> None:
        self._options = options
        self._template = check_template(options)
        if options.template is None and "prompt" not in columns:
            raise ConfigError(f"{name} needs a template, as '…{{{columns[0]}}}…'; its columns are {', '.join(columns)}")
        self._template.check(name, columns)
        if options.id_column is not None and options.id_column not in columns:
            raise ConfigError(f"{name} has no column {show(options.id_column)}{nearest(options.id_column, columns)}")
        wanted = (*self._template.columns, *([] if options.id_column is None else [options.id_column]))
        self.columns = tuple(dict.fromkeys(wanted))

    def line(self, values: Mapping[str, Any]) -> Record:
        """The plain line of a row; `values` has at least self.columns."""
        line: dict[str, Any] = {}
        if self._options.id_column is not None:
            identity = values[self._options.id_column]
            line["id"] = identity if isinstance(identity, int) else _text(identity)
        texts = {name: _text(values[name]) for name in self._template.columns}
        for name, text in texts.items():
            if text is None:
                return Problem(f"column {show(name)} holds {show(values[name])}, which is no text", line or None)
        text = self._template.fill({name: text or "" for name, text in texts.items()})
        if len(text) > self._options.max_line_bytes:
            return Problem(too_long(len(text), self._options.max_line_bytes).error, line or None)
        return line | self._request(text)

    def _request(self, text: str) -> dict[str, Any]:
        if self._options.task == "embedding":
            return {"input": text}
        if self._options.task == "completion":
            return {"prompt": text}
        before = [] if self._options.system is None else [{"role": "system", "content": self._options.system}]
        return {"messages": [*before, {"role": "user", "content": text}]}


def _text(value: Any) -> str | None:
    """A value as a CSV file would hold it; None: it has no such form."""
    if isinstance(value, str):
        return value
    if value is None:
        return None
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(value, (list, tuple, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return None
    return str(value)


class Template:
    """A text with {column} for a column's value, and {{ and }} for braces.

    The text between braces is a column's whole name, with any other characters; nothing is looked up in a value.

    Attributes:
        columns: the names in it, each once.

    Raises:
        ConfigError: a brace is open, or there is no name between two.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text or len(text) > MAX_CHARS:
            raise ConfigError(f"template is {show(text)}; give a text of 1 to {MAX_CHARS} characters")
        self._pieces: list[tuple[str, str | None]] = []
        end = 0
        for found in _BRACES.finditer(text):
            braces, literal = found[0], text[end : found.start()]
            if len(braces) == 1:
                raise ConfigError(
                    f"template is {show(text)}: the brace at character {found.start() + 1} is no pair with a column's "
                    "name between; write {{ or }} for a brace"
                )
            if braces in ("{{", "}}"):
                self._pieces.append((literal + braces[0], None))
            else:
                self._pieces.append((literal, braces[1:-1]))
            end = found.end()
        self._pieces.append((text[end:], None))
        self.columns = tuple(dict.fromkeys(name for _, name in self._pieces if name is not None))
        if not self.columns:
            raise ConfigError(f"template is {show(text)}; it names no column, so that all rows would ask the same")

    def check(self, source: str, columns: Sequence[str]) -> None:
        """Raises ConfigError: it names a column that the table does not have."""
        for name in self.columns:
            if name not in columns:
                raise ConfigError(f"{source} has no column {show(name)} for the template{nearest(name, columns)}")

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with a row's values."""
        return "".join(literal + (values[name] if name is not None else "") for literal, name in self._pieces)
