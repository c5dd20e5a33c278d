"""RequestOutput: the result of a request. SequenceOutput: the part of a result that one step produces.

The method to_openai() of both returns dictionaries in the form of OpenAI's API and llama_cpp.Llama.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from llamabatch.errors import EngineError, InputError, LlamaBatchError, describe, error_class, error_type
from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.request import Request
from llamabatch.request.tool_calls import ToolCall, ToolCallDelta
from llamabatch.utils.absent import absent
from llamabatch.utils.brief import brief
from llamabatch.utils.other_names import OF_OUTPUT

if TYPE_CHECKING:
    from llamabatch.request.logprobs import Logprob


class FinishReason(str, Enum):
    """The reason why a sequence ended."""

    STOP = "stop"  # an end-of-generation token, a stop string or a stop token
    LENGTH = "length"  # max_tokens was reached, or n_ctx was used up
    ABORT = "abort"  # the caller ended the request
    ERROR = "error"  # see RequestOutput.error

    __str__ = str.__str__


@dataclass(frozen=True)
class Timings:
    """Times of one request, in seconds from its arrival.

    Attributes:
        queued_s: time until the request got a slot; None if the request never had a slot.
        ttft_s: time until the first output token was known (time to first token); None without output tokens.
        total_s: time until the request finished.
        token_times_s: time at which each output token was known.
    """

    queued_s: float | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    token_times_s: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return brief(self)

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Seconds between neighbouring output tokens; one value fewer than tokens."""
        return tuple(b - a for a, b in itertools.pairwise(self.token_times_s))

    @property
    def generation_tps(self) -> float | None:
        """Output tokens per second after the first token; None for fewer than two tokens."""
        if len(self.token_times_s) < 2:
            return None
        span = self.token_times_s[-1] - self.token_times_s[0]
        return (len(self.token_times_s) - 1) / span if span > 0 else None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: position among the continuations of the prompt (from 0).
        text: the generated text. Stop strings and special tokens are left out unless the parameters keep them. Invalid
            UTF-8 becomes U+FFFD.
        token_ids: all sampled tokens, including the end-of-generation token.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string (str), stop token or end-of-generation token (int) that ended the text, else None.
        logprobs: for each of token_ids, {token id: Logprob} of this token and the likeliest tokens; None: the request
            does not ask for logprobs.
        cumulative_logprob: the sum of the logprobs of token_ids; None unless logprobs or best_of asked for it.
        reasoning: the thinking before the text, in a chat with a model of a known family (`plan.reasoning`). None: the
            model did not think, or the generated text is not parsed.
        tool_calls: calls of the conversation's tools; the text does not contain them. After calls, finish_reason is
            still "stop", but to_openai() returns "tool_calls".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True)
class RequestOutput:
    """The result of one request. The names are vLLM's. `text`, `reasoning`, `tool_calls`, `token_ids` and
    `finish_reason` are the fields of outputs[0].

    Attributes:
        prompt_logprobs: for each token of the prompt, {token id: Logprob} of this token and the likeliest tokens; None
            for the first token. The whole field is None if the request does not ask for it, or ended before its prompt
            was computed.
        embedding: n_embd float32 values of the text (with pooling="none": of each token, one after another), or the
            outputs of the classification head. None unless the request embeds or classifies.
        num_truncated: number of tokens that the prompt lost (overflow="truncate"). prompt_token_ids does not have these
            tokens.
        num_cached_tokens: number of prompt tokens that were not computed, because the prefix cache, a loaded prefix or
            another request had the cells of these tokens. Counted once, at the first start of the request's first
            continuation.
        error_type: name of the exception class in llamabatch.errors that exception() returns; None: EngineError.
        not_held: parts of the JSON schema that were not enforced: formats that are only annotations ("format
            'password'"), and with "lenient": True the keywords that no grammar can enforce. For a required tool call,
            also functions that the model could not call because their schemas are not supported: "function 'f'".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: str | None = None
    timings: Timings = Timings()
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    embedding: array[float] | None = None
    num_truncated: int = 0
    num_cached_tokens: int = 0
    not_held: tuple[str, ...] = ()
    error_type: str | None = None

    def __repr__(self) -> str:
        return brief(self, hidden=("timings",))

    if not TYPE_CHECKING:  # hidden from type checkers, which then report wrong names

        def __getattr__(self, name: str) -> Any:
            raise absent(self, name, OF_OUTPUT)

    def to_openai(self, *, chat: bool = False, model: str = "") -> dict[str, Any]:
        """Returns a dictionary in the form of OpenAI's API and llama_cpp.Llama.

        Args:
            chat: True: a chat completion; False: a completion.
            model: the value of "model".
        """
        return openai_chat_completion(self, model) if chat else openai_completion(self, model)

    def exception(self) -> LlamaBatchError | None:
        """Returns the exception that a call with only this prompt would raise; None if the request did not fail."""
        if self.error is not None:
            return error_class(self.error_type)(self.error)
        aborted = self.finish_reason is FinishReason.ABORT
        return EngineError("the request was aborted") if aborted else None

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text

    @property
    def reasoning(self) -> str | None:
        """Thinking of the first continuation."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the first continuation."""
        return self.outputs[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first continuation."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the first continuation ended."""
        return self.outputs[0].finish_reason

    @classmethod
    def failed(cls, request: Request, error: Exception | str) -> RequestOutput:
        """Returns the output of a request that was refused before it ran."""
        if isinstance(error, Exception):
            output = cls.failed(request, describe(error))
            return replace(output, error_type=error_type(error))
        nothing = CompletionOutput(0, "", (), FinishReason.ERROR)
        total = time.perf_counter() - request.arrival_s
        return cls(
            request.request_id, request.prompt, request.prompt_token_ids, (nothing,), error, Timings(total_s=total)
        )


@dataclass(frozen=True)
class SequenceOutput:
    """The part of a result that one step produces: new tokens, text that is safe to show, and finally the whole output.

    Attributes:
        index: position among the continuations of the prompt (from 0).
        finished: the whole output of the request, in the last piece of its last continuation; otherwise None.
        prompt_index: position of the prompt in the call (from 0).
        logprobs: logprobs of token_ids, as in CompletionOutput.
        reasoning: new thinking; "" if there is none.
        ended: the finish reason in the last piece of each continuation, if the request has several; otherwise None.
        tool_calls: parts of calls, new or continued. All parts with the same index together are one of the tool_calls
            of the CompletionOutput.
        called_tools: True in the last piece of a continuation that has called tools.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finished: RequestOutput | None = None
    index: int = 0
    prompt_index: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None
    reasoning: str = ""
    ended: FinishReason | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    called_tools: bool = False

    def __repr__(self) -> str:
        return brief(self, finished=self.finish_reason)

    @classmethod
    def of_step(
        cls, request_id: str, token_ids: tuple[int, ...], text: str, logprobs: Sequence[TokenLogprobs] | None = None
    ) -> SequenceOutput:
        """Returns a piece that does not end its continuation. Fields without an argument have their defaults. A step
        makes a piece for each row, and the __init__ of a frozen dataclass would take four times as long."""
        made = object.__new__(cls)
        fields = made.__dict__
        fields["request_id"] = request_id
        fields["token_ids"] = token_ids
        fields["text"] = text
        fields["logprobs"] = logprobs
        return made

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason, in the last piece of a continuation; None in earlier pieces."""
        if self.ended is not None or self.finished is None:
            return self.ended
        return self.finished.outputs[min(self.index, len(self.finished.outputs) - 1)].finish_reason

    def to_openai(self, *, chat: bool = False, model: str = "") -> dict[str, Any]:
        """Returns a chunk of a stream of OpenAI's API. Arguments are those of RequestOutput.to_openai."""
        return openai_chat_chunk(self, model) if chat else openai_completion_chunk(self, model)


def openai_completion(output: RequestOutput, model: str) -> dict[str, Any]:
    """Returns a "text_completion" dictionary. A failed request has finish_reason "error" and the key "error"."""
    choices = [
        {
            "index": each.index,
            "text": each.text,
            "logprobs": completion_logprobs(each),
            "finish_reason": each.finish_reason.value,
        }
        for each in output.outputs
    ]
    return _document(f"cmpl-{output.request_id}", "text_completion", model, choices) | _ending(output)


def openai_chat_completion(output: RequestOutput, model: str) -> dict[str, Any]:
    """Returns a "chat.completion" dictionary. A failed request has finish_reason "error" and the key "error"."""
    choices = [
        {
            "index": each.index,
            "message": {"role": "assistant", **_thought(each.reasoning), **_content(each)},
            "logprobs": _chat_logprobs(each.logprobs),
            "finish_reason": chat_reason(each.finish_reason, called=bool(each.tool_calls)),
        }
        for each in output.outputs
    ]
    return _document(f"chatcmpl-{output.request_id}", "chat.completion", model, choices) | _ending(output)


def openai_completion_chunk(piece: SequenceOutput, model: str) -> dict[str, Any]:
    """Returns a piece of a stream in the form of llama_cpp.Llama's create_completion(stream=True)."""
    choice = {
        "index": piece.index,
        "text": piece.text,
        "logprobs": completion_logprobs(piece),
        "finish_reason": _reason(piece),
    }
    return _document(f"cmpl-{piece.request_id}", "text_completion", model, [choice])


def openai_chat_chunk(piece: SequenceOutput, model: str) -> dict[str, Any]:
    """Returns a piece of a stream, a "chat.completion.chunk"."""
    choice = {
        "index": piece.index,
        "delta": {**_thought(piece.reasoning or None), **_content(piece)},
        "logprobs": _chat_logprobs(piece.logprobs),
        "finish_reason": chat_reason(piece.finish_reason, called=piece.called_tools),
    }
    return _document(f"chatcmpl-{piece.request_id}", "chat.completion.chunk", model, [choice])


def _document(identity: str, kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model, "choices": choices}


def _ending(output: RequestOutput) -> dict[str, Any]:
    prompt, generated = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    ending: dict[str, Any] = {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        }
    }
    if output.error is not None:
        refused = issubclass(error_class(output.error_type), InputError)
        ending["error"] = {"message": output.error, "type": "invalid_request_error" if refused else "server_error"}
    return ending


def _reason(piece: SequenceOutput) -> str | None:
    return None if piece.finish_reason is None else piece.finish_reason.value


def chat_reason(reason: FinishReason | None, *, called: bool) -> str | None:
    """Returns the finish_reason of a chat. "tool_calls": the model has called tools, and the text was not cut."""
    if reason is None:
        return None
    return "tool_calls" if called and reason is FinishReason.STOP else reason.value


def _content(part: CompletionOutput | SequenceOutput) -> dict[str, Any]:
    """Returns the text and the calls of a message or a delta. The text is None if there are calls and no text."""
    if not part.tool_calls:
        return {"content": part.text}
    return {"content": part.text or None, "tool_calls": [call.to_openai() for call in part.tool_calls]}


def _thought(reasoning: str | None) -> dict[str, str]:
    """Returns the thinking under two names, because clients of OpenAI's API read DeepSeek's name or vLLM's newer
    name."""
    return {} if reasoning is None else {"reasoning_content": reasoning, "reasoning": reasoning}


_BROKEN = "\N{REPLACEMENT CHARACTER}"  # in a decoded_token, this stands for bytes that are not a whole character


def completion_logprobs(each: CompletionOutput | SequenceOutput) -> dict[str, Any] | None:
    """Returns the field "logprobs" of a completion's choice; None: no logprobs. Offsets are positions in the text of
    `each`."""
    if each.logprobs is None:
        return None
    tokens, offsets, offset = list[str](), list[int](), 0
    chosen = [given[token_id] for token_id, given in zip(each.token_ids, each.logprobs, strict=True)]
    for token in chosen:
        name = token.decoded_token
        # several tokens before this one form a character that `offset` does not count yet
        if tokens and _BROKEN in tokens[-1] and _BROKEN not in name:
            offset = max(offset, each.text.find(name, offset))
        tokens.append(name)
        offsets.append(offset)
        offset += len(name.replace(_BROKEN, ""))
    return {
        "tokens": tokens,
        "token_logprobs": [token.logprob for token in chosen],
        "top_logprobs": [{t.decoded_token: t.logprob for t in given.values()} for given in each.logprobs],
        "text_offset": offsets,
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
    """Returns the field "logprobs" of a chat's choice; None if logprobs were not asked for."""
    return None if logprobs is None else {"content": [chat_logprob(given) for given in logprobs]}


def chat_logprob(
    given: TokenLogprobs, piece: Callable[[int], bytes] | None = None, most: int | None = None
) -> dict[str, Any]:
    """Returns the entry of one token in the field "logprobs" of a chat.

    Args:
        piece: returns the bytes of a token by its id. None: tokens that are not whole characters have no bytes.
        most: the number of likeliest tokens in top_logprobs; None or -1: all. If the sampled token is not one of the
            likeliest, top_logprobs does not have it.
    """
    (chosen_id, chosen), *others = given.items()  # the sampled token is first
    shown = given.items() if chosen.rank <= len(given) else others
    likeliest = sorted(shown, key=lambda item: item[1].rank)
    top = [_token(token_id, each, piece) for token_id, each in likeliest[: None if most == -1 else most]]
    return {**_token(chosen_id, chosen, piece), "top_logprobs": top}


def _token(token_id: int, t: Logprob, piece: Callable[[int], bytes] | None) -> dict[str, Any]:
    data: bytes | None = t.decoded_token.encode()
    if _BROKEN in t.decoded_token:
        data = None if piece is None else piece(token_id)
    return {"token": t.decoded_token, "logprob": t.logprob, "bytes": None if data is None else list(data)}
