"""CSV and Parquet: templates, ids, what a broken table says."""

import datetime
import gzip
import json

import pytest

from llamabatch.errors import ConfigError, InputError, SetupError
from llamabatch.jobs.input import tables
from llamabatch.jobs.input.reader import Reader, read
from llamabatch.jobs.input.sources import find
from llamabatch.jobs.input.templates import template_of
from llamabatch.jobs.output.records import RecordOptions
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
        ("{{ nme }}", "has no column 'nme' for the template; did you mean 'name'"),
        ("{{ 'name' }}", "it names no column"),
        ("{{ name", "the template cannot be compiled"),
        ("{% for %}", "the template cannot be compiled"),
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
    assert [row.id for row in rows] == [7, 8, 9, None]
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


@pytest.mark.parametrize("given", [{"task": "embedding"}, {"task": "chat", "system": "s"}])
def test_options_for_prompts_of_a_template_are_refused_where_nothing_makes_them(given, tmp_path):
    lines = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="is for CSV, Parquet and a template, and there is none of these"):
        read(find([lines]), ReadOptions(**given))
    assert read(find([lines]), ReadOptions(template="{prompt}", **given))
    assert read(find([lines, write(tmp_path / "b.csv", "a,prompt\n1,2\n")]), ReadOptions(**given))


def lines_of(tmp_path, *records, **options):
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    return rows_of(path, **options)


def test_a_template_of_jinja2_is_filled_from_tables_and_from_lines(tmp_path):
    prompt = "{% if lang == 'fr' %}Traduire{% else %}Translate{% endif %}: {{ text | upper }} {\"n\": {{ row['a b'] }}}"
    table = write(tmp_path / "a.csv", "lang,text,a b\nfr,bon,1\nen,good,2\n")
    wanted = ['Traduire: BON {"n": 1}', 'Translate: GOOD {"n": 2}']
    assert [row.prompt for row in rows_of(table, prompt=prompt)] == wanted
    records = [{"lang": "fr", "text": "bon", "a b": 1}, {"lang": "en", "text": "good", "a b": 2}]
    assert [row.prompt for row in lines_of(tmp_path, *records, prompt=prompt)] == wanted
    assert [row.prompt for row in lines_of(tmp_path, *records, template="{lang}: {a b}")] == ["fr: 1", "en: 2"]


def test_lines_under_a_template_keep_their_parameters_and_ids_and_prompts_are_data(tmp_path):
    records = [
        {"id": 7, "instruction": "Add.", "input": "1 2", "output": "3", "max_tokens": 5, "url": "http://a"},
        {"custom_id": "b", "instruction": "Go.", "input": "", "messages": "none"},
    ]
    rows = lines_of(tmp_path, *records, prompt="{{ instruction }} {{ input }}", task="chat", system="In {{ row.id }}")
    assert "cannot be filled" in rows[1].error  # it has no field "id"
    assert (rows[0].id, rows[0].task, rows[0].params.max_tokens) == (7, "chat", 5)
    assert rows[0].prompt == [{"role": "system", "content": "In 7"}, {"role": "user", "content": "Add. 1 2"}]


def test_a_line_without_a_field_of_the_template_is_one_error_row(tmp_path):
    rows = lines_of(tmp_path, {"text": "a"}, {"txt": "a"}, {"text": None}, {"text": "b"}, prompt="Say {{ text }}")
    assert [row.prompt for row in rows if isinstance(row, Row)] == ["Say a", "Say b"]
    assert "'text' is undefined" in rows[1].error
    assert "is null" in rows[2].error
    filled = lines_of(
        tmp_path, {"b": 1}, {"text": None, "b": 2}, prompt="{% if text is defined and text %}x{% endif %}{{ b }}"
    )
    assert [row.prompt for row in filled] == ["1", "2"]


def test_a_template_that_never_ends_is_one_error_row(tmp_path):
    [row] = lines_of(
        tmp_path,
        {"a": 1},
        prompt="{% for i in range(10**6) %}{% for j in range(10**5) %}{{ a }}{% endfor %}{% endfor %}",
    )
    assert "cannot be filled" in row.error


def test_unknown_fields_are_data_and_near_misses_are_errors(tmp_path):
    record = {"prompt": "a", "label": 1, "url": "http://a", "title": "t", "step": 3}
    [row] = lines_of(tmp_path, record)
    assert (row.prompt, row.openai, row.kept) == ("a", False, None)
    for name, meant in (("temprature", "temperature"), ("mesages", "messages"), ("max_token", "max_tokens")):
        [row] = lines_of(tmp_path, {"prompt": "a", name: 1})
        assert f"there is no field {name!r}; did you mean {meant!r}" in row.error
        assert isinstance(lines_of(tmp_path, {"prompt": "a", name: 1}, keep=(name,))[0], Row)
        assert isinstance(lines_of(tmp_path, {name: 1}, prompt=f"{{{{ {name} }}}}")[0], Row)
    [row] = lines_of(tmp_path, {"prompt": "a", "json_schema": {}})
    assert "structured_outputs={'json'" in row.error


def test_kept_columns_come_with_their_rows(tmp_path):
    table = write(tmp_path / "a.csv", "key,prompt,label\n1,one,x\n2,two,\n")
    assert [row.kept for row in rows_of(table, keep=("label",))] == [{"label": "x"}, {"label": ""}]
    assert rows_of(table, keep="all", id_column="key")[0].kept == {"prompt": "one", "label": "x"}
    records = [{"id": 1, "prompt": "a", "n_words": 2, "tags": ["x", {"y": None}]}, {"id": 2, "promt": "a"}]
    rows = lines_of(tmp_path, *records, keep=("tags", "n_words"))
    assert [row.kept for row in rows] == [{"tags": ["x", {"y": None}], "n_words": 2}, {"tags": None, "n_words": None}]
    assert isinstance(rows[1], BadRow)
    assert lines_of(tmp_path, records[0], keep="all")[0].kept == {
        "prompt": "a",
        "n_words": 2,
        "tags": ["x", {"y": None}],
    }


def test_kept_values_of_parquet_are_values_of_json(tmp_path):
    day = datetime.date(2026, 1, 2)
    path = parquet(tmp_path / "a.parquet", {"prompt": ["a"], "n": [3], "day": [day], "raw": [b"\xff"], "list": [[day]]})
    [row] = rows_of(path, keep=("n", "day", "raw", "list"))
    assert row.kept == {"n": 3, "day": "2026-01-02", "raw": None, "list": ["2026-01-02"]}


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (("lable",), "has no column 'lable' to keep; did you mean 'label'"),
        (("text",), "the column 'text' cannot be kept: the output has one of that name; give the answer another name"),
        (("id",), "give --id-column id"),
        ("all", "the column 'id' cannot be kept"),
    ],
)
def test_columns_that_cannot_be_kept_are_refused_before_the_first_row(keep, message, tmp_path):
    table = write(tmp_path / "a.csv", "id,text,label,prompt\n1,2,3,4\n")
    with pytest.raises(ConfigError) as refused:
        Reader(find([table]), ReadOptions(keep=keep), RecordOptions().taken)
    assert message in str(refused.value)
    lines = write(tmp_path / "a.jsonl", '{"prompt": "a", "error": 1}\n')
    with pytest.raises(ConfigError, match="the column 'error' cannot be kept"):
        Reader(find([lines]), ReadOptions(keep="all"), RecordOptions().taken)


@pytest.mark.parametrize("keep", ["label", (), ("a", "a"), (1,), 5])
def test_keep_is_names_of_columns(keep):
    with pytest.raises(ConfigError, match="keep is"):
        ReadOptions(keep=keep)


def test_an_id_column_of_lines(tmp_path):
    rows = lines_of(tmp_path, {"key": "a", "id": 1, "prompt": "x"}, {"prompt": "y"}, id_column="key")
    assert rows[0].id == "a"
    assert isinstance(rows[1], BadRow)


def test_a_template_looks_nothing_up():
    assert template_of("{a.b}{c[0]}").columns == ("a.b", "c[0]")
    assert template_of("{a.b}").fill({"a.b": "{x}"}) == "{x}"
    assert template_of("{at: UTC}{ok?!}").fill({"at: UTC": "noon", "ok?!": "yes"}) == "noonyes"
    assert tables.DEFAULT_TEMPLATE == "{prompt}"


def test_beside_a_table_lines_ask_for_themselves_unless_the_template_is_given_as_prompt(tmp_path):
    table = write(tmp_path / "a.csv", "key,text\nk,one\n")
    lines = write(tmp_path / "b.jsonl", '{"id": "x", "prompt": "own", "key": "y", "text": "two"}\n')
    options = ReadOptions(template="Say {text}", id_column="key")
    assert [(row.id, row.prompt) for row in read(find([table, lines]), options)] == [("k", "Say one"), ("x", "own")]
    options = ReadOptions(prompt="Say {{ text }}", id_column="key")
    assert [(row.id, row.prompt) for row in read(find([table, lines]), options)] == [("k", "Say one"), ("y", "Say two")]
