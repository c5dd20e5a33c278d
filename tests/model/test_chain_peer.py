"""Rarely used samplers leave the same candidates and probabilities as llama.cpp's own on the same logits."""

import ctypes
import math

import numpy as np
import pytest

from llamabatch.gguf.resolve import resolve
from llamabatch.llama.library import load
from llamabatch.llama.model import Model
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling.defaults import fill
from llamabatch.sampling.dry import DryPenalty, breaker_tokens
from llamabatch.sampling.infill import Infill
from llamabatch.sampling.sampler import SamplerState, distribution
from llamabatch.sampling.sampler_chain import Chain

PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
BREAKERS = ("\n", ":", '"', "*")


@pytest.fixture(scope="module")
def lib():
    return load()


@pytest.fixture(scope="module")
def model(lib):
    model = Model(resolve("tiny"))
    yield model
    model.close()


class Peer:
    """A chain of llama.cpp's samplers that can be applied to many rows."""

    def __init__(self, lib, samplers):
        self._lib = lib
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in samplers:
            lib.llama_sampler_chain_add(self._chain, sampler)

    def apply(self, row):
        """Applies the chain to a row. Returns the remaining candidates, {id: probability}, and the drawn id."""
        n = len(row)
        data = (self._lib.llama_token_data * n)()
        view = np.ctypeslib.as_array(data)
        view["id"], view["logit"], view["p"] = np.arange(n), row, 0
        array = self._lib.llama_token_data_array(data=data, size=n, selected=-1, sorted=False)
        self._lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        left = {array.data[i].id: array.data[i].p for i in range(array.size)}
        return left, array.data[array.selected].id

    def accept(self, token_ids):
        for token_id in token_ids:
            self._lib.llama_sampler_accept(self._chain, token_id)

    def close(self):
        self._lib.llama_sampler_free(self._chain)


def peer_samplers(lib, params, seed=1):
    """Returns the samplers of llama.cpp's default chain (common/sampling.cpp) that come after DRY."""
    return [
        lib.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        lib.llama_sampler_init_top_k(params.top_k),
        lib.llama_sampler_init_typical(params.typical_p, 0),
        lib.llama_sampler_init_top_p(params.top_p, 0),
        lib.llama_sampler_init_min_p(params.min_p, 0),
        lib.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, seed),
        lib.llama_sampler_init_temp_ext(params.temperature, params.dynatemp_range, params.dynatemp_exponent),
        lib.llama_sampler_init_dist(seed),
    ]


def random_row(rng, sizes=(50, 500, 3000, 32_000)):
    return rng.normal(0, rng.choice([1.0, 2.0, 4.0, 8.0]), int(rng.choice(sizes))).astype(np.float32)


def ours(row, params):
    ids, probabilities = distribution(row, SamplerState(params, 0))
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def assert_same(got, wanted):
    """Checks that candidates and probabilities are the same, but for rounding.

    Tokens less likely than 1e-7 may be absent. llama.cpp adds up in float32. This can move a border by one token, or by
    more tokens in wide rows, where an entropy may also be off by 1e-4 of its value.
    """
    wide = len(wanted) > 3000
    at_border = 1 + len(wanted) // 100 if wide else 1
    odd = [i for i in got.keys() ^ wanted.keys() if got.get(i, wanted.get(i)) > 1e-7]
    assert len(odd) <= at_border, (len(got), len(wanted), len(odd))
    shared = got.keys() & wanted.keys()
    ours_sum, theirs_sum = math.fsum(got[i] for i in shared), math.fsum(wanted[i] for i in shared)
    theirs = {i: wanted[i] / theirs_sum for i in shared}
    assert {i: got[i] / ours_sum for i in shared} == pytest.approx(theirs, abs=1e-4 if wide else 1e-5)


CASES = {
    "typical": {"typical_p": (0.2, 0.5, 0.9)},
    "typical after top_k": {"typical_p": (0.2, 0.5, 0.9), "top_k": (5, 40)},
    "top_n_sigma": {"top_n_sigma": (0.5, 1.0, 2.5)},
    "xtc": {"xtc_probability": (1.0,), "xtc_threshold": (0.02, 0.1, 0.4), "top_k": (0, 40)},
    "xtc above one half": {"xtc_probability": (1.0,), "xtc_threshold": (0.51,), "top_k": (40,)},
    "dynamic temperature": {
        "dynatemp_range": (0.3, 1.0, 2.0), "dynatemp_exponent": (0.5, 1.0, 3.0), "temperature": (0.5, 1.0, 1.5),
    },
    "all but typical": {
        "top_n_sigma": (2.0, 4.0), "top_k": (40, 200), "top_p": (0.8, 0.95), "min_p": (0.02, 0.1),
        "xtc_probability": (1.0,), "xtc_threshold": (0.05, 0.2), "dynatemp_range": (0.4,), "temperature": (0.7, 1.2),
    },
    # without top_n_sigma, because llama.cpp's typical_p makes NaNs of the logits that it sets to -inf
    "all but top_n_sigma": {
        "typical_p": (0.7, 0.95), "top_k": (40, 200), "top_p": (0.8, 0.95), "min_p": (0.02, 0.1),
        "xtc_probability": (1.0,), "xtc_threshold": (0.05, 0.2), "dynatemp_range": (0.4,), "temperature": (0.7, 1.2),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(10))
def test_same_candidates_same_probabilities(lib, case, seed):
    rng = np.random.default_rng(seed)
    row = random_row(rng)
    params = fill(SamplingParams(**PLAIN | {name: rng.choice(values).item() for name, values in CASES[case].items()}))
    assert params.uncommon
    peer = Peer(lib, peer_samplers(lib, params))
    wanted, _ = peer.apply(row)
    peer.close()
    assert_same(ours(row, params), wanted)


ORDERS = {
    "backwards": ("temperature", "xtc", "min_p", "top_p", "typ_p", "top_k"),
    "temperature first": ("temperature", "top_k", "top_p", "min_p"),
    "twice": ("top_p", "temperature", "top_p", "temperature"),
    "dynamic temperature first": ("temperature", "typ_p", "top_n_sigma"),
    "infill": ("top_k", "top_p", "infill"),
    "infill before the temperature": ("top_k", "infill", "temperature"),
}
VALUES = {
    "top_k": 50, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.7, "top_n_sigma": 2.0, "xtc_probability": 1.0,
    "xtc_threshold": 0.1, "temperature": 1.6,
}  # fmt: skip


def peer_of(lib, name, params, model):
    made = {
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        "top_k": lambda: lib.llama_sampler_init_top_k(params.top_k),
        "typ_p": lambda: lib.llama_sampler_init_typical(params.typical_p, 0),
        "top_p": lambda: lib.llama_sampler_init_top_p(params.top_p, 0),
        "min_p": lambda: lib.llama_sampler_init_min_p(params.min_p, 0),
        "xtc": lambda: lib.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 1),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(
            params.temperature, params.dynatemp_range, params.dynatemp_exponent
        ),
        "infill": lambda: lib.llama_sampler_init_infill(model.vocab_handle),
    }
    return made[name]()


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_its_own(lib, model, name):
    more = {"dynatemp_range": 0.5} if name.startswith("dynamic") else {}
    params = fill(SamplingParams(**VALUES, **more, samplers=ORDERS[name]))
    assert params.chain is not None
    infill = Infill(model.eog_ids, model.special_ids["eot"], model.token_bytes)
    ended = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        row = rng.normal(0, rng.choice([1.0, 2.0, 4.0]), model.n_vocab).astype(np.float32)
        row[model.special_ids["eot"]] += seed % 3 * 4
        peer = Peer(
            lib, [*(peer_of(lib, each, params, model) for each in params.chain), lib.llama_sampler_init_dist(1)]
        )
        wanted, _ = peer.apply(row)
        peer.close()
        ids, probabilities = distribution(row, SamplerState(params, 0, infill=infill))
        assert_same(dict(zip(ids.tolist(), probabilities.tolist(), strict=True)), wanted)
        ended += ids.tolist() == [model.special_ids["eot"]]
    assert not name.startswith("infill") or 0 < ended < 12


def text_with_repeats(rng, model):
    """Returns token ids in which some runs are repeated, with DRY's sequence breakers between them."""
    words = [
        model.tokenize(w, add_special=False) for w in (" the fox ran", ": one", " two two", "\n", " * three", ' "a"')
    ]
    return [token_id for _ in range(25) for token_id in words[rng.integers(len(words))]]


@pytest.mark.parametrize("breakers", [BREAKERS, (), (" fox", "the f", "two\n")])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("seed", range(6))
def test_dry(lib, model, breakers, window, seed):
    rng = np.random.default_rng(seed)
    params = SamplingParams(
        **PLAIN,
        dry_multiplier=float(rng.choice([0.3, 0.8])),
        dry_base=float(rng.choice([1.0, 1.75, 3.0])),
        dry_allowed_length=int(rng.choice([1, 2, 4])),
        dry_penalty_last_n=window,
        dry_sequence_breakers=breakers,
    )
    raw = (ctypes.c_char_p * len(breakers))(*(b.encode() for b in breakers))
    last_n = 4096 if window < 0 else window
    sizes = params.dry_base, params.dry_allowed_length, last_n
    dry = lib.llama_sampler_init_dry(model.vocab_handle, params.dry_multiplier, *sizes, raw, len(breakers))
    peer = Peer(lib, [dry, lib.llama_sampler_init_dist(1)])
    tails = breaker_tokens(breakers, model.n_vocab, model.all_bytes, model.tokenize_bytes)
    draw = SamplerState(params, 0, dry=DryPenalty(tails, params.dry_allowed_length, window))
    tokens, n_prompt, changed = text_with_repeats(rng, model), 30, 0
    peer.accept(tokens[:n_prompt])
    for count in range(n_prompt, len(tokens)):
        row = rng.normal(0, 1, model.n_vocab).astype(np.float32)
        draw.index, draw.token_ids = count - n_prompt, tokens[:count]
        ids, probabilities = distribution(row, draw)
        wanted, _ = peer.apply(row)
        assert_same(dict(zip(ids.tolist(), probabilities.tolist(), strict=True)), wanted)
        changed += bool((distribution(row, SamplerState(SamplingParams(**PLAIN), 0))[1] != probabilities).any())
        peer.accept([tokens[count]])
    peer.close()
    assert changed or params.dry_allowed_length > 2


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_mirostat(lib, version, seed):
    """llama.cpp draws a token, and our sampler gets the same token. If its mu changed otherwise, its candidates would
    differ."""
    rng = np.random.default_rng(seed)
    n_vocab = int(rng.choice([300, 3000]))
    params = SamplingParams(
        mirostat=version,
        mirostat_tau=float(rng.choice([2.0, 3.0, 5.0])),
        mirostat_eta=float(rng.choice([0.1, 0.5])),
        temperature=float(rng.choice([0.7, 1.0, 1.4])),
    )
    tuning = params.mirostat_tau, params.mirostat_eta
    sampler = (
        lib.llama_sampler_init_mirostat(n_vocab, seed, *tuning, 100)
        if version == 1
        else lib.llama_sampler_init_mirostat_v2(seed, *tuning)
    )
    peer = Peer(lib, [lib.llama_sampler_init_temp(params.temperature), sampler])
    draw, sizes = SamplerState(params, 0), set()
    for index in range(60):
        row = rng.normal(0, rng.choice([1.0, 3.0]), n_vocab).astype(np.float32)
        draw.index = index
        ids, probabilities = distribution(row, draw)
        got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
        wanted, drawn = peer.apply(row)
        assert_same(got, wanted)
        sizes.add(len(wanted))
        draw.chain.learn(index, wanted[drawn])
        surprise = -math.log2(wanted[drawn])
        assert draw.chain.mu(index + 1) == draw.chain.mu(index) - tuning[1] * (surprise - tuning[0])
    peer.close()
    assert len(sizes) > 10


def test_mirostat_holds_the_surprise(lib):
    """The mean surprise of our own draws is near tau, whatever the temperature."""
    for version, temperature in [(1, 1.0), (2, 1.0), (2, 1.5)]:
        params = fill(SamplingParams(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, temperature=temperature))
        rng, chain, sum_ = np.random.default_rng(0), Chain(params), 0.0
        draw = SamplerState(params, 5)
        draw.chain = chain
        for index in range(400):
            draw.index = index
            row = rng.normal(0, 2, 1000).astype(np.float32)
            before = chain.mu(index)
            token = chain.sample(row, draw)
            assert chain.sample(row, draw) == token, "asked again for the same output token"
            sum_ += (before - chain.mu(index + 1)) / params.mirostat_eta + params.mirostat_tau
        assert sum_ / 400 == pytest.approx(3.0, abs=0.15)
