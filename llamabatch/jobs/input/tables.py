"""Tables: each row of a CSV or Parquet file becomes the plain line that a template makes of it."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from llamabatch.errors import ConfigError, InputError, PromptError, SetupError
from llamabatch.jobs.input.jsonl import Filled, Problem, Record, lines, too_long, without_mark
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.input.templates import JinjaTemplate, Template, as_json, as_text, is_jinja, template_of
from llamabatch.jobs.rows import ALL, ReadOptions
from llamabatch.utils.checks import counted, nearest, show

DEFAULT_TEMPLATE = "{prompt}"

_DELIMITERS = {"csv": ",", "tsv": "\t"}
_BATCH_ROWS = 256


def csv_rows(source: Source, stream: BinaryIO, options: ReadOptions, taken: Collection[str] = ()) -> Iterator[Record]:
    """The rows of a CSV file in UTF-8. Empty rows at the end are ignored.

    Its first row names the columns. Values are separated by commas (tabs in .tsv); a value with a separator, a quote
    or a line's end in it is in double quotes, with its own ones doubled.
    """
    table, n_empty = _Csv(source, stream, options, taken), 0
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

    def __init__(self, source: Source, stream: BinaryIO, options: ReadOptions, taken: Collection[str] = ()) -> None:
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
        self._rows = RowLines(source.name, options, taken, self._header)

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


def parquet(source: Source, options: ReadOptions, taken: Collection[str] = ()) -> Iterator[Record]:
    """The rows of a Parquet file, a few hundred at a time, with the wanted columns alone."""
    with _parquet_file(source) as file:
        rows = RowLines(source.name, options, taken, file.schema_arrow.names)
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


def check_csv(source: Source, stream: BinaryIO, options: ReadOptions, taken: Collection[str] = ()) -> None:
    """Reads the header.

    Args:
        taken: names of columns that the output has already, which no kept column can have.

    Raises:
        ConfigError: template, id column or kept columns do not fit it. InputError: there is none.
    """
    _Csv(source, stream, options, taken)


def check_parquet(source: Source, options: ReadOptions, taken: Collection[str] = ()) -> None:
    """Reads the schema. Raises as check_csv; SetupError without pyarrow."""
    with _parquet_file(source) as file:
        RowLines(source.name, options, taken, file.schema_arrow.names)


def check_template(options: ReadOptions) -> Template:
    """The template of rows. Raises ConfigError."""
    if options.prompt is not None:
        return template_of(options.prompt, jinja=True)
    return template_of(DEFAULT_TEMPLATE if options.template is None else options.template)


def check_kept(options: ReadOptions, taken: Collection[str], columns: Collection[str] = ()) -> None:
    """Checks the names of the columns that are kept.

    Args:
        columns: those that there are, for options.keep == "all".

    Raises:
        ConfigError: the output has a column of that name already.
    """
    for name in columns if options.keep == ALL else options.keep or ():
        if name not in taken or name == options.id_column:
            continue
        if name == "id":
            cure = "give --id-column id, and it is the id of its row"
        elif name == "text":
            cure = "give the answer another name (--answer NAME)"
        else:
            cure = "rename it in the input, or name the columns to keep without it"
        raise ConfigError(f"the column {show(name)} cannot be kept: the output has one of that name; {cure}")


class RowLines:
    """The plain lines that are made of rows of a table, or of the fields of lines of JSON.

    Args:
        name: of the input, for messages.
        options: template, task, system message, id column and kept columns.
        taken: names of columns that the output has already.
        columns: those of the table; None: lines of JSON, each with fields of its own.

    Attributes:
        columns: the names that are read, of a table.

    Raises:
        ConfigError: the options do not fit the columns.
    """

    def __init__(
        self, name: str, options: ReadOptions, taken: Collection[str] = (), columns: Sequence[str] | None = None
    ) -> None:
        self._options = options
        self._is_table = columns is not None
        self._template = check_template(options) if columns is not None or options.has_template else None
        system = options.system
        self._system = None if system is None or not is_jinja(system) else JinjaTemplate(system, names_columns=False)
        self.columns: tuple[str, ...] = ()
        if columns is None:
            return
        assert self._template is not None
        if not options.has_template and "prompt" not in columns:
            raise ConfigError(f"{name} needs a template, as '…{{{columns[0]}}}…'; its columns are {', '.join(columns)}")
        wanted: list[str] = []
        for template in (self._template, self._system):
            if template is not None:
                template.check(name, columns)
                wanted += columns if template.reads_all else template.columns
        if options.id_column is not None:
            if options.id_column not in columns:
                raise ConfigError(
                    f"{name} has no column {show(options.id_column)}{nearest(options.id_column, columns)}"
                )
            wanted.append(options.id_column)
        for each in columns if options.keep == ALL else options.keep or ():
            if each not in columns:
                raise ConfigError(f"{name} has no column {show(each)} to keep{nearest(each, columns)}")
            wanted.append(each)
        check_kept(options, taken, columns)
        self.columns = tuple(dict.fromkeys(wanted))

    @property
    def used(self) -> frozenset[str]:
        """Names of fields that the templates read, or that are kept by name: data, whatever they resemble."""
        found = () if self._options.keep in (None, ALL) else self._options.keep
        read = [] if self._template is None else [*self._template.columns]
        return frozenset((*found, *read, *([] if self._system is None else self._system.columns)))

    def line(self, values: Mapping[str, Any]) -> Filled | Problem:
        """The plain line of a row; `values` has at least self.columns."""
        kept = self._kept(values)
        line: dict[str, Any] = {}
        if self._is_table:
            if self._options.id_column is not None:
                identity = values[self._options.id_column]
                line["id"] = identity if isinstance(identity, int) else as_text(identity)
        else:
            line = self._own(values)
        if self._template is None:
            return Filled(line, kept)
        try:
            text = self._template.fill(values)
            limit = self._options.max_line_bytes
            if len(text) > limit:
                return Problem(too_long(len(text), limit).error, line or None, kept)
            return Filled(line | self._request(text, values), kept)
        except PromptError as error:
            return Problem(str(error), line or None, kept)

    def _own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a line of JSON that are no data: with a template those of SamplingParams and the id, else
        all."""
        if self._template is None and self._options.id_column is None:
            return dict(values)
        dropped = ("prompt", "messages", "input") if self._template is not None else ()
        line = {name: value for name, value in values.items() if name not in dropped and name not in self.used}
        if self._template is None:
            line = dict(values)
        if self._options.id_column is not None:
            line = {name: value for name, value in line.items() if name not in ("id", "custom_id")}
            line["id"] = values.get(self._options.id_column)
        elif self._template is not None:
            line |= {name: values[name] for name in ("id", "custom_id") if name in values}
        return line

    def _kept(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        keep = self._options.keep
        if keep is None:
            return None
        if keep == ALL:
            own = ("id", "custom_id") if not self._is_table and self._options.id_column is None else ()
            keep = tuple(name for name in values if name not in own and name != self._options.id_column)
        return {name: as_json(values.get(name)) for name in keep}

    def _request(self, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._options.task == "embedding":
            return {"input": text}
        if self._options.task == "completion":
            return {"prompt": text}
        system = self._options.system if self._system is None else self._system.fill(values)
        before = [] if system is None else [{"role": "system", "content": system}]
        return {"messages": [*before, {"role": "user", "content": text}]}
