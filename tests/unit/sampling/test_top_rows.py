"""The most likely tokens of a row give the same token as the whole row."""

import types
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.config import DEVICE_TOP
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling.defaults import fill
from llamabatch.sampling.prepared_params import PreparedParams
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, sample_rows
from llamabatch.sampling.top_rows import TopRows, is_enough

REQUEST = Request("a", (1, 2), SamplingParams())


def top_rows(logits: np.ndarray, rng: np.random.Generator) -> TopRows:
    """Returns rows as a device does: in no order, and with any of the equal logits at the border."""
    shuffled = np.stack([rng.permutation(logits.shape[1]) for _ in logits])
    order = np.argsort(-np.take_along_axis(logits, shuffled, 1), axis=1, kind="stable")[:, :DEVICE_TOP]
    ids = np.take_along_axis(shuffled, order, 1).astype(np.int32)
    return TopRows(ids, np.take_along_axis(logits, ids, 1))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([1, 2, 5, 20, 40, 63, 64]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    n_vocab=st.sampled_from([66, 100, 1120, 5000]),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    steps=st.sampled_from([0.0, 0.25, 2.0]),
    params=st.lists(PARAMS, min_size=1, max_size=4),
)
@pytest.mark.usefixtures("implementation")
def test_sampled_tokens_are_those_of_whole_rows(seed, n_vocab, spread, steps, params):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (len(params), n_vocab)).astype(np.float32)
    if steps:  # many logits are equal
        logits = (np.round(logits / steps) * steps).astype(np.float32)
    states = [SamplerState(each, seed + i, index=i) for i, each in enumerate(params)]
    assert all(is_enough(REQUEST, state) for state in states)
    top = top_rows(logits, rng)
    expected = sample_rows(logits, states)
    found = top.sample(states, 1)
    for i, state in enumerate(states):
        assert found[i] == expected[i] or top[i : i + 1].is_ambiguous([state])
    if not steps:
        assert not top.is_ambiguous(states)


@pytest.mark.usefixtures("implementation")
def test_equal_logits_at_the_border_show():
    logits = np.zeros((1, 200), np.float32)
    logits[0, :30] = 1
    ties = top_rows(logits, np.random.default_rng(1))
    assert not ties.is_ambiguous([SamplerState(SamplingParams(top_k=30, temperature=1.0), 1)])
    assert ties.is_ambiguous([SamplerState(SamplingParams(top_k=31, temperature=1.0), 1)])
    assert not ties.is_ambiguous([SamplerState(SamplingParams(temperature=0), 1)])


@pytest.mark.usefixtures("implementation")
def test_rows_that_are_no_numbers_are_looked_at_whole():
    rows = TopRows(np.arange(DEVICE_TOP, dtype=np.int32)[None], np.full((1, DEVICE_TOP), np.nan, np.float32))
    states = [SamplerState(SamplingParams(temperature=0), 1)]
    assert rows.is_ambiguous(states)
    assert rows.sample(states, 1) == [NO_TOKEN]


def test_a_dictated_token_takes_the_place_of_the_sampled_one():
    states = [SamplerState(SamplingParams(temperature=0), 1)]
    states[0].dictated = 7
    assert top_rows(np.zeros((1, 80), np.float32), np.random.default_rng(0)).sample(states, 1) == [7]


class Words:
    n_vocab = 100
    metadata = types.MappingProxyType({})
    eog_ids = (0,)

    def tokenize(self, text, *, add_special=True, parse_special=False):
        return [5]

    def token_bytes(self, token_id):
        return b"a"


def enough(request: Request = REQUEST, **params) -> bool:
    given = SamplingParams(**params)
    prepared = PreparedParams(fill(given), Words())
    request = replace(request, params=prepared.params)
    return is_enough(request, prepared.sampler_state(request))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"temperature": 0, "top_k": 0},
        {"top_k": 64, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 1, "stop": ["a"], "ignore_eos": True, "seed": 3},
    ],
)
def test_the_likeliest_tokens_are_enough(params):
    assert enough(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 0},
        {"top_k": 65},
        {"top_k": 0, "top_p": 0.9},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "temperature": 0},
        {"frequency_penalty": 0.5},
        {"min_tokens": 3},
        {"bad_words": ["x"]},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"mirostat": 2},
        {"typical_p": 0.9},
        {"top_n_sigma": 1.0},
        {"xtc_probability": 0.5},
        {"dynatemp_range": 0.3},
        pytest.param({"logits_processors": [lambda ids, logits: logits]}, id="logits_processors"),
        {"structured_outputs": {"regex": "a+"}},
    ],
    ids=str,
)
def test_the_whole_row_is_needed(params):
    assert not enough(**params)


def test_scores_and_ranks_need_the_whole_row():
    assert not enough(replace(REQUEST, score_from=1))
    assert not enough(replace(REQUEST, ranked=True))
