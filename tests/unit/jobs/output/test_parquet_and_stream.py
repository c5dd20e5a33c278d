"""Outputs that are no file of lines: stdout, and Parquet."""

import csv
import gzip
import io
import json
import os
import sys
from array import array
from dataclasses import replace

import pytest

from llamabatch.errors import ConfigError, OutputError, SetupError
from llamabatch.gguf.resolve import model_identity
from llamabatch.jobs import formats
from llamabatch.jobs.output import conversion, parquet
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.output import Output, OutputOptions
from llamabatch.jobs.output.own_files import OwnFiles
from llamabatch.jobs.output.records import RecordOptions, record
from llamabatch.jobs.output.stream import StreamOutput, open_output
from llamabatch.jobs.rows import Row
from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput


def rec(number, text="é"):
    return {"row": number, "id": f"id-{number}", "text": text, "finish_reason": "stop", "error": None}


def read(fd):
    return [json.loads(line)["row"] for line in os.read(fd, 2**16).splitlines()]


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    yield ends
    for fd in ends:
        os.close(fd)


def test_a_stream_is_in_order_and_ends_with_all_that_finished(pipe):
    with StreamOutput(pipe[1]) as output:
        for n in (2, 0, 5):
            output.write(n, rec(n))
        assert read(pipe[0]) == [0]
        output.write(1, rec(1))
        assert read(pipe[0]) == [1, 2]
        with pytest.raises(ValueError, match="row 1 is not due"):
            output.write(1, rec(1))
        with pytest.raises(ValueError, match="row 3 is missing"):
            output.finish()
    assert read(pipe[0]) == [5]


def test_a_stream_as_rows_finish(pipe):
    output = open_output("-", {}, OutputOptions(order="finished"))
    assert isinstance(output, StreamOutput)
    output._fd = pipe[1]
    for n in (2, 0):
        output.write(n, rec(n))
    assert read(pipe[0]) == [2, 0]
    assert not output.is_done(0)
    with pytest.raises(ConfigError, match="retry_errors needs an output that is a file"):
        open_output("-", {}, OutputOptions(retry_errors=True))


def test_a_reader_that_is_gone(pipe):
    gone, fd = os.pipe()
    os.close(gone)
    with StreamOutput(fd) as output, pytest.raises(OutputError, match="-: write failed: Broken pipe"):
        output.write(0, rec(0))
    os.close(fd)


def result(number):
    logprobs = ({5: Logprob(-0.5, 1, "Pa")},)
    last = 2**31 - 1
    first = CompletionOutput(0, "é\n", (5, last), FinishReason.STOP, None, (*logprobs, {last: Logprob(-1.5, 2, "x")}))
    second = CompletionOutput(1, "b", (7,), FinishReason.LENGTH, reasoning="a thought")
    odd = RequestOutput("r", "x", (1,), (first, second), prompt_logprobs=(None, *logprobs))
    vector = RequestOutput(
        "r", "x", (1,), (CompletionOutput(0, "", (), FinishReason.STOP),), embedding=array("f", [0.1])
    )
    failed = RequestOutput("r", "x", (1,), (CompletionOutput(0, "", (), FinishReason.ERROR),), "no")
    return (odd, vector, failed)[number % 3]


def row(number):
    return Row(number, f"id-{number}", ("completion", "embedding", "chat")[number % 3], "x", openai=number == 4)


@pytest.mark.parametrize("shape", ["auto", "openai"])
def test_parquet_holds_all_that_lines_hold_and_becomes_lines_again(tmp_path, shape, monkeypatch):
    import pyarrow.parquet as pq

    monkeypatch.setattr(parquet, "_GROUP_ROWS", 4)
    out, options = tmp_path / "out.parquet", OutputOptions(records=RecordOptions(shape=shape, token_ids=True))
    with Output(out, {}, options) as output:
        kept = output.records
        assert kept.shape == ("flat" if shape == "auto" else shape)
        for n in range(9):
            output.done(row(n), result(n))
        assert not out.exists()
        header, _, lines = (tmp_path / "out.parquet.part").read_bytes().partition(b"\n")
        output.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.parquet", "out.parquet.job.json"]
    with pq.ParquetFile(out) as file:
        assert file.metadata.num_row_groups == 3
        found = file.read().to_pylist()
    made = record(row(0), result(0), kept)
    if shape == "auto":
        assert [each["row"] for each in found] == list(range(9))
        assert (found[0]["text"], found[0]["token_ids"]) == ("é\n", [5, 2**31 - 1])
        assert json.loads(found[0]["logprobs"]) == made["logprobs"]
        assert [each["text"] for each in found[0]["outputs"]] == ["é\n", "b"]
        assert [each["reasoning"] for each in found[0]["outputs"]] == [None, "a thought"]
        assert found[1]["embedding"] == list(array("f", [0.1]))
        assert (found[2]["error"], found[1]["error"]) == ("no", None)
    else:
        assert json.loads(found[0]["response"])["body"]["choices"] == made["response"]["body"]["choices"]
        assert found[2]["error"] == {"code": "request_failed", "message": "no"}
    conversion.restore(OwnFiles(Files(), out, json.loads(header)["job"]), out, tmp_path / "lines", kept)
    again = [json.loads(line) for line in (tmp_path / "lines").read_bytes().splitlines()[1:]]
    assert again == [json.loads(line) for line in lines.splitlines()]
    with Output(out, {}, options) as output:
        assert (output.finished, output.n_before, output.n_errors_before) == (True, 9, 3)


def test_a_parquet_file_that_no_job_has_written_stays_as_it_is(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = tmp_path / "out.parquet"
    pq.write_table(pa.table({"precious": [1]}), out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"exists without out\.parquet\.job\.json"):
        Output(out, {})
    with pytest.raises(ConfigError, match="is not the output of a job"):
        Output(out, {}, OutputOptions(force=True))
    assert out.read_bytes() == before
    out.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="is no Parquet file, or is damaged"):
        Output(out, {}, OutputOptions(force=True))


def test_an_empty_parquet_file_has_its_columns(tmp_path):
    import pyarrow.parquet as pq

    out = tmp_path / "out.parquet"
    with Output(out, {}) as output:
        output.finish()
    assert pq.read_schema(out).names[:4] == ["row", "id", "text", "finish_reason"]


def test_lone_surrogates_in_parquet(tmp_path):
    import pyarrow.parquet as pq

    out = tmp_path / "out.parquet"
    with Output(out, {}) as output:
        output.write(0, {**rec(0), "id": "\ud800a"})
        output.finish()
    assert pq.read_table(out).column("id").to_pylist() == ["?a"]


def test_parquet_without_pyarrow_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(SetupError, match=r"pip install \"llamabatch\[parquet\]\""):
        Output(tmp_path / "out.parquet", {})
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_known_by_its_content_not_by_its_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    content = bytearray(os.urandom(3_000_000))
    first, second = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    first.write_bytes(content)
    second.write_bytes(content)
    assert model_identity(first) == model_identity(second)
    content[-1] ^= 1
    second.write_bytes(content)
    assert model_identity(first) != model_identity(second)
    assert model_identity(first)["size"] == 3_000_000


def job_of(tmp_path, name, **records):
    """Writes the output of a job of six rows with kept columns. Every third row fails. Returns its path."""
    out = tmp_path / name
    with Output(out, {}, OutputOptions(records=RecordOptions(answer="said", **records))) as output:
        for n in range(6):
            kept = {"n": n, "x": n / 2 if n % 2 else n, "tags": ["a,b"], "odd": n if n % 2 else "t", "none": None}
            output.done(replace(row(n), id=n, kept=kept), result(n))
        output.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, f"{name}.job.json"]
    return out


def test_a_csv_file_has_the_columns_that_have_values(tmp_path):
    out = job_of(tmp_path, "out.csv")
    content = out.read_bytes()
    assert b"\r" not in content
    found = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    names = ["row", "id", "n", "x", "tags", "odd", "none", "said", "finish_reason"]
    assert list(found[0]) == [*names, "logprobs", "outputs", "prompt_logprobs", "embedding", "error"]
    assert found[0]["said"] == "é\n"
    assert (found[1]["id"], found[1]["x"], found[1]["tags"], found[0]["odd"]) == ("1", "0.5", '["a,b"]', "t")
    assert (found[1]["none"], found[1]["error"], found[2]["error"]) == ("", "", "no")
    assert json.loads(found[1]["embedding"]) == pytest.approx([0.1])


def test_a_csv_file_has_a_column_of_zeros(tmp_path):
    found = list(csv.DictReader(io.StringIO(job_of(tmp_path, "out.csv", times=True).read_text(), newline="")))
    assert {line["num_cached_tokens"] for line in found if not line["error"]} == {"0"}


def test_a_parquet_file_has_the_types_of_what_is_kept(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(job_of(tmp_path, "out.parquet"))
    types = {name: str(table.schema.field(name).type) for name in ("id", "n", "x", "tags", "odd", "none", "said")}
    assert types == {
        "id": "int64", "n": "int64", "x": "double", "tags": "string", "odd": "string", "none": "string",
        "said": "string",
    }  # fmt: skip
    assert table.column("id").to_pylist() == list(range(6))
    assert table.column("odd").to_pylist()[:2] == ['"t"', "1"]
    assert table.column("tags").to_pylist()[0] == '["a,b"]'


def test_ids_of_both_kinds_are_texts_of_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    with Output(tmp_path / "out.parquet", {}) as output:
        for n in range(2):
            output.done(replace(row(n), id=n if n else "a"), result(n))
        output.finish()
    assert pq.read_table(tmp_path / "out.parquet").column("id").to_pylist() == ["a", "1"]


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.jsonl.zst", "out.csv.gz", "out.tsv.zst"])
def test_a_compressed_output_holds_what_a_plain_one_does(name, tmp_path):
    (tmp_path / "plain").mkdir()
    plain = job_of(tmp_path / "plain", name.rpartition(".")[0]).read_bytes()
    (tmp_path / "packed").mkdir()
    packed = job_of(tmp_path / "packed", name).read_bytes()
    assert (gzip.decompress(packed) if name.endswith(".gz") else formats.zstd().decompress(packed)) == plain


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl.gz", "out.jsonl.zst"])
def test_an_output_that_was_changed_after_its_end_is_refused(name, tmp_path):
    out = job_of(tmp_path, name)
    content = bytearray(out.read_bytes())
    content[len(content) // 2] ^= 1
    out.write_bytes(content)
    with pytest.raises(ConfigError, match="it has changed since the job wrote it"):
        Output(out, {}, OutputOptions(records=RecordOptions(answer="said")))


@pytest.mark.parametrize(
    ("name", "content"),
    [("out.csv", b"a,b\n1,2\n"), ("out.jsonl.gz", gzip.compress(b"mine\n", mtime=0)), ("out.jsonl.gz", b"mine\n")],
)
def test_a_file_that_no_job_has_written_stays_as_it_is(name, content, tmp_path):
    out = tmp_path / name
    out.write_bytes(content)
    for force in (False, True):
        with pytest.raises(ConfigError):
            Output(out, {}, OutputOptions(force=force))
    assert out.read_bytes() == content


def test_without_zstd_it_says_what_to_install(tmp_path, monkeypatch):
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=r'pip install "llamabatch\[zstd\]"'):
        Output(tmp_path / "out.jsonl.zst", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", parquet.COMPRESSIONS)
def test_the_compression_of_parquet_may_be_chosen(compression, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    with Output(out, {}, OutputOptions(compression=compression)) as output:
        output.done(row(0), result(0))
        output.finish()
    used = pq.ParquetFile(out).metadata.row_group(0).column(0).compression
    assert used == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())
    with Output(out, {}, OutputOptions(compression="snappy")) as output:
        assert output.finished


def test_the_compression_of_parquet_is_for_parquet(tmp_path):
    with pytest.raises(ConfigError, match="compression is 'snappy', which is only for"):
        Output(tmp_path / "out.jsonl", {}, OutputOptions(compression="snappy"))
    with pytest.raises(ConfigError, match="compression is 'zip'"):
        OutputOptions(compression="zip")
