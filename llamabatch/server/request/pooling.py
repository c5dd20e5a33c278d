"""Shared fields of bodies for embeddings, ranks and classes. The model generates no text for these bodies."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llamabatch.engine.validation import longest_text
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import InputError
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.http.errors import ApiError, check_ends
from llamabatch.server.request.adapters import read_adapters, scales_of
from llamabatch.server.request.body import TEXT, TIMEOUT_HEADER, Body, Field, Fields, Json, Rules
from llamabatch.server.request.reading import adapter_ids
from llamabatch.server.serving.serving import Serving

POOLING: Fields = {
    "model": Field(TEXT, "a name of /v1/models"),
    "lora": Field({"type": ["array", "null"], "items": {"type": "object"}}, "ids of /lora-adapters and their scales"),
    "adapters": Field({}, "names of adapters and their scales"),
    "user": Field({}, "kept by other services; without effect here"),
    "truncate_prompt_tokens": Field(
        {"type": ["integer", "null"], "minimum": -1},
        "keep so many tokens of a text, of an embedding its last ones; -1: what fits",
    ),
    "priority": Field({}, "", (0,), "texts go through the model as they come"),
    "add_special_tokens": Field({}, "", (True,), "give token ids for texts without special tokens"),
}


@dataclass(frozen=True)
class PooledBody(ABC):
    """A body for embeddings, ranks or classes.

    Attributes:
        model, adapters, lora: as in Generation.
        timeout_s: seconds until the request fails with an error; None: no limit.
        longest: texts are cut to this number of tokens; -1: the limit of the model; None: texts are not cut, and a text
            above the limit is an error.
        ignored: names of unknown fields.
    """

    model: str | None = None
    adapters: Mapping[str, float] | None = None
    lora: tuple[tuple[int, float], ...] | None = None
    timeout_s: float | None = None
    longest: int | None = None
    ignored: tuple[str, ...] = ()

    def adapter_scales(self, loaded: Sequence[str]) -> Mapping[str, float] | None:
        """Returns names and scales of adapters, as Generation.adapter_scales does."""
        return scales_of(self.adapters, self.lora, loaded)

    @property
    @abstractmethod
    def n_texts(self) -> int:
        """The number of texts."""

    @abstractmethod
    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns the requests. Raises InputError.

        Args:
            loaded: names of the loaded adapters. The index of a name is the adapter's id in llama-server's API.
        """


def read_pooled(body: Body, rules: Rules) -> dict[str, Any]:
    """Reads the values of a PooledBody by name. Raises InputError."""
    found: dict[str, Any] = {"model": body.label("model"), "timeout_s": rules.timeout_s}
    found["adapters"], found["lora"] = read_adapters(body)
    found["longest"] = body.integer("truncate_prompt_tokens", -1, 2**31 - 1)
    if found["longest"] == 0:
        raise InputError("truncate_prompt_tokens is 0; give 1 or more, or -1")
    found["ignored"] = tuple(body.ignored)
    return found


def cut_ids(processor: InputProcessor, ids: Sequence[int], longest: int, *, keeps_end: bool = False) -> list[int]:
    """Returns the first `longest` tokens of a text. The special tokens that enclose every text are kept.

    Args:
        ids: token ids of the whole text.
        keeps_end: True: returns the last tokens instead of the first.
    """
    if len(ids) <= longest:
        return list(ids)
    around = processor.tokenize("", True, False)
    n_first = 1 if around and ids[0] == around[0] else 0
    n_last = 1 if len(around) > n_first and ids[-1] == around[-1] else 0
    inner = ids[n_first : len(ids) - n_last]
    room = max(0, longest - n_first - n_last)
    kept = inner[len(inner) - room :] if keeps_end else inner[:room]
    return [*ids[:n_first], *kept, *ids[len(ids) - n_last :]][:longest]


def cut_prompts(processor: InputProcessor, prompts: Any, longest: int | None, *, keeps_end: bool = False) -> Any:
    """Takes prompts from as_prompts, and returns them with at most `longest` tokens each, cut by cut_ids. If `longest`
    is None, nothing is cut. Prompts with media are never cut."""
    if longest is None:
        return prompts
    given = prompts if isinstance(prompts, list) else [prompts]
    return [
        {**each, "prompt_token_ids": cut_ids(processor, each["prompt_token_ids"], longest, keeps_end=keeps_end)}
        if "prompt_token_ids" in each
        else each
        for each in given
    ]


def pooled_usage(outputs: Sequence[RequestOutput]) -> Json:
    """Returns the `usage` of a request that generates no tokens."""
    n_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


async def pooled_outputs(serving: Serving, body: PooledBody) -> list[RequestOutput]:
    """Runs the requests of a body and returns their outputs. Enforces the timeout, because these requests have no
    deadline in the engine.

    Raises:
        ApiError: a text failed, or the texts took longer than the header X-Request-Timeout allows (504). The errors of
            Serving.submit are raised as well.
    """

    if body.longest is not None:
        most = longest_text(serving.plan.config)
        body = replace(body, longest=most if body.longest == -1 else min(body.longest, most))

    async def found() -> list[RequestOutput]:
        prepare = partial(body.submission, loaded=adapter_ids(serving))
        call = await serving.submit(prepare, body.n_texts, cuts=body.longest is not None)
        return await call.outputs()

    try:
        outputs = await asyncio.wait_for(found(), body.timeout_s)
    except (asyncio.TimeoutError, TimeoutError):  # two different classes before Python 3.11
        raise ApiError(504, f"{TIMEOUT_HEADER} is {body.timeout_s:g}, and the texts took longer") from None
    for output in outputs:
        check_ends(output)
    return outputs
