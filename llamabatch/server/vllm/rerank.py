"""vLLM's /v1/rerank, /v1/score and /v1/classify. /v1/rerank has the format of Jina, Cohere and vLLM, or the format of
text-embeddings-inference."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.entrypoints.classification import Classification, RerankResult, classified, reranked
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import PromptError
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.http.ids import random_hex
from llamabatch.server.request.body import BOOLEAN, RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.pooling import (
    POOLING,
    PooledBody,
    cut_prompts,
    pooled_outputs,
    pooled_usage,
    read_pooled,
)
from llamabatch.server.request.prompts import MAX_PROMPTS, PROMPT_SCHEMA, Prompt, as_prompts, read_prompts
from llamabatch.server.request.reading import read_body, with_model
from llamabatch.server.response.answer import large_response
from llamabatch.server.serving.serving import Serving, serving_of
from llamabatch.utils.checks import show

_DOCUMENTS: Json = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
        ]
    },
}
_ACTIVATION = Field(BOOLEAN, "true (default): scores from 0 to 1; false: the scores of the model's head")

RERANK: Fields = {
    **POOLING,
    "query": Field({"type": "string", "minLength": 1}, "a text"),
    "documents": Field(_DOCUMENTS, "texts"),
    "texts": Field(_DOCUMENTS, "documents, for an answer in the shape of text-embeddings-inference"),
    "top_n": Field({"type": ["integer", "null"], "minimum": 1}, "number of results"),
    "return_documents": Field(BOOLEAN, "results hold their document; true unless given"),
    "return_text": Field(BOOLEAN, "the same for texts; false unless given"),
    "truncate": Field(BOOLEAN, "true: a document that is too long is cut at its end"),
    "raw_scores": Field(BOOLEAN, "the opposite of use_activation, for texts"),
    "use_activation": _ACTIVATION,
    "activation": Field(BOOLEAN, "the same as use_activation"),
}
SCORE: Fields = {
    **POOLING,
    "text_1": Field({"anyOf": [{"type": "string", "minLength": 1}, _DOCUMENTS]}, "the query, or one for each document"),
    "text_2": Field({"anyOf": [{"type": "string"}, _DOCUMENTS]}, "a document, or several"),
    "queries": Field({}, "the same as text_1"),
    "documents": Field({}, "the same as text_2"),
    "use_activation": _ACTIVATION,
    "activation": Field(BOOLEAN, "the same as use_activation"),
}
CLASSIFY: Fields = {
    **POOLING,
    "input": Field(PROMPT_SCHEMA, "a text, token ids, or a list of them"),
    "use_activation": _ACTIVATION,
    "activation": Field(BOOLEAN, "the same as use_activation"),
}


@dataclass(frozen=True)
class RerankBody(PooledBody):
    """A request to rank documents.

    Attributes:
        query: one query for all documents, or a query for each document.
        documents: the texts to rank.
        given: the documents as the body contains them, for the response.
        top_n: number of results; None: all.
        return_documents: each result has its document.
        use_activation: True: scores are from 0 to 1. False: scores are the raw outputs of the model's head.
        tei: the response is a list, as in text-embeddings-inference.
    """

    query: str | tuple[str, ...] = ""
    documents: tuple[str, ...] = ()
    given: tuple[Any, ...] = ()
    top_n: int | None = None
    return_documents: bool = True
    use_activation: bool = True
    tei: bool = False

    @property
    def n_texts(self) -> int:
        return len(self.documents)

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns one request for each pair of query and document. Raises InputError."""
        adapters = self.adapter_scales(loaded)
        return processor.documents(self.query, list(self.documents), adapters, "raise", longest=self.longest)[1]


@dataclass(frozen=True)
class ClassifyBody(PooledBody):
    """A request to classify texts or token ids."""

    inputs: tuple[Prompt, ...] = ()
    use_activation: bool = True

    @property
    def n_texts(self) -> int:
        return len(self.inputs)

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns one request for each input. Raises InputError."""
        given = cut_prompts(processor, as_prompts(processor, self.inputs), self.longest)
        return processor.texts_to_classify(given, self.adapter_scales(loaded), "raise")


@reads
def read_rerank(body: Mapping[str, Any], rules: Rules = RULES) -> RerankBody:
    """Reads a RerankBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, RERANK, rules)
    query = _query("query", given.needed("query", "a text"))
    tei = "texts" in given
    if tei and "documents" in given:
        raise PromptError("documents and texts are both given; give one of them")
    name = "texts" if tei else "documents"
    found = given.needed(name, "a list of texts")
    documents = _documents(name, found)
    with_document, with_text = given.boolean("return_documents", True), given.boolean("return_text")
    raw, cuts = given.boolean("raw_scores"), given.boolean("truncate")
    activation, pooled = _activation(given), read_pooled(given, rules)
    if cuts and pooled["longest"] is None:
        pooled["longest"] = -1
    return RerankBody(
        query=query,
        documents=documents,
        given=tuple(found),
        top_n=given.integer("top_n", 1, 2**31 - 1),
        return_documents=with_text if tei else with_document,
        use_activation=activation and not raw,
        tei=tei,
        **pooled,
    )


@reads
def read_score(body: Mapping[str, Any], rules: Rules = RULES) -> RerankBody:
    """Reads a RerankBody from a body of /v1/score: one query, or a query for each document. Raises ApiError."""
    given = Body(body, SCORE, rules)
    queries = given.take("text_1") or given.take("queries") or given.needed("text_1", "a text")
    found = given.take("text_2") or given.take("documents") or given.needed("text_2", "a text, or a list of them")
    found = found if isinstance(found, list) else [found]
    documents = _documents("text_2", found)
    texts = queries if isinstance(queries, list) else [queries]
    if len(texts) not in (1, len(documents)):
        raise PromptError(
            f"text_1 is a list of {len(texts)}, and text_2 of {len(documents)}; give one text, or as many of both"
        )
    asked = tuple(_query("text_1", each) for each in texts)
    query = asked[0] if len(asked) == 1 else asked
    use_activation = _activation(given)
    pooled = read_pooled(given, rules)
    return RerankBody(query=query, documents=documents, given=tuple(found), use_activation=use_activation, **pooled)


@reads
def read_classify(body: Mapping[str, Any], rules: Rules = RULES) -> ClassifyBody:
    """Reads a ClassifyBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, CLASSIFY, rules)
    inputs = read_prompts("input", given.needed("input", "a text, token ids, or a list of them"))
    return ClassifyBody(inputs=inputs, use_activation=_activation(given), **read_pooled(given, rules))


def _activation(body: Body) -> bool:
    other = body.boolean("activation", True)
    return body.boolean("use_activation", other)


def _query(name: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise PromptError(f"{name} is {show(given)}; give a text")
    return given


def _documents(name: str, given: object) -> tuple[str, ...]:
    """Returns the texts of documents. A document is a text or {"text": …}. Raises PromptError."""
    if not isinstance(given, list) or not given:
        raise PromptError(f"{name} is {show(given)}; give a list of at least one text")
    if len(given) > MAX_PROMPTS:
        raise PromptError(f"{name} is a list of {len(given)}; at most {MAX_PROMPTS} are allowed")
    texts: list[str] = []
    for index, each in enumerate(given):
        text = each.get("text") if isinstance(each, Mapping) else each
        if not isinstance(text, str):
            raise PromptError(f"{name}[{index}] is {show(each)}; give a text")
        texts.append(text)
    return tuple(texts)


def rerank_response(
    body: RerankBody, results: Sequence[RerankResult], outputs: Sequence[RequestOutput], name: str
) -> Any:
    """Returns the response in the requested format.

    Args:
        results: the results in order, the most relevant first.
    """
    if body.tei:
        return [
            {"index": each.index, "score": each.relevance_score}
            | ({"text": body.documents[each.index]} if body.return_documents else {})
            for each in results
        ]
    found = [
        {"index": each.index, "relevance_score": each.relevance_score}
        | ({"document": _document(body.given[each.index])} if body.return_documents else {})
        for each in results
    ]
    usage = pooled_usage(outputs)
    return {"id": f"rerank-{random_hex()}", "object": "list", "model": name, "usage": usage, "results": found}


def _document(given: Any) -> Any:
    return given if isinstance(given, Mapping) else {"text": given}


def score_response(results: Sequence[RerankResult], outputs: Sequence[RequestOutput], name: str) -> Json:
    """Returns the response of /v1/score, in the order of the documents."""
    in_order = sorted(results, key=lambda each: each.index)
    return {
        "id": f"score-{random_hex()}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": [{"index": each.index, "object": "score", "score": each.relevance_score} for each in in_order],
        "usage": pooled_usage(outputs),
    }


def classify_response(found: Sequence[Classification], outputs: Sequence[RequestOutput], name: str) -> Json:
    """Returns the response of /v1/classify."""
    return {
        "id": f"classify-{random_hex()}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": [
            {
                "index": index,
                "label": each.label,
                "probs": list(each.probs.values()),
                "labels": list(each.probs),
                "num_classes": len(each.probs),
            }
            for index, each in enumerate(found)
        ],
        "usage": pooled_usage(outputs),
    }


async def rerank(request: HttpRequest) -> Any:
    """Ranks documents by their relevance to a query."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_rerank), serving)
    results, outputs, name = await _ranked(serving, body)
    return await large_response(serving, rerank_response, body, results, outputs, name, ignored=body.ignored)


async def score(request: HttpRequest) -> Any:
    """Scores the relevance of documents to a query."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_score), serving)
    results, outputs, name = await _ranked(serving, body)
    return await large_response(serving, score_response, results, outputs, name, ignored=body.ignored)


async def _ranked(serving: Serving, body: RerankBody) -> tuple[list[RerankResult], list[RequestOutput], str]:
    outputs = await pooled_outputs(serving, body)
    results = reranked(
        serving.model,
        body.documents,
        outputs,
        top_n=body.top_n,
        use_activation=body.use_activation,
        errors="raise",
    )
    return results, outputs, body.model or serving.names[0]


async def classify(request: HttpRequest) -> Any:
    """Classifies each text."""
    serving = serving_of(request)
    body = with_model(await read_body(request, serving, read_classify), serving)
    outputs = await pooled_outputs(serving, body)
    found = classified(serving.model, outputs, use_activation=body.use_activation, errors="raise")
    return await large_response(
        serving, classify_response, found, outputs, body.model or serving.names[0], ignored=body.ignored
    )


routes = [
    *(
        Route(path, rerank, methods=["POST"])
        for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking", "/v2/rerank")
    ),
    *(Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")),
    *(Route(path, classify, methods=["POST"]) for path in ("/v1/classify", "/classify")),
]
