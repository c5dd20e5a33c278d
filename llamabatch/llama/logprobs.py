"""Logprobs of rows of a call, for those sequences that asked: compiled, or in numpy with the same values to 1e-6."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch import native
from llamabatch.logprobs import RowLogprobs

Floats = npt.NDArray[np.float32]


def row_logprobs(
    logits: Floats, rows: ListLike[int], tokens: ListLike[int], tops: ListLike[int], n_threads: int = 1
) -> list[RowLogprobs]:
    """For each wanted row the logprob of one token, and of the likeliest ones; without any where the logits are no
    numbers.

    Args:
        logits: shape (rows of the call, vocabulary), float32, read in place.
        rows: which rows, in any order.
        tokens: the token of each of them that is asked about.
        tops: how many likeliest tokens come after it, at most the vocabulary; tokens of probability 0 do not. With -1
            the rank of the first is not looked for, and 0.
        n_threads: for the compiled helper, where it has OpenMP and the rows are worth it.
    """
    if native.available():
        return [RowLogprobs(*found) for found in native.row_logprobs(logits, rows, tokens, tops, n_threads)]
    return [_row_logprobs(logits[row], token, top) for row, token, top in zip(rows, tokens, tops, strict=True)]


def _row_logprobs(row: Floats, token: int, top: int) -> RowLogprobs:
    largest = row.max()
    if not -np.inf < largest <= np.finfo(np.float32).max:  # a NaN too: `max` hands it on
        return RowLogprobs((), (), 0)
    below = row.astype(np.float64) - float(largest)
    whole = np.log(np.exp(below).sum())
    ids: list[int] = [token]
    rank = 0
    if top >= 0:
        value = row[token]
        rank = 1 + int((row > value).sum() + (row[:token] == value).sum())
        ids += _likeliest(row, top).tolist()
    return RowLogprobs(ids, (below[ids] - whole).tolist(), rank)


def _likeliest(row: Floats, k: int) -> npt.NDArray[Any]:
    """Ids of the k largest that are not -inf, in order; the lower id first where two are equal."""
    if k == 0:
        return np.empty(0, np.int64)
    bound = np.partition(row, len(row) - k)[len(row) - k] if k < len(row) else -np.inf
    ids = np.flatnonzero((row >= bound) & (row > -np.inf))
    return ids[np.argsort(-row[ids], kind="stable")][:k]
