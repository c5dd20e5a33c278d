"""The sampler, compiled and in numpy, compared with a plain reading of the rules that sorts everything."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling import numpy_sampler
from llamabatch.sampling.numpy_sampler import uniform
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, distribution, sample_rows
from llamabatch.sampling.token_counts import TokenCounts

pytestmark = pytest.mark.usefixtures("implementation")

EVERYTHING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def plain_values(row: np.ndarray, draw: SamplerState) -> list[float]:
    """Applies bias, then repetition, frequency and presence penalty as vLLM and OpenAI define them, then the masks."""
    params, values = draw.params, [float(x) for x in row]
    for i, bias in params.biases:
        values[i] += bias
    if draw.counts is not None:
        for i, count in zip(draw.counts.ids, draw.counts.counts, strict=True):
            penalty = params.repetition_penalty
            values[i] = values[i] / penalty if values[i] > 0 else values[i] * penalty
            values[i] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    for i in range(len(values)):
        by_mask = draw.mask is not None and not draw.mask[i // 32] >> (i % 32) & 1
        if by_mask or (params.allowed_ids is not None and i not in params.allowed_ids):
            values[i] = -math.inf
    return values


def plain(row: np.ndarray, draw: SamplerState) -> dict[int, float]:
    """Applies top_k, top_p and min_p to untempered probabilities, then temperature, all in float64."""
    params, values = draw.params, plain_values(row, draw)
    ids = sorted((i for i in range(len(row)) if values[i] > -math.inf), key=lambda i: (-values[i], i))
    if 0 < params.top_k < len(row):
        ids = ids[: params.top_k]
    top = values[ids[0]]
    weights = [math.exp(values[i] - top) for i in ids]
    probabilities = [w / math.fsum(weights) for w in weights]
    keep, total = len(ids), 0.0
    if params.top_p < 1:
        for n, p in enumerate(probabilities, 1):
            total += p
            if total >= params.top_p:
                keep = n
                break
    if params.min_p > 0:
        keep = min(keep, sum(p >= params.min_p * probabilities[0] for p in probabilities))
    ids = ids[: max(keep, 1)]
    tempered = [math.exp((values[i] - top) / params.temperature) for i in ids]
    return {i: t / math.fsum(tempered) for i, t in zip(ids, tempered, strict=True)}


def as_dict(row: np.ndarray, draw: SamplerState) -> dict[int, float]:
    ids, probabilities = distribution(row, draw)
    assert ids.tolist() == sorted(ids.tolist())
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def counts_of(prompt, output) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.add(token_id)
    return counts


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 7, 300, 5000]),
    spread=st.sampled_from([0.1, 3.0, 20.0]),
    top_k=st.sampled_from([0, -1, 1, 5, 40, 3000, 10**6]),
    top_p=st.sampled_from([0.0, 0.3, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    edits=st.booleans(),
)
def test_distribution_is_the_plain_one(seed, size, spread, top_k, top_p, min_p, temperature, edits):
    rng = np.random.default_rng(seed)
    row = rng.normal(0, spread, size).astype(np.float32)
    params, counts, mask = {}, None, None
    if edits:
        some = rng.integers(0, size, 5).tolist()
        params = {
            "logit_bias": {i: float(np.float32(rng.normal(0, 3))) for i in some},
            "repetition_penalty": 1.25,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
        }
        counts = counts_of(rng.integers(0, size, 6).tolist(), some * 2)
        mask = rng.integers(0, 2**32, (size + 31) // 32, dtype=np.uint32) | np.uint32(1)
    draw = SamplerState(
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, **params), 0, 0, counts, mask
    )
    wanted, got = plain(row, draw), as_dict(row, draw)
    # if a sum is as near to top_p, or a value to min_p, as float32 rounds, one token more or fewer may be left
    assert len(got.keys() ^ wanted.keys()) <= 1
    if got.keys() == wanted.keys():
        assert got == pytest.approx(wanted, abs=1e-5)


@given(st.integers(0, 2**32))
def test_ties_go_to_the_lower_id(seed):
    row = np.random.default_rng(seed).integers(0, 3, 400).astype(np.float32)
    row[row == 0] *= np.float32(-1)  # minus zero must count as zero
    wanted = sorted(range(400), key=lambda i: (-row[i], i))[:10]
    assert set(as_dict(row, SamplerState(SamplingParams(top_k=10, top_p=1.0, min_p=0.0), 0))) == set(wanted)
    assert sample_rows(row[None], [SamplerState(SamplingParams(temperature=0), 0)]) == [wanted[0]]


def test_same_row_and_seed_give_the_same_token_in_any_company():
    rows = np.random.default_rng(1).normal(0, 3, (96, 3000)).astype(np.float32)
    draws = [SamplerState(SamplingParams(temperature=1.5), seed=i, index=i) for i in range(96)]
    together = sample_rows(rows, draws)
    alone = [sample_rows(rows[i : i + 1].copy(), [draws[i]])[0] for i in range(96)]
    assert together == alone
    assert sample_rows(rows[::-1], draws[::-1])[::-1] == together
    assert sample_rows(rows, draws, n_threads=2) == together


def test_draws_follow_the_probabilities():
    row = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    draw = SamplerState(SamplingParams(temperature=1.0, **EVERYTHING), 7)
    drawn = []
    for draw.index in range(20_000):
        drawn += sample_rows(row, [draw])
    assert np.bincount(drawn, minlength=4) / 20_000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)


def test_uniform_is_splitmix64():
    # the generator's published first output for state 0 is 0xE220A8397B1DCDAF
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53
    assert uniform(2**64 - 1, 10**9) < 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_touch_their_own_row_only(bad, temperature):
    rows = np.zeros((5, 500), np.float32)
    rows[:, 3] = 30
    rows[[1, 2, 4], [0, 100, 499]] = bad
    params = SamplingParams(temperature=temperature)
    assert sample_rows(rows, [SamplerState(params, 1)] * 5) == [3, NO_TOKEN, NO_TOKEN, 3, NO_TOKEN]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 0}, {"temperature": 1.0, **EVERYTHING}])
def test_rows_without_any_token_that_may_come(params):
    row = np.full((1, 300), -np.inf, np.float32)
    assert sample_rows(row, [SamplerState(SamplingParams(**params), 1)]) == [NO_TOKEN]
    draw = SamplerState(SamplingParams(**params), 1, mask=np.zeros(10, np.uint32))
    assert sample_rows(np.zeros_like(row), [draw]) == [NO_TOKEN]
    assert not len(distribution(row[0], draw)[0])


def test_logits_of_minus_infinity_are_never_drawn():
    row = np.full((1, 1000), -np.inf, np.float32)
    row[0, [5, 9]] = 1.0
    params = SamplingParams(temperature=1.0, **EVERYTHING)
    assert {sample_rows(row, [SamplerState(params, 3, i)])[0] for i in range(100)} == {5, 9}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_and_a_list_of_allowed_tokens_do_what_they_say(temperature):
    row = np.random.default_rng(0).normal(0, 1, (1, 70)).astype(np.float32)

    def tokens(**params):
        params = SamplingParams(temperature=temperature, **EVERYTHING, **params)
        return {sample_rows(row, [SamplerState(params, 1, i)])[0] for i in range(200)}

    assert tokens(logit_bias={69: 100}) == {69}
    best = int(row.argmax())
    assert best not in tokens(logit_bias={best: -100})
    assert tokens(allowed_token_ids=[3, 64]) <= {3, 64}
    assert tokens(allowed_token_ids=[3, 64], logit_bias={5: 100}) <= {3, 64}


def test_both_masks_count():
    mask = np.array([0b0110, 0], np.uint32)
    draw = SamplerState(SamplingParams(allowed_token_ids=[2, 3]), 1, mask=mask)
    assert sample_rows(np.zeros((1, 40), np.float32), [draw]) == [2]


def test_ids_beyond_the_vocabulary_are_ignored():
    params = SamplingParams(temperature=0, logit_bias={10: 100.0}, presence_penalty=2.0, allowed_token_ids=[2, 99])
    draw = SamplerState(params, 1, counts=counts_of([], [1, 2**30]))
    assert sample_rows(np.zeros((1, 10), np.float32), [draw]) == [2]


def test_logits_stay_as_they_were():
    rows = np.random.default_rng(0).normal(0, 1, (4, 5000)).astype(np.float32)
    before = rows.copy()
    rows.flags.writeable = False
    params = SamplingParams(logit_bias={3: 5.0}, repetition_penalty=2.0, allowed_token_ids=list(range(100)))
    sample_rows(rows, [SamplerState(params, i, counts=counts_of([1, 2], [3])) for i in range(4)])
    assert (rows == before).all()


def test_the_numpy_exponential_is_one():
    values = -np.random.default_rng(0).uniform(0, 20, 10_000).astype(np.float32)
    values[0] = 0
    got = numpy_sampler.weights_of(values, np.float32(0)) / 2.0**33
    assert got == pytest.approx(np.exp(values.astype(np.float64)), rel=3e-7, abs=2.0**-33)
    assert got[0] == 1
