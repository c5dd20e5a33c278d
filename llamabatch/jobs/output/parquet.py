"""A Parquet file of results: written at once from the lines of a job when the last row is there, and turned back.

A Parquet file can be read only when it is whole, so that a job goes on with lines.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamabatch.errors import ConfigError, SetupError
from llamabatch.jobs import formats
from llamabatch.jobs.output.files import AppendFile
from llamabatch.jobs.output.lock import lock_file
from llamabatch.jobs.output.own_files import OwnFiles
from llamabatch.jobs.output.records import Shape, lines_of, number_of, to_line

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_ROWS = 10_000
_GROUP_BYTES = 16 * 2**20  # of lines
_PIECE_BYTES = 2**20
_RANGE_BYTES = 16 * 2**20
_JSON = ("logprobs", "prompt_logprobs", "response", "tool_calls")  # columns that hold a text of JSON
_ALWAYS = ("id", "custom_id", "response", "error")  # keys of records that may be None


def is_parquet(path: Path) -> bool:
    """True for the name of a Parquet file."""
    return path.suffix.lower() in formats.PARQUET


def check_installed() -> None:
    """Raises SetupError where pyarrow is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise SetupError('Parquet files need pyarrow: pip install "llamabatch[parquet]"') from error


def schema(shape: Shape) -> pa.Schema:
    """The columns of a file, the same for each job; null stands for a field that a row does not have."""
    import pyarrow as pa

    if shape == "openai":
        error = pa.struct([("code", pa.string()), ("message", pa.string())])
        return pa.schema([("id", pa.string()), ("custom_id", pa.string()), ("response", pa.string()), ("error", error)])
    tokens = pa.list_(pa.int32())
    continuation = [("text", pa.string()), ("finish_reason", pa.string()), ("token_ids", tokens)]
    logprobs = [(name, pa.string()) for name in ("reasoning", "tool_calls", "logprobs")]
    times = [(name, pa.float64()) for name in ("queued_s", "ttft_s", "total_s", "generation_tps")]
    return pa.schema(
        [
            *(("row", pa.int64()), ("id", pa.string()), *continuation, *logprobs),
            ("outputs", pa.list_(pa.struct([("index", pa.int32()), *continuation, *logprobs]))),
            *(("prompt_logprobs", pa.string()), ("embedding", pa.list_(pa.float32())), ("num_truncated", pa.int64())),
            *(*times, ("num_cached_tokens", pa.int64()), ("error", pa.string())),
        ]
    )


def convert(own: OwnFiles, source: Path, shape: Shape, *, over: bool) -> tuple[int, str]:
    """Writes the Parquet file of lines, a group of rows at a time.

    Args:
        over: it replaces an earlier one.

    Returns:
        Its bytes, and the checksums of its ranges; see sums_of_ranges.

    Raises:
        OutputError, OSError: reading or writing fails.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = schema(shape)
    file = own.create()
    try:
        lock_file(file, own.out)  # before it takes the name of the output
        sink = _Sink(file)
        with pq.ParquetWriter(sink, columns, compression="zstd") as writer:
            for rows in _groups(source, len(own.header("part"))):
                writer.write_table(pa.Table.from_pylist(rows, schema=columns))
        sink.flush_all()
        file.sync()
        sums = sums_of_ranges(file.path)
        own.commit(file, own.out, over=over)
    finally:
        file.close()
    return file.size, sums


def sums_of_ranges(path: Path) -> str:
    """The checksum of each 16 MiB of a file, 8 hexadecimal digits each. Raises OSError."""
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(data):08x}" for data in iter(lambda: file.read(_RANGE_BYTES), b""))


def restore(own: OwnFiles, source: Path, target: Path) -> None:
    """Turns a Parquet file that a job has written into lines again, so that the job can go on.

    Raises:
        ConfigError: no job has written it.
        OutputError, OSError: reading or writing fails.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = own.create("part")
    try:
        with pq.ParquetFile(source) as parquet:
            for batch in parquet.iter_batches(1000):
                for row in batch.to_pylist():
                    line = to_line(_unpacked(row))
                    if number_of(line) is None:
                        raise ConfigError(f"{source} is not the output of a job; give another name")
                    file.write(line)
        own.commit(file, target, over=True)
    except pa.ArrowException as error:
        raise ConfigError(f"{source} is no Parquet file, or is damaged ({error}); give another name") from error
    finally:
        file.close()


class _Sink:
    """The file that pyarrow writes to, in pieces of any size."""

    closed = False

    def __init__(self, file: AppendFile) -> None:
        self.file = file
        self._waiting = bytearray()

    def write(self, data: Any) -> int:
        before = len(self._waiting)
        self._waiting += data
        written = len(self._waiting) - before
        if len(self._waiting) >= _PIECE_BYTES:
            self.flush_all()
        return written

    def flush_all(self) -> None:
        """Writes all bytes so far; flush() does not, since pyarrow calls it after each piece."""
        self.file.write(bytes(self._waiting))
        self._waiting.clear()

    def tell(self) -> int:
        return self.file.size + len(self._waiting)

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def _groups(source: Path, start: int) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    n_bytes = 0
    for line in lines_of(source, start):
        rows.append(_packed(json.loads(line.content)))
        n_bytes += len(line.content)
        if len(rows) == _GROUP_ROWS or n_bytes > _GROUP_BYTES:
            yield rows
            rows, n_bytes = [], 0
    if rows:
        yield rows


def _packed(value: Any) -> Any:
    """A record as the columns hold it: nested JSON as text, lone surrogates, which have no UTF-8, as "?"."""
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


def _unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: each for name, each in row.items() if each is not None or name in _ALWAYS}
    for name in _JSON:
        if kept.get(name) is not None:
            kept[name] = json.loads(kept[name])
    if isinstance(kept.get("outputs"), list):
        kept["outputs"] = [_unpacked(each) for each in kept["outputs"]]
    return kept
