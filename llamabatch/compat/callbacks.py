"""Callbacks in llama_cpp's form: each gets all token ids and a row of logits. Also Biases and Penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intc]
Row = npt.NDArray[np.float32]
LogitsProcessor = Callable[[Ids, Row], Row]
StoppingCriteria = Callable[[Ids, Row], bool]


class LogitsProcessorList(list[LogitsProcessor]):
    """A list of functions that run one after another. Each gets (token ids of prompt and output, logits) and returns
    the new logits."""

    def __call__(self, input_ids: Ids, scores: Row) -> Row:
        for process in self:
            scores = process(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """A list of functions. Each gets (token ids of prompt and output, logits). If one returns True, the text ends."""

    def __call__(self, input_ids: Ids, logits: Row) -> bool:
        results = [criterion(input_ids, logits) for criterion in self]  # each criterion is called: it may count calls
        return any(results)


def with_prompt(process: LogitsProcessor, prompt: tuple[int, ...]) -> Callable[[list[int], Any], Any]:
    """Turns a processor of (prompt and output, logits) into a processor of (output, logits), for SamplingParams."""

    def processor(output: list[int], logits: Row) -> Row:
        return process(np.array([*prompt, *output], np.intc), logits)

    return processor


class Biases:
    """A logits processor that adds biases of any number and size.

    Args:
        pairs: token ids, and the numbers to add to their logits.
    """

    def __init__(self, pairs: Iterable[tuple[int, float]]) -> None:
        ids, values = zip(*pairs, strict=True)
        self._ids, self._values = np.array(ids), np.array(values, np.float32)

    def __call__(self, output: list[int], logits: Row) -> Row:
        logits[self._ids] += self._values
        return logits


class Penalties:
    """llama.cpp's penalties over the last tokens of the output (llama-sampler.cpp, llama_sampler_penalties_apply).

    Args:
        last_n: the number of last tokens to look at.
        repeat: divides the logit of each of these tokens if the logit is positive, else multiplies the logit.
        frequency: subtracted from a token's logit once for each occurrence.
        presence: subtracted from a token's logit once.
    """

    def __init__(self, last_n: int, repeat: float, frequency: float, presence: float) -> None:
        self._last_n = last_n
        self._repeat, self._frequency, self._presence = repeat, frequency, presence

    def __call__(self, output: list[int], logits: Row) -> Row:
        for token_id, count in Counter(output[-self._last_n :]).items():
            logit = float(logits[token_id])
            logit = logit * self._repeat if logit <= 0 else logit / self._repeat
            logits[token_id] = logit - count * self._frequency - self._presence
        return logits
