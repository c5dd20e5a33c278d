"""The check of an uploaded file before its batch begins: each line must be a request to the batch's endpoint, and each
custom_id must be unique."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamabatch.errors import InputError
from llamabatch.jobs import formats
from llamabatch.jobs.input import jsonl
from llamabatch.jobs.input.ids import Ids
from llamabatch.jobs.input.jsonl import Problem
from llamabatch.jobs.input.lines import id_of
from llamabatch.jobs.rows import MAX_LINE_BYTES
from llamabatch.utils.checks import present, show

MAX_ERRORS = 100  # maximum number of errors in the record of a batch
MAX_LINES = 1_000_000
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass
class Checked:
    """The outcome of a check.

    Attributes:
        total: the number of lines.
        errors: objects with code, line (from 1 on; None: the error concerns the whole file), message and param.
    """

    total: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, code: str, line: int | None, message: str, param: str | None = None) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "line": line, "message": message, "param": param})


def check_lines(path: Path, endpoint: str, stopped: Callable[[], object] = lambda: False) -> Checked:
    """Checks all lines of a file, but not the fields of their bodies: a line with a wrong field fails when it runs.

    Args:
        stopped: the check ends early when `stopped` returns true.

    Raises:
        OSError: the disk fails.
    """
    found, ids = Checked(), Ids()
    with path.open("rb") as file:
        begins = file.read(formats.MOST_FIRST_BYTES)
        if (kind := formats.kind_of(begins)) is not None or begins.startswith((formats.GZIP_START, formats.ZSTD_START)):
            found.add("invalid_file", None, f"the file is {kind or 'compressed'}; send lines of JSON as they are")
            return found
        file.seek(0)
        try:
            for record in jsonl.objects(path.name, file, MAX_LINE_BYTES):
                found.total += 1
                if found.total > MAX_LINES:
                    found.add("too_many_lines", found.total, f"a batch takes at most {MAX_LINES:,} lines; send several")
                    return found
                _check(record, found, ids, endpoint)
                if len(found.errors) == MAX_ERRORS or stopped():
                    return found
        except InputError as error:  # the error concerns the whole file: for example, the file is UTF-16
            found.add("invalid_file", None, str(error).removeprefix(path.name).strip())
            return found
    if not found.total:
        found.add("empty_file", None, "the file has no line; send one JSON object a line")
    return found


def _check(record: Mapping[str, Any] | Any, found: Checked, ids: Ids, endpoint: str) -> None:
    number = found.total
    if isinstance(record, Problem):
        found.add("invalid_json_line", number, record.error)
        return
    record = present(record)
    for name in record:
        if name not in _FIELDS:
            found.add("invalid_field", number, f"a line has no field {show(name)}; it has {', '.join(_FIELDS)}", name)
    for name in _FIELDS:
        if name not in record:
            found.add("missing_required_parameter", number, f"the line has no {name}", name)
            return
    try:
        custom_id = id_of(record)
    except InputError as error:
        found.add("invalid_custom_id", number, str(error), "custom_id")
        return
    holder = ids.claim(str(custom_id), number)
    if holder is not None:
        found.add("duplicate_custom_id", number, f"custom_id {show(custom_id)} is that of line {holder}", "custom_id")
    if record["method"] != "POST":
        found.add("invalid_method", number, f"method is {show(record['method'])}; give 'POST'", "method")
    if record["url"] != endpoint:
        message = f"url is {show(record['url'])}, but the batch is for {endpoint}"
        found.add("invalid_url", number, message, "url")
    body = record["body"]
    if not isinstance(body, Mapping):
        found.add("invalid_body", number, f"body is {show(body)}; give the object that would be sent", "body")
    elif body.get("stream"):
        found.add("invalid_body", number, "stream is true; a batch has whole answers: leave it out", "body.stream")
