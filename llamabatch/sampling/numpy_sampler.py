"""The sampler in numpy, for installations without the compiled helper. It returns the same tokens as the helper.

native_patches/sampler/sampler.cpp has the same steps. It explains why weights are whole numbers. The chain is
llama.cpp's: bias, penalties, mask, top_k, top_p, min_p (all before the temperature), temperature, one draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llamabatch.sampling.defaults import FilledParams
from llamabatch.sampling.native import allowed_words
from llamabatch.sampling.token_counts import TokenCounts

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.uint32]

NO_TOKEN = -1
# Number of logits in a chunk. The k-th largest maximum of the chunks is a lower bound of the k-th largest logit. With a
# vocabulary of 152k tokens, chunks of 64 to 256 logits are equally fast.
_CHUNK = 128
# top_p first sorts only this many candidates, and the whole vocabulary only if necessary.
_FIRST_LOOK = 1024
UNIT = 2.0**33  # the weight of the likeliest token
COLDEST = 1e-9  # below this temperature sampling is greedy


class RowState(Protocol):
    """The fields of a SamplerState for the samplers in numpy."""

    params: FilledParams
    seed: int
    index: int
    counts: TokenCounts | None
    mask: Mask | None
    token_ids: Sequence[int]
    error: str | None


def sample_row(row: Floats, state: RowState) -> int:
    """Returns the token of one row, or NO_TOKEN. If two logits are equal, the logit with the lower id counts as
    larger."""
    if state.params.greedy:
        values = values_of(row, state)
        return NO_TOKEN if values is None else int(values.argmax())
    ids, weights = candidates(row, state)
    if not len(ids):
        return NO_TOKEN
    sums = np.cumsum(weights)
    return int(ids[np.searchsorted(sums, uniform(state.seed, state.index) * sums[-1], side="right")])


def candidates(row: Floats, state: RowState) -> tuple[Ids, Floats]:
    """Returns the token ids that remain after the sampler chain, in ascending order, and their integer weights. Both
    may be empty."""
    values = values_of(row, state)
    if values is None:
        return np.empty(0, np.int64), np.empty(0)
    params, vocabulary, top = state.params, len(values), values.max()
    floor = float(top) + params.log_min_p
    if 0 < params.top_k < vocabulary:
        ids = top_of(values, params.top_k)
        if params.top_p < 1:
            weights = weights_of(values[ids], top)
            ids = ids[: _reach(weights, params.top_p * weights.sum())]
    elif params.top_p < 1:
        ids = nucleus(values, top, params.top_p)
    else:
        ids = np.flatnonzero(values > -np.inf)
    ids = np.sort(ids[values[ids].astype(np.float64) >= floor])
    return ids, weights_of(values[ids], top, params.temperature)


def values_of(row: Floats, state: RowState, *, penalised: bool = True) -> Floats | None:
    """Returns the row with bias, penalties and masks; None if nothing can be sampled. The given row is not changed.

    Args:
        penalised: False: the penalties are left out.
    """
    if not row.max() <= np.finfo(np.float32).max:  # a NaN or +inf: `max` of a row with a NaN is NaN
        return None
    values, params, counts = row, state.params, state.counts if penalised else None
    if params.biases or counts is not None:
        values = row.copy()
        with np.errstate(over="ignore"):
            for token_id, bias in params.biases:
                if token_id < len(row):
                    values[token_id] += np.float32(bias)
            if counts is not None:
                penalise(values, params, counts)
    for words in (allowed_words(params.allowed_ids), state.mask):
        if words is not None:
            bits = np.unpackbits(np.asarray(words, np.dtype("<u4")).view(np.uint8), bitorder="little")[: len(row)]
            allowed = np.zeros(len(row), bool)
            allowed[: len(bits)] = bits
            values = np.where(allowed, values, np.float32(-np.inf))
    return values if np.isfinite(values.max()) else None


def penalise(values: Floats, params: FilledParams, counts: TokenCounts) -> None:
    """Applies the penalties to a row, in place."""
    ids, times = np.array(counts.ids), np.array(counts.counts)
    ids, times = ids[ids < len(values)], times[ids < len(values)]
    if params.repetition_penalty != 1:
        penalty, chosen = np.float32(params.repetition_penalty), values[ids]
        values[ids] = np.where(chosen > 0, chosen / penalty, chosen * penalty)
    ids, times = ids[times > 0], times[times > 0]
    values[ids] -= times.astype(np.float32) * np.float32(params.frequency_penalty)
    values[ids] -= np.float32(params.presence_penalty)


def nucleus(values: Floats, top: Any, top_p: float) -> Ids:
    """Returns the smallest set of likeliest tokens whose weights reach the share top_p of all weights."""
    target = top_p * weights_of(values, top).sum()
    for look in (_FIRST_LOOK, len(values)):
        ids = top_of(values, look)
        weights = weights_of(values[ids], top)
        if weights.sum() >= target:
            break
    return ids[: _reach(weights, target)]


def _reach(weights: Floats, target: float) -> int:
    return int(np.searchsorted(np.cumsum(weights), target, side="left")) + 1


def top_of(values: Floats, k: int) -> Ids:
    """Returns the ids of the k largest values except -inf, largest first. Sorts only values above a lower bound."""
    vocabulary = len(values)
    whole = vocabulary // _CHUNK
    if k * 4 <= whole:
        maxima = values[: whole * _CHUNK].reshape(whole, _CHUNK).max(axis=1)
        bound = np.partition(maxima, whole - k)[whole - k]
    else:
        bound = np.partition(values, vocabulary - k)[vocabulary - k] if k < vocabulary else -np.inf
    ids = np.flatnonzero((values >= bound) & (values > -np.inf))
    return ids[np.argsort(-values[ids], kind="stable")][:k]


def weights_of(values: Floats, top: Any, temperature: float = 1.0) -> Floats:
    """Returns exp((values - top) / temperature) * 2^33, rounded to whole numbers in float64. Sums of these weights are
    exact.

    The float32 steps equal those of native_patches/sampler/kernels.hpp down to the last bit. The polynomial is that of
    Cephes' expf (Moshier).
    """
    single = np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        x = (values - single(top)) * (single(1) / max(single(temperature), single(COLDEST)))
    x = np.maximum(x, single(-25))
    shifted = x * single(1.44269504) + single(12582912)
    n = shifted - single(12582912)
    r = (x - n * single(0.693359375)) - n * single(-2.12194440e-4)
    p = np.full_like(r, single(1.9875691500e-4))
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + single(factor)
    p = (p * (r * r) + r) + single(1)
    result: Floats = np.rint(np.ldexp(p.astype(np.float64), n.astype(np.int32)) * UNIT)
    return result


_MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """Returns a number in [0, 1) that depends only on (seed, index): the top 53 bits of splitmix64 (Steele, Lea, Flood
    2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / 2.0**53
