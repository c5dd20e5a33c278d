"""Bias, penalties and allowed tokens in the whole engine, with and without the compiled helper."""

from collections import Counter

import pytest

from llamabatch import LLM, FinishReason, SamplingParams
from llamabatch.sampling import native

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        yield llm


def one(llm, **params):
    params = {"temperature": 0, "max_tokens": 48, "ignore_eos": True} | params
    (out,) = llm.chat([CHAT], SamplingParams(**params))
    assert out.error is None
    return out.token_ids


def test_a_bias_brings_and_bans_tokens(llm):
    plain = one(llm)
    assert set(one(llm, logit_bias={plain[3]: 100})) == {plain[3]}
    banned = Counter(plain).most_common(3)
    assert not set(one(llm, logit_bias={token_id: -100 for token_id, _ in banned})) & {t for t, _ in banned}


def test_only_allowed_tokens_come(llm):
    allowed = one(llm)[:4]
    assert set(one(llm, allowed_token_ids=allowed, temperature=1.0, seed=1)) <= set(allowed)


def test_penalties_make_repetition_rare(llm):
    plain = one(llm, max_tokens=200)
    for penalty in ({"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert len(set(one(llm, max_tokens=200, **penalty))) > len(set(plain)), penalty


def test_the_repetition_penalty_looks_at_the_prompt_and_the_others_do_not(llm):
    (first,) = one(llm, max_tokens=1)
    prompt = [first] * 4

    def next_token(**params):
        (out,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, **params))
        return out.token_ids[0]

    lifted = {"logit_bias": {first: 100}}
    assert next_token(**lifted) == first
    assert next_token(**lifted, presence_penalty=2.0, frequency_penalty=2.0) == first
    assert next_token(**lifted, repetition_penalty=100.0) != first


def test_ids_outside_the_vocabulary_fail_their_own_request(llm):
    fields = {"logit_bias": {1_000_000: 1.0}, "stop_token_ids": [1_000_000], "logprob_token_ids": [5, 1_000_000]}
    params = [{}, *({name: value} for name, value in fields.items())]
    first, *others = llm.generate(["a"] * 4, [{"max_tokens": 2, **each} for each in params], errors="return")
    assert first.error is None
    for name, other in zip(fields, others, strict=True):
        assert other.finish_reason is FinishReason.ERROR
        assert f"{name} has token id 1000000; this model's ids are 0 to 2047" in other.error


@pytest.mark.skipif(not native.available(), reason="compares the compiled helper with numpy")
def test_numpy_gives_the_same_texts(llm, monkeypatch):
    several = [
        SamplingParams(max_tokens=32, seed=i, temperature=1.2, top_k=k, top_p=p, min_p=0.0, repetition_penalty=r)
        for i, (k, p, r) in enumerate([(40, 0.95, 1.0), (0, 0.9, 1.0), (0, 1.0, 1.2), (5, 1.0, 1.1)])
    ]
    compiled = llm.chat([CHAT] * 4, several)
    monkeypatch.setattr(native, "available", lambda: False)
    assert [out.token_ids for out in llm.chat([CHAT] * 4, several)] == [out.token_ids for out in compiled]
