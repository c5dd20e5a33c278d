"""The uncommon samplers: the state that they store, what they leave unchanged, and that rows stay independent."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.request.samplers import CHAIN, is_off
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling import native, numpy_sampler, sampler_chain
from llamabatch.sampling.defaults import fill
from llamabatch.sampling.dry import DryPenalty
from llamabatch.sampling.infill import Infill
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, distribution, sample_rows
from llamabatch.sampling.sampler_chain import Chain
from llamabatch.sampling.token_counts import token_counts

RARE = [
    {"typical_p": 0.5}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.5}, {"mirostat": 1}, {"mirostat": 2},
    {"dynatemp_range": 0.5}, {"dry_multiplier": 0.8},
]  # fmt: skip


def rows(n, size=300, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (n, size)).astype(np.float32)


@given(
    st.sampled_from([50, 700, 5000]), st.integers(0, 2**32), st.sampled_from([0, 1, 40, 300]),
    st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from([0.0, 0.1]), st.sampled_from([0.5, 1.3]),
)  # fmt: skip
def test_with_common_parameters_it_gives_what_the_common_samplers_give(size, seed, top_k, top_p, min_p, temperature):
    row = rows(1, size, seed)[0]
    params = fill(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature))
    draw = SamplerState(params, seed)
    assert draw.chain is None
    ids, weights = Chain(params).candidates(row, draw)
    wanted_ids, wanted_weights = numpy_sampler.candidates(row, draw)
    assert (ids.tolist(), weights.tolist()) == (wanted_ids.tolist(), wanted_weights.tolist())
    assert Chain(params).sample(row, draw) == sample_rows(row[None], [draw])[0]


@pytest.mark.skipif(not native.available(), reason="compares the compiled helper with numpy")
def test_rows_of_all_kinds_share_a_call_and_none_sees_another(monkeypatch):
    logits, kinds = rows(16), [*RARE, {}]
    logits.flags.writeable = False

    def draws():
        made = [SamplerState(SamplingParams(**kinds[i % 8]), i, 3, dry=DryPenalty({}, 2)) for i in range(16)]
        for draw in made:
            draw.token_ids = [1, 2, 3, 1, 2, 3, 1, 2]
        return made

    together = sample_rows(logits, draws())
    assert together == [sample_rows(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws())]
    monkeypatch.setattr(native, "available", lambda: False)
    assert together == sample_rows(logits, draws())


@pytest.mark.parametrize("params", [p for p in RARE if "dry_multiplier" not in p])
def test_temperature_0_is_greedy_whatever_else_is_asked(params):
    params = fill(SamplingParams(temperature=0, **params))
    assert not params.uncommon
    logits = rows(4)
    assert sample_rows(logits, [SamplerState(params, 1)] * 4) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("params", RARE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_numbers_give_no_token(params, bad):
    row = np.full((1, 40), bad, np.float32)
    draw = SamplerState(SamplingParams(**params), 1, dry=DryPenalty({}, 2))
    assert sample_rows(row, [draw]) == [NO_TOKEN]
    assert not len(distribution(row[0], draw)[0])
    row[0, :] = -np.inf
    row[0, 7] = 1.0
    assert sample_rows(row, [draw]) == [7]


@pytest.mark.parametrize("params", RARE)
def test_masks_hold(params):
    mask = np.zeros(10, np.uint32)
    mask[0] = 0b110
    draw = SamplerState(SamplingParams(**params), 1, mask=mask, dry=DryPenalty({}, 2))
    assert {sample_rows(rows(1, seed=i), [draw])[0] for i in range(20)} <= {1, 2}


def test_xtc_acts_as_often_as_it_says_and_not_together_with_the_draw():
    row = np.zeros((1, 10), np.float32)  # each token has a probability of 0.1, so XTC removes all but the last
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.05, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    drawn = [sample_rows(row, [SamplerState(params, 11, index)])[0] for index in range(4000)]
    shares = np.bincount(drawn, minlength=10) / 4000
    assert shares[9] == pytest.approx(0.3 + 0.07, abs=0.03)
    assert shares[:9] == pytest.approx(np.full(9, 0.07), abs=0.02)
    never = SamplingParams(xtc_probability=1.0, xtc_threshold=0.6, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert len(distribution(row[0], SamplerState(never, 1))[0]) == 10


def test_mirostat_goes_back_when_a_token_is_sampled_anew():
    """A step may be lost (no room in the cache), or be tried again. Only the step whose tokens are applied counts."""
    params, logits = SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5), rows(30, seed=3)

    def run(stumble):
        draw, tokens = SamplerState(params, 9), []
        for index in range(30):
            draw.index = index
            if stumble:
                sample_rows(rows(1, seed=100 + index), [draw])  # lost: other logits
                draw.index = index + 1
                sample_rows(rows(1, seed=200 + index), [draw])  # lost: a guess ahead
                draw.index = index
            tokens.append(sample_rows(logits[index : index + 1], [draw])[0])
        return tokens, draw.chain.mu(30)

    assert run(stumble=True) == run(stumble=False)


def test_dry_sees_each_token_once_however_often_it_is_asked():
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, temperature=0)
    text, repeats = [1, 2, 3, 4, 1, 2, 3], DryPenalty({}, 2)
    draw = SamplerState(params, 0, dry=repeats)
    row = np.zeros((1, 8), np.float32)
    row[0, 4], row[0, 5] = 1.9, 0.0
    for index in (0, 0, 1, 1, 3):
        draw.index, draw.token_ids = index, text[: 4 + index]
        token = sample_rows(row, [draw])[0]
        assert token == (0 if index == 3 else 4)  # after 1 2 3, the logit of token 4 loses 2 ** (3 - 2)
    assert len(repeats) == 7


@pytest.mark.parametrize("n", [1, 2, 5, 400])
@pytest.mark.parametrize("mu", [-30.0, 0.0, 3.0, 1e4])
def test_mirostat_leaves_at_least_one_token_and_at_most_all(n, mu):
    for version, spread in itertools.product((1, 2), (0.0, 1e-6, 1.0, 1e4)):
        values = (np.random.default_rng(1).normal(0, 1, n) * spread).astype(np.float32)
        left = sampler_chain.mirostat(values, fill(SamplingParams(mirostat=version, temperature=0.7)), mu)
        assert 1 <= len(left) <= n
        assert (np.diff(left) > 0).all()
        assert int(values.argmax()) in left


@pytest.mark.parametrize("cut", [sampler_chain.typical, sampler_chain.xtc, sampler_chain.top_n_sigma])
@pytest.mark.parametrize("size", [0.0, 0.3, 1.0])
def test_a_cut_of_one_or_equal_values_leaves_something(cut, size):
    for values in (np.zeros(1, np.float32), np.zeros(9, np.float32), np.array([0, 80, 0], np.float32)):
        left = cut(values, size)
        assert 1 <= len(left) <= len(values)


@pytest.mark.parametrize("mass", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_typical_looks_no_further_than_it_must_and_finds_the_same(mass, spread, monkeypatch):
    values = np.random.default_rng(2).normal(0, spread, 20_000).astype(np.float32).round(2)  # many values are equal
    found = sampler_chain.typical(values, mass)
    monkeypatch.setattr(sampler_chain, "_LOOKS", ())
    assert found.tolist() == sampler_chain.typical(values, mass).tolist()


@pytest.mark.parametrize(
    ("options", "acting"),
    [
        ({"samplers": CHAIN}, None),
        ({"samplers": ["top_k", "top_p"], "temperature": 0}, None),
        ({"samplers": ["top_p", "top_k"], "top_k": -1}, None),
        ({"samplers": ["top_p", "top_n_sigma"], "top_n_sigma": 0}, None),
        ({"samplers": ["temperature", "top_k"], "temperature": 1.0}, None),  # temperature 1.0 does nothing
        ({"samplers": ["top_p", "top_k"], "top_k": 0}, None),
        ({"samplers": ["temperature", "top_k"]}, ("temperature", "top_k")),
        ({"samplers": ["top_k", "top_k"]}, ("top_k", "top_k")),
        ({"samplers": ["infill"]}, ("infill",)),
        ({"samplers": ["temperature", "xtc"], "xtc_probability": 1, "temperature": 0}, None),
        ({"samplers": ["top_k", "penalties"], "presence_penalty": 1}, ("top_k", "penalties")),
        ({"samplers": ["temperature", "top_k"], "mirostat": 2}, None),
    ],
)
def test_only_an_order_that_changes_what_comes_needs_a_chain(options, acting):
    params = fill(SamplingParams(**options))
    assert params.chain == acting
    assert params.uncommon == (acting is not None or params.mirostat > 0)
    off = [name for name in CHAIN if name not in options["samplers"]]
    assert all(is_off(name, vars(params)) for name in off if name != "temperature" or not params.greedy)


def test_the_first_of_two_samplers_decides_what_the_second_sees():
    row = np.array([2.5, 2.0, 1.0, 0.0], np.float32)
    counts = token_counts([], -1)
    counts.add(0)
    penalty = {"presence_penalty": 2.0, "top_k": 2, "temperature": 1.0}

    def left(*samplers):
        return distribution(row, SamplerState(SamplingParams(samplers=samplers, **penalty), 0, counts=counts))[0]

    assert left("penalties", "top_k").tolist() == [1, 2]  # computed by the compiled helper
    assert left("top_k", "penalties").tolist() == [0, 1]


def test_temperature_0_keeps_the_likeliest_where_it_stands():
    row = np.array([3.0, 2.0, 1.0], np.float32)
    counts = token_counts([], -1)
    counts.add(0)
    for samplers, token in ((("penalties", "temperature"), 1), (("temperature", "penalties"), 0)):
        params = SamplingParams(samplers=samplers, presence_penalty=2.0, temperature=0)
        assert sample_rows(row[None], [SamplerState(params, 0, counts=counts)]) == [token]


@pytest.mark.parametrize(
    "options",
    [
        {"samplers": ["top_k"]},
        {"samplers": ["top_p", "top_k"], "top_k": 3},
        {"samplers": ["infill"]},
        {"samplers": ["temperature", "top_k"], "dynatemp_range": 2.0},
        {"samplers": ["temperature", "top_k"], "temperature": 1e-39},
    ],
)
def test_temperature_0_is_greedy_in_any_order(options):
    params = fill(SamplingParams(**{"temperature": 0, **options}))
    infill = Infill([], None, lambda token: bytes([token % 256, token // 256]))
    logits = rows(8) + 50
    assert sample_rows(logits, [SamplerState(params, 1, infill=infill)] * 8) == logits.argmax(axis=1).tolist()


def test_a_row_that_a_penalty_makes_infinite_gives_no_token():
    counts = token_counts([0, 1], -1)
    counts.add(0)
    params = SamplingParams(samplers=["penalties"] * 40, repetition_penalty=0.01)
    row = np.array([[20.0, 15, 1, 0]], np.float32)
    assert sample_rows(row, [SamplerState(params, 5, counts=counts)]) == [NO_TOKEN]


def test_mirostat_keeps_the_temperature_where_the_samplers_do_not_name_it():
    params = fill(SamplingParams(samplers=["top_k"], mirostat=2, temperature=0.3))
    assert (params.temperature, params.mirostat, params.chain) == (0.3, 2, None)


@pytest.mark.parametrize(("end", "wanted"), [(3, [3]), (None, [0])])
def test_a_gap_ends_where_no_token_is_likely(end, wanted):
    texts = [b"a", b"b", b"c", b"", b"d", b"e", b"f", b"g"]
    infill = Infill([3], end, texts.__getitem__)
    values = np.array([0.1, 0, 0, -9, 0, 0, 0, 0], np.float32)
    assert infill.left(values, np.arange(8)).tolist() == wanted
    values[3] = -np.inf  # the end token is forbidden
    assert infill.left(values, np.delete(np.arange(8), 3)).tolist() == [0]
    values[3] = 1.0
    assert infill.left(values, np.arange(8)).tolist() == [3]


def test_guesses_are_sampled_by_the_same_chain():
    state = SamplerState(SamplingParams(samplers=["infill"]), 0, infill=Infill([], None, [b"a", b"ab"].__getitem__))
    rows_of_two = np.array([[1.0, 0.9]] * 9, np.float32)
    assert sample_rows(rows_of_two, [state.later(number) for number in range(9)]) == [0] * 9


def test_tokens_that_begin_alike_are_one():
    texts = [b"re", b"return", b"x", b""]
    values = np.array([1.0, 1.2, 1.5, -20], np.float32)
    assert Infill([3], 3, texts.__getitem__).left(values, np.arange(4)).tolist() == [1, 2, 3]
