"""Parameters through a loaded model: its own defaults, functions of the caller, and values that no field takes."""

import numpy as np
import pytest

from llamabatch import LLM, FinishReason, SamplingError, SamplingParams
from tests.model.architectures import write
from tests.unit.request.test_sampling_params import BAD_VALUES

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        yield llm


def test_300_bad_values_are_refused_and_the_engine_goes_on(llm):
    params = SamplingParams(temperature=0, max_tokens=5)
    before = llm.generate("Hello", params)[0].token_ids
    for name, value in BAD_VALUES:
        if name == "logprobs" and value is True:  # in a mapping it is OpenAI's way to ask for them
            continue
        with pytest.raises(SamplingError, match=name):
            llm.generate("Hello", {name: value})
    assert llm.generate("Hello", params)[0].token_ids == before


def test_a_processor_of_one_request_touches_no_other(llm):
    def ban_evens(token_ids, logits):
        logits[::2] = -np.inf
        return logits

    def fail_later(token_ids, logits):
        if len(token_ids) == 3:
            raise RuntimeError("three is enough")
        return logits

    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    several = [
        plain,
        *(
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processors=[f])
            for f in (ban_evens, fail_later)
        ),
    ]
    first, odd, failed = llm.chat([CHAT] * 3, several, errors="return")
    assert first.error is None
    assert all(token_id % 2 for token_id in odd.token_ids)
    assert failed.finish_reason is FinishReason.ERROR
    assert "fail_later raised RuntimeError: 'three is enough'" in failed.error
    assert failed.token_ids == first.token_ids[:3]


def test_functions_are_refused_where_a_child_does_the_work(llm):
    params = SamplingParams(max_tokens=2, logits_processors=[lambda _, logits: logits])
    with LLM("tiny", isolate=True) as child:
        refused, fine = child.generate(["Hello", "Hello"], [params, SamplingParams(max_tokens=2)], errors="return")
    assert "logits_processors" in refused.error
    assert fine.error is None


def test_a_model_advises_what_the_request_leaves_open(tmp_path):
    says = {"general__sampling__temp": 0.0, "general__sampling__penalty_repeat": 50.0}
    paths = [write("llama", tmp_path / "plain.gguf"), write("llama", tmp_path / "advises.gguf", **says)]
    texts = []
    for path in paths:
        with LLM(path, n_ctx=256) as llm:
            own = {"max_tokens": 12, "ignore_eos": True}
            greedy = SamplingParams(**own, temperature=0, repetition_penalty=1.0)
            silent = [SamplingParams(**own, seed=seed) for seed in range(4)]
            explicit, *left_open = [out.token_ids for out in llm.generate([[5, 6, 7]] * 5, [greedy, *silent])]
            texts.append((explicit, left_open))
    (greedy, drawn), (greedy_too, advised) = texts
    assert greedy == greedy_too
    assert len(set(drawn)) == 4  # 0.8 where the file says nothing
    assert len(set(advised)) == 1  # temperature 0, whatever the seed
    assert advised[0] != greedy or len(set(greedy)) == len(greedy)
    assert len(set(advised[0])) == 12, "the file's penalty holds: no token comes twice"
