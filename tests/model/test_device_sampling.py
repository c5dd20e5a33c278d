"""device_sampling on the CPU, which llama.cpp treats like any other device."""

import random

import pytest

from llamabatch import LLM, ConfigError, SamplingParams
from llamabatch.llama import context as contexts
from llamabatch.llama import model_runner
from llamabatch.llama.context import Context
from llamabatch.sampling.top_rows import TopRows

OPTIONS = {"n_slots": 4, "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "profile": False, "start_slots": 4}
PROMPTS = [f"The capital of {name} is" for name in ("France", "Spain", "Italy", "Peru", "Chad", "Japan", "Cuba")]
PROMPTS += ["Write a story about a fox.", "2 + 2 =", 'Give a JSON record of a person: {"name":']


@pytest.fixture
def rows(monkeypatch):
    """A list that gets the kind of rows of each read: "top" or "whole"."""
    read, kinds = Context.rows, []

    def noted(self, n_rows):
        found = read(self, n_rows)
        kinds.append("top" if isinstance(found, TopRows) else "whole")
        return found

    monkeypatch.setattr(Context, "rows", noted)
    return kinds


@pytest.fixture(scope="module")
def plain():
    with LLM("tiny", **OPTIONS) as llm:
        assert llm.plan.config.device_sampling == "off"
        yield llm


@pytest.fixture
def sampling():
    with LLM("tiny", **OPTIONS, device_sampling="on") as llm:
        yield llm


def many_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=24,
        ignore_eos=True,
        seed=rng.getrandbits(32),
        temperature=rng.choice([0, 0.3, 0.8, 1.5, 3.0]),
        top_k=rng.choice([1, 3, 40, 64]),
        top_p=rng.choice([0.3, 0.95, 1.0]),
        min_p=rng.choice([0.0, 0.05, 0.3]),
    )


def tokens(llm, prompts, params):
    outputs = llm.generate(prompts, params, progress=False)
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def test_tokens_are_those_of_whole_rows(plain, sampling, rows):
    rng = random.Random(4)
    prompts = PROMPTS * 4
    params = [many_params(rng) for _ in prompts]
    found = tokens(sampling, prompts, params)
    assert set(rows) == {"top"}
    assert found == tokens(plain, prompts, params)
    assert len(set(found)) > len(PROMPTS)


def test_requests_that_need_whole_rows_get_them_in_any_company(plain, sampling, rows):
    whole = [
        SamplingParams(max_tokens=12, logprobs=2, seed=1),
        SamplingParams(max_tokens=12, top_k=0, top_p=0.9, seed=2),
        SamplingParams(max_tokens=12, repetition_penalty=1.3, seed=3),
        SamplingParams(max_tokens=12, logit_bias={5: 4.0}, temperature=0),
        SamplingParams(max_tokens=12, structured_outputs={"regex": "[a-z ]{3,20}"}, seed=4),
        SamplingParams(max_tokens=2, prompt_logprobs=1, temperature=0),
    ]
    params = [*whole, *[SamplingParams(max_tokens=90, ignore_eos=True, seed=i) for i in range(4)]]
    ours, theirs = sampling.generate(PROMPTS, params, progress=False), plain.generate(PROMPTS, params, progress=False)
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
    assert ours[0].outputs[0].logprobs == theirs[0].outputs[0].logprobs
    assert ours[5].prompt_logprobs == theirs[5].prompt_logprobs
    assert "whole" in rows
    assert sampling.score(PROMPTS[0], [" Paris", " Rome"]) == plain.score(PROMPTS[0], [" Paris", " Rome"])


def test_the_device_samples_again_once_no_request_needs_whole_rows(sampling, rows):
    tokens(sampling, PROMPTS[:2], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1))
    assert set(rows) == {"whole"}
    rows.clear()
    n = model_runner.CALLS_UNTIL_TOP + 10
    tokens(sampling, PROMPTS[:1], SamplingParams(max_tokens=n, ignore_eos=True, temperature=0))
    assert rows == ["whole"] * (n - 11) + ["top"] * 11


def test_a_tie_at_the_border_is_computed_again_with_whole_rows(plain, sampling, rows, monkeypatch):
    ties = iter([False, False, True])
    monkeypatch.setattr(TopRows, "is_ambiguous", lambda self, states: next(ties, False))
    params = [SamplingParams(max_tokens=10, ignore_eos=True, seed=i) for i in range(4)]
    found = tokens(sampling, PROMPTS[:4], params)
    assert rows[:4] == ["top", "top", "top", "whole"]
    assert found == tokens(plain, PROMPTS[:4], params)


def test_logits_that_stayed_on_the_device_are_not_handed_out(sampling, rows, monkeypatch):
    monkeypatch.setattr(Context, "rows", Context.logits)
    [output] = sampling.generate(PROMPTS[:1], SamplingParams(max_tokens=3), errors="return", progress=False)
    assert "still on the device" in output.error


def test_a_device_without_the_operation_returns_whole_rows(plain, rows, monkeypatch):
    def init(lib):
        return lambda k: lib.llama_sampler_init_typical(0.9, 1)  # no device has an operation for this sampler

    class Library:
        def __init__(self, lib):
            self._lib = lib

        def __getattr__(self, name):
            return init(self._lib) if name == "llama_sampler_init_top_k" else getattr(self._lib, name)

    lib = contexts.library.load()
    monkeypatch.setattr(contexts.library, "load", lambda *measured: Library(lib))
    params = [SamplingParams(max_tokens=10, ignore_eos=True, seed=i) for i in range(4)]
    with LLM("tiny", **OPTIONS, device_sampling="on") as llm:
        found = tokens(llm, PROMPTS[:4], params)
    assert set(rows) == {"whole"}
    assert found == tokens(plain, PROMPTS[:4], params)


@pytest.mark.parametrize("missing", ["llama_set_sampler", "samplers"])
def test_a_binding_that_cannot_is_refused_by_name(missing, monkeypatch):
    lib = contexts.library.load()
    if missing == "samplers":
        fields = [field for field in lib.llama_context_params._fields_ if field[0] != "samplers"]
        params = type("llama_context_params", (), {"_fields_": fields})
        monkeypatch.setattr(lib, "llama_context_params", params)
    else:
        monkeypatch.delattr(lib, missing)
    with pytest.raises(ConfigError, match=f"device_sampling is 'on', but this binding of llama.cpp has no {missing}"):
        LLM("tiny", **OPTIONS, device_sampling="on")


def test_a_context_that_grows_goes_on(plain):
    options = {**OPTIONS, "start_slots": 1}
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=i) for i in range(10)]
    with LLM("tiny", **options, device_sampling="on") as llm:
        assert tokens(llm, PROMPTS, params) == tokens(plain, PROMPTS, params)


def test_isolated_and_unified_engines_sample_alike(plain):
    params = [SamplingParams(max_tokens=20, seed=i, temperature=0) for i in range(10)]
    with LLM("tiny", **OPTIONS, device_sampling=True, isolate=True, kv="unified", kv_cells=1024) as llm:
        assert llm.plan.config.device_sampling == "on"
        assert tokens(llm, PROMPTS, params) == tokens(plain, PROMPTS, params)


def test_options_that_exclude_it():
    with pytest.raises(ConfigError, match="device_sampling is 'on', but speculate is 'lookup'"):
        LLM("tiny", **OPTIONS, device_sampling="on", speculate="lookup")
    with pytest.raises(ConfigError, match="device_sampling is 'maybe'"):
        LLM("tiny", **OPTIONS, device_sampling="maybe")
