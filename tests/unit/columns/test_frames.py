"""Batches of every kind are read as rows, and come back in the same kind with more columns."""

import sys
import types

import numpy as np
import pytest

from llamabatch import InputError, SetupError
from llamabatch.columns import Generate
from llamabatch.columns.frames import open_batch, rows_of
from llamabatch.testing import FakeLLM

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"type": "string"},
        "score": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
    },
}
ANSWER = '{"label": "good", "score": 3, "share": 1, "sure": true, "tags": ["a", "b"], "more": {"x": [1]}}'
FIELDS = {"label": "good", "score": 3, "share": 1.0, "sure": True, "tags": ["a", "b"], "more": '{"x": [1]}'}
DATA = {"review": ["fine", "bad", None], "stars": [5, 1, 3]}
KINDS = {
    "lists": dict,
    "numpy": lambda data: {name: np.array(values, object) for name, values in data.items()},
    "pandas": lambda data: pd.DataFrame(data, index=range(7, 7 + len(data["review"]))),
    "polars": pl.DataFrame,
    "lazy": pl.LazyFrame,
    "table": pa.table,
    "batch": pa.RecordBatch.from_pydict,
}


@pytest.fixture
def generate():
    with FakeLLM(answers=ANSWER) as llm:
        yield Generate(llm, prompt="Classify: {{ review }}", schema=SCHEMA, output={"n_tokens": "n"})


def plain(batch):
    """Returns columns as lists of Python's values, with None for every kind of null."""
    opened = open_batch(batch)
    return {name: [row[name] for row in rows_of(opened, opened.names)] for name in opened.names}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_with_the_same_values(generate, kind):
    given = KINDS[kind](DATA)
    before = plain(given)
    made = generate(given)
    assert type(made) is type(given)
    found = plain(made)
    assert list(found) == ["review", "stars", "n", *FIELDS, "error"]
    assert {name: found[name] for name in DATA} == DATA
    for name, value in FIELDS.items():
        assert found[name] == [value, value, None]
    assert found["n"][:2] == [found["n"][0]] * 2
    assert found["error"][:2] == [None, None]
    assert "'review' is null" in found["error"][2]
    assert plain(given) == before, "the batch of the caller was changed"


@pytest.mark.parametrize("kind", KINDS)
def test_types_do_not_depend_on_the_rows(generate, kind):
    full, nulls = ({"review": reviews, "stars": [1] * len(reviews)} for reviews in (["a", "b"], ["a", None]))
    batches = [generate(KINDS[kind](data)) for data in (full, nulls)]
    if kind == "pandas":
        assert list(batches[0].dtypes) == list(batches[1].dtypes)
        assert str(batches[0]["score"].dtype) == "Int64"
        assert str(batches[0]["sure"].dtype) == "boolean"
    elif kind == "lazy":
        assert batches[0].collect_schema() == batches[1].collect_schema()
    elif kind not in ("lists", "numpy"):
        assert batches[0].schema == batches[1].schema
    if kind == "numpy":
        assert batches[0]["score"].dtype == np.int64
        assert batches[1]["score"].dtype == object


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gets_the_columns(kind):
    llm = FakeLLM()
    empty = {"review": [], "stars": []}
    given = KINDS[kind](empty)
    made = Generate(llm, prompt="{{ review }}", schema=SCHEMA)(given)
    assert type(made) is type(given)
    assert list(plain(made)) == ["review", "stars", *FIELDS, "error"]
    assert open_batch(made).n_rows == 0
    assert llm.requests == []


def test_a_batch_without_columns_gets_them():
    assert Generate(FakeLLM(), prompt="{{ review }}")({}) == {"generated_text": [], "error": []}


def test_the_index_of_pandas_stays(generate):
    frame = pd.DataFrame({"review": ["a", "b"]}, index=["x", "x"])
    assert list(generate(frame).index) == ["x", "x"]
    assert list(generate(frame)["label"]) == ["good", "good"]


def test_metadata_of_an_arrow_schema_stays(generate):
    table = pa.table({"review": ["a"]}).replace_schema_metadata({"of": "us"})
    assert generate(table).schema.metadata == {b"of": b"us"}


def test_missing_values_of_every_kind_are_null():
    frame = pd.DataFrame(
        {
            "a": pd.Series([1, None], dtype="Int64"),
            "b": [0.5, float("nan")],
            "c": pd.to_datetime(["2026-01-01", None]),
            "d": [np.str_("x"), None],
        }
    )
    opened = open_batch(frame)
    first, second = rows_of(opened, opened.names)
    assert (first["a"], first["b"], first["d"]) == (1, 0.5, "x")
    assert set(second.values()) == {None}


def test_cells_of_numpy_are_values_of_python():
    opened = open_batch({"a": np.array([[1, 2], [3, 4]]), "b": np.array([True, False])})
    rows = list(rows_of(opened, ["a", "b"]))
    assert rows == [{"a": [1, 2], "b": True}, {"a": [3, 4], "b": False}]
    assert type(rows[0]["b"]) is bool


def test_a_query_that_fails_is_an_input_error(generate):
    with pytest.raises(InputError, match=r"(?s)^the LazyFrame of polars cannot be collected: .*gone") as refused:
        generate(pl.LazyFrame(DATA).select("gone"))
    assert isinstance(refused.value.__cause__, pl.exceptions.PolarsError)
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    with duckdb.connect() as connection:
        relation = connection.sql("select case when i = 2 then error('broken') end as review from range(3) as t(i)")
        with pytest.raises(InputError, match=r"^the query of the DuckDB relation failed: .*broken"):
            generate(relation)


def test_a_relation_of_duckdb_comes_back_as_a_table_that_duckdb_reads(generate):
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    with duckdb.connect() as connection:
        given = connection.sql("select 'fine' as review, 5 as stars union all select 'bad', 1 order by stars")
        made = generate(given)
        assert type(made) is pa.Table
        assert connection.sql("select review, label from made").fetchall() == [("bad", "good"), ("fine", "good")]
        with pytest.raises(InputError, match="the batch has two columns 'a'"):
            generate(connection.sql("select 1 as a, 2 as a"))


def test_a_relation_without_pyarrow_says_what_to_install(generate, monkeypatch):
    duckdb = types.SimpleNamespace(DuckDBPyRelation=type("DuckDBPyRelation", (), {}))
    monkeypatch.setitem(sys.modules, "duckdb", duckdb)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"pip install 'llamabatch\[parquet\]'"):
        generate(duckdb.DuckDBPyRelation())


def test_a_frame_that_is_computed_elsewhere_is_refused(generate):
    class Frame:
        def compute(self): ...

    with pytest.raises(InputError, match="the batch is a Frame; collect it first"):
        generate(Frame())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "the batch is 'text'; give a data frame"),
        ([{"review": "a"}], r"the batch is \[\{.*; give a data frame"),
        (None, "the batch is None"),
        (7, "the batch is a int; give a data frame"),
        ({"a": ["x"], "b": []}, "column 'b' has 0 rows, and 'a' 1"),
        ({"a": "text"}, "column 'a' is 'text'; give a list"),
        ({"a": np.array(3)}, "has no dimension"),
        ({1: ["x"]}, "the batch has a column 1; give columns whose names are texts"),
        (pd.DataFrame([["a", "b"]], columns=["review", "review"]), "the batch has two columns 'review'"),
        (pa.Table.from_arrays([pa.array(["a"])] * 2, names=["review", "review"]), "two columns 'review'"),
        (pd.Series(["a"]), "the batch is a Series; give a data frame"),
    ],
)
def test_anything_else_is_refused(generate, given, message):
    with pytest.raises(InputError, match=message):
        generate(given)


@pytest.mark.parametrize(
    ("output", "column", "message"),
    [
        ("review", "review", "has a column 'review' already; give output={'text': 'another name'}"),
        (None, "error", "has a column 'error' already; give output={'error': 'another name'}"),
        ({"n_tokens": "n"}, "n", "has a column 'n' already; give output={'n_tokens': 'another name'}"),
    ],
)
def test_a_column_that_is_there_is_not_replaced(output, column, message):
    llm = FakeLLM()
    with pytest.raises(InputError, match=message):
        Generate(llm, prompt="{{ review }}", output=output)({"review": ["a"], column: ["b"]})
    assert llm.requests == []


def test_without_narwhals_dictionaries_and_arrow_still_work(generate, monkeypatch):
    monkeypatch.setitem(sys.modules, "narwhals", None)
    assert generate({"review": ["a"]})["label"] == ["good"]
    assert generate(pa.table({"review": ["a"]}))["label"].to_pylist() == ["good"]
    with pytest.raises(SetupError, match=r"pip install 'llamabatch\[columns\]'"):
        generate(pd.DataFrame({"review": ["a"]}))
