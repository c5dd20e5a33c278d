"""The responses of /v1/chat/completions, as one document or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    SequenceOutput,
    chat_logprob,
    chat_reason,
)
from llamabatch.request.tool_calls import ToolCallDelta
from llamabatch.server.http.errors import check_ends
from llamabatch.server.openai.chunks import (
    EventWriter,
    Head,
    Usage,
    last_event,
    llama_server_extras,
    prompt_logprobs_of,
    usage_of,
    usage_part,
)
from llamabatch.server.request.chat_body import ChatBody
from llamabatch.server.response.event_stream import DONE
from llamabatch.server.response.json_text import LIGHT, Rows, dump, quoted, weight_of_pieces


def chat_response(head: Head, outputs: list[RequestOutput], body: ChatBody, n_reasoning: int = 0) -> dict[str, Any]:
    """Returns the "chat.completion" document of one conversation. Raises ApiError if an error ended the request.

    Args:
        n_reasoning: the number of tokens in the thinking, for the usage.
    """
    [output] = outputs
    check_ends(output)
    choices = [_choice(head, each, body) for each in output.outputs]
    usage = usage_of(outputs)
    usage.reasoning_tokens = n_reasoning
    document = head.document("chat.completion", choices) | {"usage": usage.to_openai()}
    document |= llama_server_extras(outputs, body)
    if body.return_token_ids:
        document["prompt_token_ids"] = list(output.prompt_token_ids)
    if body.params.prompt_logprobs is not None:
        document["prompt_logprobs"] = prompt_logprobs_of(output)
    return document


def _choice(head: Head, each: CompletionOutput, body: ChatBody) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": each.text, "refusal": None}
    if each.reasoning is not None and body.include_reasoning:
        message["reasoning_content"] = message["reasoning"] = each.reasoning
    reason = chat_reason(each.finish_reason, called=bool(each.tool_calls))
    if each.tool_calls:
        message["content"] = each.text or None
        calls = [call.to_openai() for call in each.tool_calls]
        if body.functions:
            message["function_call"] = calls[0]["function"]
            reason = _old_form(reason)
        else:
            message["tool_calls"] = calls
    choice: dict[str, Any] = {
        "index": each.index,
        "message": message,
        "logprobs": logprobs_of(each.logprobs, body, head),
        "finish_reason": reason,
        "stop_reason": each.stop_reason,
    }
    return choice | {"token_ids": list(each.token_ids)} if body.return_token_ids else choice


def _old_form(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason


def logprobs_of(logprobs: Sequence[TokenLogprobs] | None, body: ChatBody, head: Head) -> dict[str, Any] | None:
    """Returns the "logprobs" of a choice or of one of its pieces; None: the request did not ask for logprobs."""
    if logprobs is None or body.params.logprobs is None:
        return None
    return {"content": Rows(logprobs, lambda given: chat_logprob(given, head.piece, body.params.logprobs))}


class ChatChunks(EventWriter):
    """A writer of the events of a streamed chat. The first event of a choice has the role, and the last event of a
    choice has the finish_reason.

    Args:
        n_prompt: the number of tokens in the prompt.
        count: returns the number of thinking tokens in outputs.
    """

    def __init__(self, head: Head, body: ChatBody, n_prompt: int, count: Callable[[list[RequestOutput]], int]) -> None:
        self._count = count
        self._of = head
        self._head = head.chunk("chat.completion.chunk")
        self._body = body
        self._usage = Usage(n_prompt)
        self._finished: list[RequestOutput] = []
        self._token_ids = body.return_token_ids
        # True: chunks have usage, token ids or logprobs in addition to text
        self._is_rich = body.continuous_usage or self._token_ids or body.params.wants_logprobs
        self._begun: set[int] = set()
        # A chunk of plain text is _head + index of the choice + _text_head + text + _text_tail.
        self._text_head = ',"delta":{"content":'
        self._text_tail = f'}},"logprobs":null,"finish_reason":null}}]{self._usage_part()}}}\n\n'

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """Returns the events of new outputs. Raises ApiError if an error ended the request."""
        events: list[str] = []
        for output in outputs:
            if output.index not in self._begun:
                self._begin(output.index, events)
            if output.finish_reason is None and output.finished is None:
                self._piece(output, events)
            else:
                self._last(output, events)
        return "".join(events).encode()

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        return weight_of_pieces(outputs) > LIGHT or self._counts(outputs)

    def end(self) -> list[bytes]:
        """Returns the last events: usage and timings if the request asks for them, and [DONE]."""
        return [last_event(self._head, self._usage, self._finished, self._body) + DONE]

    def _counts(self, outputs: Sequence[SequenceOutput]) -> bool:
        """Returns True if the thinking of a finished output must be tokenized, because its tokens are counted."""
        is_wanted = self._body.include_usage or self._body.continuous_usage
        ended = [each.finished for each in outputs if each.finished is not None] if is_wanted else []
        return any(each.reasoning for output in ended for each in output.outputs)

    def _usage_part(self) -> str:
        return usage_part(self._usage, self._body)

    def _begin(self, index: int, events: list[str]) -> None:
        self._begun.add(index)
        events.append(
            f'{self._head}{{"index":{index},"delta":{{"role":"assistant","content":null}},"logprobs":null,'
            f'"finish_reason":null}}]{self._usage_part()}}}\n\n'
        )

    def _piece(self, output: SequenceOutput, events: list[str]) -> None:
        if self._is_rich or output.reasoning or output.tool_calls:
            self._full_piece(output, events)
        elif output.text:
            events.append(
                f'{self._head}{{"index":{output.index}{self._text_head}{quoted(output.text)}{self._text_tail}'
            )

    def _full_piece(self, output: SequenceOutput, events: list[str]) -> None:
        if output.reasoning:
            self._usage.reasoning_tokens += len(output.token_ids)
        self._usage.completion_tokens += len(output.token_ids)
        delta: dict[str, Any] = {}
        if output.reasoning and self._body.include_reasoning:
            delta["reasoning_content"] = delta["reasoning"] = output.reasoning
        if output.text:
            delta["content"] = output.text
        if output.tool_calls and self._body.functions:
            delta |= _function_call(output.tool_calls)
        elif output.tool_calls:
            delta["tool_calls"] = [call.to_openai() for call in output.tool_calls]
        logprobs = logprobs_of(output.logprobs, self._body, self._of)
        if not delta and not logprobs and not (self._token_ids and output.token_ids):
            return
        choice = {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if self._token_ids:
            choice["token_ids"] = list(output.token_ids)
        events.append(f"{self._head}{dump(choice)}]{self._usage_part()}}}\n\n")

    def _last(self, output: SequenceOutput, events: list[str]) -> None:
        finished = output.finished
        if finished is not None and (finished.error is not None or output.finish_reason is FinishReason.ABORT):
            check_ends(finished)
        self._full_piece(output, events)
        reason = output.finish_reason
        if reason is not None:
            word = chat_reason(reason, called=output.called_tools)
            self._end_choice(output.index, _old_form(word) if self._body.functions else word, events)
        if finished is not None:
            self._finished.append(finished)
            usage = usage_of([finished])
            usage.reasoning_tokens = self._usage.reasoning_tokens
            if usage.reasoning_tokens and self._counts([output]):
                usage.reasoning_tokens = self._count([finished])  # again, because a piece may mix thinking and text
            self._usage = usage

    def _end_choice(self, index: int, reason: str | None, events: list[str]) -> None:
        events.append(
            f'{self._head}{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":{quoted(str(reason))}}}]'
            f"{self._usage_part()}}}\n\n"
        )


def _function_call(calls: tuple[ToolCallDelta, ...]) -> dict[str, Any]:
    """Returns a delta with the old field `function_call`. The field has room for the first call only."""
    first = [call.to_openai()["function"] for call in calls if call.index == 0]
    if not first:
        return {}
    joined = {"arguments": "".join(each["arguments"] for each in first)}
    return {"function_call": {**{k: v for each in first for k, v in each.items() if k == "name"}, **joined}}
