"""Our sampler, compiled and in numpy, leaves the candidates and probabilities of llama.cpp's chain on equal logits."""

import ctypes

import numpy as np
import pytest

from llamabatch.llama.library import load
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling import native
from llamabatch.sampling.defaults import fill
from llamabatch.sampling.sampler import SamplerState, distribution
from llamabatch.sampling.token_counts import token_counts


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(f"the compiled helper is {native.why_not()}")


def peer(lib, row, params, output=()):
    """Returns candidates and probabilities after llama.cpp's chain. Penalties apply to the tokens of `output`."""
    n = len(row)
    data = (lib.llama_token_data * n)()
    view = np.ctypeslib.as_array(data)
    view["id"], view["logit"], view["p"] = np.arange(n), row, 0
    array = lib.llama_token_data_array(data=data, size=n, selected=-1, sorted=False)
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    biases = (lib.llama_logit_bias * len(params.biases))(*params.biases)
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_logit_bias(n, len(biases), biases))
    penalties = (n, params.repeat_last_n, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_penalties(*penalties))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(params.top_k))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(params.top_p, 1))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_min_p(params.min_p, 1))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(params.temperature))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(1))
    for token_id in output:
        lib.llama_sampler_accept(chain, token_id)
    lib.llama_sampler_apply(chain, ctypes.byref(array))
    left = {array.data[i].id: array.data[i].p for i in range(array.size)}
    lib.llama_sampler_free(chain)
    return left


@pytest.mark.parametrize("edits", [False, True], ids=["plain", "edits"])
@pytest.mark.parametrize("seed", range(40))
def test_same_candidates_same_probabilities(seed, edits):
    rng = np.random.default_rng(seed)
    row = rng.normal(0, rng.choice([1.0, 3.0, 8.0]), int(rng.choice([50, 3000, 32_000, 152_064]))).astype(np.float32)
    changes, output, counts = {}, [], None
    if edits:
        best = np.argsort(-row)[:40]
        output = rng.choice(best, 60).tolist()
        changes = {
            "logit_bias": {int(i): float(rng.uniform(-5, 5)) for i in rng.choice(len(row), 9, replace=False)},
            "repetition_penalty": float(rng.choice([1.0, 1.1, 1.5])),
            "presence_penalty": float(rng.choice([0.0, 0.5, -1.0])),
            "frequency_penalty": float(rng.choice([0.0, 0.3])),
            "repeat_last_n": (window := int(rng.choice([len(output), 20]))),
        }
        counts = token_counts((), window)
        for token_id in output:
            counts.add(token_id)
    params = fill(
        SamplingParams(
            top_k=int(rng.choice([0, 1, 10, 40, 500])),
            top_p=float(rng.choice([0.5, 0.9, 0.95, 1.0])),
            min_p=float(rng.choice([0.0, 0.02, 0.1])),
            temperature=float(rng.choice([0.3, 0.8, 1.0, 1.7])),
            **changes,
        )
    )
    ids, probabilities = distribution(row, SamplerState(params, 0, counts=counts))
    got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
    wanted = peer(load(), row, params, output)
    if params.top_p < 1 and params.top_k == 0:
        # llama.cpp adds the probabilities of the whole vocabulary in float32, so its cut may be a little off. Tokens
        # that only one side keeps must be the least likely ones.
        odd = got.keys() ^ wanted.keys()
        assert len(odd) <= 1 + len(got) / 500
        assert all(got.get(i, wanted.get(i)) <= min(got[j] for j in got.keys() & wanted.keys()) for i in odd)
    else:
        assert got.keys() == wanted.keys()
    if got.keys() == wanted.keys():
        assert got == pytest.approx(wanted, abs=1e-5)
