"""What the model tests share: the bundled model, questions it was never trained on, and the rule of equality."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from llamabatch import LLM, EngineConfig, RequestOutput, SamplingParams
from llamabatch.engine import plan
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context, DecodeCode
from llamabatch.llama.library import load
from llamabatch.llama.model import Model
from llamabatch.model_file import resolve
from llamabatch.request import Request, Sequence
from llamabatch.step import Call, Span

HELDOUT = Path(__file__).parents[2] / "models" / "heldout.jsonl"

# Greedy text may part where the two best logits lie closer than this: llama.cpp's arithmetic depends on the shape of
# the batch. The largest gap that benchmarks/equality.py found is 0.113 (the deviation of the logits is 4.2).
MAX_GAP = 0.15


def questions() -> list[str]:
    """300 questions from templates that training never saw."""
    return [json.loads(line)["messages"][-1]["content"] for line in HELDOUT.read_text(encoding="utf-8").splitlines()]


def mixed_conversations(n: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of mixed length: some with earlier turns before the question."""
    rng = random.Random(seed)
    asked = questions()
    chosen = []
    for i in range(n):
        turns = []
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            turns += [
                {"role": "user", "content": rng.choice(asked)},
                {"role": "assistant", "content": "I do not know."},
            ]
        chosen.append([*turns, {"role": "user", "content": asked[i % len(asked)]}])
    return chosen


@pytest.fixture(scope="session")
def reference():
    """Runs conversations strictly one after another: what every other way must reproduce."""
    with LLM("tiny", strategy="sequential") as llm:
        yield llm


class LogitGap:
    """The distance between the two best logits after a text, computed alone in a context of its own."""

    def __init__(self) -> None:
        config = EngineConfig("tiny", n_slots=1)
        self._model = Model(resolve("tiny"), config)
        resolved = plan(config, self._model).config
        self._context = Context(self._model, resolved, 1)
        self._batch = Batch(load(), resolved.n_batch)

    def __call__(self, token_ids: tuple[int, ...]) -> float:
        sequence = Sequence(Request("gap", token_ids), self._model.vocabulary, 10**6)
        self._context.clear(0)
        struct, _ = self._batch.fill(Call((Span(sequence, 0, 0, len(token_ids), True),)))
        assert self._context.decode(struct) is DecodeCode.OK
        second, best = np.partition(self._context.logits(1)[0], -2)[-2:]
        return float(best - second)

    def close(self) -> None:
        self._context.close()
        self._model.close()


@pytest.fixture(scope="session")
def logit_gap():
    gap = LogitGap()
    yield gap
    gap.close()


@pytest.fixture(scope="session")
def assert_equal_by_the_rule(logit_gap):
    """Greedy outputs are equal, or part where the model itself was undecided; at least 99 % are equal."""

    def check(got: list[RequestOutput], wanted: list[RequestOutput], least: float = 0.99) -> None:
        differing = 0
        for one, other in zip(got, wanted, strict=True):
            assert one.error is None
            assert one.prompt_token_ids == other.prompt_token_ids
            if one.token_ids == other.token_ids:
                assert one.text == other.text
                continue
            differing += 1
            pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(one.token_ids), len(other.token_ids)))
            gap = logit_gap((*one.prompt_token_ids, *one.token_ids[:at]))
            assert gap < MAX_GAP, f"{one.text!r} and {other.text!r} part at token {at}, where the gap is {gap}"
        assert differing <= (1 - least) * len(got), f"{differing} of {len(got)} outputs differ"

    return check


GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture
def greedy() -> SamplingParams:
    return GREEDY
