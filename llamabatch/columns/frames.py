"""Batches of columns (pandas, polars, pyarrow, DuckDB, dictionaries): reads their rows and adds columns.

narwhals reads and extends data frames. Dictionaries and pyarrow objects do not need narwhals.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llamabatch.columns.schema import BOOLEAN, INTEGER, NUMBER, Kind
from llamabatch.errors import InputError, SetupError
from llamabatch.utils.checks import counted, show

_KINDS = (
    "a data frame of pandas or polars, a relation of DuckDB, a Table or RecordBatch of pyarrow, or a dictionary of "
    "arrays or lists"
)


@dataclass(frozen=True)
class Column:
    """A column to add. The value None stands for null."""

    name: str
    kind: Kind
    values: list[Any]


class Batch(Protocol):
    """A batch of columns.

    Attributes:
        names: the names of the columns.
        n_rows: the number of rows.
    """

    names: list[str]
    n_rows: int

    def values(self, name: str) -> list[Any]:
        """Returns the cells of a column as Python values."""

    def extended(self, columns: Sequence[Column]) -> Any:
        """Returns a new batch of the same kind with these columns at the end. The batch itself does not change."""


def open_batch(given: Any) -> Batch:
    """Returns the Batch of a caller's table.

    Raises:
        InputError: the table is of an unknown kind, its columns differ in length, two columns have the same name, or
            the query of a relation or a LazyFrame fails.
        SetupError: a data frame needs narwhals, or a relation needs pyarrow, and the package is not installed.
    """
    if isinstance(given, Mapping):
        batch: Batch = _Dictionary(given)
    elif _is_arrow(given):
        batch = _Arrow(given)
    elif _is_relation(given):
        batch = _Arrow(_table_of(given))
    else:
        batch = _Frame(given)
    return batch


def rows_of(batch: Batch, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields each row as a dictionary of these columns. A cell without a value (null, NaN, NA, NaT) is None."""
    if not names:
        yield from ({} for _ in range(batch.n_rows))
        return
    for cells in zip(*map(batch.values, names), strict=True):
        yield dict(zip(names, map(_cell, cells), strict=True))


def _cell(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return None if value != value else value
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return _cell(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_cell(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _cell(each) for name, each in value.items()}
    return value


def _check_names(names: Sequence[Any]) -> list[str]:
    seen = set()
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"the batch has a column {show(name)}; give columns whose names are texts")
        if name in seen:
            raise InputError(f"the batch has two columns {show(name)}; rename one of them")
        seen.add(name)
    return list(names)


class _Dictionary:
    """A dictionary of lists or numpy arrays. New columns are arrays if any old column is an array."""

    def __init__(self, given: Mapping[Any, Any]) -> None:
        self._given = given
        self.names = _check_names(list(given))
        self.n_rows = 0
        for index, (name, values) in enumerate(given.items()):
            is_array = getattr(values, "ndim", None) is not None
            if not is_array and not isinstance(values, (list, tuple)):
                raise InputError(f"column {show(name)} is {show(values)}; give a list, or an array of numpy")
            if is_array and values.ndim == 0:
                raise InputError(f"column {show(name)} has no dimension; give an array of values")
            if index and len(values) != self.n_rows:
                rows = f"{counted(len(values), 'row')}, and {show(self.names[0])} {self.n_rows:,}"
                raise InputError(f"column {show(name)} has {rows}; all columns of a batch have the same number")
            self.n_rows = len(values)

    def values(self, name: str) -> list[Any]:
        return list(self._given[name])

    def extended(self, columns: Sequence[Column]) -> dict[str, Any]:
        arrays = any(getattr(values, "ndim", None) is not None for values in self._given.values())
        return {**self._given, **{each.name: _array(each) if arrays else each.values for each in columns}}


def _array(column: Column) -> Any:
    """Returns the values as an array. The dtype is object, unless the values are numbers or booleans without null."""
    import numpy as np

    types = {INTEGER: np.int64, NUMBER: np.float64, BOOLEAN: np.bool_}
    if not column.kind.is_list and column.kind.name in types and None not in column.values:
        return np.array(column.values, types[column.kind.name])
    array = np.empty(len(column.values), object)
    for index, value in enumerate(column.values):  # array[:] = values would turn lists of equal length into a matrix
        array[index] = value
    return array


class _Arrow:
    """A Table or a RecordBatch of pyarrow, read without narwhals. narwhals cannot read a RecordBatch."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.names = _check_names(given.schema.names)
        self.n_rows = given.num_rows

    def values(self, name: str) -> list[Any]:
        values: list[Any] = self._given.column(name).to_pylist()
        return values

    def extended(self, columns: Sequence[Column]) -> Any:
        pyarrow = sys.modules["pyarrow"]
        schema, arrays = self._given.schema, list(self._given.columns)
        for each in columns:
            array = pyarrow.array(each.values, _arrow_type(pyarrow, each.kind))
            schema, arrays = schema.append(pyarrow.field(each.name, array.type)), [*arrays, array]
        return type(self._given).from_arrays(arrays, schema=schema)


def _is_arrow(given: Any) -> bool:
    pyarrow = sys.modules.get("pyarrow")
    return pyarrow is not None and isinstance(given, (pyarrow.RecordBatch, pyarrow.Table))


def _is_relation(given: Any) -> bool:
    duckdb = sys.modules.get("duckdb")
    return duckdb is not None and isinstance(given, duckdb.DuckDBPyRelation)


def _table_of(relation: Any) -> Any:
    """Runs the query of a DuckDB relation and returns its rows. Raises SetupError without pyarrow, and InputError if
    the query fails."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise SetupError("relations of DuckDB need pyarrow: pip install 'llamabatch[parquet]'") from error
    try:
        return relation.to_arrow_table()
    except sys.modules["duckdb"].Error as error:
        raise InputError(f"the query of the DuckDB relation failed: {error}") from error


def _arrow_type(pyarrow: Any, kind: Kind) -> Any:
    types = {INTEGER: pyarrow.int64, NUMBER: pyarrow.float64, BOOLEAN: pyarrow.bool_}
    scalar = types.get(kind.name, pyarrow.string)()
    return pyarrow.list_(scalar) if kind.is_list else scalar


def _collected(frame: Any) -> Any:
    """Collects a LazyFrame of polars. Raises InputError."""
    try:
        return frame.collect()
    except sys.modules["polars"].exceptions.PolarsError as error:
        raise InputError(f"the LazyFrame of polars cannot be collected: {error}") from error


class _Frame:
    """A data frame that narwhals reads. A LazyFrame of polars is collected, and extended() returns a new LazyFrame."""

    def __init__(self, given: Any) -> None:
        if isinstance(given, (str, bytes, list, tuple)) or given is None:
            raise InputError(f"the batch is {show(given)}; give {_KINDS}")
        polars = sys.modules.get("polars")
        self._is_lazy = polars is not None and isinstance(given, polars.LazyFrame)
        try:
            import narwhals as nw
        except ImportError as error:
            raise SetupError(
                "data frames need narwhals, which is not installed: pip install 'llamabatch[columns]'; dictionaries of "
                "lists, and pyarrow, need nothing"
            ) from error
        try:
            frame = nw.from_native(_collected(given) if self._is_lazy else given, eager_only=True)
        except nw.exceptions.DuplicateError:
            _check_names(list(given.columns))
            raise
        except TypeError as error:
            cure = "collect it first" if hasattr(given, "collect") or hasattr(given, "compute") else f"give {_KINDS}"
            raise InputError(f"the batch is a {type(given).__name__}; {cure}") from error
        self._frame: Any = frame
        self._nw = nw
        self.names = _check_names(list(frame.columns))
        self.n_rows = len(frame)

    def values(self, name: str) -> list[Any]:
        values: list[Any] = self._frame.get_column(name).to_list()
        return values

    def extended(self, columns: Sequence[Column]) -> Any:
        if self._frame.implementation.is_pandas_like():
            return self._extended_pandas(columns)
        nw = self._nw
        backend = self._frame.implementation
        types = {INTEGER: nw.Int64, NUMBER: nw.Float64, BOOLEAN: nw.Boolean}
        series = []
        for each in columns:
            scalar = types.get(each.kind.name, nw.String)
            dtype = nw.List(scalar) if each.kind.is_list else scalar
            series.append(nw.new_series(each.name, each.values, dtype, backend=backend))
        made = self._frame.with_columns(series).to_native()
        return made.lazy() if self._is_lazy else made

    def _extended_pandas(self, columns: Sequence[Column]) -> Any:
        """Extends a pandas frame. The new columns have nullable types, which do not depend on the rows of a batch."""
        native = self._frame.to_native()
        pandas = self._frame.implementation.to_native_namespace()
        types = {INTEGER: "Int64", NUMBER: "float64", BOOLEAN: "boolean"}
        text = pandas.Series([""]).dtype  # dtype object; from pandas 3 on, dtype str
        series = {
            each.name: pandas.Series(
                each.values, native.index, dtype=object if each.kind.is_list else types.get(each.kind.name, text)
            )
            for each in columns
        }
        return native.assign(**series)
