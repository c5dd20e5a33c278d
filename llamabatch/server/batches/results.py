"""The end of a batch: its journal becomes a file of results and a file of errors, in OpenAI's format.

This step may be interrupted anywhere and then repeated: the ids of the files are chosen before the step, each file gets
its final name only when the file is complete, and the journal is removed last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llamabatch.jobs.input import jsonl
from llamabatch.jobs.input.jsonl import Problem
from llamabatch.jobs.input.sources import Source
from llamabatch.jobs.output.records import has_error, lines_of
from llamabatch.jobs.rows import MAX_LINE_BYTES, Bits
from llamabatch.server.http.errors import ApiError
from llamabatch.utils.atomic_file import sync_folder

_STATUS = "answered_with_status"  # an error with this key in a journal contains an endpoint's response
_MESSAGES = {
    "batch_expired": "this request could not be run before the completion window ended",
    "batch_cancelled": "the batch was cancelled before this request ran",
    "batch_failed": "the batch ended before this request ran; its errors name the cause",
}


@dataclass(frozen=True)
class Written:
    """The files of results and errors of a batch.

    Attributes:
        completed, failed: the number of lines in each file.
        output_bytes, error_bytes: the size of each file in bytes; 0: there is no file.
    """

    completed: int
    failed: int
    output_bytes: int
    error_bytes: int


def write_results(
    source: Path, journal: Path, output: Path, errors: Path, code: str, sign: Callable[[Path], Path]
) -> Written:
    """Writes the files of results and errors.

    Args:
        source: the uploaded lines.
        journal: the journal of the finished rows. It need not exist.
        code: the error code of the unfinished lines: "batch_expired", "batch_cancelled" or "batch_failed".
        sign: takes the path of a result file, and returns the path at which the file is written first.

    Raises:
        OSError: the disk fails.
    """
    counts = [0, 0]
    made: list[int] = []
    for kind, target in enumerate((output, errors)):
        new = sign(target)
        with new.open("wb") as file:
            for line in _lines(journal) if kind == 0 else _errors(source, journal, code):
                if kind == 1 or not has_error(line):
                    file.write(line)
                    counts[kind] += 1
            made.append(_sync(file))
        if counts[kind]:
            os.replace(new, target)
            sync_folder(target.parent)
        else:
            new.unlink()
    return Written(counts[0], counts[1], made[0], made[1])


def answer_of(error: ApiError) -> str:
    """Returns the error of a refused line as a text for the journal: JSON with the endpoint's response."""
    return json.dumps({_STATUS: error.status, "body": error.to_openai()})


def _with_response(line: bytes) -> bytes:
    """Returns the line of a failed row in OpenAI's format. The response and its status are in "response", because
    "error" is only for rows without a response."""
    record = json.loads(line)
    status, body = _answer_in(record["error"])
    number = record["id"].rpartition("_")[2]
    response = {"status_code": status, "request_id": f"req_{number}", "body": body}
    return json.dumps({**record, "response": response, "error": None}).encode() + b"\n"


def _answer_in(error: Mapping[str, str]) -> tuple[int, Mapping[str, Any]]:
    """Returns the HTTP status and the body of the error response to a failed row."""
    _, mark, rest = error["message"].partition(f'{{"{_STATUS}": ')
    try:
        made = json.loads(mark + rest)  # the text before `mark` says only which line failed
        return int(made[_STATUS]), dict(made["body"])
    except (ValueError, KeyError, TypeError):  # the error has no response: the engine or the job failed
        is_refused = error["code"] == "invalid_request"
        failure = ApiError(400, error["message"]) if is_refused else ApiError.of_output(error["message"])
        return failure.status, failure.to_openai()


def _sync(file: BinaryIO) -> int:
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


def _lines(journal: Path) -> Iterator[bytes]:
    """Yields the complete lines of a journal."""
    if journal.exists():
        yield from (line.content for line in lines_of(journal) if line.number is not None)


def _errors(source: Path, journal: Path, code: str) -> Iterator[bytes]:
    """Yields the lines of failed rows, and a line for each row that has not run."""
    done, place = Bits(), json.dumps(f"{Source(source).name}, ", ensure_ascii=False)[1:-1].encode()
    if journal.exists():
        for line in lines_of(journal):
            if line.number is None:
                continue
            done.add(line.number)
            if has_error(line.content):
                yield _with_response(line.content.replace(place, b"", 1))  # hides the path of the source file
    try:
        file = source.open("rb")
    except FileNotFoundError:  # another program has removed the file: the batch ends with the lines of the journal
        return
    with file:
        for number, record in enumerate(jsonl.objects(source.name, file, MAX_LINE_BYTES)):
            if number in done:
                continue
            custom_id = None if isinstance(record, Problem) else record.get("custom_id")
            error = {"code": code, "message": _MESSAGES[code]}
            custom_id = custom_id if custom_id is None else str(custom_id)
            made = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": None, "error": error}
            yield json.dumps(made).encode() + b"\n"
