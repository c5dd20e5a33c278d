"""Reads files of columns (Parquet, Excel): the names of the columns, and the rows as Python values."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from llamabatch.errors import InputError, SetupError
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.output.parquet import check_installed
from llamabatch.utils.checks import show

_BATCH_ROWS = 256
_BATCH_BYTES = 64 * 2**20
DAMAGE = (OSError, ValueError)  # errors of a damaged file; pyarrow's errors are subclasses


class ColumnFile:
    """An open file of columns.

    Attributes:
        names: the names of the columns.
        n_rows: the number of rows.
    """

    names: list[str]
    n_rows: int

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields each row with the values of these columns. Raises DAMAGE if the file cannot be read any further."""
        raise NotImplementedError

    def values(self, column: str) -> Iterator[Any]:
        """Yields the values of one column. Raises DAMAGE."""
        raise NotImplementedError


@contextlib.contextmanager
def open_columns(source: Source) -> Iterator[ColumnFile]:
    """Opens a file of the kind "parquet" or "xlsx".

    Raises:
        InputError: the source is a stream, or cannot be read. SetupError: the package for the file is not installed.
    """
    if source.path is None or source.is_stream:
        what = "a Parquet file" if source.kind == "parquet" else "an Excel file"
        raise InputError(f"{source.name} is a stream; {what} can be read only from a disk")
    with contextlib.ExitStack() as stack:
        if source.kind == "parquet":
            yield _Parquet(source, stack)
        else:
            if source not in _sheets:
                _sheets[source] = _Sheet(source)
            yield _sheets[source]


def check_names(source: str, names: Sequence[str]) -> None:
    """Raises InputError if two columns have the same name."""
    counts = Counter(names)
    for name in names:
        if counts[name] > 1:
            what = f"two columns {show(name)}" if name else "two columns without a name"
            raise InputError(f"{source} has {what}; give each a name of its own")


class _Parquet(ColumnFile):
    """A Parquet file. One read returns up to 256 rows, and only the columns that the caller needs."""

    def __init__(self, source: Source, stack: contextlib.ExitStack) -> None:
        check_installed()
        import pyarrow.parquet as pq

        try:
            self._file: Any = stack.enter_context(pq.ParquetFile(source.path))
        except DAMAGE as error:
            raise InputError(f"{source.name} cannot be read as a Parquet file: {error}") from error
        self.names = self._file.schema_arrow.names
        check_names(source.name, self.names)
        self.n_rows = self._file.metadata.num_rows

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        known = self._file.metadata
        whole = sum(known.row_group(at).total_byte_size for at in range(known.num_row_groups))
        most = max(1, _BATCH_BYTES * self.n_rows // max(1, whole))  # large rows make `most` smaller than _BATCH_ROWS
        for batch in self._file.iter_batches(batch_size=min(_BATCH_ROWS, most), columns=list(columns)):
            yield from batch.to_pylist()

    def values(self, column: str) -> Iterator[Any]:
        for batch in self._file.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()


class _Sheet(ColumnFile):
    """The first sheet of an Excel file, held in memory. All values are texts, as in CSV. Empty rows above the column
    names and at the end are ignored, and so are empty columns without a name."""

    def __init__(self, source: Source) -> None:
        try:
            import fastexcel
            import pyarrow  # fastexcel returns pyarrow tables
        except ImportError as error:
            raise SetupError('.xlsx files need fastexcel and pyarrow: pip install "llamabatch[excel]"') from error
        try:
            # All columns are read as strings, because a type for each column would lose values of other types. No
            # header row is set, because fastexcel would replace repeated and missing names.
            options = {"dtypes": "string", "header_row": None, "skip_rows": 0}
            sheet: Any = fastexcel.read_excel(str(source.path)).load_sheet(0, **options).to_arrow()
        except fastexcel.FastExcelError as error:
            why = str(error).partition("\n")[0]  # the later lines of the message are context
            raise InputError(f"{source.name} cannot be read as an Excel file: {why}") from error
        columns, n_sheet = sheet.columns, sheet.num_rows
        filled = (row for row in range(n_sheet) if any(column[row].is_valid for column in columns))
        header = next(filled, None)
        if header is None:
            raise InputError(f"{source.name} has no columns; write their names into the first row of its first sheet")
        used = [column for column in columns if column.null_count < n_sheet]
        self.names = [column[header].as_py() or "" for column in used]
        check_names(source.name, self.names)
        n_rows = n_sheet
        while not any(column[n_rows - 1].is_valid for column in used):
            n_rows -= 1
        self.n_rows = n_rows - header - 1
        self._rows = pyarrow.table([column[header + 1 : n_rows] for column in used], self.names)

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        wanted = self._rows.select(list(columns))
        for start in range(0, self.n_rows, _BATCH_ROWS):
            yield from wanted.slice(start, _BATCH_ROWS).to_pylist()

    def values(self, column: str) -> Iterator[Any]:
        yield from self._rows.column(column).to_pylist()


# The parsed sheets. A job opens a source several times (for columns, ids, number of rows, rows), but parses a sheet
# only once.
_sheets: weakref.WeakKeyDictionary[Source, _Sheet] = weakref.WeakKeyDictionary()
