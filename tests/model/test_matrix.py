"""With all features in flight at once, each request gives the same output as alone."""

import contextlib
import random
import threading

import numpy as np
import pytest

from llamabatch import LLM, SamplingError, SamplingParams
from tests.model.adapter_files import write_control_vector, write_lora
from tests.model.conftest import MAX_GAP, questions

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
GREEDY = {"temperature": 0, "max_tokens": 24}


def never_the_letter_e(token_ids, logits):
    logits[5 + len(token_ids) % 3] = float("-inf")
    return logits


# Options of requests. Each entry is tried alone and combined with another one.
FEATURES = [
    {},
    {"n": 3, "temperature": 0.9},
    {"n": 1, "best_of": 3, "temperature": 1.0},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.8, "typical_p": 0.7},
    {"temperature": 0.8, "top_n_sigma": 1.0},
    {"temperature": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"temperature": 0.9, "mirostat": 1},
    {"temperature": 0.9, "mirostat": 2, "mirostat_tau": 3.0},
    {"temperature": 0.7, "dynatemp_range": 0.5},
    {"dry_multiplier": 0.8},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"logit_bias": {40: 3.0, 41: -3.0}},
    {"bad_words": ["the", "Paris"]},
    {"allowed_token_ids": list(range(20, 400))},
    {"min_tokens": 12, "stop": ["a", "e"]},
    {"stop": [" is", "t "], "include_stop_str_in_output": True},
    {"stop_token_ids": [32, 40, 50, 60]},
    {"ignore_eos": True, "skip_special_tokens": False},
    {"logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 2},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps not"]}},
    {"logits_processors": [never_the_letter_e]},
    {"priority": -1},
    {"background": True},
    {"deadline_s": 600.0},
]


# Adapters of requests. Most requests have none.
ADAPTERS = [None, None, None, None, {"lora": 1.0}, {"lora": 0.5, "vector": 1.0}]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, reference):
    """Adapter files by name. The reference has also loaded them."""
    folder = tmp_path_factory.mktemp("adapters")
    files = {
        "lora": write_lora(folder / "lora.gguf", seed=1, size=0.5),
        "vector": write_control_vector(folder / "vector.gguf", seed=2, size=4.0),
    }
    for name, path in files.items():
        reference.load_adapter(name, path)
    yield files
    for name in files:
        reference.unload_adapter(name)


def requests(n: int, seed: int) -> list[tuple[str, SamplingParams, dict[str, float] | None]]:
    """Returns requests with every feature alone, and then with pairs of features, on prompts of all lengths. They are
    greedy unless a feature has a temperature."""
    rng, others, asked = random.Random(seed), random.Random(seed + 1), questions()
    chosen = []
    for i in range(n):
        options = FEATURES[i % len(FEATURES)]
        if i >= len(FEATURES):
            with contextlib.suppress(SamplingError):  # a few pairs contradict each other
                SamplingParams(**(both := {**rng.choice(FEATURES), **options}))
                options = both
        prompt = " ".join(rng.choice(asked) for _ in range(rng.choice([1, 1, 2, 6])))
        chosen.append((prompt, SamplingParams(**{**GREEDY, "seed": i, **options}), others.choice(ADAPTERS)))
    return chosen


def same(one, other) -> bool:
    """Returns True if all continuations have the same tokens, texts and reasons, and nearly the same logprobs, whose
    rounding depends on the shape of the batch."""
    for a, b in zip(one.outputs, other.outputs, strict=True):
        if (a.token_ids, a.text, a.finish_reason, a.stop_reason) != (
            b.token_ids,
            b.text,
            b.finish_reason,
            b.stop_reason,
        ):
            return False
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert next(iter(x)) == next(iter(y))
            assert next(iter(x.values())).logprob == pytest.approx(next(iter(y.values())).logprob, abs=MAX_GAP)
    assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    return True


def together(llm: LLM, asked: list) -> tuple[list, list]:
    """Runs the requests from four threads, each with a part of the list, so that lists, streams and priorities mix. A
    fifth thread asks for vectors of the prompts. Returns outputs and vectors."""
    results: list = [None] * len(asked)
    vectors: list = []

    def part(start: int) -> None:
        indices = range(start, len(asked), 4)
        prompts, params, adapters = zip(*(asked[i] for i in indices), strict=True)
        outputs = llm.generate(list(prompts), list(params), adapters=list(adapters))
        for i, output in zip(indices, outputs, strict=True):
            results[i] = output

    threads = [threading.Thread(target=part, args=(start,)) for start in range(4)]
    threads.append(threading.Thread(target=lambda: vectors.extend(llm.embed([prompt for prompt, _, _ in asked]))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, vectors


@pytest.mark.parametrize(
    "options",
    [
        {"n_slots": 12},
        {"n_slots": 8, "kv": "unified", "kv_cells": 2048},
        {"n_slots": 6, "prefill_budget": 32, "cache_prefix": False, "preempt": True},
        {"n_slots": 8, "speculate": "lookup"},
        {"n_slots": 8, "speculate": "lookup", "speculate_always": True},
        {"n_slots": 8, "speculate": "draft", "draft_model": "tiny", "speculate_always": True, "n_threads_batch": 1},
    ],
    ids=["split", "unified", "small chunks", "speculating", "always", "drafting"],
)
def test_every_request_gives_what_it_gives_alone(reference, adapters, options):
    asked = requests(70, seed=len(options))
    alone = [reference.generate([prompt], params, adapters=which)[0] for prompt, params, which in asked]
    with LLM("tiny", n_ctx=512, instances=1, strategy="batched", adapters=adapters, **options) as llm:
        mixed, vectors = together(llm, asked)
        assert llm.stats().adapter_switches > 2
    assert [output.error for output in mixed] == [output.error for output in alone] == [None] * len(asked)
    differing = [i for i, (one, other) in enumerate(zip(mixed, alone, strict=True)) if not same(one, other)]
    # 99.8 to 100 % of greedy texts are equal, and about as many sampled ones; there are many continuations here
    assert len(differing) <= 2, [(asked[i][1], mixed[i].outputs, alone[i].outputs) for i in differing]
    units = reference.embed([prompt for prompt, _, _ in asked], normalize=True)
    for vector, unit in zip(vectors, units, strict=True):
        assert float(vector @ unit) > 0.9999 * float(np.linalg.norm(vector))
