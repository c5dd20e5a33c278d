"""The responses of /v1/chat/completions: whole, and in chunks."""

from __future__ import annotations

from typing import Any

from llamabatch.request.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    SequenceOutput,
    chat_logprobs,
    chat_reason,
)
from llamabatch.server.errors import ApiError
from llamabatch.server.openai.chunks import Head, Usage, check_ends, dump, error_event, quoted, usage_of
from llamabatch.server.sse import DONE


def chat_response(head: Head, outputs: list[RequestOutput], *, token_ids: bool = False) -> dict[str, Any]:
    """A "chat.completion" document of one conversation.

    Args:
        token_ids: with the ids of the prompt and of each choice, as vLLM's return_token_ids.

    Raises:
        ApiError: the request was ended by an error.
    """
    [output] = outputs
    check_ends(output)
    choices = [_choice(each, token_ids) for each in output.outputs]
    document = head.document("chat.completion", choices) | {"usage": usage_of(outputs).to_openai()}
    if token_ids:
        document["prompt_token_ids"] = list(output.prompt_token_ids)
    return document


def _choice(each: CompletionOutput, token_ids: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": each.text, "refusal": None}
    if each.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = each.reasoning
    if each.tool_calls:
        message["content"] = each.text or None
        message["tool_calls"] = [call.to_openai() for call in each.tool_calls]
    choice = {
        "index": each.index,
        "message": message,
        "logprobs": chat_logprobs(each.logprobs),
        "finish_reason": chat_reason(each.finish_reason, called=bool(each.tool_calls)),
        "stop_reason": each.stop_reason,
    }
    return choice | {"token_ids": list(each.token_ids)} if token_ids else choice


class ChatChunks:
    """The events of a streamed chat. The first of each choice has its role, the last one its finish_reason.

    Args:
        include_usage: a chunk without choices at the end has the usage; continuous_usage: every chunk has it so far.
        token_ids: chunks have their token ids, the first one those of the prompt, as vLLM's return_token_ids.
    """

    def __init__(
        self,
        head: Head,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
        token_ids: bool = False,
        prompt_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._head = head.chunk("chat.completion.chunk")
        self._usage = Usage()
        self._usage.prompt_tokens = len(prompt_token_ids)
        self._prompt_token_ids = prompt_token_ids
        self._wants_usage = include_usage
        self._counts = continuous_usage
        self._token_ids = token_ids
        self._begun: set[int] = set()
        # a chunk of plain text is these, with the choice's index and the text between them
        self._text_head = ',"delta":{"content":'
        self._text_tail = f'}},"logprobs":null,"finish_reason":null}}]{self._usage_part()}}}\n\n'

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """The events of outputs. Raises ApiError for a request that was ended by an error."""
        events: list[str] = []
        for output in outputs:
            if output.index not in self._begun:
                self._begin(output.index, events)
            if output.finish_reason is None and output.finished is None:
                self._piece(output, events)
            else:
                self._last(output, events)
        return "".join(events).encode()

    def end(self) -> bytes:
        """The usage, where it was asked for, and the end."""
        if not self._wants_usage:
            return DONE
        return f'{self._head}],"usage":{dump(self._usage.to_openai())}}}\n\n'.encode() + DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _usage_part(self) -> str:
        if self._counts:
            return f',"usage":{dump(self._usage.to_openai())}'
        return ',"usage":null' if self._wants_usage else ""

    def _begin(self, index: int, events: list[str]) -> None:
        self._begun.add(index)
        more = f',"prompt_token_ids":{dump(self._prompt_token_ids)}' if self._token_ids else ""
        events.append(
            f'{self._head}{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{more}{self._usage_part()}}}\n\n'
        )

    def _piece(self, output: SequenceOutput, events: list[str]) -> None:
        """A piece that is not the last of its choice."""
        if self._counts or self._token_ids or output.reasoning or output.tool_calls or output.logprobs is not None:
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
        if output.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = output.reasoning
        if output.text:
            delta["content"] = output.text
        if output.tool_calls:
            delta["tool_calls"] = [call.to_openai() for call in output.tool_calls]
        logprobs = chat_logprobs(output.logprobs)
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
            self._end_choice(output.index, chat_reason(reason, called=output.called_tools), events)
        if finished is not None:
            usage = usage_of([finished])
            usage.reasoning_tokens, self._usage = self._usage.reasoning_tokens, usage

    def _end_choice(self, index: int, reason: str | None, events: list[str]) -> None:
        events.append(
            f'{self._head}{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":{quoted(str(reason))}}}]'
            f"{self._usage_part()}}}\n\n"
        )
