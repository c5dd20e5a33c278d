"""The responses of /v1/responses, as one document or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput, chat_logprob
from llamabatch.request.tool_calls import ToolCallDelta, in_order
from llamabatch.server.http.errors import ApiError, check_ends
from llamabatch.server.http.ids import random_hex
from llamabatch.server.openai.custom_tools import CustomInput, input_of
from llamabatch.server.openai.kept_responses import item_id, response_id, size_of
from llamabatch.server.openai.responses_body import ResponsesBody
from llamabatch.server.request.generation import filled
from llamabatch.server.response.answer import in_parts
from llamabatch.server.response.event_stream import DONE
from llamabatch.server.response.json_text import LIGHT, Rows, dump, dump_in_pieces, weight_of_pieces
from llamabatch.server.serving.serving import Serving

_MUCH = 2**16  # bytes of repeated fields in memory; writing more than this takes over a millisecond

Json = dict[str, Any]


@dataclass(frozen=True)
class ResponseHead:
    """Common data of a response and its events.

    Attributes:
        number: the common part of the ids of the response and its items.
        created: time.time() of the request in whole seconds.
        sampling: the temperature and top_p in effect, from the body or from the model's defaults.
        piece: returns the bytes of a token id, for logprobs; None: the bytes are not known.
        keep: stores the finished response object; None: the response is not stored.
    """

    number: str
    model: str
    created: int
    body: ResponsesBody
    sampling: Json = field(default_factory=dict)
    piece: Callable[[int], bytes] | None = None
    keep: Callable[[Json], None] | None = None

    @classmethod
    def of(cls, serving: Serving, body: ResponsesBody, keep: Callable[[Json], None] | None = None) -> ResponseHead:
        """Returns the head of the response to a request body."""
        chat = body.chat
        number = random_hex() if chat.request_id is None else chat.request_id
        full = filled(chat.params, serving.model)
        sampling = {"temperature": full.temperature, "top_p": full.top_p}
        name = serving.names[0] if chat.model is None else chat.model
        return cls(number, name, int(time.time()), body, sampling, serving.model.piece, keep)

    def item_id(self, kind: str, index: int) -> str:
        """Returns the id of an output item."""
        return item_id(kind, self.number, index)

    def document(self, status: str, output: list[Json], usage: Json | None = None, **more: Any) -> Json:
        """Returns a response object."""
        document: Json = {
            "id": response_id(self.number),
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "service_tier": self.body.chat.answered_tier or "default",
            "usage": usage,
        }
        return document | self.body.repeated | self.sampling | more


def reasoning_item(item_id: str, text: str, status: str = "completed") -> Json:
    """Returns an output item with the thinking of the model."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def message_item(item_id: str, parts: list[Json], status: str = "completed") -> Json:
    """Returns an output item with text."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": parts}


def text_part(text: str, logprobs: Sequence[Json]) -> Json:
    """Returns the content part with the text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(item_id: str, call_id: str, called: Json, arguments: str, status: str = "completed") -> Json:
    """Returns an output item for a tool call. `called` is the result of ResponsesBody.called."""
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        **called,
        "arguments": arguments,
        "status": status,
    }


def custom_item(item_id: str, call_id: str, called: Json, text: str, status: str = "completed") -> Json:
    """Returns an output item for a call of a custom tool. `called` is the result of ResponsesBody.called."""
    return {"id": item_id, "type": "custom_tool_call", "call_id": call_id, **called, "input": text, "status": status}


def response_document(head: ResponseHead, outputs: list[RequestOutput], n_reasoning: int = 0) -> Json:
    """Returns the whole response.

    Args:
        n_reasoning: the number of tokens in the thinking.

    Raises:
        ApiError: an error ended the request.
    """
    [output] = outputs
    check_ends(output)
    [whole] = output.outputs
    items: list[Json] = []
    if whole.reasoning and head.body.chat.include_reasoning:
        items.append(reasoning_item(head.item_id("rs", len(items)), whole.reasoning))
    logprobs = logprobs_of(whole.logprobs, head)
    parts = list(in_order(whole.text, whole.tool_calls))
    for part in parts or ([] if items else [""]):
        if isinstance(part, str):
            items.append(message_item(head.item_id("msg", len(items)), [text_part(part, logprobs)]))
            logprobs = []  # the first message gets all logprobs, because nothing shows which of them belong to calls
        else:
            called, place = head.body.called(part.name), len(items)
            if part.name in head.body.custom:
                items.append(custom_item(head.item_id("ctc", place), part.id, called, input_of(part.arguments)))
            else:
                items.append(call_item(head.item_id("fc", place), part.id, called, part.arguments))
    return ended(head, output, items, n_reasoning)


def ended(head: ResponseHead, output: RequestOutput, items: list[Json], n_reasoning: int) -> Json:
    """Returns the response object of a finished request, and stores it if `head.keep` is set."""
    usage = usage_of(output, n_reasoning)
    if output.outputs[0].finish_reason is FinishReason.LENGTH:
        if items:
            items[-1] = items[-1] | {"status": "incomplete"}
        document = head.document("incomplete", items, usage, incomplete_details={"reason": "max_output_tokens"})
    else:
        document = head.document("completed", items, usage)
    if head.keep is not None:
        head.keep(document)
    return document


def usage_of(output: RequestOutput, n_reasoning: int) -> Json:
    """Returns the token counts of a request."""
    n_in, n_out = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    return {
        "input_tokens": n_in,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": n_out,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": n_in + n_out,
    }


def logprobs_of(logprobs: Sequence[TokenLogprobs] | None, head: ResponseHead) -> Sequence[Json]:
    """Returns the logprobs of a text or of a piece of it; empty if the request did not ask for logprobs."""
    if not logprobs or not head.body.logprobs:
        return []
    return Rows(logprobs, lambda given: chat_logprob(given, head.piece))


class ResponseEvents:
    """A writer of the numbered events of a streamed response: items of thinking, text and calls, one after another.

    The stream ends with [DONE], as the OpenResponses specification requires. OpenAI's clients stop reading there.

    Args:
        count: returns the number of thinking tokens in outputs.
    """

    def __init__(self, head: ResponseHead, count: Callable[[list[RequestOutput]], int] = lambda outputs: 0) -> None:
        self.head = head
        self._count = count
        self._number = 0  # number of the next event
        self._items: list[Json] = []  # the complete items
        self._item: _Item | None = None  # the item that is being written
        self._is_begun = False
        self._finished: RequestOutput | None = None
        self._n_text = 0  # characters of the answer so far
        self._n_logprobs = 0
        self._has_thought = False  # True: `end` tokenizes the thinking again to count its tokens
        self._repeats_much = size_of([head.body.repeated], _MUCH) > _MUCH  # True: tools or instructions are large

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """Returns the events of new outputs. Raises ApiError if an error ended the request."""
        events: list[str] = []
        for output in outputs:
            if output.finished is not None:
                check_ends(output.finished)
                self._finished = output.finished
            self._begin(events)
            if output.reasoning and self.head.body.chat.include_reasoning:
                self._open("rs", 0, events).add(output.reasoning, (), events)
            self._has_thought |= bool(output.reasoning)
            logprobs = output.logprobs or ()
            self._n_logprobs += sum(map(len, logprobs))
            for part in in_order(output.text, output.tool_calls, self._n_text):
                if isinstance(part, str):
                    self._open("msg", 0, events).add(part, logprobs, events)
                    logprobs = ()
                else:
                    self._open("fc", part.index, events, part).add(part.arguments, (), events)
            self._n_text += len(output.text)
        return "".join(events).encode(errors="replace")

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        begins = self._repeats_much and not self._is_begun
        closes = self._n_logprobs > LIGHT and any(each.tool_calls for each in outputs)
        return begins or closes or weight_of_pieces(outputs) > LIGHT

    def end_takes_long(self) -> bool:
        return self._n_logprobs > LIGHT or self._has_thought or self._repeats_much

    def end(self) -> Iterator[bytes]:
        """Yields the last events of the stream, in parts: the end of the last item and of the response."""
        events: list[str] = []
        self._begin(events)
        finished = self._finished
        assert finished is not None
        is_cut = finished.outputs[0].finish_reason is FinishReason.LENGTH
        if self._item is None and not self._items:  # adds an empty message, as response_document does
            self._open("msg", 0, events)
        self._close(events, "incomplete" if is_cut else "completed")
        document = ended(self.head, finished, self._items, self._count([finished]))
        yield "".join(events).encode(errors="replace")
        yield from in_parts(self.large_event(f"response.{document['status']}", {"response": document}))
        yield DONE

    def error(self, error: ApiError) -> bytes:
        failure = {"code": "server_error", "message": error.public_message}
        items = [*self._items, *([] if self._item is None else [self._item.document("incomplete")])]
        document = self.head.document("failed", items, error=failure)
        return self.event("response.failed", {"response": document}).encode(errors="replace") + DONE

    def event(self, kind: str, more: Json) -> str:
        """Returns an event with the next number."""
        number, self._number = self._number, self._number + 1
        return f"event: {kind}\ndata: {dump({'type': kind, 'sequence_number': number, **more})}\n\n"

    def large_event(self, kind: str, more: Json) -> Iterator[str]:
        """Returns an event in pieces, because it is large. The event has the next number."""
        number, self._number = self._number, self._number + 1
        return chain(
            [f"event: {kind}\ndata: "],
            dump_in_pieces({"type": kind, "sequence_number": number, **more}),
            ["\n\n"],
        )

    def _begin(self, events: list[str]) -> None:
        if not self._is_begun:
            self._is_begun = True
            document = self.head.document("in_progress", [])
            for kind in ("response.created", "response.in_progress"):
                more = {"response": document}
                events += self.large_event(kind, more) if self._repeats_much else [self.event(kind, more)]

    def _open(self, kind: str, number: int, events: list[str], call: ToolCallDelta | None = None) -> _Item:
        """Returns the open item if it has this kind and number. Otherwise closes the open item and opens a new one."""
        item = self._item
        if item is not None and (item.kind, item.number) == (kind, number):
            return item
        self._close(events)
        place = len(self._items)
        is_custom = call is not None and call.name in self.head.body.custom
        made: type[_Item] = _CustomItem if is_custom else _Item
        self._item = made(self, kind, number, place, self.head.item_id("ctc" if is_custom else kind, place), call)
        self._item.begin(events)
        return self._item

    def _close(self, events: list[str], status: str = "completed") -> None:
        if self._item is not None:
            self._items.append(self._item.end(events, status))
            self._item = None


class _Item:
    """The output item that is being written.

    Args:
        kind: "rs" (thinking), "msg" (text) or "fc" (call).
        number: the index of the call; 0 for other kinds.
        place: the index among the output items.
        call: the first delta of the call; None for other kinds.
    """

    _NAMES = {"rs": "reasoning_text", "msg": "output_text", "fc": "function_call_arguments"}  # noqa: RUF012

    def __init__(
        self, stream: ResponseEvents, kind: str, number: int, place: int, item_id: str, call: ToolCallDelta | None
    ) -> None:
        self.kind = kind
        self.number = number
        self._stream = stream
        self._place = place
        self._id = item_id
        self._call = call
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    def document(self, status: str) -> Json:
        """Returns the item with the content so far."""
        text = "".join(self._text)
        if self.kind == "rs":
            return reasoning_item(self._id, text, status)
        if self.kind == "msg":
            is_begun = status != "in_progress" or bool(text)
            return message_item(self._id, [self._part(text, self._logprobs)] if is_begun else [], status)
        call = self._call
        assert call is not None
        called = self._stream.head.body.called(call.name or "")
        return call_item(self._id, call.id or "", called, text, status)

    def begin(self, events: list[str]) -> None:
        item = self.document("in_progress")
        events.append(self._stream.event("response.output_item.added", {"output_index": self._place, "item": item}))
        if self.kind != "fc":
            events.append(self._stream.event("response.content_part.added", self._at({"part": self._part("", [])})))

    def add(self, text: str, logprobs: Sequence[TokenLogprobs], events: list[str]) -> None:
        if not text:
            return
        self._text.append(text)
        self._logprobs += logprobs
        more: Json = {"delta": text} | ({"logprobs": self._written(logprobs)} if self.kind == "msg" else {})
        events.append(self._stream.event(f"response.{self._NAMES[self.kind]}.delta", self._at(more)))

    def end(self, events: list[str], status: str) -> Json:
        """Writes the end of the item and returns the complete item."""
        text, item = "".join(self._text), self.document(status)
        if self.kind == "fc":
            more: Json = {"arguments": text, "name": item["name"]}
        else:
            more = {"text": text} | ({"logprobs": self._written(self._logprobs)} if self.kind == "msg" else {})
        events += self._stream.large_event(f"response.{self._NAMES[self.kind]}.done", self._at(more))
        if self.kind != "fc":
            part = self._part(text, self._logprobs)
            events += self._stream.large_event("response.content_part.done", self._at({"part": part}))
        return self._done(item, events)

    def _done(self, item: Json, events: list[str]) -> Json:
        events += self._stream.large_event("response.output_item.done", {"output_index": self._place, "item": item})
        return item

    def _part(self, text: str, logprobs: Sequence[TokenLogprobs]) -> Json:
        if self.kind == "rs":
            return {"type": "reasoning_text", "text": text}
        return text_part(text, self._written(logprobs))

    def _written(self, logprobs: Sequence[TokenLogprobs]) -> Sequence[Json]:
        return logprobs_of(logprobs, self._stream.head)

    def _at(self, more: Json) -> Json:
        content = {} if self.kind == "fc" else {"content_index": 0}
        return {"item_id": self._id, "output_index": self._place, **content, **more}


class _CustomItem(_Item):
    """The custom tool call that is being written. The model writes JSON, but the item has only the text in the JSON."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._input = CustomInput()

    def document(self, status: str) -> Json:
        call = self._call
        assert call is not None
        called = self._stream.head.body.called(call.name or "")
        return custom_item(self._id, call.id or "", called, self._input.text, status)

    def add(self, text: str, logprobs: Sequence[TokenLogprobs], events: list[str]) -> None:
        self._delta(self._input.add(text), events)

    def end(self, events: list[str], status: str) -> Json:
        self._delta(self._input.end(), events)
        done = self._at({"input": self._input.text})
        events += self._stream.large_event("response.custom_tool_call_input.done", done)
        return self._done(self.document(status), events)

    def _delta(self, text: str, events: list[str]) -> None:
        if text:
            events.append(self._stream.event("response.custom_tool_call_input.delta", self._at({"delta": text})))
