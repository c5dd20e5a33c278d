"""Turns each row of a table (CSV, text, Parquet or Excel) into a plain line, by a template."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from llamabatch.errors import ConfigError, InputError, PromptError
from llamabatch.jobs import formats
from llamabatch.jobs.input.column_files import DAMAGE, check_names, open_columns
from llamabatch.jobs.input.jsonl import Filled, Problem, Record, lines, not_utf8, too_long, without_mark
from llamabatch.jobs.input.sources import DAMAGED, Source
from llamabatch.jobs.input.templates import JinjaTemplate, Template, as_json, as_text, is_jinja, template_of
from llamabatch.jobs.rows import ALL, OWN_IDS, ReadOptions
from llamabatch.media.parts import message_with_media
from llamabatch.request.media import IMAGE, SOUND
from llamabatch.request.parameter_names import ALIASES
from llamabatch.request.sampling_params import BOOLEANS, INTEGERS, OPTIONAL_INTEGERS
from llamabatch.utils.checks import counted, nearest, show

_PROMPT = "prompt"  # the column of a text file
DEFAULT_TEMPLATE = f"{{{_PROMPT}}}"

_WHOLE = frozenset((*INTEGERS, *OPTIONAL_INTEGERS))
# Parameters that may have a text as their value.
_TEXTS = frozenset(("stop", "bad_words", "dry_sequence_breakers", "overflow", "structured_outputs"))
# pandas reads these texts as missing values, and so does pyarrow, except "None". A parameter with such a text in its
# cell has the job's value, unless the parameter is in _TEXTS.
_MISSING = frozenset(
    (
        *("nan", "NaN", "-nan", "-NaN", "null", "NULL", "None", "n/a", "N/A", "NA", "<NA>", "#N/A", "#N/A N/A", "#NA"),
        *("-1.#IND", "1.#IND", "-1.#QNAN", "1.#QNAN"),
    )
)


def text_rows(source: Source, stream: BinaryIO, options: ReadOptions, taken: Collection[str] = ()) -> Iterator[Record]:
    """Yields the rows of a table that is UTF-8 text. Empty rows at the end are ignored.

    The first row of a CSV file names the columns. Commas (tabs in .tsv) separate the values. A value that contains a
    separator, a quote or a line end is in double quotes, and its own quotes are doubled. A .txt file has one column,
    "prompt", and a row for each line that is not empty.
    """
    table = _table(source, stream, options.max_line_bytes)
    rows = RowLines(source.name, options, taken, table.header)
    for record in table.records():
        if isinstance(record, Problem):
            yield rows.unread(record)
        else:
            yield rows.line(dict(zip(table.header, record, strict=True)))


class _Plain:
    """A text file as a table with one column."""

    header = (_PROMPT,)

    def __init__(self, source: Source, stream: BinaryIO, limit: int) -> None:
        self._lines = lines(stream, limit)
        self._first = next(self._lines, b"")
        if isinstance(self._first, bytes):
            self._first = without_mark(source.name, self._first)

    def records(self) -> Iterator[list[str] | Problem]:
        """Yields each line that is not empty, as a row of one value."""
        for line in itertools.chain([self._first], self._lines):
            text = line if isinstance(line, Problem) else _text(line)
            if isinstance(text, Problem):
                yield text
            elif text.strip():
                yield [text]


def _text(line: bytes) -> str | Problem:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return not_utf8(line, error)


class _Csv:
    """The parser of one CSV file. The constructor reads the header."""

    def __init__(self, source: Source, stream: BinaryIO, limit: int) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), limit))  # a value needs no limit: _CsvLines limits each row
        self._lines = _CsvLines(source.name, stream, limit)
        self._records = csv.reader(self._lines, delimiter=formats.CSV[f".{source.kind}"], strict=True)
        header = self._next()
        if isinstance(header, Problem):
            raise InputError(f"{source.name}, the row with the columns' names: {header.error}")
        self.header = header or []
        if not self.header:
            raise InputError(f"{source.name} has no columns; write their names into its first row")
        # Spreadsheets write empty columns without a name. Several such columns are allowed, because no template can
        # name them.
        check_names(source.name, [name for name in self.header if name])

    def records(self) -> Iterator[list[str] | Problem]:
        """Yields each row as a list with one value for each column."""
        n_empty = 0
        while (record := self._next()) is not None:
            if record == []:
                n_empty += 1
                continue
            for _ in range(n_empty):
                yield Problem("this row is empty")
            n_empty = 0
            if isinstance(record, list) and len(record) != len(self.header):
                n, named = len(record), len(self.header)
                yield Problem(f"this row has {counted(n, 'value')}; the first row names {counted(named, 'column')}")
            else:
                yield record

    def _next(self) -> list[str] | Problem | None:
        """Returns the values of the next row, or a Problem; None: the end."""
        self._lines.start()
        try:
            return next(self._records, None)
        except (csv.Error, _BadText) as error:
            return Problem(f"this is no row of CSV: {error}")


def _table(source: Source, stream: BinaryIO, limit: int) -> _Csv | _Plain:
    return (_Plain if source.kind == "txt" else _Csv)(source, stream, limit)


class _BadText(Exception):
    """The error for a line that is not passed to the CSV parser."""


class _CsvLines(Iterator[str]):
    """Lines for the CSV parser. A row that becomes too long raises _BadText; the next row can be read after that."""

    def __init__(self, name: str, stream: BinaryIO, limit: int) -> None:
        self._name = name
        self._lines = lines(stream, limit)
        self._limit = limit
        self._size = 0
        self._first = True

    def start(self) -> None:
        """Begins to count the bytes of a new row."""
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


def column_rows(source: Source, options: ReadOptions, taken: Collection[str] = ()) -> Iterator[Record]:
    """Yields the rows of a Parquet or Excel file."""
    with open_columns(source) as file:
        rows = RowLines(source.name, options, taken, file.names)
        records = file.rows(rows.columns)
        while True:
            try:
                values = next(records, None)
            except DAMAGE as error:
                yield Problem(f"the file is damaged, and nothing can be read from here on: {error}")
                return
            if values is None:
                return
            yield rows.line(values)


def check_text(source: Source, stream: BinaryIO, options: ReadOptions, taken: Collection[str] = ()) -> None:
    """Checks the header of a table that is text.

    Args:
        taken: names of the output's own columns, which no kept column may have.

    Raises:
        ConfigError: the template, or the columns of ids, parameters or kept values, do not fit the header.
        InputError: there is no header.
    """
    RowLines(source.name, options, taken, _table(source, stream, options.max_line_bytes).header)


def check_columns(source: Source, options: ReadOptions, taken: Collection[str] = ()) -> None:
    """Checks the column names of a Parquet or Excel file. Raises the errors of check_text and open_columns."""
    with open_columns(source) as file:
        RowLines(source.name, options, taken, file.names)


def own_id_column(source: Source, options: ReadOptions) -> str | None:
    """Returns the name of a table's own column of ids: "id" or "custom_id". None: there is no such column, an option
    names the column of ids, or the source is a stream or has lines of JSON. Raises the errors of check_text."""
    if source.kind == "jsonl" or source.is_stream or options.id_column is not None:
        return None
    if source.has_columns:
        with open_columns(source) as file:
            return id_column_of(source.name, options, file.names)
    try:
        with source.open() as stream:
            return id_column_of(source.name, options, _table(source, stream, options.max_line_bytes).header)
    except DAMAGED:  # the error is reported when the rows are read
        return None


# Common names of columns with texts.
_USUAL = ("text", "question", "content", "input", "instruction", "message", "body", "document", "sentence", "title")


def _check_separator(name: str, columns: Sequence[str]) -> None:
    """Raises ConfigError if a table has only one column, whose name contains a separator other than a comma."""
    names = columns[0] if len(columns) == 1 else ""
    separator = next((each for each in ";\t|" if each in names), None)
    if separator is not None:
        raise ConfigError(
            f"{name} has one column, {show(names)}: its fields seem to be separated by {separator!r}, and llamabatch "
            "reads commas; save the file with commas"
        )


def _example(columns: Sequence[str]) -> str:
    """Returns a quoted example of a template, with the column that most likely holds the texts."""
    texts = [each for each in columns if each.lower() in _USUAL] or [
        each for each in columns if each.lower() not in OWN_IDS
    ]
    column = (texts or list(columns))[0]
    return f"'{{{{ {column} }}}}'" if column.isidentifier() else f"\"{{{{ row['{column}'] }}}}\""


def id_column_of(name: str, options: ReadOptions, columns: Collection[str]) -> str | None:
    """Returns the column of a table that holds the ids; None: the row numbers are the ids. Raises ConfigError."""
    if options.id_column is not None:
        if options.id_column and options.id_column not in columns:
            raise ConfigError(f"{name} has no column {show(options.id_column)}{nearest(options.id_column, columns)}")
        return options.id_column or None
    # Spreadsheets and databases also write "ID".
    found = [each for each in OWN_IDS if each in columns] or [each for each in columns if each.lower() in OWN_IDS]
    if len(found) > 1:
        names = " and ".join(map(repr, found))
        raise ConfigError(f"{name} has columns {names}; name the one that holds the ids: --id-column {found[0]}")
    return found[0] if found else None


def values_of(source: Source, options: ReadOptions, column: str) -> Iterator[Any]:
    """Yields the value of a column in each row of a table, or a Problem for a row that cannot be read."""
    if source.has_columns:
        with open_columns(source) as file, contextlib.suppress(*DAMAGE):  # reading the rows reports the error
            yield from file.values(column)
        return
    try:
        with source.open() as stream:
            table = _table(source, stream, options.max_line_bytes)
            place = table.header.index(column)
            for record in table.records():
                yield record if isinstance(record, Problem) else record[place]
    except DAMAGED:
        return


def check_template(options: ReadOptions) -> Template:
    """Returns the template of rows. Raises ConfigError."""
    differ = not options.has_media  # with media, all rows may have the same text
    if options.prompt is not None:
        return template_of(options.prompt, jinja=True, names_columns=differ)
    return template_of(DEFAULT_TEMPLATE if options.template is None else options.template, names_columns=differ)


def check_kept(
    options: ReadOptions, taken: Collection[str], columns: Collection[str] = (), id_column: str | None = None
) -> None:
    """Checks the names of the kept columns.

    Args:
        columns: the columns of the input, for options.keep == "all".
        id_column: the column of the ids, which the output has anyway.

    Raises:
        ConfigError: the output has a column of the same name.
    """
    for name in columns if options.keep == ALL else options.keep or ():
        if name not in taken or name == id_column:
            continue
        if name == "id":
            cure = "the id of a row is there anyway, so leave it out"
        elif name == "text":
            cure = "give the answer another name (--answer NAME)"
        else:
            cure = "rename it in the input, or name the columns to keep without it"
        raise ConfigError(f"the column {show(name)} cannot be kept: the output has its own column of that name; {cure}")


def parameter(name: str, value: Any) -> Any:
    """Returns the value of a parameter in a cell of a table; None: no value. A text that is JSON is parsed. If the
    parameter may be a text, only a JSON string, list or object is parsed."""
    field = ALIASES.get(name, name)
    if isinstance(value, float) and math.isnan(value):
        return None  # pandas writes NaN for an empty cell in a column of numbers
    if isinstance(value, str):
        if not value or (value in _MISSING and field not in _TEXTS):
            return None
        if field in BOOLEANS:
            value = value.lower() if value in ("True", "False", "TRUE", "FALSE") else value
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        value = value if field in _TEXTS and not isinstance(found, (str, list, dict)) else found
    return as_json(_whole(name, value))


def _whole(name: str, value: Any) -> Any:
    """Turns 5.0 into 5 for parameters that are whole numbers. pandas writes 5.0 in columns with empty cells."""
    is_whole = isinstance(value, float) and value.is_integer() and ALIASES.get(name, name) in _WHOLE
    return int(value) if is_whole else value


class RowLines:
    """Makes plain lines from the rows of a table, or from lines of JSON.

    Args:
        name: the name of the input, for messages.
        options: the template, task, system message, and the columns of ids, parameters and kept values.
        taken: names of the output's own columns.
        columns: the columns of the table; None: the input has lines of JSON, each with its own fields.

    Attributes:
        columns: the columns that must be read from a table.
        id_column: the column or field of the ids. None: a line of JSON has its id in "id" or "custom_id", and a
            row of a table has its number as its id.

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
        self._system = None if system is None or not is_jinja(system) else JinjaTemplate(system)
        self.columns: tuple[str, ...] = ()
        self.id_column = options.id_column
        if columns is None:
            return
        assert self._template is not None
        if options.prompt is None and options.template is None and "prompt" not in columns:
            _check_separator(name, columns)
            example = "'Describe this.'" if options.has_media else _example(columns)
            raise ConfigError(
                f"{name} has no column 'prompt'; give a template, as --prompt {example}; its columns are "
                f"{', '.join(columns)}"
            )
        wanted: list[str] = []
        for template in (self._template, self._system):
            if template is not None:
                if not template.reads_all and not set(template.columns) <= set(columns):
                    _check_separator(name, columns)
                template.check(name, columns)
                wanted += columns if template.reads_all else template.columns
        self.id_column = id_column_of(name, options, columns)
        wanted += [] if self.id_column is None else [self.id_column]
        for what, names in (
            ("to keep", columns if options.keep == ALL else options.keep),
            ("of parameters", options.params_from),
            ("of pictures", options.image_columns),
            ("of sounds", options.audio_columns),
        ):
            for each in names or ():
                if each not in columns:
                    raise ConfigError(f"{name} has no column {show(each)} {what}{nearest(each, columns)}")
                wanted.append(each)
        check_kept(options, taken, columns, self.id_column)
        self.columns = tuple(dict.fromkeys(wanted))

    @property
    def used(self) -> frozenset[str]:
        """The fields named in options.keep. They are data, even if a name resembles the name of a known field. With a
        template, all fields are data, so this set is empty."""
        keep = self._options.keep
        return frozenset(() if keep in (None, ALL) or self._template is not None else keep)

    def unread(self, problem: Problem) -> Problem:
        """Returns the Problem of an unreadable row. If no column holds ids, the row gets its number as its id."""
        return problem if self.id_column is not None else problem._replace(line={})

    def line(self, values: Mapping[str, Any]) -> Filled | Problem:
        """Returns the plain line of a row. `values` must have at least self.columns."""
        kept = self._kept(values)
        try:
            line = self._id(values)
        except PromptError as error:
            return Problem(str(error), None, kept)
        if self._template is None:
            own = {name: value for name, value in values.items() if name not in OWN_IDS}
            return Filled(own | line, kept)
        try:
            text = self._template.fill(values)
            limit = self._options.max_line_bytes
            if len(text) > limit:
                return Problem(too_long(len(text), limit).error, line, kept)
            return Filled(line | self._request(text, values) | self._params(values), kept)
        except PromptError as error:
            return Problem(str(error), line, kept)

    def _id(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the id as a field of a plain line; {}: the number of the row is the id. Raises PromptError."""
        if self.id_column is None:
            return {} if self._is_table else {name: values[name] for name in OWN_IDS if name in values}
        value = values.get(self.id_column)
        if value is None:
            raise PromptError(f"column {show(self.id_column)} holds no id; give a text or a whole number")
        return {"id": value if isinstance(value, int) or not self._is_table else as_text(value)}

    def _params(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters of a row by name. The value None means the job's value."""
        names = [name for name in self._options.params_from or () if name in values]
        return {name: (parameter if self._is_table else _whole)(name, values[name]) for name in names}

    def _kept(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        keep = self._options.keep
        if keep is None:
            return None
        if keep == ALL:
            own = OWN_IDS if not self._is_table and self._options.id_column is None else (self.id_column,)
            keep = tuple(name for name in values if name not in own)
        return {name: as_json(values.get(name)) for name in keep}

    def _request(self, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._options.task == "embedding":
            return {"input": text}
        if self._options.task == "completion":
            return {"prompt": text}
        system = self._options.system if self._system is None else self._system.fill(values)
        before = [] if system is None else [{"role": "system", "content": system}]
        if not self._options.has_media:
            return {"messages": [*before, {"role": "user", "content": text}]}
        given = {IMAGE: self._options.image_columns, SOUND: self._options.audio_columns}
        columns = {kind: names for kind, names in given.items() if names}
        return {"messages": [*before, message_with_media(text, values, columns)]}
