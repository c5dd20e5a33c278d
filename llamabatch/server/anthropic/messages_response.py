"""The responses of /v1/messages, as one document or as the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.tool_calls import ToolCallDelta, in_order, object_of
from llamabatch.server.anthropic.dialect import error_document
from llamabatch.server.http.errors import ApiError, check_ends
from llamabatch.server.http.ids import random_hex
from llamabatch.server.request.chat_body import ChatBody
from llamabatch.server.response.json_text import LIGHT, dump, quoted, weight_of_pieces
from llamabatch.server.serving.serving import Serving

Json = dict[str, Any]

# Anthropic's schema allows citations to be a list or null. Some clients that check types accept only one of the two.
_EMPTY_TEXT = '{"type":"text","text":"","citations":[]}'


@dataclass(frozen=True)
class MessageHead:
    """The id and the model of a response. A stream sends them in its first event.

    Attributes:
        model: the requested name.
    """

    id: str
    model: str

    @classmethod
    def of(cls, serving: Serving, body: ChatBody) -> MessageHead:
        """Returns the head of the response to a request body."""
        number = random_hex() if body.request_id is None else body.request_id
        return cls(f"msg_{number}", serving.names[0] if body.model is None else body.model)

    def document(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        """Returns a message in Anthropic's format."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
            "usage": usage,
        }


def message_response(head: MessageHead, outputs: list[RequestOutput], body: ChatBody, n_thinking: int = 0) -> Json:
    """Returns the message that answers a conversation.

    Args:
        n_thinking: the number of tokens in the thinking.

    Raises:
        ApiError: an error ended the request.
    """
    [output] = outputs
    check_ends(output)
    [whole] = output.outputs
    content: list[Json] = []
    if whole.reasoning and body.include_reasoning:
        content.append({"type": "thinking", "thinking": whole.reasoning, "signature": ""})
    parts = list(in_order(whole.text, whole.tool_calls))
    for part in parts or ([] if content else [""]):
        if isinstance(part, str):
            content.append({"type": "text", "text": part, "citations": []})
        else:
            content.append(_tool_use(part.id, part.name, object_of(part.arguments)))
    reason, stop = _ended(whole.finish_reason, whole.stop_reason, bool(whole.tool_calls))
    return head.document(content, reason, stop, usage_of(output, n_thinking))


def usage_of(output: RequestOutput, n_thinking: int = 0) -> Json:
    """Returns the token counts of a request. input_tokens does not include cached tokens of the prompt."""
    cached = output.num_cached_tokens
    n_out = sum(len(each.token_ids) for each in output.outputs)
    return _usage(len(output.prompt_token_ids) - cached, cached, n_out, n_thinking)


def _usage(n_in: int, n_cached: int, n_out: int, n_thinking: int) -> Json:
    return {
        "input_tokens": n_in,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_out,
        "output_tokens_details": {"thinking_tokens": n_thinking},
        # The following fields only describe a hosted service, but clients with type checks expect them.
        "cache_creation": None,
        "inference_geo": None,
        "server_tool_use": None,
        "service_tier": "standard",
    }


def _tool_use(call_id: str, name: str | None, given: Json) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given, "caller": {"type": "direct"}}


def _ended(reason: FinishReason, stop: str | int | None, called: bool) -> tuple[str, str | None]:
    """Returns stop_reason and stop_sequence."""
    if reason is FinishReason.LENGTH:
        return "max_tokens", None
    if called:
        return "tool_use", None
    return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)


class MessageEvents:
    """A writer of the events of a streamed message: blocks of thinking, text and calls, one after another.

    Args:
        n_prompt: the number of tokens in the prompt.
        count: returns the number of thinking tokens in outputs.
    """

    def __init__(
        self,
        head: MessageHead,
        body: ChatBody,
        n_prompt: int,
        count: Callable[[list[RequestOutput]], int] = lambda outputs: 0,
    ) -> None:
        self._count = count
        self._head = head
        self._body = body
        self._n_prompt = n_prompt
        self._is_begun = False
        self._index = -1  # index of the open block, or of the last closed block; -1: no block yet
        self._open: str | tuple[str, int] | None = None  # kind of the open block; for a call, kind and index
        self._has_called = False
        self._has_thought = False  # True: the answer has thinking, so `end` must count the thinking tokens
        self._n_text = 0  # characters of the answer so far
        self._finished: RequestOutput | None = None

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """Returns the events of new outputs. Raises ApiError if an error ended the request."""
        events: list[str] = []
        for output in outputs:
            finished = output.finished
            if finished is not None:
                check_ends(finished)
                self._finished = finished
            self._begin(events)
            self._has_thought |= bool(output.reasoning)
            if output.reasoning and self._body.include_reasoning:
                self._switch("thinking", '{"type":"thinking","thinking":"","signature":""}', events)
                self._delta("thinking_delta", "thinking", output.reasoning, events)
            for part in in_order(output.text, output.tool_calls, self._n_text):
                if isinstance(part, str):
                    self._switch("text", _EMPTY_TEXT, events)
                    self._delta("text_delta", "text", part, events)
                else:
                    self._call(part, events)
            self._n_text += len(output.text)
        return "".join(events).encode(errors="replace")

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        return weight_of_pieces(outputs) > LIGHT

    def end_takes_long(self) -> bool:
        return self._has_thought

    def end(self) -> Iterator[bytes]:
        """Yields the events that end the last block and the message."""
        events: list[str] = []
        self._begin(events)
        finished = self._finished
        assert finished is not None
        whole: CompletionOutput = finished.outputs[0]
        if self._index < 0:  # an empty message gets an empty text, as in message_response
            self._switch("text", _EMPTY_TEXT, events)
        self._close(events)
        reason, stop = _ended(whole.finish_reason, whole.stop_reason, self._has_called)
        delta = {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}
        usage = usage_of(finished, self._count([finished]))
        events.append(_event("message_delta", {"delta": delta, "usage": usage}))
        events.append(_event("message_stop", {}))
        yield "".join(events).encode(errors="replace")

    def error(self, error: ApiError) -> bytes:
        return f"event: error\ndata: {dump(error_document(error))}\n\n".encode(errors="replace")

    def _begin(self, events: list[str]) -> None:
        if not self._is_begun:
            self._is_begun = True
            usage = _usage(self._n_prompt, 0, 0, 0)
            events.append(_event("message_start", {"message": self._head.document([], None, None, usage)}))

    def _switch(self, kind: str | tuple[str, int], block: str, events: list[str]) -> None:
        """Closes the open block and opens a block of this kind, unless the open block has this kind."""
        if self._open == kind:
            return
        self._close(events)
        self._open = kind
        self._index += 1
        events.append(
            f'event: content_block_start\ndata: {{"type":"content_block_start","index":{self._index},'
            f'"content_block":{block}}}\n\n'
        )

    def _close(self, events: list[str]) -> None:
        if self._open is not None:
            self._open = None
            events.append(_event("content_block_stop", {"index": self._index}))

    def _delta(self, kind: str, name: str, text: str, events: list[str]) -> None:
        events.append(
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{kind}","{name}":{quoted(text)}}}}}\n\n'
        )

    def _call(self, call: ToolCallDelta, events: list[str]) -> None:
        if call.id is not None:
            self._has_called = True
            block = _tool_use(call.id, call.name, {})
            self._switch(("tool_use", call.index), dump(block), events)
        if call.arguments:
            self._delta("input_json_delta", "partial_json", call.arguments, events)


def _event(kind: str, more: Json) -> str:
    return f"event: {kind}\ndata: {dump({'type': kind, **more})}\n\n"
