"""/v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission, vectors
from llamabatch.errors import ConfigError, InputError, PromptError
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.request.body import BOOLEAN, RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.pooling import (
    POOLING,
    PooledBody,
    cut_prompts,
    pooled_outputs,
    pooled_usage,
    read_pooled,
)
from llamabatch.server.request.prompts import (
    MIXED_SCHEMA,
    MediaPrompt,
    Mixed,
    Prompt,
    as_prompts,
    mixed_ids,
    read_with_media,
)
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import large_response
from llamabatch.server.serving.serving import serving_of
from llamabatch.utils.checks import show

_FORMATS = ("float", "base64")


EMBEDDING: Fields = {
    **POOLING,
    "input": Field(MIXED_SCHEMA, "a text, token ids, both mixed in one list, or a list of such inputs"),
    "encoding_format": Field({"enum": [*_FORMATS, None]}, "base64: little-endian float32"),
    "dimensions": Field({"type": ["integer", "null"], "minimum": 1}, "the number of elements that the vector keeps"),
    "embd_normalize": Field({"enum": [2, -1, None]}, "2: vectors have the length 1; -1: as the model gives them"),
    "normalize": Field(BOOLEAN, "vectors have the length 1; true unless given"),
    "input_type": Field({}, "", (), "put the instruction of the model before the text"),
}


@dataclass(frozen=True)
class EmbeddingBody(PooledBody):
    """A request for embeddings.

    Attributes:
        inputs: one or several inputs, each a text, token ids, a mix of both, or a text with media.
        base64: vectors are sent as base64 of little-endian float32; otherwise as lists.
        dimensions: the vectors are cut to this number of elements; None: they are not cut.
        normalize: vectors have the length 1.
    """

    inputs: tuple[Mixed | MediaPrompt, ...] = ()
    base64: bool = False
    dimensions: int | None = None
    normalize: bool = True

    @property
    def n_texts(self) -> int:
        return len(self.inputs)

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns one request for each input. Raises InputError, also if the server makes a vector for each token."""
        if processor.pooling == "none":
            raise ConfigError(
                "the server was started with pooling 'none', which makes a vector for each token; start it with "
                "--pooling mean or cls"
            )
        texts: list[Prompt | MediaPrompt] = [  # an empty text becomes only the special tokens that enclose every text
            each if isinstance(each, (str, MediaPrompt)) and each else tuple(mixed_ids(each, processor))
            for each in self.inputs
        ]
        if () in texts:
            raise PromptError(f"input[{texts.index(())}] is empty; this model needs at least one character")
        given = cut_prompts(processor, as_prompts(processor, texts), self.longest, keeps_end=True)
        return processor.texts(given, self.adapter_scales(loaded), "raise", dimensions=self.dimensions)


@reads
def read_embedding(body: Mapping[str, Any], rules: Rules = RULES) -> EmbeddingBody:
    """Reads an EmbeddingBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, EMBEDDING, rules)
    inputs, _ = read_with_media(given.needed("input", "a text, token ids, or a list of them"), given, "input")
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


def embedding_response(body: EmbeddingBody, outputs: Sequence[RequestOutput], model: str) -> Json:
    """Returns the response in OpenAI's format."""
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


async def embeddings(request: HttpRequest) -> Any:
    """Returns an embedding for each text."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_embedding), serving)
    outputs = await pooled_outputs(serving, body)
    model = body.model or serving.names[0]
    return await large_response(serving, embedding_response, body, outputs, model, ignored=body.ignored)


routes = [Route("/v1/embeddings", embeddings, methods=["POST"])]
