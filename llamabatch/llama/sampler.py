"""Samples all output rows of a call: with the compiled helper, or with numpy where there is none. Same tokens.

A row's token depends on its logits, its parameters, the tokens before it (penalties only), its mask, and
(seed, index). Each row is worked on alone, in place and unchanged, so that company cannot change a token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamabatch import native
from llamabatch.llama import sampler_numpy
from llamabatch.llama.masks import Masks
from llamabatch.sampling_params import SamplingParams
from llamabatch.token_counts import TokenCounts

NO_TOKEN = sampler_numpy.NO_TOKEN


class Draw:
    """What sampling a row takes beside its logits. Made once for a sequence; `index` moves on, `mask` may change.

    Attributes:
        params: how to sample.
        seed: the request's, 0 .. 2**64-1.
        index: which output token this is, from 0.
        counts: the tokens before it, needed for penalties only; ids outside the vocabulary are ignored.
        mask: bit i of word i / 32 allows token i (llguidance's format), uint32, without gaps; None: no mask. What
            params.allowed_token_ids forbids stays forbidden.
        masks: where the mask of each token comes from; None for most.
    """

    __slots__ = ("_prepared", "counts", "index", "mask", "masks", "params", "seed")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        index: int = 0,
        counts: TokenCounts | None = None,
        mask: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.index = index
        self.counts = counts
        self.mask = mask
        self.masks: Masks | None = None
        self._prepared: native.Prepared | None = None

    @property
    def prepared(self) -> native.Prepared:
        """The parameters as the helper reads them."""
        if self._prepared is None:
            self._prepared = native.Prepared(self.params)
        return self._prepared

    def later(self, number: int) -> Draw:
        """The same for the output token that comes so many after this one."""
        draw = Draw(self.params, self.seed, self.index + number, self.counts, self.mask)
        draw._prepared = self.prepared
        return draw


def sample_rows(logits: npt.NDArray[np.float32], draws: list[Draw], n_threads: int = 1) -> list[int]:
    """A token id for each row, or NO_TOKEN where the logits are not numbers or nothing is allowed.

    Args:
        logits: shape (len(draws), vocabulary), float32; not changed.
        draws: one for each row.
        n_threads: for the compiled helper, where it has OpenMP and the rows are worth it.
    """
    if native.available():
        return native.sample_rows(logits, draws, n_threads)
    return [sampler_numpy.sample_row(row, draw) for row, draw in zip(logits, draws, strict=True)]


def distribution(row: npt.NDArray[np.float32], draw: Draw) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that a row may draw, in order of their ids, and their probabilities, which sum to 1.

    A token less than 2^-34 times as likely as the likeliest has probability 0. Both are empty where the logits are
    not numbers or nothing is allowed.
    """
    if native.available():
        raw_ids, raw_weights = native.candidates(row, draw)
        ids, weights = np.array(raw_ids, np.int64), np.array(raw_weights)
    else:
        ids, weights = sampler_numpy.candidates(row, draw)
    return ids, weights / weights.sum() if len(ids) else weights
