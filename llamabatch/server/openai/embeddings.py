"""/v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission, vectors
from llamabatch.errors import ConfigError, InputError, PromptError
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.asked import adapter_ids, large_response, read_body, with_model
from llamabatch.server.bodies import RULES, TIMEOUT_HEADER, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.errors import ApiError
from llamabatch.server.llama_server.completion_body import MIXED_SCHEMA, Mixed, mixed_ids, read_mixed
from llamabatch.server.openai.chunks import check_ends
from llamabatch.server.openai.completion_body import Prompt, as_prompts
from llamabatch.server.openai.generation import read_adapters, scales_of
from llamabatch.server.serving import Serving, serving_of
from llamabatch.utils.checks import show

_FORMATS = ("float", "base64")

# Fields of every body whose texts go through the model at once.
POOLING: Fields = {
    "model": Field({"type": ["string", "null"]}, "a name of /v1/models"),
    "lora": Field({"type": ["array", "null"], "items": {"type": "object"}}, "ids of /lora-adapters and their scales"),
    "adapters": Field({}, "names of adapters and their scales"),
    "user": Field({}, "kept by other services; without effect here"),
    "truncate_prompt_tokens": Field({}, "", (), "give shorter texts"),
    "priority": Field({}, "", (0,), "texts go through the model as they come"),
    "add_special_tokens": Field({}, "", (True,), "give token ids for texts without special tokens"),
}

EMBEDDING: Fields = {
    **POOLING,
    "input": Field(MIXED_SCHEMA, "a text, token ids, both mixed in one list, or a list of such inputs"),
    "encoding_format": Field({"enum": [*_FORMATS, None]}, "base64: of float32, little end first"),
    "dimensions": Field({"type": ["integer", "null"], "minimum": 1}, "the vector is cut to so many elements"),
    "embd_normalize": Field({"enum": [2, -1, None]}, "2: vectors have the length 1; -1: as the model gives them"),
    "normalize": Field({"type": ["boolean", "null"]}, "vectors have the length 1; true unless given"),
    "input_type": Field({}, "", (), "put the instruction of the model before the text"),
}


@dataclass(frozen=True)
class PooledBody(ABC):
    """The part that bodies of embeddings, ranks and classes have in common.

    Attributes:
        model, adapters, lora: as in Generation.
        timeout_s: seconds until it ends as an error.
        ignored: names of unknown fields.
    """

    model: str | None = None
    adapters: Mapping[str, float] | None = None
    lora: tuple[tuple[int, float], ...] | None = None
    timeout_s: float | None = None
    ignored: tuple[str, ...] = ()

    def adapter_scales(self, loaded: Sequence[str]) -> Mapping[str, float] | None:
        """As Generation.adapter_scales."""
        return scales_of(self.adapters, self.lora, loaded)

    @abstractmethod
    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """The requests. Raises InputError.

        Args:
            loaded: names of the adapters in the order of llama-server's ids.
        """


@dataclass(frozen=True)
class EmbeddingBody(PooledBody):
    """Embeddings as asked for.

    Attributes:
        inputs: texts and token ids, one or several, or both one behind another.
        base64: vectors as base64 of float32, little end first; else as lists.
        dimensions: elements of a vector; None: all.
        normalize: vectors have the length 1.
    """

    inputs: tuple[Mixed, ...] = ()
    base64: bool = False
    dimensions: int | None = None
    normalize: bool = True

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """One request for each text. Raises InputError, also for a model whose pooling gives several vectors."""
        if processor.pooling == "none":
            raise ConfigError(
                "the server was started with pooling 'none', a vector for each token; give 'mean' or 'cls'"
            )
        texts: list[Prompt] = [  # an empty text has the tokens that stand around any other
            each if isinstance(each, str) and each else tuple(mixed_ids(each, processor)) for each in self.inputs
        ]
        if () in texts:
            raise PromptError(f"input[{texts.index(())}] is empty; this model needs at least one character")
        given = as_prompts(processor, texts)
        return processor.texts(given, self.adapter_scales(loaded), "raise", dimensions=self.dimensions)


@reads
def read_embedding(body: Mapping[str, Any], rules: Rules = RULES) -> EmbeddingBody:
    """The EmbeddingBody of a body. Raises ApiError, whose message names the field, its value and the allowed ones."""
    given = Body(body, EMBEDDING, rules)
    inputs, _ = read_mixed(given.needed("input", "a text, token ids, or a list of them"), "input")
    norm = given.take("embd_normalize")
    if norm not in (None, 2, -1) or isinstance(norm, (bool, float)):
        raise InputError(f"embd_normalize is {show(norm)}; give 2, for vectors of length 1, or -1")
    return EmbeddingBody(
        inputs=inputs,
        base64=given.choice("encoding_format", _FORMATS) == "base64",
        dimensions=given.integer("dimensions", 1, 2**24),
        normalize=given.boolean("normalize", norm != -1),
        **read_pooled(given, rules),
    )


def read_pooled(body: Body, rules: Rules) -> dict[str, Any]:
    """The values of a PooledBody by name. Raises InputError."""
    found: dict[str, Any] = {"model": body.text("model"), "timeout_s": rules.timeout_s}
    found["adapters"], found["lora"] = read_adapters(body)
    found["ignored"] = tuple(body.ignored)
    return found


def embedding_response(body: EmbeddingBody, outputs: Sequence[RequestOutput], model: str) -> Json:
    """The response in OpenAI's shape."""
    found = vectors(outputs, normalize=body.normalize, errors="raise", dimensions=body.dimensions)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, body.base64)}
        for index, vector in enumerate(found)
    ]
    return {"object": "list", "data": data, "model": model, "usage": pooled_usage(outputs)}


def _written(vector: Any, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found


def pooled_usage(outputs: Sequence[RequestOutput]) -> Json:
    """Counts of tokens of texts that nothing is generated for."""
    n_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


async def pooled_outputs(serving: Serving, body: PooledBody) -> list[RequestOutput]:
    """The outputs of texts, for which the engine knows no deadline.

    Raises:
        ApiError: one of them failed; 504 where they took longer than the header X-Request-Timeout allows. What
            Serving.submit raises.
    """

    async def found() -> list[RequestOutput]:
        call = await serving.submit(partial(body.submission, loaded=adapter_ids(serving)))
        return await call.outputs()

    try:
        outputs = await asyncio.wait_for(found(), body.timeout_s)
    except (asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
        raise ApiError(504, f"{TIMEOUT_HEADER} is {body.timeout_s:g}, and the texts took longer") from None
    for output in outputs:
        check_ends(output)
    return outputs


async def embeddings(request: HttpRequest) -> Any:
    """A vector for each text."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_embedding), serving)
    outputs = await pooled_outputs(serving, body)
    model = body.model or serving.names[0]
    return await large_response(serving, embedding_response, body, outputs, model, ignored=body.ignored)


routes = [Route("/v1/embeddings", embeddings, methods=["POST"])]
