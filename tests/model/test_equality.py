"""The rule of equality: other requests, the strategy and prefix sharing do not change a greedy text."""

import pytest

from llamabatch import LLM, SamplingParams
from tests.model.conftest import mixed_conversations

pytestmark = pytest.mark.alone  # threads on all cores


@pytest.fixture(scope="module")
def wanted(reference):
    conversations = mixed_conversations(200)
    # alone: each conversation has a call of its own, and the engine has no other request
    return [reference.chat(c, SamplingParams(temperature=0, max_tokens=48))[0] for c in conversations]


@pytest.mark.parametrize(
    "strategy", ["sequential", "length-sorted", "interleaved", "static", "batched", "multi-instance", "auto"]
)
def test_200_prompts_of_mixed_length(strategy, wanted, greedy, assert_equal_by_the_rule):
    with LLM("tiny", strategy=strategy, n_slots=16) as llm:
        assert_equal_by_the_rule(llm.chat(mixed_conversations(200), greedy), wanted)


@pytest.mark.parametrize(
    "options", [{"n_batch": 64, "n_ubatch": 16}, {"flash_attn": "off"}, {"isolate": True}, {"kv": "unified"}]
)
def test_other_shapes_of_the_batch(options, wanted, greedy, assert_equal_by_the_rule):
    with LLM("tiny", n_slots=8, **options) as llm:
        assert_equal_by_the_rule(llm.chat(mixed_conversations(200)[:60], greedy), wanted[:60], least=0.98)


def test_the_same_prompt_many_times_is_the_same_text(greedy):
    with LLM("tiny", n_slots=16) as llm:
        conversation = max(mixed_conversations(50), key=lambda c: len(str(c)))
        outputs = llm.chat([conversation] * 40, greedy)
        assert llm.stats().shared_tokens > 0
    assert len({o.text for o in outputs}) == 1


def test_sampled_text_depends_on_the_seed_alone():
    """Rounding depends on the shape of the batch, so not every sampled text is equal. The test checks the share."""
    conversations = mixed_conversations(60, seed=3)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=32) for i in range(60)]
    with LLM("tiny", strategy="sequential") as one, LLM("tiny", n_slots=16) as many:
        alone, together = one.chat(conversations, params), many.chat(conversations, params)
        other_seed = many.chat(
            conversations[:1], SamplingParams(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=99)
        )
        again = many.chat(conversations[:1], SamplingParams(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=98))
    equal = sum(a.token_ids == b.token_ids for a, b in zip(alone, together, strict=True))
    assert equal >= 57
    assert other_seed[0].token_ids != again[0].token_ids
