"""Reranking and classification of texts, from the outputs of a model's classification head."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.entrypoints.submission import ErrorPolicy, failed
from llamabatch.errors import ConfigError, InputError, LlamaBatchError, PromptError
from llamabatch.llama.model import Model
from llamabatch.request.outputs import RequestOutput
from llamabatch.utils.checks import boolean, integer, show

_PLACES = re.compile(r"(\{query\}|\{document\})")
# llama.cpp ends the graph of these architectures with a softmax (llama-graph.cpp): their outputs are probabilities.
_WITH_SOFTMAX = ("qwen3", "qwen3vl")

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RerankResult:
    """The relevance of one document.

    Attributes:
        index: the document's place in the list of documents.
        document: the document's text, as given.
        relevance_score: 0 to 1, or the model's raw score with use_activation=False; NaN if the document failed.
        error: the reason why the document failed, else None.
    """

    index: int
    document: Any
    relevance_score: float
    error: str | None = None


@dataclass(frozen=True)
class Classification:
    """The classes of one text.

    Attributes:
        label: the most likely class; "LABEL_0", … where the GGUF has no names.
        probability: the probability of `label`; with use_activation=False its raw score.
        probs: the probability (or raw score) of each label, in the model's order.
    """

    label: str
    probability: float
    probs: Mapping[str, float]


def relevance_index(model: Model) -> int:
    """Returns the index of the classification head's output that gives the relevance.

    Raises:
        ConfigError: the model has several outputs, and none has the name "yes" (as in Qwen3-Reranker).
    """
    index = model.relevance_index
    if index is None:
        raise ConfigError(
            f"{model.path.name} ranks no documents: its classification head has {len(model.labels)} outputs "
            f"({', '.join(map(show, model.labels[:8]))}), but ranking needs 1; classify() gives them all"
        )
    return index


def pair_tokenizer(model: Model, query: str, longest: int | None = None) -> Callable[[str], tuple[int, ...]]:
    """Returns a function that turns a document into the tokens of its pair with the query.

    If the GGUF has a "rerank" template, the filled template is tokenized with special tokens, like a chat prompt. This
    includes special tokens spelled out in the query or the document. Without a template, special tokens of the
    vocabulary surround and separate query and document; special tokens spelled out in these texts are plain text.

    Args:
        longest: maximum number of tokens of a pair; a longer document loses its end. None: no limit.
    """
    to_ids = _pair_tokenizer(model, query)
    return to_ids if longest is None else lambda document: _cut_pair(model, to_ids, document, longest)


def _cut_pair(model: Model, to_ids: Callable[[str], tuple[int, ...]], document: str, longest: int) -> tuple[int, ...]:
    ids, kept = to_ids(document), _plain(model, document)
    while len(ids) > longest and kept:
        # Cutting a text can change its last tokens, so only tokenizing it again shows its length.
        kept = kept[: -(len(ids) - longest)] if len(ids) - longest < len(kept) else []
        ids = to_ids(model.detokenize(kept))
    return ids


def _pair_tokenizer(model: Model, query: str) -> Callable[[str], tuple[int, ...]]:
    template = model.rerank_template
    if template is not None:
        parts = _PLACES.split(template)
        return lambda document: tuple(
            model.tokenize("".join(_filled(part, query, document) for part in parts), parse_special=True)
        )
    marks = model.pair_marks
    start = (*marks.before, *_plain(model, query), *marks.between)
    return lambda document: (*start, *_plain(model, document), *marks.behind)


def _filled(part: str, query: str, document: str) -> str:
    return {"{query}": query, "{document}": document}.get(part, part)


def _plain(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False) if text else []


def check_rerank(query: object, top_n: object, use_activation: object) -> int | None:
    """Returns the value of top_n. Raises PromptError or InputError for invalid arguments of rerank()."""
    if not isinstance(query, str) or not query:
        raise PromptError(f"query is {show(query)}; give a text")
    boolean(InputError, "use_activation", use_activation)
    return None if top_n is None else integer(InputError, "top_n", top_n, 1, 2**31 - 1, ", or None")


def reranked(
    model: Model,
    documents: Sequence[Any],
    outputs: Sequence[RequestOutput],
    *,
    top_n: int | None,
    use_activation: bool,
    errors: ErrorPolicy,
) -> list[RerankResult]:
    """Returns the first `top_n` results, the most relevant first. Documents with errors come last.

    Raises:
        EngineError: a document failed or was aborted, and errors is "raise".
    """
    at = relevance_index(model)
    found = []
    for index, (document, output) in enumerate(zip(documents, outputs, strict=True)):
        if output.embedding is None:
            found.append(RerankResult(index, document, math.nan, str(failed(output, errors))))
            continue
        values = np.array(output.embedding, np.float64)
        score = float(_activated(model, values)[at] if use_activation else values[at])
        found.append(RerankResult(index, document, score))
    found.sort(key=lambda each: (each.error is not None, 0.0 if each.error else -each.relevance_score, each.index))
    return found if top_n is None else found[:top_n]


def classified(
    model: Model, outputs: Sequence[RequestOutput], *, use_activation: bool, errors: ErrorPolicy
) -> list[Any]:
    """Returns a Classification of each output, or its error.

    Raises:
        EngineError: an output failed or was aborted, and errors is "raise".
    """
    return [_classified(model, output, use_activation, errors) for output in outputs]


def _classified(
    model: Model, output: RequestOutput, use_activation: bool, errors: ErrorPolicy
) -> Classification | LlamaBatchError:
    if output.embedding is None:
        return failed(output, errors)
    values = np.array(output.embedding, np.float64)
    if use_activation:
        values = _activated(model, values)
    best = int(np.argmax(values))
    probs = dict(zip(model.labels, map(float, values), strict=True))
    return Classification(model.labels[best], float(values[best]), probs)


def _activated(model: Model, values: _Values) -> _Values:
    """Returns the probabilities of a model's outputs. Raw scores pass through the logistic function if there is one
    score, else through softmax. Architectures in _WITH_SOFTMAX return probabilities already."""
    if model.metadata.get("general.architecture") in _WITH_SOFTMAX:
        return values
    if len(values) == 1:
        return np.exp(-np.logaddexp(0.0, -values))
    shifted = np.exp(values - values.max())
    found: _Values = shifted / shifted.sum()
    return found
