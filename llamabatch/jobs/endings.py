"""Endings of names: of the formats that a job reads and writes, and of what it keeps beside its output."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = ".job.json"
AHEAD = ".ahead"
PART = ".part"
SUMS = ".sums"
LOCK = ".lock"
RESCUED = ".rescued"
ALL = (MANIFEST, AHEAD, PART, SUMS, LOCK, RESCUED)
TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
LONGEST = 13  # characters of an ending: of a manifest in being, of lines that wait beside a Parquet file's

READ = "lines of JSON (.jsonl, .ndjson, .json), .csv, .tsv and .parquet, all but the last also with .gz behind"
WRITTEN = "lines of JSON (.jsonl, .ndjson) and .parquet"
LINES = (".jsonl", ".ndjson")  # the name promises lines of JSON
PARQUET = (".parquet", ".pq")
GZIP = ".gz"

_SHEET = "a spreadsheet"
_ARCHIVE = "an archive"
_COMPRESSED = "compressed by another program than gzip"
_COLUMNS = "a file of columns other than Parquet"
_DATABASE = "a database"
_DATA = "data of a program"
_DOCUMENT = "one document"

# What no job reads or writes. A name with any other ending says nothing of a format.
FOREIGN = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"), _SHEET),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz"), _ARCHIVE),
    **dict.fromkeys((".zst", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".snappy", ".sz", ".z"), _COMPRESSED),
    **dict.fromkeys((".arrow", ".arrows", ".ipc", ".feather", ".orc", ".avro"), _COLUMNS),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb"), _DATABASE),
    **dict.fromkeys((".pkl", ".pickle", ".npy", ".npz", ".pt", ".h5", ".hdf5", ".msgpack", ".tfrecord"), _DATA),
    **dict.fromkeys((".gguf", ".safetensors"), "a model"),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".pdf", ".doc", ".docx", ".rtf"), _DOCUMENT),
}

# How such files begin, whatever their names are: with bytes that no line of text has.
_BEGINNINGS = {
    b"PK\x03\x04": "a spreadsheet or an archive",
    b"\xd0\xcf\x11\xe0": _SHEET,
    b"7z\xbc\xaf": _ARCHIVE,
    b"Rar!\x1a": _ARCHIVE,
    b"\x28\xb5\x2f\xfd": _COMPRESSED,
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
BEGINNING_BYTES = max(map(len, _BEGINNINGS))

_CURES = {
    _SHEET: "save it as CSV",
    _ARCHIVE: "unpack it",
    _COMPRESSED: "unpack it, or have its program write to a pipe that is read as '-'",
    _COLUMNS: "convert it to Parquet",
}


def suffixes(path: Path) -> tuple[str, bool]:
    """The ending that tells the format, in small letters, and whether .gz follows it."""
    found = [each.lower() for each in path.suffixes]
    zipped = found[-1:] == [GZIP]
    if zipped:
        found.pop()
    return (found[-1] if found else ""), zipped


def begins(content: bytes) -> str | None:
    """What a file is of which these are the first bytes; None: it may be text."""
    return next((words for start, words in _BEGINNINGS.items() if content.startswith(start)), None)


def cure(words: str) -> str:
    """What to do with an input that is such a file."""
    return _CURES.get(words, "give its rows in another form")


def temporary(out: Path, job_id: str) -> Path:
    """Where a file of a job is written before it is renamed: in the same folder, so that a rename is enough, and under
    a name that holds a part of the job's id, so that nothing else has it."""
    return out.with_name(f"{out.name}.{job_id[:8]}.tmp")


def shortened(name: str) -> str | None:
    """The name of the output that a file of this name may be kept beside; None: it has no such ending."""
    if match := TEMPORARY.search(name):
        return name[: match.start()] or None
    return next((name.removesuffix(each) for each in ALL if name.endswith(each)), "") or None
