"""row_ladder on the CPU, which llama.cpp treats like any other device: texts and bits stay, and graphs are reused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llamabatch import LLM, ConfigError, SamplingParams
from llamabatch.llama import library
from llamabatch.llama.context import Context

OPTIONS = {"n_slots": 8, "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "profile": False, "start_slots": 8}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
LENGTHS = (6, 30, 12, 24, 18, 9, 27, 15)


@pytest.fixture
def reused(monkeypatch):
    """A list that gets, for each closed context, the number of decodes that reused the last graph."""
    close, counts = Context.close, []

    def counted(self):
        if self.handle:
            counts.append(library.load().llama_perf_context(self.handle).n_reused)
        close(self)

    monkeypatch.setattr(Context, "close", counted)
    return counts


def made(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(output.token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attn": "off"},  # passes then have equal counts in neighbouring slots, as on GPUs
        {"batch_invariant": True},
        {"device_sampling": "on", "flash_attn": "off"},
        {"type_k": "q8_0", "type_v": "q8_0"},
        {"cache_prefix": False, "flash_attn": "off", "strategy": "static"},
    ],
    ids=str,
)
def test_more_steps_compute_the_last_graph_again_and_no_bit_changes(reused, options):
    params = [replace(GREEDY, max_tokens=length) for length in LENGTHS]
    prompts = [f"Number {n}:" for n in range(len(LENGTHS))]
    found, steps, dummies = [], [], []
    for row_ladder in ("off", "on"):
        with LLM("tiny", **{**OPTIONS, **options, "row_ladder": row_ladder}) as llm:
            found.append(made(llm.generate(prompts, params, progress=False)))
            stats = llm.stats()
            dummies.append(stats.dummy_rows)
            assert stats.decode_passes == stats.decode_calls
            steps.append(stats.decode_calls)
    assert found[0] == found[1]
    assert dummies[0] < dummies[1]
    assert reused[0] <= steps[0] - 7
    assert reused[1] >= steps[1] - 2


def test_prefixes_prompt_logprobs_scores_and_samplers_beside_dummy_rows():
    """Cells of earlier turns stay in slots that get dummy rows. Requests of every kind run meanwhile."""
    rng = random.Random(3)
    params = [
        SamplingParams(
            max_tokens=rng.randrange(1, 24), ignore_eos=True, seed=n, logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]), temperature=rng.choice([0.0, 0.9]),
            frequency_penalty=rng.choice([0.0, 0.5]), n=rng.choice([1, 1, 2]),
        )
        for n in range(20)
    ]  # fmt: skip
    head = 3 * "You are a helpful assistant that answers in one short sentence. "
    found = []
    for row_ladder in ("off", "on"):
        with LLM("tiny", **OPTIONS, flash_attn="off", row_ladder=row_ladder, cache_prefix=True) as llm:
            texts = []
            for turn in range(3):
                prompts = [f"{head}Question {n}. " + "And then? " * turn for n in range(len(params))]
                outputs = llm.generate(prompts, params, progress=False)
                assert [output.error for output in outputs] == [None] * len(outputs)
                texts += [[one.text for one in output.outputs] for output in outputs]
                texts.append([each.logprob for each in llm.score(prompts[0], [" Yes.", " No."])])
            found.append((texts, llm.stats().prefix_hits > 0))
    assert found[0] == found[1]
    assert found[1][1]


def test_what_cannot_be_padded_is_refused():
    with pytest.raises(ConfigError, match="row_ladder is 'on', but speculate is 'lookup'"):
        LLM("tiny", row_ladder="on", speculate="lookup")
    with pytest.raises(ConfigError, match="row_ladder is 'on', but kv is 'unified'"):
        LLM("tiny", row_ladder=True, kv="unified")
    with pytest.raises(ConfigError, match=r"row_ladder is 'maybe' \(known: auto, on, off\)"):
        LLM("tiny", row_ladder="maybe")
