"""The formats of a job's files: suffixes to read, suffixes to write, and the first bytes of unsupported formats."""

from __future__ import annotations

import gzip
import importlib
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from llamabatch.errors import SetupError

READ = "lines of JSON (.jsonl, .ndjson, .json), .csv, .tsv and .txt, also with .gz or .zst behind, .parquet and .xlsx"
WRITTEN = "lines of JSON (.jsonl, .ndjson), .csv, .tsv and .parquet, all but the last also with .gz or .zst behind"
LINES = (".jsonl", ".ndjson")  # a name with such a suffix promises lines of JSON
PARQUET = (".parquet", ".pq")
CSV = {".csv": ",", ".tsv": "\t"}  # suffix -> separator
EXCEL = ".xlsx"  # a suffix that can be read, but not written
GZIP, ZSTD = ".gz", ".zst"
GZIP_START, ZSTD_START = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

_SHEET = "a spreadsheet"
_ARCHIVE = "an archive"
_COMPRESSED = "compressed by another program than gzip and zstd"
_COLUMNS = "a file of columns other than Parquet"
_DATABASE = "a database"
_DATA = "data of a program"
_DOCUMENT = "one document"

# Keys: suffixes of files that a job does not write. Values: the kind of the file. Of these, a job reads only .xlsx.
FOREIGN = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"), _SHEET),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz"), _ARCHIVE),
    **dict.fromkeys((".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".snappy", ".sz", ".z"), _COMPRESSED),
    **dict.fromkeys((".arrow", ".arrows", ".ipc", ".feather", ".orc", ".avro"), _COLUMNS),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb"), _DATABASE),
    **dict.fromkeys((".pkl", ".pickle", ".npy", ".npz", ".pt", ".h5", ".hdf5", ".msgpack", ".tfrecord"), _DATA),
    **dict.fromkeys((".gguf", ".safetensors"), "a model"),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".pdf", ".doc", ".docx", ".rtf"), _DOCUMENT),
}

# Keys: the first bytes of unsupported files, which never begin a line of text. Values: the kind of the file.
_FIRST_BYTES = {
    b"PK\x03\x04": "a spreadsheet or an archive",
    b"\xd0\xcf\x11\xe0": _SHEET,
    b"7z\xbc\xaf": _ARCHIVE,
    b"Rar!\x1a": _ARCHIVE,
    b"\xfd7zXZ\x00": _COMPRESSED,
    b"\x04\x22\x4d\x18": _COMPRESSED,
    **{b"BZh%d1AY&SY" % level: _COMPRESSED for level in range(1, 10)},
    b"PAR1\x15": "Parquet, which can be read from a file only whose name ends with .parquet",
    b"ARROW1\x00": _COLUMNS,
    b"Obj\x01": _COLUMNS,
    b"SQLite format 3\x00": _DATABASE,
    b"\x93NUMPY": _DATA,
    b"\x89HDF": _DATA,
    b"GGUF\x03\x00": "a model",
}
MOST_FIRST_BYTES = max(map(len, _FIRST_BYTES))

_CURES = {
    _SHEET: "save it as .xlsx or CSV",
    _ARCHIVE: "unpack it",
    _COMPRESSED: "unpack it, or have its program write to a pipe that is read as '-'",
    _COLUMNS: "convert it to Parquet",
}


def suffixes(path: Path) -> tuple[str, str]:
    """Returns the suffix of the format in lower case, and the suffix of the compression: ".gz", ".zst" or ""."""
    found = [each.lower() for each in path.suffixes]
    compression = found.pop() if found[-1:] in ([GZIP], [ZSTD]) else ""
    return (found[-1] if found else ""), compression


def zstd() -> Any:
    """Returns a module for zstd: Python's own (from 3.14 on) or backports.zstd. Raises SetupError if there is none."""
    try:
        return importlib.import_module("compression.zstd")
    except ImportError:
        pass
    try:
        return importlib.import_module("backports.zstd")
    except ImportError as error:
        raise SetupError('.zst files need backports.zstd: pip install "llamabatch[zstd]"') from error


def open_compressed(file: Any, compression: str, mode: Literal["rb", "wb"]) -> BinaryIO:
    """Opens a compressed file to read or write its content. Equal contents give equal files.

    Closing the result does not close `file`.

    Args:
        compression: ".gz" or ".zst".

    Raises:
        SetupError: no package for zstd is installed, as in `zstd`.
    """
    if compression == ZSTD:
        return cast(BinaryIO, zstd().ZstdFile(file, mode))
    return cast(BinaryIO, gzip.GzipFile(filename="", mode=mode, fileobj=file, mtime=0))


def kind_of(content: bytes) -> str | None:
    """Returns the kind of an unsupported file by its first bytes; None: the file may be text."""
    return next((words for start, words in _FIRST_BYTES.items() if content.startswith(start)), None)


def cure(words: str) -> str:
    """Returns advice for an input of an unsupported kind. `words`: the kind, from `kind_of` or FOREIGN."""
    return _CURES.get(words, "give its rows in another form")
