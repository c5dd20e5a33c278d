"""On CPUs with AMX, rows of prompts have kernels of their own. Their bits do not depend on other rows, and are near to
those of the usual kernels."""

import numpy as np
import pytest

from benchmarks.equal_bits import Digests
from llamabatch import LLM, Engine, EngineConfig, Request, SamplingParams
from llamabatch.llama import library
from tests.model.conftest import MAX_GAP, questions

OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "strategy": "batched", "n_slots": 2, "trial": "off"}
PROMPT = " ".join(questions()[:6])


@pytest.mark.skipif("prompts" not in library.repack_features(), reason="no AMX, or a build without 0020")
def test_prompts_have_kernels_of_their_own_unless_all_rows_are_to_be_alike():
    asks = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for promised in (False, True):
        with LLM("tiny", instances=1, batch_invariant=promised, **OPTIONS) as llm:
            rows = llm.generate(PROMPT, asks)[0].prompt_logprobs[1:]
            found.append(np.array([next(iter(row.values())).logprob for row in rows]))
    assert np.any(found[0] != found[1])
    assert np.median(np.abs(found[0] - found[1])) < MAX_GAP / 2


def test_a_prompt_has_the_same_bits_in_one_pass_and_in_many():
    """More than 32 rows have a SwiGLU together with its products (0024), fewer rows have it after them."""
    asks = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for rows in (16, 512):
        with LLM("tiny", instances=1, n_batch=rows, n_ubatch=rows, **OPTIONS) as llm:
            found.append(
                [next(iter(each.values())).logprob for each in llm.generate(PROMPT, asks)[0].prompt_logprobs[1:]]
            )
    assert len(found[0]) > 32
    assert found[0] == found[1]


def test_what_is_computed_again_after_a_preemption_has_its_bits_again():
    """Prompt tokens use the kernels of prompts again, and generated tokens use those of generated rows."""

    def run(preempted_after):
        rows = Digests()
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logits_processors=[rows])
        with Engine(EngineConfig("tiny", cache_prefix=False, cache_ram=0, **OPTIONS)) as engine:
            engine.add(Request("one", tuple(engine.model.tokenize(PROMPT)), params))
            for step in range(200):
                if step == preempted_after:
                    engine._scheduler._preempt(engine._scheduler.running[0])
                engine.step()
                if not engine.has_work:
                    break
            return rows.rows, engine.stats().preemptions

    (expected, none), (found, once) = run(None), run(14)
    assert (none, once) == (0, 1)
    assert len(expected) == 24
    assert found == expected
