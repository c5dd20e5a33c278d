"""Rarely used samplers in the whole engine."""

import pytest

from llamabatch import LLM, Engine, EngineConfig, Request, SamplingParams
from llamabatch.llama.context import Context
from llamabatch.sampling import native

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
LIVELY = {"max_tokens": 40, "temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
KINDS = {
    "plain": {},
    "typical": {"typical_p": 0.3},
    "sigma": {"top_n_sigma": 0.8},
    "xtc": {"xtc_probability": 0.8, "xtc_threshold": 0.05},
    "dry": {"dry_multiplier": 4.0, "dry_base": 3.0, "dry_allowed_length": 1},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 2.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
    "dynamic": {"dynatemp_range": 1.2},
}


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        yield llm


def params(kind, **more):
    return SamplingParams(**LIVELY | KINDS[kind] | {"seed": 3} | more)


def tokens(llm):
    outs = llm.chat([CHAT] * len(KINDS), [params(kind) for kind in KINDS])
    assert all(out.error is None for out in outs)
    return {kind: out.token_ids for kind, out in zip(KINDS, outs, strict=True)}


def test_each_changes_the_text_and_they_run_in_one_batch(llm):
    found = tokens(llm)
    same = [kind for kind in KINDS if found[kind] == found["plain"]]
    assert same in (["plain"], ["plain", "dry"])  # DRY changes nothing if the text has no repetition


@pytest.mark.skipif(not native.available(), reason="compares the compiled helper with numpy")
def test_texts_are_the_same_without_the_helper_and_in_a_child(llm, monkeypatch):
    with_helper = tokens(llm)
    monkeypatch.setattr(native, "available", lambda: False)
    assert tokens(llm) == with_helper
    with LLM("tiny", isolate=True) as child:
        assert tokens(child) == with_helper


def test_dry_ends_repetition(llm):
    prompt = "the cat sat. " * 12
    looping = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain, dry = llm.generate(
        [prompt, prompt],
        [SamplingParams(**looping), SamplingParams(**looping, dry_multiplier=5.0, dry_sequence_breakers=())],
    )

    def repeated(out):
        ids = (*out.prompt_token_ids, *out.token_ids)
        return sum(
            ids[i : i + 4] in {ids[j : j + 4] for j in range(i)} for i in range(len(out.prompt_token_ids), len(ids) - 4)
        )

    assert repeated(dry) < repeated(plain)


def test_what_they_remember_survives_a_context_that_is_lost(llm, monkeypatch):
    """The context grows while requests run, and their cells are lost and computed again. Tokens and mirostat's state
    are kept."""
    monkeypatch.setattr(Context, "carry_over", lambda *_: frozenset())
    ids = tuple(llm.chat([CHAT], SamplingParams(max_tokens=1))[0].prompt_token_ids)
    texts = []
    for disturb in (False, True):
        with Engine(EngineConfig("tiny", n_slots=8, start_slots=1)) as engine:
            kinds = ["mirostat 1", "mirostat 2", "dry", "xtc"]
            for kind in kinds if disturb else []:
                engine.add(Request(kind, ids, params(kind)))
                for _ in range(3):
                    engine.step()
            for kind in [] if disturb else kinds:
                engine.add(Request(kind, ids, params(kind)))
            finished = {}
            while engine.has_work:
                finished |= {o.request_id: o.finished.token_ids for o in engine.step() if o.finished}
            assert (engine.stats().preemptions > 0) == disturb
            texts.append(finished)
    # logits differ in their last bits, so a draw may rarely give another token
    assert sum(texts[0][kind] == texts[1][kind] for kind in texts[0]) >= 3


def test_guesses_change_nothing(llm):
    """Speculation samples several tokens of a sequence at once. Samplers that depend on earlier tokens do without
    it."""
    chat = [{"role": "user", "content": "Copy: the fox ran to the fox and the fox ran to the fox."}]
    more = [{"bad_words": ["fox"]}, {"min_tokens": 30}, {"stop": ["the"]}, {"repetition_penalty": 1.2}]
    kinds = [*KINDS.values(), *more]
    several = [
        SamplingParams(seed=i, max_tokens=60, temperature=0.7, **{"ignore_eos": True} | kind)
        for i, kind in enumerate(kinds)
    ]
    wanted = llm.chat([chat] * len(kinds), several)
    with LLM("tiny", speculate="lookup", speculate_always=True) as guessing:
        found = guessing.chat([chat] * len(kinds), several)
        assert guessing.stats().drafted_tokens > 50
    same = sum(one.token_ids == other.token_ids for one, other in zip(found, wanted, strict=True))
    assert same >= len(kinds) - 1  # logits of a pass over several tokens differ in their last bits


def test_company_changes_nothing(llm, reference):
    """Greedy requests with different options give the same texts together and one after another."""
    questions = ["What is the capital of France?", "Tell me a story about a fox.", "What is 12 + 7?"]
    kinds = [
        {}, {"bad_words": ["the", "fox"]}, {"min_tokens": 20}, {"stop_token_ids": [16]}, {"dry_multiplier": 2.0},
        {"logits_processors": [lambda token_ids, logits: logits - 3 * (len(token_ids) % 2) * (logits > 10)]},
        {"allowed_token_ids": range(200, 700)}, {"presence_penalty": 1.0, "logit_bias": {300: 2.0}},
    ]  # fmt: skip
    chats = [[{"role": "user", "content": question}] for question in questions for _ in kinds]
    several = [SamplingParams(temperature=0, max_tokens=32, **kind) for _ in questions for kind in kinds]
    together, alone = llm.chat(chats, several), reference.chat(chats, several)
    assert all(out.error is None for out in (*together, *alone))
    same = sum(one.token_ids == other.token_ids for one, other in zip(together, alone, strict=True))
    assert same >= len(chats) - 1
