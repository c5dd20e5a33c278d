"""Parts that the responses of OpenAI's endpoints share: JSON by hand, usage, ends and errors of choices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from llamabatch.llama.model import Model
from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.server.errors import ApiError
from llamabatch.server.ids import random_hex
from llamabatch.server.openai.generation import Generation
from llamabatch.server.serving import Serving
from llamabatch.server.timings import timings_of

quoted = encode_basestring  # a str as JSON; compiled

_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode

_SLICE = 1024  # entries of a list that are written at once


def dump(value: Any) -> str:
    """A value as JSON, without blanks."""
    return _dump(value)


def dump_in_turns(value: Any) -> str:
    """As dump, for large values, on a worker's thread. The encoder lets no other thread run before its end, so it gets
    long lists in slices."""
    if isinstance(value, dict) and not _is_flat(value):
        return f"{{{','.join([f'{_dump(key)}:{dump_in_turns(each)}' for key, each in value.items()])}}}"
    if not isinstance(value, list) or len(value) == 0:
        return _dump(value)
    if not _is_flat(value[0]):  # entries of a list are of one kind
        return f"[{','.join([dump_in_turns(each) for each in value])}]"
    slices = [value[start : start + _SLICE] for start in range(0, len(value), _SLICE)]
    return f"[{','.join([_dump(each)[1:-1] for each in slices])}]"


def _is_flat(value: Any) -> bool:
    """No list, and no object that holds one or another object."""
    return not isinstance(value, list) and not (
        isinstance(value, dict) and any(isinstance(each, (dict, list)) for each in value.values())
    )


@dataclass(frozen=True)
class Head:
    """The part that a response and all its chunks have in common.

    Attributes:
        id: with OpenAI's prefix; model: the name that the caller asked for.
        created: time.time() of the request.
        tier: service_tier of the answer; None: the caller named none.
        piece: the bytes of a token by its id, for logprobs; None: they are not known.
    """

    id: str
    model: str
    fingerprint: str
    created: int
    tier: str | None = None
    piece: Callable[[int], bytes] | None = None

    @classmethod
    def of(cls, serving: Serving, prefix: str, body: Generation) -> Head:
        """The head of the response to a body."""
        name = serving.names[0] if body.model is None else body.model
        number = random_hex() if body.request_id is None else body.request_id
        return cls(
            f"{prefix}-{number}", name, serving.fingerprint, int(time.time()), tier_of(body), serving.model.piece
        )

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A whole response but for its usage."""
        document: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
        }
        return document if self.tier is None else document | {"service_tier": self.tier}

    def chunk(self, kind: str) -> str:
        """The beginning of a chunk's event, up to its choices' bracket."""
        tier = "" if self.tier is None else f'"service_tier":{quoted(self.tier)},'
        return (
            f'data: {{"id":{quoted(self.id)},"object":{quoted(kind)},"created":{self.created},'
            f'"model":{quoted(self.model)},"system_fingerprint":{quoted(self.fingerprint)},{tier}"choices":['
        )


def tier_of(body: Generation) -> str | None:
    """service_tier of an answer, in which "auto" has become a tier."""
    return "default" if body.service_tier == "auto" else body.service_tier


class Usage:
    """Tokens of a response so far."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.completion_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Counts a request that has ended; its output tokens, too."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        self.completion_tokens += sum(len(each.token_ids) for each in output.outputs)

    def to_openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def reasoning_tokens(outputs: Sequence[RequestOutput], model: Model) -> int:
    """Tokens of the thinking in whole outputs, which do not say where it ends among their tokens."""
    texts = [each.reasoning for output in outputs for each in output.outputs if each.reasoning]
    return sum(len(model.tokenize(text, add_special=False)) for text in texts)


async def thinking_of(outputs: Sequence[RequestOutput], serving: Serving) -> int:
    """The same for a whole response, counted on a thread where there is any."""
    thinks = any(each.reasoning for output in outputs for each in output.outputs)
    return await serving.on_thread(reasoning_tokens, outputs, serving.model) if thinks else 0


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """The usage of a whole response."""
    usage = Usage()
    for output in outputs:
        usage.add(output)
    return usage


def check_ends(output: RequestOutput) -> None:
    """Raises ApiError for a request that the engine, or the end of the server, has ended."""
    if output.error is not None:
        raise ApiError.of_output(output.error)
    if any(each.finish_reason is FinishReason.ABORT for each in output.outputs):
        raise ApiError(503, "the request was ended, as the server is shutting down", headers={"Retry-After": "10"})


def error_event(error: ApiError) -> bytes:
    """The event of an error within a stream."""
    return f"data: {dump(error.to_openai())}\n\n".encode()


def usage_part(usage: Usage, body: Generation) -> str:
    """The entry "usage" of a chunk, with the comma before it; "" where the body asks for none."""
    if body.continuous_usage:
        return f',"usage":{dump(usage.to_openai())}'
    return ',"usage":null' if body.include_usage else ""


def last_event(head: str, usage: Usage, outputs: Sequence[RequestOutput], body: Generation) -> bytes:
    """The event behind the last piece of a stream, without choices; empty where nothing of it was asked for."""
    more: dict[str, Any] = {"usage": usage.to_openai()} if body.include_usage else {}
    if body.timings_per_token:
        more["timings"] = timings_of(outputs)
    return f"{head}],{dump(more)[1:]}\n\n".encode() if more else b""


def llama_server_extras(outputs: Sequence[RequestOutput], body: Generation) -> dict[str, Any]:
    """The entries of a whole response that llama-server's fields ask for."""
    more: dict[str, Any] = {"timings": timings_of(outputs)} if body.timings_per_token else {}
    if body.verbose:
        prompts = [output.prompt for output in outputs]
        more["__verbose"] = {"prompt": prompts[0] if len(prompts) == 1 else prompts}
    return more


def prompt_logprobs_of(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs: for each token of the prompt those at its place by id, None for the first."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if given is None else {str(token_id): each._asdict() for token_id, each in given.items()}
        for given in output.prompt_logprobs
    ]
