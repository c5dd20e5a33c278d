"""Fixtures of the model tests: the bundled model, questions it was never trained on, and the rule of equality."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.equality import LogitGap, parting
from llamabatch import LLM, RequestOutput, SamplingParams

HELDOUT = Path(__file__).parents[2] / "models" / "tiny" / "heldout.jsonl"

# Greedy texts may part if the two best logits are closer than this, because llama.cpp's rounding depends on the shape
# of the batch. The largest gap that benchmarks/equality.py found is 0.113 (the deviation of the logits is 4.2).
MAX_GAP = 0.15


def questions() -> list[str]:
    """Returns 300 questions from templates that were not in the training data."""
    return [json.loads(line)["messages"][-1]["content"] for line in HELDOUT.read_text(encoding="utf-8").splitlines()]


def mixed_conversations(n: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Returns conversations of mixed length: some have earlier turns before the question."""
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
    """An LLM that runs conversations strictly one after another. Every other way must reproduce its texts."""
    with LLM("tiny", strategy="sequential") as llm:
        yield llm


@pytest.fixture(scope="session")
def logit_gap():
    gap = LogitGap()
    yield gap
    gap.close()


@pytest.fixture(scope="session")
def assert_equal_by_the_rule(logit_gap):
    """A function that checks outputs by the rule of equality: at least 99 % of greedy outputs are equal, and the others
    part where the model was undecided."""

    def check(got: list[RequestOutput], wanted: list[RequestOutput], least: float = 0.99, gap_of=logit_gap) -> None:
        differing = 0
        for one, other in zip(got, wanted, strict=True):
            assert one.error is None
            assert one.prompt_token_ids == other.prompt_token_ids
            if one.token_ids == other.token_ids:
                assert one.text == other.text
                continue
            differing += 1
            at = parting(one, other)
            gap = gap_of((*one.prompt_token_ids, *one.token_ids[:at]))
            assert gap < MAX_GAP, f"{one.text!r} and {other.text!r} part at token {at}, where the gap is {gap}"
        assert differing <= (1 - least) * len(got), f"{differing} of {len(got)} outputs differ"

    return check


GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture
def greedy() -> SamplingParams:
    return GREEDY
