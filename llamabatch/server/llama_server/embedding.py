"""llama-server's /embedding and /embeddings. OpenAI's /v1/embeddings is another endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission, token_vectors, vectors
from llamabatch.errors import InputError
from llamabatch.llama.model import Model
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.llama_server.dialect import in_dialect
from llamabatch.server.request.body import RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.pooling import POOLING, PooledBody, cut_prompts, pooled_outputs, read_pooled
from llamabatch.server.request.prompts import MediaPrompt, Mixed, as_prompts, mixed_ids, read_with_media
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import large_response
from llamabatch.server.serving.serving import serving_of

MAX_NORM = 64
_LARGEST = 32760.0  # largest element of a vector if embd_normalize is 0, as in llama.cpp's common_embd_normalize

Vector = npt.NDArray[np.float32]

EMBEDDING: Fields = {
    **POOLING,
    "content": Field({}, "a text, token ids, or a list of them"),
    "input": Field({}, "the same as content"),
    "embd_normalize": Field(
        {"type": ["integer", "null"], "minimum": -1, "maximum": MAX_NORM},
        "-1: as the model gives them, 0: the largest element is 32760, 1: sum of 1, 2: length of 1, p: p-norm of 1",
    ),
    "encoding_format": Field({}, "", ("float",), "/v1/embeddings has base64"),
}


@dataclass(frozen=True)
class LlamaEmbeddingBody(PooledBody):
    """A request for embeddings.

    Attributes:
        inputs: one or several inputs, each a text, token ids, a mix of both, or a text with media.
        norm: the value of embd_normalize. It applies to pooled vectors only.
    """

    inputs: tuple[Mixed | MediaPrompt, ...] = ()
    norm: int = 2

    @property
    def n_texts(self) -> int:
        return len(self.inputs)

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns one request for each input. Raises InputError."""
        inputs: list[Any] = [
            each if isinstance(each, (str, MediaPrompt)) else mixed_ids(each, processor) for each in self.inputs
        ]
        if self.longest is None:
            whole = [each.mapping if isinstance(each, MediaPrompt) else each for each in inputs]
            return processor.texts(whole if len(whole) > 1 else whole[0], self.adapter_scales(loaded), "raise")
        given = cut_prompts(processor, as_prompts(processor, inputs), self.longest, keeps_end=True)
        return processor.texts(given, self.adapter_scales(loaded), "raise")


@reads
def read_llama_embedding(body: Mapping[str, Any], rules: Rules = RULES) -> LlamaEmbeddingBody:
    """Reads the body of /embedding. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, EMBEDDING, rules)
    name = "content" if "content" in given else "input"
    other = given.take("input") if name == "content" else None
    if other is not None:
        raise InputError("content and input are both given; give one of them")
    inputs, _ = read_with_media(given.needed(name, "a text, token ids, or a list of them"), given, name)
    norm = given.integer("embd_normalize", -1, MAX_NORM)
    return LlamaEmbeddingBody(inputs=inputs, norm=2 if norm is None else norm, **read_pooled(given, rules))


def embedding_documents(body: LlamaEmbeddingBody, outputs: Sequence[RequestOutput], model: Model) -> list[Json]:
    """Returns the vectors of each input: one vector if the model pools, otherwise one vector for each token."""
    n_embd = token_vectors(model)
    found = vectors(outputs, normalize=False, errors="raise", n_embd=n_embd)
    return [
        {"index": index, "embedding": [each.tolist()] if n_embd is None else each.tolist()}
        for index, each in enumerate(normalized(one, body.norm) if n_embd is None else one for one in found)
    ]


def normalized(vector: Vector, norm: int) -> Vector:
    """Returns a vector scaled by `norm`. The field embd_normalize of EMBEDDING explains the values of `norm`."""
    if norm < 0:
        return vector
    size = np.abs(vector).max() / _LARGEST if norm == 0 else np.linalg.norm(vector.astype(np.float64), norm)
    scaled: Vector = vector if size == 0 else (vector / size).astype(np.float32)
    return scaled


async def embedding(request: HttpRequest) -> Any:
    """Returns the embeddings of texts."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_llama_embedding), serving)
    outputs = await pooled_outputs(serving, body)
    return await large_response(serving, embedding_documents, body, outputs, serving.model, ignored=body.ignored)


routes = [
    Route("/embedding", in_dialect(embedding), methods=["POST"]),
    Route("/embeddings", in_dialect(embedding), methods=["POST"]),
]
