"""FakeRequest: one request to a FakeLLM. Script: the answers, vectors and scores of a test."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from llamabatch.request.sampling_params import SamplingParams
from llamabatch.testing.fake_model import N_EMBD
from llamabatch.utils.checks import show

T = TypeVar("T")
Kind = Literal["generate", "chat", "embed", "score", "rerank", "classify"]


@dataclass(frozen=True)
class FakeRequest:
    """One request of a FakeLLM: the argument of an answer function, and an item of `FakeLLM.requests`.

    Attributes:
        kind: the called method of LLM. For stream and as_completed: "generate", or "chat" for a conversation.
        prompt: the text of the prompt. For a conversation: the result of the chat template. For "rerank": the query.
        messages: the conversation; None for any other request.
        params: the sampling parameters.
        prompt_token_ids: the prompt as ids of the fake vocabulary.
        index: number of the continuation among those of its prompt, from 0 to n - 1.
        adapters: pairs of an adapter's name and its scale.
        continuation: the text to score, or the document to rank; "" for any other request.
    """

    kind: Kind
    prompt: str
    messages: tuple[dict[str, str], ...] | None = None
    params: SamplingParams = SamplingParams()
    prompt_token_ids: tuple[int, ...] = ()
    index: int = 0
    adapters: tuple[tuple[str, float], ...] = ()
    continuation: str = ""

    @property
    def text(self) -> str:
        """The content of a conversation's last message, or else the prompt. In a mapping of answers, this text is
        the key of the answer."""
        return self.messages[-1]["content"] if self.messages else self.prompt


Answer = str | Exception
Answers = str | Callable[[FakeRequest], Answer] | Mapping[str, Answer] | Sequence[Answer] | None
Embeddings = Callable[[FakeRequest], Sequence[float]] | Mapping[str, Sequence[float]] | None
Scores = Callable[[FakeRequest], float] | Mapping[str, float] | None
Relevance = Callable[[FakeRequest], float] | Mapping[str, float] | None
Classes = Callable[[FakeRequest], Mapping[str, float]] | Mapping[str, Mapping[str, float]] | None


class Script:
    """The answers of a test. Safe to call from several threads.

    Args:
        answers, embeddings, scores, relevance, classes: as for FakeLLM.

    Raises:
        AssertionError: raised by each method if the test gave no answer for the request, or an answer of a wrong type.
    """

    def __init__(
        self,
        answers: Answers = None,
        embeddings: Embeddings = None,
        scores: Scores = None,
        relevance: Relevance = None,
        classes: Classes = None,
    ) -> None:
        self._relevance = relevance
        self._classes = classes
        self._answers = answers
        self._embeddings = embeddings
        self._scores = scores
        self._n_given = 0
        self._lock = threading.Lock()

    def answer(self, request: FakeRequest) -> str:
        """Returns the text that continues the prompt. If the test gave an exception instead, raises the exception."""
        answer = self._answer(request)
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, str):
            raise AssertionError(f"the answer to {show(request.text)} is {show(answer)}; give a str or an exception")
        return answer

    def _answer(self, request: FakeRequest) -> object:
        answers = self._answers
        if answers is None:
            return request.text
        if callable(answers):
            return answers(request)
        if isinstance(answers, Mapping):
            return _of_mapping("answers", answers, request.text)
        if isinstance(answers, str):
            return answers
        with self._lock:
            place = self._n_given
            self._n_given += 1
        if place >= len(answers):
            raise AssertionError(f"answers holds {len(answers)}; {show(request.text)} is request {place + 1}")
        return answers[place]

    def embedding(self, request: FakeRequest) -> list[float]:
        """Returns the vector of a text: by default 16 numbers from -1 to 1, the same for equal texts."""
        if callable(self._embeddings):
            return [float(value) for value in self._embeddings(request)]
        if self._embeddings is not None:
            return [float(value) for value in _of_mapping("embeddings", self._embeddings, request.text)]
        draw = random.Random(request.text)
        return [draw.uniform(-1, 1) for _ in range(N_EMBD)]

    def score(self, request: FakeRequest, n_tokens: int) -> float:
        """Returns the logprob of a continuation of `n_tokens`: by default -1 for each token."""
        if callable(self._scores):
            return float(self._scores(request))
        if self._scores is not None:
            return float(_of_mapping("scores", self._scores, request.continuation))
        return -1.0 * n_tokens

    def relevance(self, request: FakeRequest) -> float:
        """Returns the raw score of a document: the logit of its relevance. By default, the relevance is the share of
        the query's words that occur in the document."""
        if callable(self._relevance):
            share = float(self._relevance(request))
        elif self._relevance is not None:
            share = float(_of_mapping("relevance", self._relevance, request.continuation))
        else:
            wanted = set(request.prompt.lower().split())
            share = len(wanted.intersection(request.continuation.lower().split())) / max(1, len(wanted))
        return _log(_checked("relevance", share, request.continuation)) - _log(1 - share)

    def classes(self, request: FakeRequest, labels: Sequence[str]) -> list[float]:
        """Returns the raw scores of a text's classes: logarithms of their probabilities, by default all equal."""
        if self._classes is None:
            return [0.0] * len(labels)
        given = self._classes(request) if callable(self._classes) else None
        if given is None:
            given = _of_mapping("classes", cast("Mapping[str, Mapping[str, float]]", self._classes), request.text)
        for label in given:
            if label not in labels:
                raise AssertionError(f"classes has the label {show(label)}; labels are {', '.join(map(show, labels))}")
        if not sum(given.values()) > 0:
            raise AssertionError(f"classes has no probability for {show(request.text)}; give one above 0")
        return [_log(_checked("classes", given.get(label, 0.0), request.text)) for label in labels]


def _checked(name: str, share: float, key: str) -> float:
    if not 0 <= share <= 1:
        raise AssertionError(f"{name} has {share} for {show(key)}; allowed are 0 to 1")
    return share


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _of_mapping(name: str, given: Mapping[str, T], key: str) -> T:
    if key not in given:
        raise AssertionError(f"{name} has nothing for {show(key)}; it has {', '.join(map(show, given)) or 'no key'}")
    return given[key]
