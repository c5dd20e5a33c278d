"""The responses of /api/chat and /api/generate, as one document or as a stream of documents, one per line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput, chat_logprob
from llamabatch.request.tool_calls import ToolCall, object_of
from llamabatch.server.http.errors import ApiError, check_ends
from llamabatch.server.ollama.body import RawBody
from llamabatch.server.ollama.dialect import error_document, moment, nanoseconds
from llamabatch.server.request.generation import Generation
from llamabatch.server.response.json_text import LIGHT, Rows, dump, weight, weight_of_pieces
from llamabatch.server.serving.serving import Serving

Json = dict[str, Any]


@dataclass(frozen=True)
class Writer:
    """A writer of the documents of one response.

    Attributes:
        model: the requested name.
        is_chat: True: the text is in the field "message". False: the text is in the field "response".
        shows_thinking: the response includes the thinking.
        logprobs: the number of likeliest tokens per position; None: no logprobs.
        piece: returns the bytes of a token id, for logprobs.
        has_context: the last document has the token ids of prompt and answer, so that a later request can continue
            them.
    """

    model: str
    is_chat: bool
    shows_thinking: bool = True
    logprobs: int | None = None
    piece: Callable[[int], bytes] | None = None
    has_context: bool = False

    @classmethod
    def of(cls, serving: Serving, body: Generation, name: str | None, *, is_chat: bool) -> Writer:
        """Returns the writer of the response to a request body.

        Args:
            name: the name of the model as the caller wrote it.
        """
        return cls(
            name or serving.names[0],
            is_chat,
            getattr(body, "include_reasoning", True),
            body.params.logprobs,
            serving.model.piece,
            not is_chat and not isinstance(body, RawBody),
        )

    def document(
        self,
        text: str = "",
        thinking: str | None = None,
        calls: Sequence[ToolCall] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> Json:
        """Returns a piece of a response, or a whole response without the fields of `end_of`."""
        found: Json = {"model": self.model, "created_at": moment()}
        part: Json = {"role": "assistant", "content": text} if self.is_chat else {"response": text}
        if thinking and self.shows_thinking:
            part["thinking"] = thinking
        if calls:
            part["tool_calls"] = [_call(call, place) for place, call in enumerate(calls)]
        found |= {"message": part} if self.is_chat else part
        if self.logprobs is not None and logprobs:
            found["logprobs"] = Rows(logprobs, lambda given: chat_logprob(given, self.piece, self.logprobs))
        return found | {"done": False}

    def loaded(self, *, unload: bool) -> Json:
        """Returns the response to a body without a prompt."""
        return self.document() | {"done": True, "done_reason": "unload" if unload else "load"}

    def end_of(self, output: RequestOutput) -> Json:
        """Returns the fields of the last document: the reason of the end, counts, and times in nanoseconds."""
        [whole] = output.outputs
        times = output.timings
        first = times.total_s if times.ttft_s is None else times.ttft_s
        last = times.token_times_s[-1] if times.token_times_s else first
        is_long = whole.finish_reason is FinishReason.LENGTH
        found = {
            "done": True,
            "done_reason": "length" if is_long else "stop",
            "total_duration": nanoseconds(times.total_s),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": nanoseconds(first - (times.queued_s or 0.0)),
            "eval_count": len(whole.token_ids),
            "eval_duration": nanoseconds(last - first),
        }
        return found | ({"context": [*_text_ids(output), *whole.token_ids]} if self.has_context else {})


def _call(call: ToolCall, place: int) -> Json:
    return {"id": call.id, "function": {"index": place, "name": call.name, "arguments": object_of(call.arguments)}}


def answer(writer: Writer, outputs: list[RequestOutput]) -> Json:
    """Returns the document of a whole response. Raises ApiError if an error ended the request."""
    [output] = outputs
    check_ends(output)
    end = writer.end_of(output)
    [whole] = output.outputs
    return writer.document(whole.text, whole.reasoning, whole.tool_calls, whole.logprobs) | end


class Lines:
    """A writer of the lines of a streamed response. All tool calls come in one line, just before the last line."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._finished: RequestOutput | None = None

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """Returns the lines of new outputs. Raises ApiError if an error ended the request."""
        lines: list[Json] = []
        for output in outputs:
            if output.finished is not None:
                check_ends(output.finished)
                self._finished = output.finished
            shown = output.text or (output.reasoning and self._writer.shows_thinking)
            if shown or (self._writer.logprobs is not None and output.logprobs):
                lines.append(self._writer.document(output.text, output.reasoning, (), output.logprobs))
        return _written(lines)

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        return weight_of_pieces(outputs) > LIGHT

    def end_takes_long(self) -> bool:
        return self._writer.has_context and self._finished is not None and weight([self._finished]) > LIGHT

    def end(self) -> Iterator[bytes]:
        """Yields the line of the tool calls, if there are any, and the last line with the counts."""
        finished, writer = self._finished, self._writer
        assert finished is not None
        [whole] = finished.outputs
        lines = []
        if whole.tool_calls:
            lines.append(writer.document(calls=whole.tool_calls))
        yield _written([*lines, writer.document() | writer.end_of(finished)])

    def error(self, error: ApiError) -> bytes:
        return _written([error_document(error)])


def _written(lines: Sequence[Json]) -> bytes:
    return "".join(f"{dump(line)}\n" for line in lines).encode(errors="replace")


def _text_ids(output: RequestOutput) -> list[int]:
    """Returns the token ids of a prompt. Negative ids, which stand for media, are left out: requests cannot contain
    them."""
    return [token_id for token_id in output.prompt_token_ids if token_id >= 0]
