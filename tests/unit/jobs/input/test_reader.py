"""Reading the inputs of a job: what lines mean, which files are read, numbers, ids, shards, and memory."""

import bz2
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import os
import queue
import random
import sys
import threading
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.errors import ConfigError, InputError
from llamabatch.jobs import formats
from llamabatch.jobs.input import jsonl, sources
from llamabatch.jobs.input import lines as openai_lines
from llamabatch.jobs.input.ids import Ids
from llamabatch.jobs.input.jsonl import Problem
from llamabatch.jobs.input.reader import Reader, read
from llamabatch.jobs.input.sources import Source, find, fingerprint
from llamabatch.jobs.input.total import Seen
from llamabatch.jobs.rows import BadRow, ReadOptions, Row
from llamabatch.request.parameter_names import ALIASES
from llamabatch.request.sampling_params import SamplingParams
from tests.long import many_rows
from tests.waiting import PATIENCE_S

USER = {"role": "user", "content": "hi"}


def write(path, *items):
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return path


def rows_of(tmp_path, *items, options=None):
    return list(read(find([write(tmp_path / "in.jsonl", *items)]), options))


def one(tmp_path, item, **options):
    [row] = rows_of(tmp_path, item, options=ReadOptions(**options))
    assert isinstance(row, Row), row
    return row


# --- what lines mean ------------------------------------------------------------------------------------------------


def test_the_field_says_what_is_asked(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a"}, {"prompt": [1, 2]}, {"messages": [USER]}, {"input": "b"}, {"input": [3]})
    assert [(row.task, row.prompt) for row in rows] == [
        ("completion", "a"), ("completion", (1, 2)), ("chat", [USER]), ("embedding", "b"), ("embedding", (3,)),
    ]  # fmt: skip
    assert [row.id for row in rows] == list("01234")
    assert rows[2].place == f"{tmp_path / 'in.jsonl'}, line 3"


def test_a_line_lies_over_the_job(tmp_path):
    job = SamplingParams(max_tokens=7, temperature=0.5, stop=["x"])
    assert one(tmp_path, {"prompt": "a"}, params=job).params is job
    over = one(tmp_path, {"prompt": "a", "n_predict": 3, "logit_bias": {"5": -1}, "seed": 9}, params=job).params
    assert over == SamplingParams(max_tokens=3, temperature=0.5, stop=["x"], logit_bias={5: -1}, seed=9)
    # the line is checked together with the job's parameters
    [bad] = rows_of(tmp_path, {"prompt": "a", "min_tokens": 9}, options=ReadOptions(params=job))
    assert "must not exceed max_tokens, 7" in bad.error


def test_lines_with_equal_fields_share_one_object_and_true_is_no_1(tmp_path):
    fields = [{"n": 1, "seed": 5}, {"n": 1, "seed": 5}, {"n": True, "seed": 5}]
    first, second, third = rows_of(tmp_path, *({"prompt": "a", **each} for each in fields))
    assert first.params is second.params
    assert isinstance(third, BadRow)
    assert "n is True" in third.error


def test_tools_and_variables_of_a_conversation(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = one(tmp_path, {"messages": [USER], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}})
    assert (row.options.tools, row.options.kwargs) == (tools, {"enable_thinking": False})


def batch(url, body, **fields):
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **fields}


def test_tools_of_lines(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"type": "function", "function": {"name": "f"}}
    for choice, parallel in (("required", False), (named, True), ("none", None)):
        asked = {"messages": [USER], "tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
        for line in (asked, batch("/v1/chat/completions", asked)):
            options = one(tmp_path, line).options
            assert (options.tools, options.tool_choice) == (tools, choice)
            assert options.parallel_tool_calls is (parallel is not False)
    for wrong, words in (
        ({"tool_choice": "required"}, "tool_choice is 'required', and there are no tools"),
        ({"tool_choice": "any", "tools": tools}, "tool_choice is 'any'; give"),
        ({"parallel_tool_calls": 1, "tools": tools}, "parallel_tool_calls is 1"),
    ):
        for line in ({"messages": [USER], **wrong}, batch("/v1/chat/completions", {"messages": [USER], **wrong})):
            [row] = rows_of(tmp_path, line)
            assert words in row.error


def test_a_batch_line_of_a_chat(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "model": "some-model", "messages": [USER], "max_completion_tokens": 5, "temperature": 0, "top_p": 0.9, "n": 2,
        "seed": 3, "stop": ["x"], "logit_bias": {"7": 2}, "logprobs": True, "top_logprobs": 4, "top_k": 9, "user": "me",
        "stream": False, "tool_choice": "auto", "metadata": {"a": "b"},
        "reasoning_effort": "low", "presence_penalty": None,
    }  # fmt: skip
    row = one(tmp_path, batch("/v1/chat/completions", body))
    assert (row.id, row.task, row.prompt, row.openai, row.model) == ("a", "chat", [USER], True, "some-model")
    assert row.options.kwargs == {"reasoning_effort": "low"}
    assert row.params == SamplingParams(
        max_tokens=5, temperature=0, top_p=0.9, n=2, seed=3, stop=["x"], logit_bias={7: 2}, logprobs=4, top_k=9
    )
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    row = one(
        tmp_path, batch("/v1/chat/completions", {"messages": [USER], "response_format": format, "logprobs": True})
    )
    assert (row.params.structure.kind, row.params.logprobs) == ("json", 0)
    assert json.loads(row.params.structure.text) == {**schema, "additionalProperties": False}


def test_a_batch_line_of_a_completion_and_of_an_embedding(tmp_path):
    row = one(tmp_path, batch("/v1/completions", {"prompt": ["a"], "logprobs": 2, "best_of": 3}))
    assert (row.task, row.prompt, row.params) == ("completion", "a", SamplingParams(logprobs=2, best_of=3))
    row = one(tmp_path, batch("/v1/embeddings", {"input": [[4, 5]], "encoding_format": "float", "model": "m"}))
    assert (row.task, row.prompt, row.model) == ("embedding", (4, 5), "m")


def test_a_batch_line_without_url_goes_by_its_body(tmp_path):
    assert one(tmp_path, {"custom_id": "a", "body": {"messages": [USER]}}).task == "chat"
    assert one(tmp_path, {"custom_id": 7, "body": {"prompt": "a"}}).id == 7


# --- lines ------------------------------------------------------------------------------------------------------------


def test_empty_lines_at_the_end_are_no_rows(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}, "", "  ")
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert (rows[1].id, rows[1].error) == ("1", f"{tmp_path / 'in.jsonl'}, line 2: this line is empty")
    assert rows_of(tmp_path, "", "") == []
    (tmp_path / "in.jsonl").write_bytes(b"")
    assert list(read(find([tmp_path / "in.jsonl"]))) == []


@settings(max_examples=200)
@given(
    pieces=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    end=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    limit=st.integers(0, 30),
    compressed=st.booleans(),
    buffer=st.integers(1, 50),
)
def test_lines_are_split_wherever_the_chunks_end(pieces, end, last, limit, compressed, buffer):
    whole = end.join(pieces) + (end if last else b"")
    if compressed:
        cut = len(whole) // 2  # two members, as `cat a.gz b.gz` makes them
        raw = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(whole[:cut]) + gzip.compress(whole[cut:])))
    else:
        raw = io.BytesIO(whole)
    found = list(jsonl.lines(io.BufferedReader(raw, buffer), limit))
    expected = whole.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert len(found) == len(expected)
    for line, right in zip(found, expected, strict=True):
        if isinstance(line, Problem):
            assert len(right) > limit
            assert f"allowed are up to {limit}" in line.error
        else:
            assert line.removesuffix(b"\n") == right
            assert len(right.rstrip(b"\r")) <= limit


def test_a_long_line_is_never_held(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b"x" * 2**20)
        file.write(b'\n{"prompt": "a"}\n')
    tracemalloc.start()
    bad, good = read(find([path]), ReadOptions(max_line_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "this line has 67108864 bytes; allowed are up to 1048576" in bad.error or "67108865 bytes" in bad.error
    assert good.prompt == "a"
    assert peak < 8 * 2**20


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_a_glob_is_read_in_the_order_of_names_and_numbers_go_on(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        write(tmp_path / name, {"prompt": name}, {"prompt": f"{name} 2"})
    rows = list(read(find([tmp_path / "c.txt", str(tmp_path / "*.jsonl")])))
    assert [row.prompt for row in rows] == ["c.txt", "c.txt 2", "a.jsonl", "a.jsonl 2", "b.jsonl", "b.jsonl 2"]
    assert [row.number for row in rows] == list(range(6))
    assert rows[3].place == f"{tmp_path / 'a.jsonl'}, line 2"


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    write(tmp_path / "[a].jsonl", {"prompt": "a"})
    assert len(find([tmp_path / "[a].jsonl"])) == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "there is no input"),
        (["none.jsonl"], "the input none.jsonl does not exist"),
        (["*.none"], "no file matches '*.none'"),
        (["folder"], "folder is a directory; name its files, as in 'folder/*.jsonl'"),
        (["a.jsonl", "./a.jsonl"], "named twice, by 'a.jsonl' and by './a.jsonl'"),
        (["a.jsonl", "*.jsonl"], "named twice, by 'a.jsonl' and by '*.jsonl'"),
        (["-", "-"], "stdin is named twice"),
        ([""], "is no file name"),
        (["a\0b"], "is no file name"),
    ],
)
def test_inputs_are_refused_by_name(tmp_path, monkeypatch, inputs, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "a.jsonl", {"prompt": "a"})
    with pytest.raises(InputError) as refused:
        find(inputs)
    assert message in str(refused.value)


def test_what_is_wrong_with_a_whole_file_comes_before_the_first_row(tmp_path):
    good = write(tmp_path / "a.jsonl", {"prompt": "a"})
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}', encoding="utf-16")
    with pytest.raises(InputError, match="UTF-16 text; save it as UTF-8"):
        read(find([good, tmp_path / "b.jsonl"]))


@pytest.mark.parametrize(
    "ending", [".ods", ".XLS", ".zip", ".arrow", ".jsonl.xz", ".csv.bz2", ".parquet.gz", ".parquet.zst", ".xlsx.gz"]
)
def test_a_format_that_is_not_read_is_refused_by_its_name(ending, tmp_path):
    path = write(tmp_path / f"in{ending}", {"prompt": "a"})
    for inputs in ([path], [str(tmp_path / "*")]):
        with pytest.raises(InputError, match=r"the input .*in\..* is not read: \..* is .*What is read: lines of JSON"):
            find(inputs)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04\x14\0\0", "a spreadsheet or an archive"),
        (bz2.compress(b"{}"), "compressed by another program than gzip and zstd; unpack it, or have its program"),
        (lzma.compress(b"{}"), "compressed by another"),
        (b"PAR1\x15\x04", "whose name ends with .parquet"),
    ],
)
@pytest.mark.parametrize("name", ["in.jsonl", "in", "in.csv", None])
def test_a_format_that_is_not_read_is_refused_by_its_content(content, what, name, tmp_path):
    path = tmp_path / (name or "in.jsonl")
    path.write_bytes(content)
    found = find([path]) if name else find(["-"], io.BytesIO(content))
    with pytest.raises(InputError, match=rf"the input .* is not read: its content is .*{what}"):
        next(read(found))


def test_text_that_begins_like_the_name_of_a_format_is_read(tmp_path):
    for i, name in enumerate(("ORCID", "PAR1", "GGUF", "BZh9", "Rar!", "ARROW1", "Obj")):
        path = tmp_path / f"{i}.csv"
        path.write_text(f"{name},prompt\nx,a\n")
        assert [row.prompt for row in read(find([path]))] == ["a"]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts", "in.json", "in.2026", "in.txt.gz"])
def test_a_file_that_is_not_named_as_lines_of_json_must_begin_as_such(name, tmp_path):
    path = tmp_path / name
    pack = gzip.compress if name.endswith(".gz") else bytes
    for content in (b'\xef\xbb\xbf\n {"prompt": "a"}\nx\n', b""):
        path.write_bytes(pack(content))
        rows = list(read(find([path])))
        assert len(rows) == 3 * bool(content)
    no_json = r"begins with .*, which is no JSON object; write each row"
    for content, message in (
        *([("Tell me a story\nAnd another\n", no_json)] if ".txt" not in name else []),
        ("[\n{}]", "is a JSON list; write one object a line"),
        ('{\n"prompt": "a"\n}', "is JSON over several lines; write one object a line"),
    ):
        path.write_bytes(pack(content.encode()))
        with pytest.raises(InputError, match=message):
            read(find([path]))
    named = write(tmp_path / "in.jsonl", "Tell me a story", {"prompt": "a"})
    assert [type(row) for row in read(find([named]))] == [BadRow, Row]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.TXT.gz"])
def test_a_text_file_has_a_prompt_in_each_line_that_is_not_empty(name, tmp_path):
    path = tmp_path / name
    pack = gzip.compress if name.endswith(".gz") else bytes
    for text in ("{curly} braces", "{{ name }}", "[[note]] of a wiki", '["Quote" he said]', "[1] is a source"):
        path.write_bytes(pack(f"{text}\nplain\n".encode()))
        assert [row.prompt for row in read(find([path]))] == [text, "plain"]
    path.write_bytes(pack("\ufeff[INST] a\r\n\n  \n b\u00e4 {x} \n".encode() + b"\xff\nc"))
    rows = list(read(find([path])))
    assert [getattr(row, "prompt", None) for row in rows] == ["[INST] a", " b\u00e4 {x} ", None, "c"]
    assert rows[2].error == f"{path}, prompt 3: this is not UTF-8 text: byte 1 of the line is 0xff"
    options = ReadOptions(prompt="Say {{ prompt }}", task="chat", keep="all")
    assert next(row.prompt for row in read(find([path]), options) if isinstance(row, Row)) == [
        {"role": "user", "content": "Say [INST] a"}
    ]
    with pytest.raises(ConfigError, match=r"has no column 'x' \(known: prompt\)"):
        read(find([path]), ReadOptions(id_column="x"))


def test_stdin_compressed_or_not():
    text = b'{"prompt": "a"}\n{"prompt": "b"}\n' * 5000
    for content in (text, gzip.compress(text), text[:10], b""):
        expected = 10000 if len(content) > 10 else len(content) // 10
        reader = read(find(["-"], io.BytesIO(content)))
        assert sum(1 for _ in reader) == expected
        assert reader.seen == ((0,), expected, None, True)
    [bad, *_] = read(find(["-"], io.BytesIO(b"nonsense")))
    assert bad.place == "stdin, line 1"


@pytest.mark.parametrize("kind", ["plain", "gzip", "csv"])
@pytest.mark.parametrize("with_fingerprint", [False, True])
def test_a_row_of_a_pipe_comes_before_the_next_one_is_written(kind, with_fingerprint, tmp_path):
    path = tmp_path / ("in.csv" if kind == "csv" else "in")
    os.mkfifo(path)
    zipped = zlib.compressobj(wbits=31)

    def sent(line):
        return line if kind != "gzip" else zipped.compress(line) + zipped.flush(zlib.Z_SYNC_FLUSH)

    got = queue.SimpleQueue()

    def take():
        found = find([path])
        if with_fingerprint:
            fingerprint(found)
        for row in read(found):
            got.put(row.prompt)
        got.put(None)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    with path.open("wb", buffering=0) as file:
        if kind == "csv":
            file.write(b"prompt\n")
        for i in range(5):
            file.write(sent(f"row {i}\n".encode() if kind == "csv" else b'{"prompt": "row %d"}\n' % i))
            assert got.get(timeout=PATIENCE_S) == f"row {i}"
        file.write(zipped.flush() if kind == "gzip" else b"")
    assert got.get(timeout=PATIENCE_S) is None
    thread.join(20)


class Pieces(io.RawIOBase):
    """A pipe that returns a line at a time. After the last line its writer ends, or waits."""

    def __init__(self, lines, waits=False):
        self.left, self._waits = list(lines), waits

    def readable(self):
        return True

    def readinto(self, buffer):
        assert self.left or not self._waits, "it would have waited"
        piece = self.left[0][: len(buffer)] if self.left else b""
        self.left[:1] = [self.left[0][len(piece) :]] if self.left and len(piece) < len(self.left[0]) else []
        buffer[: len(piece)] = piece
        return len(piece)


def test_the_fingerprint_of_a_stream_is_of_what_it_was_before():
    lines = [b'{"prompt": "%d"}\n' % i for i in range(9000)]
    slow = fingerprint([Source(None, Pieces(lines))])
    assert slow[0]["bytes"] == len(lines[0])
    fast = fingerprint([Source(None, io.BytesIO(b"".join(lines)))])
    assert fast[0]["bytes"] == sources.HEAD_BYTES
    whole = b"".join(lines)
    for before, stream in itertools.product((slow, fast), (lambda: Pieces(lines), lambda: io.BytesIO(whole))):
        source = Source(None, stream())
        assert fingerprint([source], before) == before
        assert sum(1 for _ in read([source])) == 9000
    for before in (slow, fast):
        assert fingerprint([Source(None, Pieces([b'{"prompt": "x"}\n', *lines]))], before) != before
    for hostile in (None, 7, [], [7], [{"size": None, "bytes": -1}], [{"size": None, "bytes": "9"}]):
        assert fingerprint([Source(None, Pieces(lines))], hostile)[0]["sha256"] == slow[0]["sha256"]


def test_a_fingerprint_shows_every_change(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", {"prompt": "a" * 300}, {"prompt": "b"})
    [before] = fingerprint(find([path]))
    assert set(before) == {"name", "size", "sha256"}
    assert before["name"] == "a.jsonl"
    (tmp_path / "other").mkdir()
    moved = path.rename(tmp_path / "other" / "a.jsonl")
    assert fingerprint(find([moved])) == [before]
    changed = moved.read_bytes()
    moved.write_bytes(changed.replace(b'"b"', b'"c"'))
    assert fingerprint(find([moved])) != [before]
    moved.write_bytes(changed + b"\n")
    assert fingerprint(find([moved])) != [before]
    monkeypatch.setattr(sources, "WHOLE_BYTES", 100)  # as if the file had gigabytes
    monkeypatch.setattr(sources, "SAMPLE_BYTES", 8)
    [large] = fingerprint(find([moved]))
    assert set(large) == {"name", "size", "sha256", "mtime_ns"}
    moved.write_bytes(b"[" + changed[1:] + b"\n")
    assert fingerprint(find([moved]))[0]["sha256"] != large["sha256"]


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_a_torn_gz_keeps_the_rows_before_and_the_next_file(tmp_path, cut):
    text = "".join(json.dumps({"prompt": random.Random(i).randbytes(20).hex()}) + "\n" for i in range(5000))
    whole = gzip.compress(text.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: int(len(whole) * cut)])
    write(tmp_path / "b.jsonl", {"prompt": "next"})
    *rows, bad, after = read(find([tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"]))
    assert [row.prompt for row in rows] == [json.loads(line)["prompt"] for line in text.splitlines()[: len(rows)]]
    assert len(rows) > 5000 * (cut - 0.2)
    assert isinstance(bad, BadRow)
    assert f"a.jsonl.gz, line {len(rows) + 1}: the compressed file is damaged" in bad.error
    assert (after.prompt, after.number) == ("next", len(rows) + 1)


def test_garbage_in_a_gz_and_behind_it(tmp_path):
    text = b'{"prompt": "a"}\n' * 10
    damaged = bytearray(gzip.compress(text * 1000))
    damaged[len(damaged) // 2] ^= 0xFF
    for content in (gzip.compress(text) + b"garbage", bytes(damaged)):
        (tmp_path / "a.gz").write_bytes(content)
        *_, last = read(find([tmp_path / "a.gz"]))
        assert isinstance(last, BadRow)
        assert "damaged" in last.error


def test_an_error_of_the_disk_stops_and_names_the_file(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"})

    def broken(stream, limit):
        yield b'{"prompt": "a"}\n'
        raise OSError(5, "Input/output error")

    reader = read(find([path]))
    monkeypatch.setattr(jsonl, "lines", broken)
    assert next(reader).prompt == "a"
    with pytest.raises(InputError, match=r"a.jsonl cannot be read: Input/output error"):
        next(reader)


# --- numbers, ids, shards ---------------------------------------------------------------------------------------------


def test_shards_are_the_whole_with_the_same_ids_and_errors(tmp_path):
    items = [{"prompt": str(i)} | ({"id": f"x{i % 40}"} if i % 3 else {}) for i in range(100)] + ["nonsense"]
    path = write(tmp_path / "a.jsonl", *items)
    whole = list(read(find([path])))
    shards = [list(read(find([path]), ReadOptions(shard=(i, 4)))) for i in (1, 2, 3, 4)]
    assert sorted(itertools.chain(*shards), key=lambda row: row.number) == whole
    assert all(row.number % 4 == i for i, shard in enumerate(shards) for row in shard)
    assert list(read(find([path]), ReadOptions(limit=10, shard=(2, 4)))) == [whole[1], whole[5], whole[9]]
    done = {row.number for row in whole if row.number % 7}
    assert list(read(find([path]), None, done.__contains__)) == [row for row in whole if row.number not in done]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"prompt": "a"}, {"id": 0, "prompt": "b"}], ("line 1 has no id", "line 2 has this id")),
        ([{"id": "1", "prompt": "a"}, {"prompt": "b"}], ("line 2 has no id", "line 1 has this id")),
        (["no JSON", {"id": 0, "prompt": "b"}], ("line 1 has no id", "line 2 has this id")),
        ([{"prompt": "a"}, {"id": [1], "prompt": "b"}], ("line 2: id is [1]; give a text of 1 to 512",)),
        ([{"id": {}, "prompt": "b"}], ("line 1: id is {}",)),
        ([{"id": True, "prompt": "b"}], ("line 1: id is True",)),
        ([{"custom_id": "", "prompt": "b"}], ("line 1: custom_id is ''",)),
        ([{"id": "\ud800", "prompt": "b"}], ("line 1: id is", "lone surrogate")),
        ([{"id": 1, "custom_id": 2, "prompt": "b"}], ("line 1: the line has an id and a custom_id",)),
    ],
)
def test_ids_that_are_none_and_numbers_of_other_lines_are_refused_before_anything_runs(lines, says, tmp_path):
    path = write(tmp_path / "in.jsonl", *lines)
    with pytest.raises(ConfigError) as refused:
        read(find([path]))
    assert str(refused.value).startswith(f"{path}, {says[0]}")
    assert all(part in str(refused.value) for part in (*says, "--id-column NAME"))
    assert len(list(read(find([path]), ReadOptions(id_column="prompt")))) == len(lines)
    # a stream is read once, and a service answers each line: in both, the line is an error row
    assert isinstance(list(read(find(["-"], io.BytesIO(path.read_bytes()))))[-1], BadRow)
    assert isinstance(list(Reader(find([path]), read_line=pytest.fail))[-1], BadRow)


def test_ids_of_lines_are_checked_over_all_files_and_up_to_the_limit(tmp_path):
    first = write(tmp_path / "a.jsonl", {"id": None, "prompt": "a"}, {"id": "x", "prompt": "a"})
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(b'{"id": 5, "prompt": "a"}\n{"id": 0, "prompt": "a"}\n'))
    with pytest.raises(ConfigError, match=f"^{first}, line 1 has no id.* {second}, line 2 has this id"):
        read(find([first, second]))
    assert [row.id for row in read(find([first, second]), ReadOptions(limit=3))] == ["0", "x", 5]
    # rows of a damaged file, and rows after it, report what is wrong
    first.with_suffix(".gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 9)[:-4])
    rows = list(read(find([first.with_suffix(".gz"), second])))
    assert [(row.id, type(row)) for row in rows[-2:]] == [(None, BadRow), (None, BadRow)]
    # where earlier lines have ids, an unreadable line has no id, not even its number
    assert [row.id for row in rows_of(tmp_path, {"id": 9, "prompt": "a"}, "no JSON", {"id": 1, "prompt": "a"})] == [
        *(9, None, 1)
    ]


def test_an_id_is_given_once(tmp_path):
    path = write(
        tmp_path / "in.jsonl",
        {"prompt": "a"},
        {"id": "0", "prompt": "a"},  # the id of the first line
        {"id": 5, "prompt": "a"},
        {"id": "x", "promt": "bad, but it has its id"},
        {"id": "x", "prompt": "a"},
        {"prompt": "its number is taken"},
        {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
        {"id": "00", "prompt": "another text than the first line's"},
    )
    rows = list(read(find(["-"], io.BytesIO(path.read_bytes()))))
    assert [row.id for row in rows] == ["0", None, 5, "x", None, None, None, "00"]
    assert [type(row) for row in rows] == [Row, BadRow, Row, BadRow, BadRow, BadRow, BadRow, Row]
    assert rows[1].error.endswith("the id '0' is taken by " + rows[0].place)
    assert "did you mean 'prompt'" in rows[3].error
    assert rows[4].error.endswith("the id 'x' is taken by " + rows[3].place)
    assert rows[5].error.endswith("this line has no id, and its number, 5, is the id of " + rows[2].place)
    assert rows[6].openai
    assert not rows[4].openai


@settings(max_examples=100)
@given(st.lists(st.one_of(st.none(), st.integers(0, 30).map(str), st.text(min_size=1, max_size=2)), max_size=40))
def test_ids_agree_with_a_dictionary(given_ids):
    ids, holders = Ids(), {}
    for number, identity in enumerate(given_ids):
        wanted = str(number) if identity is None else identity
        found = ids.claim_number(number) if identity is None else ids.claim(identity, number)
        assert found == holders.get(wanted)
        holders.setdefault(wanted, number)


def test_ids_stay_distinct_as_their_table_grows():
    ids = Ids()
    assert all(ids.claim(f"row {i}", i) is None for i in range(20_000))
    assert all(ids.claim(f"row {i}", 0) == i for i in range(20_000))
    bytes_an_id = (sys.getsizeof(ids._keys) + sys.getsizeof(ids._numbers)) / 20_000
    assert bytes_an_id < 64


def test_how_much_has_been_read(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl", *[{"prompt": "a" * 1000}] * 2000) for i in range(2)]
    reader = read(find(paths))
    assert reader.seen == Seen()
    for _ in range(2001):
        next(reader)
    assert reader.seen == Seen((0, 2000), 2001, 1 / 2000)
    assert len(list(reader)) == 1999
    assert reader.seen == Seen((0, 2000), 4000, ended=True)


def test_reading_takes_little_memory(tmp_path):
    for number in range(many_rows.QUICK):
        many_rows.case(number, tmp_path)


# --- whatever comes ---------------------------------------------------------------------------------------------------

NAMES = (
    *("id", "custom_id", "prompt", "messages", "input", "tools", "chat_template_kwargs", "method", "url", "body"),
    *(field.name for field in dataclasses.fields(SamplingParams)),
    *("max_completion_tokens", "top_logprobs", "response_format", "stream", "tool_choice", "model", "user"),
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
        st.sampled_from(["user", "/v1/completions", "/v1/chat/completions", "POST", 10**400, "json_schema"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*NAMES, "role", "content", "type", "function", "name", "arguments", "schema", "5"]),
            inner, max_size=4,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=120)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5), min_size=1, max_size=4))
def test_any_object_is_a_row_or_a_bad_row(objects):
    check_whatever(objects)
    without_body = [{k: v for k, v in each.items() if k not in ("method", "url", "body")} for each in objects]
    for begins in ({"prompt": "a"}, {"messages": [USER]}):
        check_whatever([{**each, **begins} for each in without_body])
        check_whatever([{"custom_id": f"{i}", "body": {**each, **begins}} for i, each in enumerate(objects)])


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"") or b"x"), min_size=1, max_size=6))
def test_any_bytes_are_bad_rows(pieces):
    if pieces[0].startswith((b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")) or formats.kind_of(b"\n".join(pieces)):
        pieces[0] = b"x"
    check_rows(b"\n".join(pieces) + b"\nx", len(pieces) + 1)


def check_whatever(objects):
    check_rows("".join(json.dumps(each) + "\n" for each in objects).encode(), len(objects))


def check_rows(content, n_lines):
    rows = list(read(find(["-"], io.BytesIO(content))))
    assert [row.number for row in rows] == list(range(n_lines))
    assert all(isinstance(row, Row) or len(row.error) < 2000 for row in rows)
    ids = [row.id for row in rows if row.id is not None]
    assert len(ids) == len(set(ids))


ODD = [
    *(None, True, 0, -1, 2**70, 10**400, 1.5, -1e308, 1e400, "", "a", "\0", "x" * 300, "{", [], [1], ["a"], [None]),
    *([[]], [{}], {}, {"1": "a"}, {"json": "{"}, {"regex": 5}, {"choice": {}}, {"type": []}),
    *({"json": {}, "regex": "a"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 5}}),
    [{"function": 5}],
]  # fmt: skip


def test_any_field_with_any_value_is_a_row_or_a_bad_row():
    objects = []
    for name, value in itertools.product([*NAMES, *ALIASES, *openai_lines._ONLY], ODD):
        for begins in ({"prompt": "a"}, {"messages": [USER]}, {"input": "a"}):
            objects += [
                {**begins, name: value},
                {"custom_id": f"{name} {len(objects)}", "body": {**begins, name: value}},
            ]
    for value in ODD:
        assistant = {"role": "assistant"}
        for message in (
            {"role": value, "content": "a"}, {"role": "user", "content": value}, {"role": "user", "content": [value]},
            {"role": "user", "content": [{"type": "text", "text": value}]}, {**assistant, "tool_calls": value},
            {**assistant, "tool_calls": [value]}, {**assistant, "tool_calls": [{"function": value}]},
            {**assistant, "tool_calls": [{"function": {"name": value, "arguments": value}}]}, value,
        ):  # fmt: skip
            objects.append({"messages": [message]})
    check_whatever(objects)


def test_the_limit_waits_for_no_further_line():
    reader = read([Source(None, Pieces([b'{"prompt": "a"}\n'] * 2, waits=True))], ReadOptions(limit=2))
    reader._sources[0]._head = b""
    assert [row.number for row in reader] == [0, 1]
    assert reader.seen == Seen((0,), 2, ended=True)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl", "a.csv.zst", None])
def test_zstd_is_known_by_its_content(name, tmp_path):
    zstd = formats.zstd()
    content = b"prompt\none\ntwo\n" if name == "a.csv.zst" else b'{"prompt": "one"}\n{"prompt": "two"}\n'
    packed = zstd.compress(content[:20]) + zstd.compress(content[20:])  # two frames, as `cat` makes them
    path = tmp_path / (name or "a")
    path.write_bytes(packed)
    assert [row.prompt for row in read(find([path]) if name else find(["-"], io.BytesIO(packed)))] == ["one", "two"]


def test_a_damaged_zstd_file_is_one_error_row(tmp_path):
    whole = formats.zstd().compress(b"".join(b'{"prompt": "%d"}\n' % (i * i) for i in range(20_000)))
    write(tmp_path / "b.jsonl", {"prompt": "after"})
    for content in (whole[: len(whole) // 2], whole[: len(whole) // 2] + b"\xff" * 100):
        (tmp_path / "a.jsonl.zst").write_bytes(content)
        *_, bad, after = read(find([tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl"]))
        assert "the compressed file is damaged" in bad.error
        assert after.prompt == "after"
