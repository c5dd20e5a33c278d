"""Logprobs of rows, compiled and in numpy, compared with a softmax in float64."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.request.logprobs import Logprob, RowLogprobs
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling import row_logprobs as module
from llamabatch.sampling.row_logprobs import NEVER, drawn_logprobs, row_logprobs
from llamabatch.sampling.sampler import SamplerState
from tests.unit.sampling.test_sampler_compiled import KINDS, SIZES, logits, needs_helper


def exact(row: np.ndarray, token: int, top: int) -> tuple[list[int], list[float], int]:
    """Returns token ids, logprobs and rank, computed in float64 and with a full sort."""
    wide = row.astype(np.float64)
    logprobs = wide - wide.max() - math.log(math.fsum(np.exp(wide - wide.max())))
    order = sorted(range(len(row)), key=lambda i: (-wide[i], i))
    ids = [token, *[i for i in order[:top] if wide[i] > -np.inf]]
    return ids, [float(logprobs[i]) for i in ids], order.index(token) + 1


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("nan", "inf")])
@pytest.mark.parametrize("size", [1, 2, 17, 129, 1120, 5001])
def test_they_are_those_of_a_softmax_in_float64(kind, size):
    rng = np.random.default_rng(size)
    rows = np.stack([logits(rng, kind, size) for _ in range(4)])
    rows = rows[[bool(np.isfinite(row.max())) for row in rows]]
    for top in (0, 1, 5, 40, size):
        tokens = [int(rng.integers(0, size)) for _ in rows]
        for row, token, found in zip(
            rows, tokens, row_logprobs(rows, range(len(rows)), tokens, [top] * len(rows)), strict=True
        ):
            ids, wanted, rank = exact(row, token, top)
            assert list(found.token_ids) == ids
            assert found.rank == rank
            assert found.logprobs == pytest.approx(wanted, rel=1e-7, abs=1e-6)


@pytest.mark.usefixtures("implementation")
def test_a_large_vocabulary_whose_tail_weighs_more_than_its_top():
    row = np.full(262_144, -20.0, np.float32)
    row[7] = 0
    [found] = row_logprobs(row[None], [0], [9], [2])
    weight = 262_143 * math.exp(-20)
    assert found.logprobs == pytest.approx([-20 - math.log1p(weight), -math.log1p(weight), -20 - math.log1p(weight)])
    assert (list(found.token_ids), found.rank) == ([9, 7, 0], 1 + 9)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_no_numbers_give_nothing(bad):
    row = np.zeros(300, np.float32)
    row[200] = bad
    none = np.full(300, -np.inf, np.float32)
    for found in row_logprobs(np.stack([row, none]), [0, 1], [3, 3], [2, 2]):
        assert (list(found.token_ids), list(found.logprobs)) == ([], [])


@pytest.mark.usefixtures("implementation")
def test_rows_in_any_order_with_numbers_of_their_own():
    rows = np.random.default_rng(0).normal(0, 3, (6, 40_000)).astype(np.float32)[::2]
    found = row_logprobs(rows, [2, 0, 2], [5, 6, 7], [3, 0, -1], n_threads=2)
    for each, row, token, top in zip(found, [2, 0], [5, 6], [3, 0], strict=False):
        ids, wanted, rank = exact(rows[row], token, top)
        assert (list(each.token_ids), each.rank) == (ids, rank)
        assert each.logprobs == pytest.approx(wanted, abs=1e-6)
    assert (list(found[2].token_ids), found[2].rank) == ([7], 0)
    assert found[2].logprobs == pytest.approx(exact(rows[2], 7, 0)[1], abs=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("nan", "inf")])
@pytest.mark.parametrize("others", [(0,), (3, 7, 200), tuple(range(0, 1120, 3))])
def test_other_tokens_have_the_logprob_and_rank_of_a_full_sort(kind, others):
    row = logits(np.random.default_rng(5), kind, 1120)
    if not np.isfinite(row.max()):
        return
    [found] = row_logprobs(row[None], [0], [9], [2])
    with_others = module._with_others(found, row, others)
    assert with_others[:3] == found[:3]
    assert [each[0] for each in with_others.others] == list(others)
    for token, logprob, rank in with_others.others:
        _, [wanted], place = exact(row, token, 0)
        assert (logprob, rank) == (pytest.approx(wanted, rel=1e-7, abs=1e-6), place)


def test_others_of_a_row_that_is_no_numbers_are_none():
    nothing = RowLogprobs((), (), 0)
    assert module._with_others(nothing, np.full(9, np.nan, np.float32), (1, 2)) == nothing


@needs_helper
@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS), size=st.sampled_from(SIZES), top=st.integers(-1, 1024))
def test_numpy_gives_the_same_to_a_millionth(seed, kind, size, top):
    rng = np.random.default_rng(seed)
    row = logits(rng, kind, size)
    token, top = int(rng.integers(0, size)), min(top, size)
    [found] = row_logprobs(row[None], [0], [token], [top])
    wanted = module._row_logprobs(row, token, top)
    assert (list(found.token_ids), found.rank) == (list(wanted.token_ids), wanted.rank)
    assert found.logprobs == pytest.approx(wanted.logprobs, rel=1e-7, abs=1e-6)


@needs_helper
def test_what_does_not_fit_is_refused_before_the_helper_sees_it():
    rows = np.zeros((2, 9), np.float32)
    for wrong in ([2], [1], [0]), ([-1], [1], [0]), ([0], [9], [0]), ([0], [-1], [0]), ([0], [1], [0, 0]):
        with pytest.raises(ValueError, match="rows"):
            row_logprobs(rows, *wrong)
    with pytest.raises(ValueError, match="float64"):
        row_logprobs(np.zeros((2, 9)), [0], [1], [0])


def test_the_token_that_came_is_named_first_others_last_and_none_twice():
    row = RowLogprobs([5, 4, 5], [-1.0, -0.5, -1.0], 2, [(4, -0.5, 1), (9, -3.0, 8)])
    named = list(row.named(lambda token: b"\xff" if token == 5 else b"t%d" % token).items())
    assert named == [(5, Logprob(-1.0, 2, "\ufffd")), (4, Logprob(-0.5, 1, "t4")), (9, Logprob(-3.0, 8, "t9"))]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("more", [{}, {"xtc_probability": 1e-9}])  # the second uses the chain of uncommon samplers
def test_those_behind_the_samplers_are_of_the_tokens_that_can_be_drawn(more):
    row = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
    params = SamplingParams(temperature=0.5, top_k=3, top_p=1.0, min_p=0.0, logit_bias={4: -100}, **more)
    found = drawn_logprobs(row, SamplerState(params, seed=1), 3, 9, (1, 2))
    weights = {1: 0.4**2, 3: 0.25**2, 0: 0.1**2}  # temperature 0.5 squares them
    wanted = {token: math.log(weight / sum(weights.values())) for token, weight in weights.items()}
    assert list(found.token_ids) == [3, 1, 3, 0]
    assert found.logprobs == pytest.approx([wanted[token] for token in found.token_ids], abs=1e-5)
    assert found.rank == 2
    assert found.others == ((1, pytest.approx(wanted[1], abs=1e-5), 1), (2, NEVER, 4))
    greedy = drawn_logprobs(row, SamplerState(SamplingParams(temperature=0, **more), seed=1), 1, 5)
    assert (list(greedy.token_ids), list(greedy.logprobs), greedy.rank) == ([1, 1], [0.0, 0.0], 1)
    assert drawn_logprobs(row, SamplerState(params, seed=1), 4, 0)[:3] == ([4], [NEVER], 4)  # a forced token, not drawn
