"""CSV and Parquet: templates, ids, what a broken table says."""

import datetime
import gzip

import pytest

from llamabatch.errors import ConfigError, InputError, SetupError
from llamabatch.jobs.input import tables
from llamabatch.jobs.input.reader import read
from llamabatch.jobs.input.sources import find
from llamabatch.jobs.input.tables import Template
from llamabatch.jobs.rows import BadRow, ReadOptions, Row


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows_of(path, **options):
    return list(read(find([path]), ReadOptions(**options)))


def errors(rows):
    return [row.error if isinstance(row, BadRow) else None for row in rows]


def test_a_template_is_filled_from_columns(tmp_path):
    path = write(tmp_path / "a.csv", 'name,the text\nAda,"one, ""two""\nthree"\nÖ,{x}\n')
    rows = rows_of(path, template="{name}: {the text} {{{name}}}")
    assert [row.prompt for row in rows] == ['Ada: one, "two"\nthree {Ada}', "Ö: {x} {Ö}"]
    assert [(row.id, row.task, row.number) for row in rows] == [("0", "completion", 0), ("1", "completion", 1)]
    assert rows[1].place == f"{path}, row 2"


def test_rows_as_messages_texts_to_embed_and_with_ids(tmp_path):
    path = write(tmp_path / "a.tsv", "\ufeffkey\tprompt\r\na\tone, two\r\nb\tthree\r\na\tfour\r\n")
    rows = rows_of(path, task="chat", system="Be brief.", id_column="key")
    assert rows[0].prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one, two"}]
    assert [row.id for row in rows] == ["a", "b", None]
    assert f"the id 'a' is taken by {path}, row 1" in rows[2].error
    assert [(row.task, row.prompt) for row in rows_of(path, task="embedding")][1] == ("embedding", "three")


def test_a_compressed_table(tmp_path):
    path = write(tmp_path / "a.csv.gz", gzip.compress(b"prompt\none\ntwo\n"))
    assert [row.prompt for row in rows_of(path)] == ["one", "two"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{nme}", "has no column 'nme' for the template; did you mean 'name'"),
        ("{name.__class__}", "has no column 'name.__class__'"),
        ("{name[0]}", "has no column 'name[0]'"),
        ("{name!r}", "has no column 'name!r'"),
        ("{name:>10}", "has no column 'name:>10'"),
        ("a {}", "the brace at character 3 is no pair with a column's name between"),
        ("{name", "write {{ or }} for a brace"),
        ("name}", "write {{ or }} for a brace"),
        ("name", "it names no column"),
        ("{{name}}", "it names no column"),
        ("", "give a text of 1 to"),
        (None, "needs a template, as '…{name}…'; its columns are name, text"),
    ],
)
def test_a_template_is_refused_before_the_first_row(tmp_path, template, message):
    path = write(tmp_path / "a.csv", "name,text\nAda,b\n")
    with pytest.raises(ConfigError) as refused:
        read(find([path]), ReadOptions(template=template))
    assert message in str(refused.value)


def test_columns_of_every_file_are_looked_at_first(tmp_path):
    paths = [write(tmp_path / "a.csv", "a,b\n1,2\n"), write(tmp_path / "b.csv", "a,c\n1,2\n")]
    with pytest.raises(ConfigError, match=r"b\.csv has no column 'b'"):
        read(find(paths), ReadOptions(template="{b}"))
    with pytest.raises(ConfigError, match=r"a\.csv has no column 'key'"):
        read(find(paths), ReadOptions(template="{a}", id_column="key"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no columns"),
        ("\n", "has no columns"),
        ("a,a\n", "has two columns 'a'"),
        ('"a\n', "the row with the columns' names"),
        (b"\xff\xfea\0", "UTF-16"),
    ],
)
def test_a_header_that_is_none(tmp_path, text, message):
    with pytest.raises(InputError) as refused:
        rows_of(write(tmp_path / "a.csv", text), template="{a}")
    assert message in str(refused.value)


def test_a_bad_row_is_one_error_and_the_next_one_is_read(tmp_path):
    bad = {
        "1,2,3": "has 3 values; the first row names 2 columns",
        "1": "has 1 value; the first row names 2 columns",
        "": "this row is empty",
        'a"b"c","': None,  # quotes inside an unquoted value mean themselves; this has two values
        '"a"b,c': "no row of CSV",
        "a\0,b": "a zero byte",
        "a\rb,c": "no row of CSV",
        "x" * 5000 + ",b": "allowed are up to 1000",
        '"' + "x\n" * 3000 + '",b': "allowed are up to 1000",
    }
    del bad['a"b"c","']
    for line, message in bad.items():
        path = write(tmp_path / "a.csv", f"a,b\nfirst,1\n{line}\nlast,2\n")
        rows = rows_of(path, template="{a}{b}", max_line_bytes=1000)
        assert rows[0].prompt == "first1", line[:20]
        assert isinstance(rows[1], BadRow), line[:20]
        assert message in rows[1].error
        if len(line) < 5500:  # of a quotation without an end it is not known where it was meant to end
            assert len(rows) == 3
            assert (rows[2].prompt, rows[2].number) == ("last2", 2)
    path = write(tmp_path / "a.csv", b"a,b\ncaf\xe9,1\nlast,2\n")
    bad_row, good = rows_of(path, template="{a}{b}")
    assert "byte 4 of a line is 0xe9, no UTF-8" in bad_row.error
    assert good.prompt == "last2"


def test_empty_rows_at_the_end_are_none(tmp_path):
    assert len(rows_of(write(tmp_path / "a.csv", "prompt\na\n\n\n"))) == 1


def test_an_empty_value_is_an_empty_text(tmp_path):
    rows = rows_of(write(tmp_path / "a.csv", "a,prompt\n1,\n"), template="[{prompt}]")
    assert rows[0].prompt == "[]"
    assert "prompt is empty" in rows_of(tmp_path / "a.csv")[0].error


# --- Parquet ----------------------------------------------------------------------------------------------------------


def parquet(path, columns, **options):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, **options)
    return path


def test_parquet_values_of_any_kind(tmp_path):
    day = datetime.date(2024, 5, 6)
    columns = {
        "key": [7, 8, 9, 9],
        "text": ["a", "b", None, "d"],
        "number": [1.5, 2.0, 3.0, 4.0],
        "day": [day] * 4,
        "list": [["ä", "y"], [], None, ["z"]],
        "bytes": [b"ok", b"\xff", b"", b"x"],
    }
    path = parquet(tmp_path / "a.parquet", columns)
    rows = rows_of(path, template="{text} {number} {day} {list}", id_column="key")
    assert rows[0].prompt == 'a 1.5 2024-05-06 ["ä", "y"]'
    assert [row.id for row in rows] == ["7", "8", "9", None]
    assert errors(rows)[2] == f"{path}, row 3: column 'text' holds None, which is no text"
    assert "the id '9' is taken" in rows[3].error
    assert [type(row) for row in rows_of(path, template="{bytes}.")] == [Row, BadRow, Row, Row]


def test_parquet_is_read_in_pieces(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"prompt": [f"row {i}" for i in range(5000)]}, row_group_size=700)
    reader = read(find([path]))
    first = [next(reader) for _ in range(1000)]
    assert reader.seen == ((0,), 1000, None, False)
    rows = first + list(reader)
    assert [row.prompt for row in rows] == [f"row {i}" for i in range(5000)]


def test_a_damaged_parquet_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read as a Parquet file"):
        rows_of(write(tmp_path / "a.parquet", b"nonsense"))
    path = parquet(tmp_path / "b.parquet", {"prompt": [f"row {i}" for i in range(5000)]}, row_group_size=500)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 2000] = b"\xff" * 2000
    *rows, last = rows_of(write(path, bytes(content)))
    assert all(isinstance(row, Row) for row in rows)
    assert len(rows) >= 500
    assert isinstance(last, BadRow)
    assert "the file is damaged" in last.error


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", {"prompt": ["a"]})
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(SetupError, match=r'pip install "llamabatch\[parquet\]"'):
        read(find([path]))


@pytest.mark.parametrize(
    "given", [{"template": "{a}"}, {"task": "embedding"}, {"task": "chat", "system": "s"}, {"id_column": "a"}]
)
def test_what_is_for_tables_is_refused_where_there_is_none(given, tmp_path):
    lines = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="is for CSV and Parquet, and no input is one"):
        read(find([lines]), ReadOptions(**given))
    assert read(find([lines, write(tmp_path / "b.csv", "a,prompt\n1,2\n")]), ReadOptions(**given))


def test_a_template_looks_nothing_up():
    assert Template("{a.b}{c[0]}").columns == ("a.b", "c[0]")
    assert Template("{a.b}").fill({"a.b": "{x}"}) == "{x}"
    assert Template("{at: UTC}{ok?!}").fill({"at: UTC": "noon", "ok?!": "yes"}) == "noonyes"
    assert tables.DEFAULT_TEMPLATE == "{prompt}"
