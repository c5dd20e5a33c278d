"""The prefix cache on the bundled model: what it saves, and that texts stay those of requests that ran alone."""

import pytest

from llamabatch import LLM, SamplingParams
from tests.model.conftest import mixed_conversations, questions

ONE = {"instances": 1, "n_slots": 8, "strategy": "batched"}


def turns(llm, n_chats: int, n_turns: int, params: SamplingParams):
    """Chats that go on side by side; all outputs, turn by turn."""
    asked = questions()
    chats = [
        [{"role": "system", "content": f"You are assistant number {i}, and you answer in few words."}]
        for i in range(n_chats)
    ]
    outputs = []
    for turn in range(n_turns):
        for i, chat in enumerate(chats):
            chat.append({"role": "user", "content": asked[(17 * i + turn) % len(asked)]})
        outputs.append(llm.chat(chats, params))
        for chat, output in zip(chats, outputs[-1], strict=True):
            chat.append({"role": "assistant", "content": output.text})
    return outputs


@pytest.mark.parametrize(
    "options",
    [ONE, {**ONE, "kv": "unified", "n_ctx": 1024, "kv_cells": 4096}, {"instances": 2, "n_slots": 16}],
    ids=["split", "unified", "two engines"],
)
def test_texts_are_those_without_a_cache_and_turns_compute_their_own_tokens(
    reference, greedy, assert_equal_by_the_rule, options
):
    with LLM("tiny", **options) as llm:
        outputs = turns(llm, 8, 4, greedy)
        stats = llm.stats()
    asked = [output for turn in outputs for output in turn]
    with LLM("tiny", strategy="sequential", cache_prefix=False) as plain:
        wanted = plain.generate([list(output.prompt_token_ids) for output in asked], greedy)
        assert (plain.stats().prefix_hits, plain.stats().prefix_tokens) == (0, 0)
        assert plain.stats().prefill_tokens + plain.stats().decode_rows >= sum(len(o.prompt_token_ids) for o in asked)
    assert_equal_by_the_rule(asked, wanted, least=0.9)
    assert stats.prefix_hits >= 18  # of 24 that go on; who stood in the way of others may have lost its cells
    assert stats.prefix_tokens > 0.6 * sum(len(o.prompt_token_ids) for o in asked[8:])
    assert stats.passes_per_step == 1


def test_sampled_texts_are_the_same_with_and_without(greedy):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24)
    texts = []
    for cache_prefix in (True, False):
        with LLM("tiny", **ONE, cache_prefix=cache_prefix) as llm:
            outputs = [llm.chat(mixed_conversations(6, seed=3), params) for _ in range(2)]
            texts.append([o.text for turn in outputs for o in turn])
            assert (llm.stats().prefix_hits > 0) is cache_prefix
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 11


@pytest.mark.parametrize(
    "options", [ONE, {"instances": 2, "n_slots": 4}, {**ONE, "isolate": True}], ids=["one", "two engines", "a child"]
)
def test_cached_tokens_are_told_and_a_reset_cache_has_none(options):
    prompt, params = "Ada keeps three cats. Ben keeps one dog. " * 4, SamplingParams(max_tokens=2, n=2)
    with LLM("tiny", **options) as llm:
        [first] = llm.generate(prompt, params)
        [again] = llm.generate(prompt, params)
        assert llm.reset_prefix_cache() is True
        [anew] = llm.generate(prompt, params)
    n_prompt = len(first.prompt_token_ids)
    assert [each.num_cached_tokens for each in (first, again, anew)] == [0, n_prompt - 1, 0]
    assert again.to_openai()["usage"]["prompt_tokens_details"] == {"cached_tokens": n_prompt - 1}
