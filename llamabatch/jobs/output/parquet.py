"""Makes a Parquet file of results from the lines of a job after the last row. On resume, turns the file back into
lines.

A Parquet file can be read only when it is complete, so a running job writes lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamabatch.errors import ConfigError, SetupError
from llamabatch.jobs.output.columns import Columns
from llamabatch.jobs.output.records import lines_of

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")

_GROUP_ROWS = 10_000
_GROUP_BYTES = 16 * 2**20  # bytes of JSON lines in one group of rows
_JSON = ("logprobs", "prompt_logprobs", "response", "tool_calls")  # columns that hold a text of JSON
_ALWAYS = ("id", "custom_id", "response", "error")  # keys that a record has even with the value None


def check_installed() -> None:
    """Raises SetupError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise SetupError('Parquet files need pyarrow: pip install "llamabatch[parquet]"') from error


_ARROW = {"null": "string", "bool": "bool", "int": "int64", "float": "double", "string": "string", "json": "string"}
_KIND = b"llamabatch"  # a column whose type depends on its values has its kind under this key of its metadata


def schema(columns: Columns) -> pa.Schema:
    """Returns the Parquet schema of the columns. A field that a row does not have is null. Flat rows have the same
    columns in every job, except kept columns and fields of answers. The types of kept columns, fields of answers and
    ids follow from the values. Mixed types, lists and objects become texts of JSON."""
    import pyarrow as pa

    if columns.is_openai:
        error = pa.struct([("code", pa.string()), ("message", pa.string())])
        return pa.schema([("id", pa.string()), ("custom_id", pa.string()), ("response", pa.string()), ("error", error)])
    tokens = pa.list_(pa.int32())
    answer = [("finish_reason", pa.string()), ("token_ids", tokens)]
    logprobs = [(name, pa.string()) for name in ("reasoning", "tool_calls", "logprobs")]
    times = [(name, pa.float64()) for name in ("queued_s", "ttft_s", "total_s", "generation_tps")]
    own = {
        name: pa.field(name, _ARROW[kind], metadata={_KIND: kind.encode()})
        for name, kind in ((name, columns.kinds.get(name, "null")) for name in columns.own)
    }
    text = columns.options.answer
    return pa.schema(
        [
            *(("row", pa.int64()), ("id", _ARROW[columns.kinds.get("id", "string")])),
            *(own[name] for name in columns.kept),
            *((text, pa.string()), *answer),
            *(own[name] for name in columns.options.fields),
            *logprobs,
            ("outputs", pa.list_(pa.struct([("index", pa.int32()), (text, pa.string()), *answer, *logprobs]))),
            *(("prompt_logprobs", pa.string()), ("embedding", pa.list_(pa.float32())), ("num_truncated", pa.int64())),
            *(*times, ("num_cached_tokens", pa.int64()), ("error", pa.string())),
        ]
    )


def write(source: Path, start: int, columns: Columns, sink: Any, compression: str) -> None:
    """Writes a file of lines as a table, a group of rows at a time. Raises OutputError, OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = schema(columns)
    as_json = {name for name in columns.own if columns.kinds.get(name) == "json"}
    texts = {"id"} if columns.kinds.get("id") == "string" else set()
    with pq.ParquetWriter(sink, made, compression=compression) as writer:
        for rows in _groups(source, start, as_json, texts):
            writer.write_table(pa.Table.from_pylist(rows, schema=made))


def records(source: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a table that `write` made. Raises ConfigError for a file that is damaged or not Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source) as file:
            own = {each.name: each.metadata[_KIND] for each in file.schema_arrow if _KIND in (each.metadata or {})}
            for batch in file.iter_batches(1000):
                for row in batch.to_pylist():
                    yield _unpacked(row, own)
    except pa.ArrowException as error:
        raise ConfigError(f"{source} is no Parquet file, or is damaged ({error}); give another name") from error


def _groups(source: Path, start: int, as_json: set[str], texts: set[str]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    n_bytes = 0
    for line in lines_of(source, start):
        record = json.loads(line.content)
        for name in as_json & record.keys():
            record[name] = None if record[name] is None else json.dumps(record[name], ensure_ascii=True)
        for name in texts & record.keys():
            record[name] = None if record[name] is None else str(record[name])
        rows.append(_packed(record))
        n_bytes += len(line.content)
        if len(rows) == _GROUP_ROWS or n_bytes > _GROUP_BYTES:
            yield rows
            rows, n_bytes = [], 0
    if rows:
        yield rows


def _packed(value: Any) -> Any:
    """Returns a record whose values have the types of the columns. The values of the fields in _JSON become JSON texts.
    A lone surrogate becomes "?"."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_packed(each) for each in value] if value and not isinstance(value[0], (int, float)) else value
    if not isinstance(value, Mapping):
        return value
    return {
        name: json.dumps(each, ensure_ascii=True) if name in _JSON and each is not None else _packed(each)
        for name, each in value.items()
    }


def _unpacked(row: Mapping[str, Any], own: Mapping[str, bytes]) -> dict[str, Any]:
    kept = {name: each for name, each in row.items() if each is not None or name in _ALWAYS or name in own}
    for name in (*_JSON, *(name for name, kind in own.items() if kind == b"json")):
        if kept.get(name) is not None:
            kept[name] = json.loads(kept[name])
    if "outputs" not in own and isinstance(kept.get("outputs"), list):
        kept["outputs"] = [_unpacked(each, {}) for each in kept["outputs"]]
    return kept
