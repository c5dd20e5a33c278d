"""Makes the record of a row, and its line of JSON. A record is flat, or has the format of OpenAI's batch results.

Two runs of a job write the same bytes for the same texts. So records have times only on request, and an id in OpenAI's
format is made of the row's number.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llamabatch.errors import ConfigError, InputError
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request import outputs
from llamabatch.request.json_schema import referred
from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.checks import boolean, choice, show

Shape = Literal["auto", "flat", "openai"]
SHAPES: tuple[Shape, ...] = ("auto", "flat", "openai")

# The start of a record with its number. The number is first and the error last, so that a survey finds both without
# parsing the JSON, which is slow.
_NUMBER = re.compile(rb'\{"(?:row": |id": "batch_req_)(\d{1,19})"?, ')
_OPENAI_ID = "batch_req_"
_NO_ERROR = b'"error": null}\n'

_MOST_REFS = 32  # a longer chain of references is not followed

# The columns of flat records.
COLUMNS = frozenset(
    (
        *("row", "id", "text", "finish_reason", "reasoning", "tool_calls", "token_ids", "logprobs", "outputs"),
        *("prompt_logprobs", "embedding", "num_truncated", "queued_s", "ttft_s", "total_s", "generation_tps"),
        *("num_cached_tokens", "error"),
    )
)


@dataclass(frozen=True)
class RecordOptions:
    """The options of records.

    Attributes:
        shape: "flat", "openai", or "auto": OpenAI's format for lines of that format, and "flat" for other lines.
        token_ids: flat records have "token_ids".
        times: flat records have "queued_s", "ttft_s", "total_s", "generation_tps" and "num_cached_tokens". Records in
            OpenAI's format have usage.prompt_tokens_details, and the time in "created" (0 without `times`).
        model: the value of "model" in OpenAI's format for an input line without a model.
        answer: the name of the column with the generated text in flat records.
        parse: fields of the answers (objects of JSON) that become columns in flat records. True: all fields of the
            job's JSON schema; Settings replaces True by their names. A field is null if the row failed or its answer
            was cut.

    Raises:
        ConfigError: a value is out of range.
    """

    shape: Shape = "auto"
    token_ids: bool = False
    times: bool = False
    model: str = ""
    answer: str = "text"
    parse: tuple[str, ...] | bool = ()

    def __post_init__(self) -> None:
        choice(ConfigError, "shape", self.shape, SHAPES)
        boolean(ConfigError, "token_ids", self.token_ids)
        boolean(ConfigError, "times", self.times)
        if not isinstance(self.answer, str) or not self.answer or self.answer in COLUMNS - {"text"}:
            taken = ", ".join(sorted(COLUMNS - {"text"}))
            raise ConfigError(f"answer is {show(self.answer)}; give the name of a column, and none of {taken}")
        if self.parse and self.shape == "openai":
            raise ConfigError("parse makes columns, and rows of shape='openai' have none; leave one of the two out")
        for name in self.fields:
            if name in COLUMNS - {"text"} | {self.answer}:
                cure = "; give the answer another name (--answer NAME)" if name == self.answer else "; rename it"
                raise ConfigError(f"the schema has the field {show(name)}, a column that the output has already{cure}")

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of answers that become columns."""
        return () if isinstance(self.parse, bool) else self.parse

    @property
    def taken(self) -> frozenset[str]:
        """The names of all columns that flat records may have, apart from kept columns."""
        return COLUMNS - {"text"} | {self.answer, *self.fields}

    def document(self) -> dict[str, Any]:
        """Returns the options as plain values for the manifest of an output."""
        return dict(vars(self))

    def is_openai(self, row: Row | BadRow) -> bool:
        """Returns True if the row is answered in OpenAI's format."""
        return self.shape == "openai" or (self.shape == "auto" and row.openai)


def record(row: Row, output: RequestOutput, options: RecordOptions) -> dict[str, Any]:
    """Returns the record of a row with a result from the engine.

    A flat record has row (the number), id, text, finish_reason and error (None unless the row failed). On request, the
    record has token_ids and times. num_cached_tokens belongs to the times, because it also depends on other requests.
    The other fields exist only if they have a value: reasoning, tool_calls, outputs (more than one continuation),
    logprobs, prompt_logprobs, num_truncated (of a prompt that was cut) and embedding.
    """
    error = _error(output)
    if options.is_openai(row):
        if error is not None:
            return _openai_error(row, "request_failed", error)
        return _openai_answer(row, output, options)
    made: dict[str, Any] = {"row": row.number, "id": row.id, **(row.kept or {})}
    made |= _continuation(output.outputs[0], options)
    if options.fields:
        made |= parsed(output.outputs[0].text if error is None else "", options.fields)
    if len(output.outputs) > 1:
        made["outputs"] = [{"index": each.index, **_continuation(each, options)} for each in output.outputs]
    if output.prompt_logprobs is not None:
        made["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    if row.task == "embedding":
        made["embedding"] = None if output.embedding is None else list(output.embedding)
    if output.num_truncated:
        made["num_truncated"] = output.num_truncated
    if options.times:
        times = output.timings
        made |= {"queued_s": times.queued_s, "ttft_s": times.ttft_s, "total_s": times.total_s}
        made["generation_tps"] = times.generation_tps
        made["num_cached_tokens"] = output.num_cached_tokens
    return made | {"error": error}


def refusal(row: Row | BadRow, error: str, options: RecordOptions) -> dict[str, Any]:
    """Returns the record of a row that could not be run. The id may be None, as in BadRow."""
    if options.is_openai(row):
        return _openai_error(row, "invalid_request", error)
    made: dict[str, Any] = {"row": row.number, "id": row.id, **(row.kept or {})}
    made |= {options.answer: "", "finish_reason": FinishReason.ERROR.value, **dict.fromkeys(options.fields)}
    return made | {"error": error}


def parsed(text: str, fields: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a JSON object. All fields are None if the text is not an object, as after a cut."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        found = None
    return {name: found.get(name) if isinstance(found, dict) else None for name in fields}


def fields_of(params: SamplingParams) -> tuple[str, ...]:
    """Returns the fields of the job's JSON schema, in order. Raises ConfigError if there is no schema, or no field."""
    form = params.structure
    root = json.loads(form.text) if form is not None and form.kind == "json" else {}
    properties = resolved(root, root).get("properties")
    if not isinstance(properties, dict) or not properties:
        raise ConfigError(
            "parse needs a JSON schema of an object with properties (--json-schema), whose names become columns"
        )
    return tuple(properties)


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follows each "$ref" within the document and returns the schema; {} if a reference leads to no schema."""
    for _ in range(_MOST_REFS):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = referred(reference, root)
    return {}


def _error(output: RequestOutput) -> str | None:
    if output.error is None and output.finish_reason is FinishReason.ABORT:
        return "the request was aborted"
    return output.error


def _continuation(each: CompletionOutput, options: RecordOptions) -> dict[str, Any]:
    made: dict[str, Any] = {options.answer: each.text, "finish_reason": each.finish_reason.value}
    if each.reasoning is not None:
        made["reasoning"] = each.reasoning
    if each.tool_calls:
        made["tool_calls"] = [call.to_openai() for call in each.tool_calls]
    if options.token_ids:
        made["token_ids"] = each.token_ids
    if each.logprobs is not None:
        made["logprobs"] = _logprobs(each.logprobs)
    return made


def _logprobs(tokens: Sequence[TokenLogprobs | None]) -> list[list[dict[str, Any]] | None]:
    """Returns a list for each token: the token itself, then the most likely tokens at its position. The first token of
    a prompt has None in place of a list."""
    return [
        None
        if given is None
        else [
            {"token_id": token_id, "token": t.decoded_token, "logprob": t.logprob, "rank": t.rank}
            for token_id, t in given.items()
        ]
        for given in tokens
    ]


def _openai_answer(row: Row, output: RequestOutput, options: RecordOptions) -> dict[str, Any]:
    if row.form is not None:
        try:
            return _openai_response(row, row.form.answer(output))
        except InputError as error:
            return _openai_error(row, "request_failed", str(error))
    body = _body(row, replace(output, request_id=str(row.number)), row.model or options.model)
    if "created" in body and not options.times:
        body["created"] = 0
        del body["usage"]["prompt_tokens_details"]
    return _openai_response(row, body)


def _openai_response(row: Row, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": 200, "request_id": f"req_{row.number}", "body": body}
    return {"id": f"batch_req_{row.number}", "custom_id": _custom_id(row), "response": response, "error": None}


def _body(row: Row, output: RequestOutput, model: str) -> dict[str, Any]:
    if row.task == "embedding":
        data = [{"object": "embedding", "index": 0, "embedding": list(output.embedding or ())}]
        prompt = len(output.prompt_token_ids)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt}
        return {"object": "list", "data": data, "model": model, "usage": usage}
    return (
        outputs.openai_chat_completion(output, model)
        if row.task == "chat"
        else outputs.openai_completion(output, model)
    )


def _custom_id(row: Row | BadRow) -> str | None:
    return None if row.id is None else str(row.id)


def _openai_error(row: Row | BadRow, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{row.number}", "custom_id": _custom_id(row), "response": None, "error": error}


def to_line(record: Mapping[str, Any]) -> bytes:
    """Returns a record as a line of JSON in UTF-8. Lone surrogates are escaped. Numbers that are not finite become
    null."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return to_line(_finite(record))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def number_in(record: Mapping[str, Any]) -> int | None:
    """Returns the row number in a record; None: no job made the record."""
    number = record["row"] if "row" in record else str(record.get("id", "")).removeprefix(_OPENAI_ID)
    return number if isinstance(number, int) else int(number) if number.isdecimal() else None


def number_of(line: bytes) -> int | None:
    """Returns the row number in a line; None: the line is not a complete line of a job."""
    match = _NUMBER.match(line)
    return int(match[1]) if match and line.endswith(b"}\n") and b"\0" not in line else None


def id_in(line: bytes) -> str | None:
    """Returns the id of the row in a line of a job; None: there is no id, or the line was edited and is not JSON."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    own = record.get("custom_id", record.get("id"))
    return None if own is None else str(own)


def has_error(line: bytes) -> bool:
    """Returns True if a complete line of a job has the record of a failed row."""
    return not line.endswith(_NO_ERROR)


class Line(NamedTuple):
    """A line in a file.

    Attributes:
        offset: the position of the line's first byte in the file.
        content: the bytes of the line with the newline.
        number: the number of the row; None: the line is torn, or not a line of a job.
    """

    offset: int
    content: bytes
    number: int | None


def lines_of(path: Path, start: int = 0) -> Iterator[Line]:
    """Yields all lines of a file from the byte `start` on, including a torn line at the end. Raises OSError."""
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
    """Returns the CRC-32 of a line, or 1 if the CRC-32 is 0. A checksum 0 counts as lost: a crash may leave zeros."""
    return zlib.crc32(line) or 1
