"""Requests that become longer than n_ctx, on the bundled model."""

import ctypes
import random
from dataclasses import replace

import numpy as np
import pytest

from llamabatch import LLM, EngineConfig, FinishReason, PromptError, SamplingParams
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.library import load
from llamabatch.llama.model import Model

N_CTX = 64
SMALL = {"n_ctx": N_CTX, "n_slots": 8, "instances": 1, "strategy": "batched", "flash_attn": "off"}
SHIFT = SamplingParams(temperature=0, max_tokens=150, overflow="shift", ignore_eos=True)


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(300, 900) for _ in range(rng.randrange(5, 60))] for _ in range(n)]


def by_hand(prompt: list[int], n_tokens: int) -> list[int]:
    """Decodes greedily with llama.cpp's own calls. When a sequence is full, its older half is removed, and the
    positions of the rest are shifted down."""
    lib, model = load(), Model(resolve("tiny"), EngineConfig("tiny"))
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max, params.flash_attn_type = 256, 64, 1, 0
    context = lib.llama_init_from_model(model.handle, params)
    memory, output, held, pending = lib.llama_get_memory(context), [], 0, list(prompt)
    try:
        while len(output) < n_tokens:
            if held == N_CTX:
                half = N_CTX // 2  # the bundled model has no BOS
                lib.llama_memory_seq_rm(memory, 0, 0, half)
                lib.llama_memory_seq_add(memory, 0, half, -1, -half)
                held -= half
            tokens = (ctypes.c_int32 * len(pending))(*pending)
            assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(pending))) == 0
            held += len(pending)
            row = lib.llama_get_logits_ith(context, -1)
            output.append(int(np.ctypeslib.as_array(row, (model.n_vocab,)).argmax()))
            pending = output[-1:]
    finally:
        lib.llama_free(context)
        model.close()
    return output


def test_a_shifted_text_is_that_of_llama_cpps_own_calls():
    asked = prompts(3)
    with LLM("tiny", **SMALL) as llm:
        outputs = llm.generate(asked, SHIFT)
    assert all(len(output.token_ids) == 150 for output in outputs)
    same = [list(output.token_ids) == by_hand(prompt, 150) for output, prompt in zip(outputs, asked, strict=True)]
    assert sum(same) >= 2  # in batches of other shapes, texts may part where two logits are equal within rounding


def test_a_chat_that_is_too_long_loses_whole_turns_and_no_more_than_it_must():
    rules = {"role": "system", "content": "Be brief."}
    turns = [
        {"role": role, "content": f"{word} {n}"}
        for n in range(9)
        for role, word in (("user", "Question"), ("assistant", "Answer"))
    ]
    last = {"role": "user", "content": "Question 9"}
    params = SamplingParams(temperature=0, max_tokens=8, overflow="truncate")
    with LLM("tiny", **{**SMALL, "n_ctx": 128}) as llm:
        texts = [llm.apply_chat_template([rules, *turns[2 * n :], last]) for n in range(10)]
        n_tokens = [len(llm.tokenize(text, parse_special=True)) for text in texts]
        fits = [count + 8 <= 128 + 1 for count in n_tokens]
        dropped = fits.index(True)
        assert 0 < dropped < 9
        long_one = [rules, *turns, {"role": "user", "content": "word " * 400}]
        [cut, over, whole] = llm.chat([[rules, *turns, last], long_one, [rules, last]], params)
        assert (cut.prompt, cut.num_truncated) == (texts[dropped], n_tokens[0] - n_tokens[dropped])
        assert len(cut.prompt_token_ids) == n_tokens[dropped]
        assert len(over.prompt_token_ids) + 8 == 128 + 1, "its last question is too long, and loses its beginning"
        whole_prompt = llm.tokenize(llm.apply_chat_template(long_one), parse_special=True)
        assert over.num_truncated + 121 == len(whole_prompt)
        assert whole.num_truncated == 0
        [fitting] = llm.chat([rules, *turns[2 * dropped :], last], replace(params, max_tokens=64))
        assert (fitting.prompt, fitting.num_truncated) == (texts[dropped], 0), "it fits, if not with 64 more"


def test_company_changes_nothing():
    asked = prompts(12)
    with LLM("tiny", **{**SMALL, "n_slots": 1, "strategy": "sequential"}) as llm:
        alone = llm.generate(asked, SHIFT)
    mixed = [SHIFT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    with LLM("tiny", **SMALL) as llm:
        together = llm.generate(asked, [mixed[i % 2] for i in range(12)])
    for i, other in enumerate(together):
        n = 150 if i % 2 == 0 else min(20, N_CTX + 1 - len(asked[i]))
        assert len(other.token_ids) == n
    shifted = list(zip(alone, together, strict=True))[::2]
    assert sum(one.token_ids == other.token_ids for one, other in shifted) >= 5


def test_a_cache_that_cannot_shift_is_refused_by_name():
    with LLM("tiny", **{**SMALL, "type_k": "q8_0", "flash_attn": "on"}) as llm:
        output = llm.generate([[500, 501]], SHIFT, errors="return")[0]
        assert output.finish_reason is FinishReason.ERROR
        assert "overflow is 'shift', which this engine cannot do" in output.error
        assert llm.generate([[500, 501]], SamplingParams(max_tokens=3, ignore_eos=True))[0].error is None


def test_a_long_prompt_is_cut_or_refused():
    long = [300 + i for i in range(200)]
    with LLM("tiny", **SMALL) as llm:
        with pytest.raises(PromptError, match="200 tokens"):
            llm.generate(long, SamplingParams(max_tokens=10))
        cut = llm.generate(long, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, overflow="truncate"))[0]
        plain = llm.generate(long[-55:], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))[0]
    assert (cut.num_truncated, plain.num_truncated) == (145, 0)
    assert cut.prompt_token_ids == plain.prompt_token_ids == tuple(long[-55:])
    assert cut.token_ids == plain.token_ids
    assert len(cut.token_ids) == 10
