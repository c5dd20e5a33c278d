"""FakeLLM and FakeAsyncLLM: the methods of LLM and AsyncLLM over a FakeClient."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamabatch.client.connect import with_front_client
from llamabatch.client.front_client import FrontClient
from llamabatch.config import EngineConfig
from llamabatch.entrypoints.async_llm import AsyncLLM
from llamabatch.entrypoints.llm import LLM
from llamabatch.testing.answers import Answers, Classes, Embeddings, FakeRequest, Relevance, Scores, Script
from llamabatch.testing.fake_client import FakeClient
from llamabatch.testing.fake_model import LABELS
from llamabatch.utils.aliases import model_named, takes_names
from llamabatch.utils.paths import HUB

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from llamabatch.config import EngineOptions


class FakeLLM(LLM):
    """An LLM without a model and without llama.cpp. It returns the answers of a test at once.

    Prompts, conversations, SamplingParams, options and adapters are checked as LLM checks them. The results have the
    same types as LLM's: RequestOutput, Score, numpy vectors. The vocabulary has words as tokens. An answer is cut at
    max_tokens and at stop strings. Sampling settings, structured_outputs and logits_processors have no effect.

    Args:
        model: any name; no file is read.
        answers: the texts that continue prompts: a function of a FakeRequest; a mapping from the prompt, or from the
            last message of a conversation; a list in the order of the requests; or one text for all. None: an answer
            repeats the prompt or the last message. An exception in place of a text ends the request with this error.
            The call itself raises QueueFull and EngineClosedError, as with an engine.
        embeddings: the vector of a text: a function of a FakeRequest, or a mapping from the text; None: 16 numbers
            drawn from the text.
        scores: the logprob of a continuation: a function of a FakeRequest, or a mapping from the continuation; None: -1
            for each token.
        relevance: the relevance of a document to a query, 0 to 1: a function of a FakeRequest, or a mapping from the
            document; None: the share of the query's words that occur in the document.
        labels: names of the classes.
        classes: the probabilities of a text's classes, by label: a function of a FakeRequest, or a mapping from the
            text; None: all equal.
        **options: as for LLM.

    Raises:
        ConfigError: an option is wrong.
        AssertionError: the test has no answer for a request. The argument `errors` of a call does not change this.
    """

    @takes_names(model_named)
    def __init__(
        self,
        model: str | os.PathLike[str] = "fake",
        *,
        answers: Answers = None,
        embeddings: Embeddings = None,
        scores: Scores = None,
        relevance: Relevance = None,
        labels: Sequence[str] = LABELS,
        classes: Classes = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        script = Script(answers, embeddings, scores, relevance, classes)
        self._fake = FakeClient(EngineConfig.from_options(model, options), script, labels)
        self._client = _counted(self._fake)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Returns a FakeLLM with this name, without a download. The options may include the arguments of FakeLLM."""
        return cls(f"{HUB}{repo_id}", **options)

    @property
    def requests(self) -> list[FakeRequest]:
        """All requests so far, in the order of their answers. Refused prompts are missing."""
        return list(self._fake.requests)


class FakeAsyncLLM(AsyncLLM):
    """An AsyncLLM without a model; see FakeLLM. A function for the answers is called on a thread, so it may block.

    Args:
        model, answers, embeddings, scores, relevance, labels, classes, **options: as for FakeLLM.
    """

    @takes_names(model_named)
    def __init__(
        self,
        model: str | os.PathLike[str] = "fake",
        *,
        answers: Answers = None,
        embeddings: Embeddings = None,
        scores: Scores = None,
        relevance: Relevance = None,
        labels: Sequence[str] = LABELS,
        classes: Classes = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **options)
        script = Script(answers, embeddings, scores, relevance, classes)
        self._fake = fake = FakeClient(self._config, script, labels)
        self._load.connect = lambda *_: _counted(fake)

    @property
    def requests(self) -> list[FakeRequest]:
        """All requests so far, as FakeLLM.requests."""
        return list(self._fake.requests)


def _counted(fake: FakeClient) -> FrontClient:
    """Wraps the client in a FrontClient, as LLM does with its client."""
    return with_front_client(fake, fake.plan.config.max_queue, fake.again)
