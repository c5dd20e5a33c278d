"""Samples all output rows of a call. numpy only; a row's token depends on its logits, its parameters and (seed, index).

The chain and its order are llama.cpp's: top_k, top_p, min_p on the untempered probabilities, temperature, one draw.
Each row is worked on alone and in place, so that company cannot change a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.sampling_params import SamplingParams

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.integer[Any]]

# Columns whose maxima bound the k-th largest logit from below; 64 to 256 are equally fast at 152k tokens.
_CHUNK = 128
# Candidates that top_p and min_p look at before they fall back on the whole vocabulary.
_FIRST_LOOK = 1024
NO_TOKEN = -1


@dataclass(frozen=True)
class Draw:
    """What sampling a row takes beside its logits: the parameters, the request's seed, the output token's index."""

    params: SamplingParams
    seed: int
    index: int


def sample_rows(logits: Floats, draws: list[Draw]) -> list[int]:
    """A token id for each row, or NO_TOKEN where the logits are not numbers.

    Args:
        logits: shape (len(draws), vocabulary), float32; not changed.
        draws: one for each row.
    """
    return [sample_row(row, draw) for row, draw in zip(logits, draws, strict=True)]


def sample_row(row: Floats, draw: Draw) -> int:
    """The token of one row, or NO_TOKEN; where logits are equal, lower ids come first."""
    best = int(row.argmax())  # the first NaN, if there is one
    if not np.isfinite(row[best]):
        return NO_TOKEN
    if draw.params.greedy:
        return best
    ids, probabilities = distribution(row, draw.params)
    total = np.cumsum(probabilities)
    at = int(np.searchsorted(total, uniform(draw.seed, draw.index) * total[-1], side="right"))
    return int(ids[min(at, len(ids) - 1)])


def distribution(row: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """The candidates that the chain leaves and their probabilities in float64, which sum to 1.

    They come likeliest first; where no cut was asked for, in the order of their ids. The row must hold no NaN.
    """
    vocabulary = len(row)
    k = params.top_k if 0 < params.top_k < vocabulary else vocabulary
    if k == vocabulary and params.top_p >= 1 and params.min_p <= 0:
        # nothing is cut, so nothing has to be sorted
        return np.arange(vocabulary), _softmax(row.astype(np.float64), float(row.max()), params.temperature)
    ids = _top(row, min(k, _FIRST_LOOK))
    if k > len(ids):
        ids = _enough(row, ids, k, params)
    scores = row[ids].astype(np.float64)
    keep = len(ids)
    if params.top_p < 1:
        weights = np.exp(scores - scores[0])
        whole = weights.sum() if k < vocabulary else _sum_exp(row, scores[0])
        keep = int(np.searchsorted(np.cumsum(weights), params.top_p * whole, side="left")) + 1
    if params.min_p > 0:
        likely = int(np.searchsorted(-scores, -(scores[0] + np.log(params.min_p)), side="right"))
        keep = min(keep, likely)
    keep = max(1, min(keep, len(ids)))
    return ids[:keep], _softmax(scores[:keep], float(scores[0]), params.temperature)


def _enough(row: Floats, ids: Ids, k: int, params: SamplingParams) -> Ids:
    """Widens the first look where top_p or min_p may reach beyond it (exact: what is left out is below both cuts)."""
    top = float(row[ids[0]])
    last = float(row[ids[-1]])
    if params.min_p > 0 and last < top + np.log(params.min_p):
        return ids
    if params.top_p < 1 and k >= len(row):
        inside = np.exp(row[ids].astype(np.float64) - top).sum()
        if inside >= params.top_p * _sum_exp(row, top):
            return ids
    return _top(row, k)


def _top(row: Floats, k: int) -> Ids:
    """The k largest, in order. A threshold from chunk maxima keeps the sort to a few dozen candidates."""
    vocabulary = len(row)
    whole = vocabulary // _CHUNK
    if k * 4 > whole:
        if k >= vocabulary:
            return _sorted(row, np.arange(vocabulary))
        bound = np.partition(row, vocabulary - k)[vocabulary - k]
    else:
        maxima = row[: whole * _CHUNK].reshape(whole, _CHUNK).max(axis=1)
        bound = np.partition(maxima, whole - k)[whole - k]
    return _sorted(row, np.flatnonzero(row >= bound))[:k]


def _sorted(row: Floats, ids: Ids) -> Ids:
    return ids[np.argsort(-row[ids], kind="stable")]


def _sum_exp(row: Floats, top: float) -> float:
    return float(np.exp(row - np.float32(top), dtype=np.float32).sum(dtype=np.float64))


def _softmax(scores: Floats, top: float, temperature: float) -> Floats:
    # subtracted first: divided by a tiny temperature, the scores themselves would overflow; below 1e-9 it is greedy
    weights = np.exp((scores - top) / max(temperature, 1e-9))
    result: Floats = weights / weights.sum()
    return result


_MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone: splitmix64 (Steele, Lea, Flood 2014), its top 53 bits."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / 2.0**53
