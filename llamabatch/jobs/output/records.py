"""What is written of a row: a flat record, or a line of OpenAI's batch results.

Two runs of a job write the same bytes where their texts are the same: times are in a record only where they are asked
for, and the ids of OpenAI's format are made of the row's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llamabatch.errors import ConfigError
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request import outputs
from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput
from llamabatch.utils.checks import boolean, choice

Shape = Literal["auto", "flat", "openai"]
SHAPES: tuple[Shape, ...] = ("auto", "flat", "openai")


@dataclass(frozen=True)
class RecordOptions:
    """What records hold.

    Attributes:
        shape: "flat", "openai", or "auto": lines of OpenAI's batch format are answered in kind, all others flat.
        token_ids: flat records have "token_ids".
        times: flat records have "queued_s", "ttft_s", "total_s" and "generation_tps", those of OpenAI's format the
            time under "created", which is 0 otherwise.
        model: what stands under "model" in OpenAI's format where the line of the input names none.

    Raises:
        ConfigError: a value is out of range.
    """

    shape: Shape = "auto"
    token_ids: bool = False
    times: bool = False
    model: str = ""

    def __post_init__(self) -> None:
        choice(ConfigError, "shape", self.shape, SHAPES)
        boolean(ConfigError, "token_ids", self.token_ids)
        boolean(ConfigError, "times", self.times)

    def is_openai(self, row: Row | BadRow) -> bool:
        return self.shape == "openai" or (self.shape == "auto" and row.openai)


def record(row: Row, output: RequestOutput, options: RecordOptions) -> dict[str, Any]:
    """What came of a row.

    Flat: row (its number), id, text, finish_reason, and error, which is None unless the row failed; beside them
    token_ids and times on request, outputs where more than one continuation was asked for, logprobs and
    prompt_logprobs where they were, num_truncated where the prompt was cut, and embedding, of a text to embed.
    """
    error = _error(output)
    if options.is_openai(row):
        if error is not None:
            return _openai_error(row.number, row.id, "request_failed", error)
        return _openai_answer(row, output, options)
    made: dict[str, Any] = {"row": row.number, "id": row.id, **_continuation(output.outputs[0], options)}
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
    return made | {"error": error}


def refusal(row: Row | BadRow, error: str, options: RecordOptions) -> dict[str, Any]:
    """What is written of a row that could not be run: its id is None where its line has none."""
    if options.is_openai(row):
        return _openai_error(row.number, row.id, "invalid_request", error)
    return {"row": row.number, "id": row.id, "text": "", "finish_reason": FinishReason.ERROR.value, "error": error}


def _error(output: RequestOutput) -> str | None:
    if output.error is None and output.finish_reason is FinishReason.ABORT:
        return "the request was aborted"
    return output.error


def _continuation(each: CompletionOutput, options: RecordOptions) -> dict[str, Any]:
    made: dict[str, Any] = {"text": each.text, "finish_reason": each.finish_reason.value}
    if options.token_ids:
        made["token_ids"] = each.token_ids
    if each.logprobs is not None:
        made["logprobs"] = _logprobs(each.logprobs)
    return made


def _logprobs(told: Sequence[TokenLogprobs | None]) -> list[list[dict[str, Any]] | None]:
    """For each token, itself and then the likeliest at its place; None for the first of a prompt."""
    return [
        None
        if given is None
        else [
            {"token_id": token_id, "token": t.decoded_token, "logprob": t.logprob, "rank": t.rank}
            for token_id, t in given.items()
        ]
        for given in told
    ]


def _openai_answer(row: Row, output: RequestOutput, options: RecordOptions) -> dict[str, Any]:
    body = _body(row, replace(output, request_id=str(row.number)), row.model or options.model)
    if "created" in body and not options.times:
        body["created"] = 0
    response = {"status_code": 200, "request_id": f"req_{row.number}", "body": body}
    return {"id": f"batch_req_{row.number}", "custom_id": row.id, "response": response, "error": None}


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


def _openai_error(number: int, custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{number}", "custom_id": custom_id, "response": None, "error": error}
