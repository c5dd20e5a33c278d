"""Turns lines of JSON into objects. A line that is not a JSON object becomes a Problem with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, NoReturn

from llamabatch.errors import InputError
from llamabatch.utils.checks import half_character, show

MAX_DEPTH = 100  # maximum depth of nested JSON, far below the limits of Python's parser and of recursive walks

_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_DISCARD_BYTES = 2**20
_LOOKED_AT = 4096
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Problem(NamedTuple):
    """A line that cannot be run, with the reason, the parsed object if there is one, and the kept fields."""

    error: str
    line: Mapping[str, Any] | None = None
    kept: Mapping[str, Any] | None = None


class Filled(NamedTuple):
    """A plain line that was made from a row, and the kept fields of the row."""

    line: Mapping[str, Any]
    kept: Mapping[str, Any] | None = None


Record = Mapping[str, Any] | Filled | Problem


def lines(stream: BinaryIO, limit: int) -> Iterator[bytes | Problem]:
    """Yields the lines of a stream, each with its line end. A line of more than `limit` bytes becomes a Problem and is
    not stored."""
    while line := stream.readline(limit + 2):
        if line.endswith(b"\n") or len(line) < limit + 2:
            size = len(line.rstrip(b"\r\n")) if len(line) > limit else 0
        else:
            size = len(line)
            while rest := stream.readline(_DISCARD_BYTES):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
        yield line if size <= limit else too_long(size, limit)


def too_long(size: int, limit: int) -> Problem:
    return Problem(f"this line has {size} bytes; allowed are up to {limit}")


def without_mark(name: str, line: bytes) -> bytes:
    """Returns the first line of a text file without its byte order mark. Raises InputError for UTF-16."""
    if line.startswith(_UTF_16):
        raise InputError(f"{name} is UTF-16 text; save it as UTF-8")
    return line.removeprefix(_BOM)


def check(name: str, stream: BinaryIO, *, named: bool) -> None:
    """Checks the first bytes of a file.

    Args:
        named: true if the file's name promises lines of JSON. A bad first line is then an error row, not an InputError.

    Raises:
        InputError: the content is not lines of JSON in UTF-8.
    """
    begins = without_mark(name, stream.read(_LOOKED_AT)).lstrip()
    if named or not begins:
        return
    if begins.startswith(b"["):
        raise InputError(f"{name} is a JSON list; write one object a line, as JSONL")
    line = begins.splitlines()[0].rstrip()
    if line == b"{":
        raise InputError(f"{name} is JSON over several lines; write one object a line, as JSONL")
    if not line.startswith(b"{"):
        text = show(line[:40].decode(errors="replace"))
        raise InputError(
            f"{name} is read as lines of JSON, because its name has no known ending, but begins with {text}, "
            'which is no JSON object; write each row as {"prompt": "..."}, or name it .csv, .tsv or .parquet if it is'
            " a table, .txt if each line is a prompt"
        )


def objects(name: str, stream: BinaryIO, limit: int) -> Iterator[Mapping[str, Any] | Problem]:
    """Yields the object in each line of a file. Empty lines are ignored at the end, and are Problems elsewhere."""
    first, n_empty = True, 0
    for line in lines(stream, limit):
        if first and isinstance(line, bytes):
            line = without_mark(name, line)
        first = False
        if isinstance(line, bytes) and not line.strip():
            n_empty += 1
            continue
        for _ in range(n_empty):
            yield Problem("this line is empty")
        n_empty = 0
        yield parse(line) if isinstance(line, bytes) else line


def not_utf8(line: bytes, error: UnicodeDecodeError) -> Problem:
    return Problem(f"this is not UTF-8 text: byte {error.start + 1} of the line is 0x{line[error.start]:02x}")


def parse(line: bytes) -> Mapping[str, Any] | Problem:
    """Returns the JSON object in a line, or a Problem."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return not_utf8(line, error)
    if text.startswith("\ufeff"):
        return Problem("the line begins with a byte order mark, which belongs to the start of a file")
    try:
        value = _loads(text)
    except RecursionError:
        return _TOO_DEEP
    except ValueError as error:
        return Problem(f"this is not JSON: {_reason(error)}")
    if not isinstance(value, dict):
        return Problem(f"this is {_kind(value)}; write a JSON object")
    # Brackets in texts are counted, too. If this makes the count too high, the only cost is a call of _depth.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        return _TOO_DEEP
    if _SURROGATE.search(line) and (half := half_character(value)) is not None:
        return Problem(f"{show(half)} holds a lone surrogate; give whole characters", value)
    return value


_TOO_DEEP = Problem(f"its values are nested more than {MAX_DEPTH} deep")


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"the name {show(twice)} comes twice in one object")
    return value


def _no_number(name: str) -> NoReturn:
    raise _Refused(f"{name} is no number of JSON")


_loads = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number).decode


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, at character {error.pos + 1}"
    if isinstance(error, _Refused):
        return str(error)
    return "a whole number has too many digits"  # any other ValueError comes from int()


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else "a number"


def _depth(value: object) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        each, depth = stack.pop()
        if isinstance(each, (dict, list)):
            deepest = max(deepest, depth)
            stack.extend((child, depth + 1) for child in (each.values() if isinstance(each, dict) else each))
    return deepest
