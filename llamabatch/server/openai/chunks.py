"""Common code for responses of OpenAI's endpoints: heads, usage, last events and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.ids import random_hex
from llamabatch.server.request.generation import Generation
from llamabatch.server.response.json_text import Rows, dump, quoted
from llamabatch.server.response.timings import timings_of
from llamabatch.server.serving.serving import Serving


@dataclass(frozen=True)
class Head:
    """Common data of a response and its chunks.

    Attributes:
        id: the id with OpenAI's prefix.
        model: the requested name.
        created: time.time() of the request in whole seconds.
        tier: the service_tier of the response; None: the request has none.
        piece: returns the bytes of a token id, for logprobs; None: the bytes are not known.
    """

    id: str
    model: str
    fingerprint: str
    created: int
    tier: str | None = None
    piece: Callable[[int], bytes] | None = None

    @classmethod
    def of(cls, serving: Serving, prefix: str, body: Generation) -> Head:
        """Returns the head of the response to a request body."""
        name = serving.names[0] if body.model is None else body.model
        number = random_hex() if body.request_id is None else body.request_id
        return cls(
            f"{prefix}-{number}", name, serving.fingerprint, int(time.time()), body.answered_tier, serving.model.piece
        )

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a whole response without its usage."""
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
        """Returns the beginning of a chunk's event, up to the opening bracket of its choices."""
        tier = "" if self.tier is None else f'"service_tier":{quoted(self.tier)},'
        return (
            f'data: {{"id":{quoted(self.id)},"object":{quoted(kind)},"created":{self.created},'
            f'"model":{quoted(self.model)},"system_fingerprint":{quoted(self.fingerprint)},{tier}"choices":['
        )


class Usage:
    """The token counts of a response so far."""

    def __init__(self, prompt_tokens: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.completion_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Adds the prompt and output tokens of a finished request."""
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


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Returns the usage of a whole response."""
    usage = Usage()
    for output in outputs:
        usage.add(output)
    return usage


class EventWriter:
    """Base class of the writers of a stream's events."""

    def end_takes_long(self) -> bool:
        return False

    def error(self, error: ApiError) -> bytes:
        """Returns the event of an error, the last event of the stream."""
        return f"data: {dump(error.to_openai())}\n\n".encode()


def usage_part(usage: Usage, body: Generation) -> str:
    """Returns a comma and the entry "usage" of a chunk; "": the body does not ask for usage."""
    if body.continuous_usage:
        return f',"usage":{dump(usage.to_openai())}'
    return ',"usage":null' if body.include_usage else ""


def last_event(head: str, usage: Usage, outputs: Sequence[RequestOutput], body: Generation) -> bytes:
    """Returns the event after the last piece, with the requested usage and timings; b"": the body requests neither."""
    more: dict[str, Any] = {"usage": usage.to_openai()} if body.include_usage else {}
    if body.timings_per_token:
        more["timings"] = timings_of(outputs)
    return f"{head}],{dump(more)[1:]}\n\n".encode() if more else b""


def llama_server_extras(outputs: Sequence[RequestOutput], body: Generation) -> dict[str, Any]:
    """Returns entries of a whole response for llama-server's fields timings_per_token and verbose."""
    more: dict[str, Any] = {"timings": timings_of(outputs)} if body.timings_per_token else {}
    if body.verbose:
        prompts = [output.prompt for output in outputs]
        more["__verbose"] = {"prompt": prompts[0] if len(prompts) == 1 else prompts}
    return more


def prompt_logprobs_of(output: RequestOutput) -> Sequence[dict[str, Any] | None] | None:
    """Returns vLLM's prompt_logprobs: None for the first token, then a dict from token id to logprob for each token."""
    if output.prompt_logprobs is None:
        return None
    return Rows(output.prompt_logprobs, _prompt_logprob)


def _prompt_logprob(given: TokenLogprobs | None) -> dict[str, Any] | None:
    return None if given is None else {str(token_id): each._asdict() for token_id, each in given.items()}
