"""Lines of an output: how a record becomes one, and what can be told of one without parsing it whole."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# records() puts these first and last, so that a million lines are looked through in seconds
_NUMBER = re.compile(rb'\{"(?:row": |id": "batch_req_)(\d{1,19})"?, ')
_BEGINS = (b'{"row": ', b'{"id": "batch_req_')
_NO_ERROR = b'"error": null}\n'


def to_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON in UTF-8. What UTF-8 cannot say (a lone surrogate, in the id of a line of the input) is escaped
    as JSON has it, and what JSON cannot say (a number that is not finite) becomes null."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return to_line(_finite(record))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def number_of(line: bytes) -> int | None:
    """The number of the row that a line answers; None: it is no whole line of a job."""
    match = _NUMBER.match(line)
    return int(match[1]) if match and line.endswith(b"}\n") and b"\0" not in line else None


def begins_as_row(begin: bytes) -> bool:
    """Of the first bytes of a file: are they a job's line, or what is left of one?"""
    return _NUMBER.match(begin) is not None or any(each.startswith(begin) for each in _BEGINS)


def has_error(line: bytes) -> bool:
    """Of a line with a number: did its row fail?"""
    return not line.endswith(_NO_ERROR)


class Line(NamedTuple):
    """A line in a file: where it begins, its bytes with the newline, and the number of its row, if it is whole."""

    offset: int
    content: bytes
    number: int | None


def lines_of(path: Path, start: int = 0) -> Iterator[Line]:
    """All lines of a file from the byte `start` on, the torn one at its end included. Raises OSError."""
    offset = start
    with path.open("rb") as file:
        file.seek(start)
        for content in file:
            yield Line(offset, content, number_of(content))
            offset += len(content)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def checksum(line: bytes) -> int:
    """Of a line, never 0: a crash of the system may leave zeros in place of what was written."""
    return zlib.crc32(line) or 1
