"""CSV, Parquet and Excel: templates, ids, errors of a broken table."""

import csv
import datetime
import gzip
import json
import re
import sys
import types
import zipfile
from xml.sax.saxutils import escape

import pytest

from llamabatch.errors import ConfigError, InputError, SetupError
from llamabatch.jobs.input import tables
from llamabatch.jobs.input.reader import Reader, read
from llamabatch.jobs.input.sources import find
from llamabatch.jobs.input.templates import template_of
from llamabatch.jobs.input.total import Seen, Total
from llamabatch.jobs.output.records import RecordOptions
from llamabatch.jobs.rows import BadRow, ReadOptions, Row
from llamabatch.request.sampling_params import SamplingParams


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


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{nme}", "takes a template of jinja2; did you mean 'name'"),
        ("{name.__class__}", "has no column 'name.__class__'"),
        ("a {}", "the brace at character 3 does not enclose the name of a column"),
        ("{name", "write {{ or }} for a brace"),
        ("name}", "write {{ or }} for a brace"),
        ("name", "it names no column"),
        ("{{ nme }}", "has no column 'nme' for the template; did you mean 'name'"),
        ("{{ 'name' }}", "it names no column"),
        ("{{ name", "the template cannot be compiled"),
        ("{% for %}", "the template cannot be compiled"),
        ("", "give a text of 1 to"),
        (None, "has no column 'prompt'; give a template, as --prompt '{{ text }}'; its columns are name, text"),
    ],
)
def test_a_template_is_refused_before_the_first_row(tmp_path, template, message):
    path = write(tmp_path / "a.csv", "name,text\nAda,b\n")
    with pytest.raises(ConfigError) as refused:
        read(find([path]), ReadOptions(template=template))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("header", "example"),
    [
        ("id,name,Question", "'{{ Question }}'"),
        ("id,word", "'{{ word }}'"),
        ("id", "'{{ id }}'"),
        ("id,my words", "\"{{ row['my words'] }}\""),
    ],
)
def test_a_missing_template_is_shown_with_the_likeliest_column(tmp_path, header, example):
    path = write(tmp_path / "a.csv", f"{header}\n{','.join('x' for _ in header.split(','))}\n")
    with pytest.raises(ConfigError) as refused:
        read(find([path]), ReadOptions())
    assert f"--prompt {example}; its" in str(refused.value)
    template = example[1:-1]
    assert list(read(find([path]), ReadOptions(template=template)))


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
        '"a"b,c': "no row of CSV",
        "a\0,b": "a zero byte",
        "a\rb,c": "no row of CSV",
        "x" * 5000 + ",b": "allowed are up to 1000",
        '"' + "x\n" * 3000 + '",b': "allowed are up to 1000",
    }
    for line, message in bad.items():
        path = write(tmp_path / "a.csv", f"a,b\nfirst,1\n{line}\nlast,2\n")
        rows = rows_of(path, template="{a}{b}", max_line_bytes=1000)
        assert rows[0].prompt == "first1", line[:20]
        assert isinstance(rows[1], BadRow), line[:20]
        assert message in rows[1].error
        if len(line) < 5500:  # after a quotation that is too long, the next row is not found
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


def test_two_columns_of_one_name_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="two columns 'text'"):
        rows_of(tmp_path / "a.parquet", prompt="{{ text }}")


def test_a_template_writes_values_of_any_kind_as_text(tmp_path):
    columns = {"raw": [b"a b", b"\xff"], "part": [{"x": "ä", "y": None}] * 2, "n": [1.5, 2.0]}
    path = parquet(tmp_path / "a.parquet", columns)
    first, second = rows_of(path, prompt="{{ raw }} {{ part }} {{ n }}")
    assert first.prompt == 'a b {"x": "ä", "y": null} 1.5'
    assert r"it writes b'\xff', which is no text" in second.error


def test_columns_without_a_name_are_passed_over(tmp_path):
    [row] = rows_of(write(tmp_path / "a.csv", "id,text,,\n1,a,,\n"), prompt="{{ text }}")
    assert (row.id, row.prompt) == ("1", "a")


def test_another_separator_is_named_with_a_template_too(tmp_path):
    with pytest.raises(ConfigError, match="seem to be separated by ';'"):
        rows_of(write(tmp_path / "a.csv", "id;text\n1;a\n"), prompt="{{ text }}")


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


# --- Excel ------------------------------------------------------------------------------------------------------------


def excel(path, rows):
    """Writes a workbook with one sheet of texts and numbers. None is an empty cell."""
    pytest.importorskip("fastexcel", reason="needs fastexcel (llamabatch[excel])")
    cells = ""
    for number, row in enumerate(rows, 1):
        cells += f'<row r="{number}">'
        for column, value in zip("ABCDEFGH", row, strict=False):
            if isinstance(value, str):
                cells += f'<c r="{column}{number}" t="inlineStr"><is><t>{escape(value)}</t></is></c>'
            elif value is not None:
                cells += f'<c r="{column}{number}"><v>{value}</v></c>'
        cells += "</row>"
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    links = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    files = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="xml" '
        'ContentType="text/xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{links}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{links}"><sheets><sheet name="one" sheetId="1" '
        'r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{links}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>{cells}</sheetData></worksheet>',
    }
    with zipfile.ZipFile(path, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    return path


def test_rows_of_excel_are_texts_and_empty_cells_have_no_value(tmp_path):
    rows = [["id", "text", "n"], [7, "ä & b", 1.5], [8, "c", None], [9, None, 2], [None, None, None]]
    path = excel(tmp_path / "a.xlsx", rows)
    found = rows_of(path, prompt="{{ text }}: {{ n or '-' }}", keep="all")
    assert [row.id for row in found] == ["7", "8", "9"]
    assert [row.prompt for row in found[:2]] == ["ä & b: 1.5", "c: -"]
    assert found[0].kept == {"text": "ä & b", "n": "1.5"}
    assert "'text' has no value" in found[2].error
    assert found[2].place == f"{path}, row 3"
    assert Total(find([path]), ReadOptions()).rows(Seen()) == (3, False)


def test_a_sheet_is_parsed_once(tmp_path, monkeypatch):
    sources = find([excel(tmp_path / "a.xlsx", [["id", "prompt"], [7, "a"]])])
    fastexcel = sys.modules["fastexcel"]
    opened, read_excel = [], fastexcel.read_excel
    monkeypatch.setattr(fastexcel, "read_excel", lambda path: opened.append(path) or read_excel(path))
    assert Total(sources, ReadOptions()).rows(Seen()) == (1, False)
    assert [row.id for row in read(sources)] == ["7"]
    assert len(opened) == 1


def test_a_column_of_excel_keeps_values_of_another_type(tmp_path):
    path = excel(tmp_path / "a.xlsx", [["prompt"], *([i] for i in range(1500)), ["late"]])
    assert [row.prompt for row in rows_of(path)] == [*map(str, range(1500)), "late"]


def test_the_columns_of_excel_are_named_in_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.xlsx has no column 'prompt'; give a template.*its columns are a, b"):
        rows_of(excel(tmp_path / "a.xlsx", [["a", "b"], [1, 2]]))
    with pytest.raises(ConfigError, match=r"row 2: column 'id' holds '7', the id of .*a\.xlsx, row 1, already"):
        rows_of(excel(tmp_path / "a.xlsx", [["id", "prompt"], [7, "a"], [7, "b"]]))


def test_names_of_columns_of_excel_are_those_of_its_first_row_with_values(tmp_path):
    above = [[None] * 4, [None, "prompt", None, "n"], [None] * 4, [0, "a", None, 1], [1, "b", None, None]]
    rows = rows_of(excel(tmp_path / "a.xlsx", above), keep="all")
    assert "row 1" in rows[0].place
    assert [row.prompt for row in rows[1:]] == ["a", "b"]
    assert [row.kept[""] for row in rows[1:]] == ["0", "1"]  # pandas gives the column of a frame's index no name
    assert [row.kept["n"] for row in rows[1:]] == ["1", None]
    for header, why in ((["prompt", "a", "a"], "two columns 'a'"), (["prompt"], "two columns without a name")):
        with pytest.raises(InputError, match=f"a.xlsx has {why}"):
            rows_of(excel(tmp_path / "a.xlsx", [header, ["a", 1, 2]]))


@pytest.mark.parametrize("content", [None, b"nonsense", b""])
def test_a_damaged_or_empty_excel_file(tmp_path, content):
    path = excel(tmp_path / "a.xlsx", [])
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.xlsx (cannot be read as an Excel file|has no columns)"):
        rows_of(path)


@pytest.mark.parametrize("missing", ["fastexcel", "pyarrow"])
def test_without_fastexcel_it_says_what_to_install(tmp_path, monkeypatch, missing):
    path = write(tmp_path / "a.xlsx", "")
    monkeypatch.setitem(sys.modules, "fastexcel", types.ModuleType("fastexcel"))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SetupError, match=r'pip install "llamabatch\[excel\]"'):
        read(find([path]))


@pytest.mark.parametrize("given", [{"task": "embedding"}, {"task": "chat", "system": "s"}])
def test_options_for_prompts_of_a_template_are_refused_where_nothing_makes_them(given, tmp_path):
    lines = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="needs a table or a template"):
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


def test_lines_under_a_template_keep_their_ids_and_all_else_is_data(tmp_path):
    records = [
        {"id": 7, "instruction": "Add.", "input": "1 2", "output": "3", "max_tokens": 5, "url": "http://a", "n": "x"},
        {"custom_id": "b", "instruction": "Go.", "input": "", "messages": "none"},
    ]
    rows = lines_of(tmp_path, *records, prompt="{{ instruction }} {{ input }}", task="chat", system="In {{ row.id }}")
    assert "cannot be filled" in rows[1].error  # this row has no field "id"
    assert (rows[0].id, rows[0].task, rows[0].params.max_tokens) == (7, "chat", 256)
    assert rows[0].prompt == [{"role": "system", "content": "In 7"}, {"role": "user", "content": "Add. 1 2"}]


RECORDS = [
    {"text": "a", "n": 3, "seed": 1.5, "stop": "the third", "max_tokens": 7, "temprature": 1, "body": {"prompt": 1}},
    {"text": "b", "n": None, "seed": None, "stop": None, "max_tokens": None, "temprature": None, "body": None},
]


def written(tmp_path, kind, records):
    if kind == "jsonl":
        return write(tmp_path / "a.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    if kind == "parquet":
        return parquet(tmp_path / "a.parquet", {name: [each[name] for each in records] for name in records[0]})
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(records[0]))
        table.writeheader()
        for record in records:
            table.writerow({name: "" if value is None else value for name, value in record.items()})
    return tmp_path / "a.csv"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_under_a_template_fields_are_data_and_parameters_are_those_that_are_named(kind, tmp_path):
    path = written(tmp_path, kind, RECORDS)
    rows = rows_of(path, prompt="Say {{ text }}", keep="all")
    assert [row.params for row in rows] == [SamplingParams()] * 2  # n, seed and stop are not read as parameters
    assert [row.prompt for row in rows] == ["Say a", "Say b"]
    assert rows[0].kept == RECORDS[0] if kind != "csv" else {*rows[0].kept} == {*RECORDS[0]}
    given = SamplingParams(max_tokens=9, stop=("x",))
    rows = rows_of(path, prompt="Say {{ text }}", keep="all", params_from=("max_tokens", "n", "stop"), params=given)
    assert rows[0].params == SamplingParams(max_tokens=7, n=3, stop="the third")
    assert rows[1].params == given  # null keeps the job's value
    assert rows[1].kept == RECORDS[1] if kind != "csv" else rows[1].kept["max_tokens"] == ""
    [bad, good] = rows_of(path, prompt="Say {{ text }}", params_from=("seed",))
    assert "seed is 1.5" in bad.error
    assert good.params == SamplingParams()


def test_cells_of_csv_become_parameters(tmp_path):
    cells = {
        "max_tokens": ("64.0", 64),  # as pandas writes a whole number beside an empty cell
        "temperature": ("0.5", 0.5),
        "ignore_eos": ("True", True),
        "stop": ('["5", "x"]', ("5", "x")),
        "stop_strings": ("5", ("5",)),
        "allowed_token_ids": ("[3, 1]", (1, 3)),
        "logit_bias": ('{"5": 1}', ((5, 1),)),
        "overflow": ("truncate", "truncate"),
    }
    for name, (cell, value) in cells.items():
        quoted = '"' + cell.replace('"', '""') + '"'
        path = write(tmp_path / "a.csv", f"prompt,{name}\na,{quoted}\nb,\n")
        first, second = rows_of(path, params_from=(name,))
        assert getattr(first.params, "stop" if name == "stop_strings" else name) == value
        assert second.params == SamplingParams()
    path = write(tmp_path / "a.csv", "prompt,max_tokens\na,many\n")
    assert "max_tokens is 'many'; give a whole number" in rows_of(path, params_from=("max_tokens",))[0].error
    path = write(tmp_path / "a.csv", 'prompt,chat_template_kwargs\na,"{""x"": 1}"\n')
    [row] = rows_of(path, task="chat", params_from=("chat_template_kwargs",))
    assert row.options.kwargs == {"x": 1}


MISSING = ("nan", "NaN", "NULL", "null", "None", "NA", "<NA>")


def test_cells_that_pandas_reads_as_missing_leave_the_value_of_the_job(tmp_path):
    job = SamplingParams(max_tokens=9, temperature=0.5, stop=("x",))
    texts = parquet(tmp_path / "t.parquet", {"prompt": ["a"] * 7, "max_tokens": MISSING, "stop": MISSING})
    cells = write(tmp_path / "a.csv", "prompt,max_tokens,stop\n" + "".join(f"a,{text},{text}\n" for text in MISSING))
    for path in (texts, cells):
        rows = rows_of(path, params_from=("max_tokens", "stop"), params=job)
        assert [(row.params.max_tokens, row.params.stop) for row in rows] == [(9, (text,)) for text in MISSING]
    numbers = {"max_tokens": [2.0, float("nan")], "temperature": [float("nan"), 1.0]}
    path = parquet(tmp_path / "n.parquet", {"prompt": ["a", "b"], **numbers})
    rows = rows_of(path, params_from=("max_tokens", "temperature"), params=job)
    assert [(row.params.max_tokens, row.params.temperature) for row in rows] == [(2, 0.5), (9, 1.0)]
    for path in (
        write(tmp_path / "b.csv", "prompt,n\na,nil\n"),
        parquet(tmp_path / "b.parquet", {"prompt": ["a"], "n": ["nil"]}),
    ):
        assert rows_of(path, params_from=("n",))[0].error.startswith(f"{path}, row 1: n is 'nil'; give a whole number")


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_whole_number_with_a_fraction_is_one_in_a_parameter(kind, tmp_path):
    path = written(tmp_path, kind, [{"prompt": "a", "max_tokens": 2.0}, {"prompt": "b", "max_tokens": 2.5}])
    good, bad = rows_of(path, prompt="{{ prompt }}", params_from=("max_tokens",))
    assert (good.params.max_tokens, type(good.params.max_tokens)) == (2, int)
    assert "max_tokens is 2.5; give a whole number" in bad.error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params_from": ("max_tokns",)}, "params_from names 'max_tokns', which is no parameter; did you mean 'max_t"),
        (
            {"params_from": ("tools",)},
            r"'tools', which is no parameter \(\d+ are known; the nearest: top_logprobs, stop",
        ),
        ({"params_from": "all"}, "params_from is 'all'; give the names of columns"),
        ({"params_from": ()}, r"params_from is \(\); give the names of columns"),
        ({"params_from": ("seed",), "task": "embedding"}, "nothing is sampled for an embedding"),
        ({"params_from": ("seed",)}, "a.csv has no column 'seed' of parameters"),
    ],
)
def test_params_from_names_columns_that_are_there_and_parameters(given, message, tmp_path):
    for path in (write(tmp_path / "a.csv", "prompt\n1\n"), parquet(tmp_path / "a.parquet", {"prompt": ["a"]})):
        with pytest.raises(ConfigError, match=message.replace("a.csv", re.escape(path.name))):
            read(find([path]), ReadOptions(**given))
    lines = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"params_from is \('seed',\), which needs a table or a template"):
        read(find([lines]), ReadOptions(params_from=("seed",)))


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("name", ["id", "custom_id"])
def test_a_column_of_its_own_is_the_id(kind, name, tmp_path):
    records = [{name: "x1", "prompt": "a", "text": "t"}, {name: "x2", "prompt": "b", "text": None}]
    path = written(tmp_path, kind, records)
    assert [row.id for row in rows_of(path)] == ["x1", "x2"]
    rows = rows_of(path, prompt="{{ text or 1 / 0 }}")
    assert [(row.id, type(row)) for row in rows] == [("x1", Row), ("x2", BadRow)]
    assert rows_of(path, keep="all")[0].kept == {"prompt": "a", "text": "t"}
    if kind == "parquet":
        path = parquet(tmp_path / "n.parquet", {name: [7, 9], "prompt": ["a", "b"]})
        assert [row.id for row in rows_of(path)] == [7, 9]
    if kind != "jsonl":
        assert [row.id for row in rows_of(path, id_column="")] == ["0", "1"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_its_own_is_found_in_capitals(kind, tmp_path):
    path = written(tmp_path, kind, [{"ID": "x1", "prompt": "a"}, {"ID": "x2", "prompt": "b"}])
    rows = [(row.id, row.kept) for row in rows_of(path, keep="all")]
    assert rows == [("x1", {"prompt": "a"}), ("x2", {"prompt": "b"})]
    path = written(tmp_path, kind, [{"ID": "x1", "prompt": "a", "id": "y1"}])
    assert [row.id for row in rows_of(path)] == ["y1"]
    path = written(tmp_path, kind, [{"Custom_ID": "x1", "prompt": "a", "Id": "y1"}])
    with pytest.raises(ConfigError, match=r"has columns 'Custom_ID' and 'Id'; .*--id-column Custom_ID"):
        read(find([path]))


def test_a_failed_row_without_an_id_has_its_number(tmp_path):
    table = write(tmp_path / "a.csv", "prompt,text\na,x\na\n\na,\n")
    rows = rows_of(table, prompt="{{ text or 1 / 0 }}")
    assert [(row.id, isinstance(row, Row)) for row in rows] == [("0", True), *((str(n), False) for n in (1, 2, 3))]
    path = parquet(tmp_path / "a.parquet", {"text": ["a", None], "n": [1, 2]})
    assert [row.id for row in rows_of(path, template="{text}")] == ["0", "1"]
    lines = write(tmp_path / "a.jsonl", '{"text": "a"}\nnonsense\n\n{"txt": "a"}\n[]\n{"text": "b"}\n')
    assert [row.id for row in rows_of(lines, prompt="{{ text }}")] == ["0", "1", "2", "3", "4", "5"]
    assert [row.id for row in rows_of(lines)] == ["0", "1", "2", "3", "4", "5"]
    # where lines have ids, the id of an unreadable line is unknown; this also holds for rows of a table
    lines = write(tmp_path / "a.jsonl", '{"id": 4, "prompt": "a"}\nnonsense\n{"prompt": 5}\n')
    assert [row.id for row in rows_of(lines)] == [4, None, "2"]
    assert [row.id for row in rows_of(lines, id_column="id")] == [4, None, None]
    table = write(tmp_path / "a.csv", "id,prompt\na\nb,c\n")
    assert [row.id for row in rows_of(table)] == [None, "b"]


@pytest.mark.parametrize(
    ("values", "row", "why"),
    [
        (["a", "b", "a"], 3, "holds 'a', the id of {path}, row 1, already"),
        (["a", None], 2, "holds None, which is no id"),
        (["a", ""], 2, "holds '', which is no id"),
        ([1.5, 2.5], 1, "holds 1.5, which is no id; an id is a text or a whole number"),
        ([True, False], 1, "holds True, which is no id"),
        ([["a"]], 1, r"holds ['a'], which is no id"),
        (["a", "x" * 600], 2, "a text of 1 to 512 characters"),
    ],
)
def test_a_column_of_its_own_that_holds_no_ids_is_refused(values, row, why, tmp_path):
    path = parquet(tmp_path / "a.parquet", {"id": values, "prompt": ["p"] * len(values)})
    with pytest.raises(ConfigError) as refused:
        read(find([path]))
    assert f"{path}, row {row}: column 'id' " in str(refused.value)
    assert why.format(path=path) in str(refused.value)
    assert "--id-column ''" in str(refused.value)
    assert [row.id for row in rows_of(path, id_column="")] == [str(n) for n in range(len(values))]


def test_a_column_of_its_own_is_checked_over_all_tables_and_up_to_the_limit(tmp_path):
    first = write(tmp_path / "a.csv", 'id,prompt\n1,"a\nb"\nbroken\n\n2,b\n')
    second = write(tmp_path / "b.csv.gz", gzip.compress(b"id,prompt\n3,a\n1,b\n"))
    with pytest.raises(ConfigError, match=f"{second}, row 2: column 'id' holds '1', the id of {first}, row 1, already"):
        read(find([first, second]))
    assert [row.id for row in read(find([first, second]), ReadOptions(limit=5))] == ["1", None, None, "2", "3"]
    both = write(tmp_path / "c.csv", "id,custom_id,prompt\n1,2,a\n")
    with pytest.raises(ConfigError, match="has columns 'id' and 'custom_id'; name the one that holds the ids"):
        read(find([both]))
    assert [row.id for row in rows_of(both, id_column="custom_id")] == ["2"]


def test_null_is_a_missing_field(tmp_path):
    given = SamplingParams(max_tokens=4, n=2, stop=("x",), temperature=0)
    null = dict.fromkeys(("max_tokens", "n", "stop", "temperature", "seed", "id", "messages", "tools", "body", "label"))
    plain, chat, batch = lines_of(
        tmp_path,
        {"prompt": "x", **null},
        {**null, "prompt": None, "messages": [{"role": "user", "content": "a"}]},
        {"custom_id": "c", "url": None, "method": None, "body": {**null, "prompt": "x", "messages": None}},
        params=given,
    )
    assert (plain.id, plain.task, plain.params) == ("0", "completion", given)
    assert (chat.id, chat.task, chat.params) == ("1", "chat", given)
    assert (batch.id, batch.task, batch.params) == ("c", "completion", given)


def test_a_line_without_a_field_of_the_template_is_one_error_row(tmp_path):
    rows = lines_of(tmp_path, {"text": "a"}, {"txt": "a"}, {"text": None}, {"text": "b"}, prompt="Say {{ text }}")
    assert [row.prompt for row in rows if isinstance(row, Row)] == ["Say a", "Say b"]
    assert "'text' has no value" in rows[1].error
    assert "'text' has no value" in rows[2].error
    for prompt in ("{% if text %}x{% endif %}{{ b }}", "{{ text | default('') }}{{ b }}"):
        filled = lines_of(tmp_path, {"b": 1}, {"text": None, "b": 2}, prompt=prompt)
        assert [row.prompt for row in filled] == ["1", "2"]
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
        (("text",), "the column 'text' cannot be kept: the output has its own column of that name; give"),
        ("all", "the column 'text' cannot be kept"),
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
    with pytest.raises(ConfigError, match="the id of a row is there anyway"):
        Reader(find([lines]), ReadOptions(keep=("id",)), RecordOptions().taken)
    with pytest.raises(ConfigError, match="the column 'id' cannot be kept"):  # even if the ids are row numbers
        Reader(find([table]), ReadOptions(keep=("id",), id_column=""), RecordOptions().taken)
    assert next(Reader(find([table]), ReadOptions(keep=("id",)), RecordOptions().taken)).kept == {"id": "1"}


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


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_another_separator_is_named(tmp_path, separator):
    path = write(tmp_path / "a.csv", separator.join(("id", "prompt")) + f"\n1{separator}b\n")
    with pytest.raises(
        ConfigError, match=re.escape(f"seem to be separated by {separator!r}, and llamabatch reads commas")
    ):
        read(find([path]), ReadOptions())
