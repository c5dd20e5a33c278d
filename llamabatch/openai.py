"""Results in the shape of OpenAI's API, which llama_cpp.Llama returns too: for code that was written for these."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamabatch.logprobs import Logprob, TokenLogprobs
    from llamabatch.request import CompletionOutput, RequestOutput, SequenceOutput


def completion(output: RequestOutput, model: str) -> dict[str, Any]:
    """A "text_completion" dictionary. A request that failed has finish_reason "error" and the key "error" beside."""
    choices = [
        {
            "index": each.index,
            "text": each.text,
            "logprobs": _completion_logprobs(each),
            "finish_reason": each.finish_reason.value,
        }
        for each in output.outputs
    ]
    return _document(f"cmpl-{output.request_id}", "text_completion", model, choices) | _ending(output)


def chat_completion(output: RequestOutput, model: str) -> dict[str, Any]:
    """A "chat.completion" dictionary; otherwise as completion()."""
    choices = [
        {
            "index": each.index,
            "message": {"role": "assistant", "content": each.text},
            "logprobs": _chat_logprobs(each.logprobs),
            "finish_reason": each.finish_reason.value,
        }
        for each in output.outputs
    ]
    return _document(f"chatcmpl-{output.request_id}", "chat.completion", model, choices) | _ending(output)


def completion_chunk(piece: SequenceOutput, model: str) -> dict[str, Any]:
    """One piece of a stream, as llama_cpp.Llama's create_completion(stream=True) yields them."""
    choice = {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": _reason(piece)}
    return _document(f"cmpl-{piece.request_id}", "text_completion", model, [choice])


def chat_chunk(piece: SequenceOutput, model: str) -> dict[str, Any]:
    """One piece of a stream, a "chat.completion.chunk"."""
    choice = {
        "index": piece.index,
        "delta": {"content": piece.text},
        "logprobs": _chat_logprobs(piece.logprobs),
        "finish_reason": _reason(piece),
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
        }
    }
    if output.error is not None:
        ending["error"] = {"message": output.error, "type": "invalid_request_error"}
    return ending


def _reason(piece: SequenceOutput) -> str | None:
    """Of a continuation that has ended; a piece of a stream tells it once the whole request has."""
    if piece.finished is None:
        return None
    return piece.finished.outputs[min(piece.index, len(piece.finished.outputs) - 1)].finish_reason.value


def _completion_logprobs(each: CompletionOutput) -> dict[str, Any] | None:
    if each.logprobs is None:
        return None
    tokens, offsets, offset = [], [], 0
    chosen = [given[token_id] for token_id, given in zip(each.token_ids, each.logprobs, strict=True)]
    for token in chosen:
        tokens.append(token.decoded_token)
        offsets.append(offset)
        offset += len(token.decoded_token)
    return {
        "tokens": tokens,
        "token_logprobs": [token.logprob for token in chosen],
        "top_logprobs": [{t.decoded_token: t.logprob for t in given.values()} for given in each.logprobs],
        "text_offset": offsets,
    }


def _chat_logprobs(logprobs: tuple[TokenLogprobs, ...] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    content = []
    for given in logprobs:
        chosen = next(iter(given.values()))  # the token that came stands first
        likeliest = [t for t in sorted(given.values(), key=lambda t: t.rank) if t.rank <= len(given)]
        content.append({**_token(chosen), "top_logprobs": [_token(t) for t in likeliest]})
    return {"content": content}


def _token(t: Logprob) -> dict[str, Any]:
    return {"token": t.decoded_token, "logprob": t.logprob, "bytes": list(t.decoded_token.encode())}
