"""The prefix cache on the bundled model saves computation, and does not change texts."""

import random

import pytest

from llamabatch import LLM, SamplingParams
from llamabatch.llama.context import Context
from llamabatch.scheduler.prefix_store import PrefixStore
from tests.model.conftest import questions

ONE = {"instances": 1, "n_slots": 8, "strategy": "batched"}


def turns(llm, n_chats: int, n_turns: int, params: SamplingParams):
    """Runs chats side by side, turn by turn. Returns the outputs of all turns."""
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
def test_texts_are_those_without_a_cache_and_turns_compute_their_own_tokens(greedy, assert_equal_by_the_rule, options):
    with LLM("tiny", **options) as llm:
        outputs = turns(llm, 8, 4, greedy)
        stats = llm.stats()
    asked = [output for turn in outputs for output in turn]
    with LLM("tiny", strategy="sequential", cache_prefix=False) as plain:
        wanted = plain.generate([list(output.prompt_token_ids) for output in asked], greedy)
        assert (plain.stats().prefix_hits, plain.stats().prefix_tokens) == (0, 0)
        assert plain.stats().prefill_tokens + plain.stats().decode_rows >= sum(len(o.prompt_token_ids) for o in asked)
    assert_equal_by_the_rule(asked, wanted, least=0.9)
    assert stats.prefix_hits >= 18  # of 24 later turns; other chats may have taken the slots of the rest
    assert stats.prefix_tokens > 0.6 * sum(len(o.prompt_token_ids) for o in asked[8:])
    assert stats.passes_per_step == 1


@pytest.mark.parametrize(
    "options", [{}, {"kv": "unified", "kv_cells": 1024}, {"start_slots": 1}], ids=["split", "unified", "a growing one"]
)
def test_sixty_four_chats_on_four_slots_compute_their_own_tokens(options, assert_equal_by_the_rule, monkeypatch):
    """Chats take random turns, and some requests are cancelled. Texts equal those of an engine without a cache."""
    monkeypatch.setattr(
        PrefixStore, "copy_s", lambda self, count: None
    )  # else measured times decide whether a copy pays
    rng, params = random.Random(7), SamplingParams(temperature=0, max_tokens=4)
    chats = [[10 + i, *(rng.randrange(10, 1500) for _ in range(47))] for i in range(64)]
    asked, outputs = [], []
    given = {"n_slots": 4, "n_ctx": 256, "instances": 1, "strategy": "batched", "profile": False}
    with LLM("tiny", **given, **options) as llm:
        for turn in range(3):
            order = rng.sample(range(64), 64)
            for first in range(0, 64, 8 if turn else 1):
                some = order[first : first + (8 if turn else 1)]
                found = llm.generate([chats[i] for i in some], params)
                asked += [list(chats[i]) for i in some]
                outputs += found
                for i, output in zip(some, found, strict=True):
                    chats[i] += [*output.token_ids, *(rng.randrange(10, 1500) for _ in range(8))]
            if turn == 0:
                assert llm.stats().prefix_hits < 4
        stats, cache_ram = llm.stats(), llm.plan.config.cache_ram
    own = 64 * 2 * (8 + params.max_tokens)
    assert stats.prefill_tokens + stats.decode_rows <= 64 * (48 + 4) + own + 64 * 2 * 4
    assert stats.prefix_hits >= 126
    assert stats.restored_tokens > 0.9 * stats.prefix_tokens
    assert 0 < stats.cache_ram_bytes <= cache_ram * 2**20
    with LLM("tiny", n_slots=16, n_ctx=256, strategy="batched", cache_prefix=False, profile=False) as plain:
        assert_equal_by_the_rule(outputs, plain.generate(asked, params), least=0.9)
        assert plain.stats().cache_ram_bytes == 0


@pytest.mark.parametrize("n_alike", [1, 2], ids=["alone", "with one that copies from it"])
def test_a_state_that_llama_cpp_refuses_is_computed_again(n_alike, monkeypatch, assert_equal_by_the_rule):
    monkeypatch.setattr(PrefixStore, "copy_s", lambda self, count: None)  # as in the test above
    written = Context.raw_state
    monkeypatch.setattr(Context, "raw_state", lambda context, slot: written(context, slot)[:-8])
    story, params = "Ada keeps three cats. Ben keeps one dog. " * 4, SamplingParams(temperature=0, max_tokens=4)
    asked = [f"{story}How many does {name} keep?" for name in ("Ada", "Ben")[:n_alike]]
    with LLM("tiny", **{**ONE, "n_slots": n_alike}) as llm:
        llm.generate(story, params)
        llm.generate(["What is the capital of Peru?", "And of Chile?"][:n_alike], params)
        outputs = llm.generate(asked, params)
        stats = llm.stats()
        assert min(output.num_cached_tokens for output in outputs) == 0
        assert min(stats.restored_tokens, stats.preemptions) > 0
        llm.reset_prefix_cache()
        assert_equal_by_the_rule(outputs, llm.generate(asked, params), least=1.0)


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
