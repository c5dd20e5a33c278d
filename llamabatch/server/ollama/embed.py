"""/api/embed, and its older form /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission, vectors
from llamabatch.errors import ConfigError, PromptError
from llamabatch.server.ollama.dialect import nanoseconds, served_name
from llamabatch.server.ollama.keep_alive import take_keep_alive
from llamabatch.server.request.body import BOOLEAN, OBJECT, RULES, TEXT, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.pooling import PooledBody, cut_ids, pooled_outputs, pooled_usage
from llamabatch.server.request.prompts import MAX_PROMPTS
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import large_response
from llamabatch.server.serving.serving import serving_of
from llamabatch.utils.checks import show

_SHARED: Fields = {
    "model": Field(TEXT, "the model"),
    "options": Field(OBJECT, "", ({},), "they are of a model that is being loaded", optional=True),
    "keep_alive": Field({}, "with several models: how long this one stays loaded; otherwise without effect"),
}
EMBED: Fields = {
    **_SHARED,
    "input": Field(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "a text, or a list of texts"
    ),
    "truncate": Field(BOOLEAN, "true: a text that is too long is cut; false: it is an error"),
    "dimensions": Field({"type": ["integer", "null"], "minimum": 1}, "the number of elements that the vector keeps"),
}
EMBEDDINGS: Fields = {**_SHARED, "prompt": Field(TEXT, "a text")}


@dataclass(frozen=True)
class EmbedBody(PooledBody):
    """A request for embeddings.

    Attributes:
        inputs: the texts.
        dimensions: the vectors are cut to this number of elements; None: they are not cut.
    """

    inputs: tuple[str, ...] = ()
    dimensions: int | None = None

    @property
    def n_texts(self) -> int:
        return len(self.inputs)

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        if processor.pooling == "none":
            raise ConfigError("the server was started with pooling 'none'; start it with --pooling mean or cls")
        given = [{"prompt": text, "prompt_token_ids": self._ids(processor, text)} for text in self.inputs]
        return processor.texts(given, self.adapter_scales(loaded), "raise", dimensions=self.dimensions)

    def _ids(self, processor: InputProcessor, text: str) -> list[int]:
        ids = processor.tokenize(text, True, True)
        return list(ids) if self.longest is None else cut_ids(processor, ids, self.longest)


@reads
def read_embed(body: Mapping[str, Any], rules: Rules = RULES) -> tuple[EmbedBody, bool]:
    """Reads the body of /api/embed. The second result is True if long texts are cut. Raises ApiError."""
    given = Body(body, EMBED, rules)
    inputs = given.needed("input", "a text, or a list of texts")
    texts = [inputs] * bool(inputs) if isinstance(inputs, str) else inputs  # as in ollama, "" gets no vector
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PromptError(f"input is {show(inputs)}; give a text, or a list of texts")
    if len(texts) > MAX_PROMPTS:
        raise PromptError(f"input is a list of {len(texts)}; at most {MAX_PROMPTS} are allowed")
    cut = given.boolean("truncate", True)
    dimensions = given.integer("dimensions", 1, 2**24)
    return EmbedBody(inputs=tuple(texts), dimensions=dimensions, **_own(given, rules)), cut


@reads
def read_embeddings(body: Mapping[str, Any], rules: Rules = RULES) -> EmbedBody:
    """Reads the body of /api/embeddings. Raises ApiError."""
    given = Body(body, EMBEDDINGS, rules)
    text = given.text("prompt")
    return EmbedBody(inputs=(text,) if text else (), **_own(given, rules))


def _own(given: Body, rules: Rules) -> Json:
    take_keep_alive(given)
    return {"model": given.label("model"), "timeout_s": rules.timeout_s, "ignored": tuple(given.ignored)}


async def embed(request: HttpRequest) -> Any:
    """Returns an embedding of length 1 for each text, as ollama does."""
    began = time.perf_counter()
    serving = serving_of(request)
    body, cut = await read_body(request, serving, read_embed)
    name = body.model or serving.names[0]
    if cut:
        body = replace(body, longest=-1)
    body = with_model(replace(body, model=served_name(name, serving)), serving)
    outputs = await pooled_outputs(serving, body) if body.inputs else []
    took = nanoseconds(time.perf_counter() - began)

    def document() -> Json:
        found = vectors(outputs, normalize=True, errors="raise", dimensions=body.dimensions) if outputs else []
        return {
            "model": name,
            "embeddings": [vector.tolist() for vector in found],
            "total_duration": took,
            "load_duration": 0,
            "prompt_eval_count": pooled_usage(outputs)["prompt_tokens"],
        }

    return await large_response(serving, document, ignored=body.ignored)


async def embeddings(request: HttpRequest) -> Any:
    """Returns the embedding of one text, not normalized."""
    serving = serving_of(request)
    body = await read_body(request, serving, read_embeddings)
    body = replace(body, longest=-1)
    if body.model is not None:
        body = replace(body, model=served_name(body.model, serving))
    body = with_model(body, serving)
    outputs = await pooled_outputs(serving, body) if body.inputs else []

    def document() -> Json:
        found = vectors(outputs, normalize=False, errors="raise") if outputs else []
        return {"embedding": found[0].tolist() if len(found) else []}

    return await large_response(serving, document, ignored=body.ignored)


routes = [
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embeddings, methods=["POST"]),
]
