"""Samples all output rows of a call: with the compiled helper, or with numpy where there is none. Same tokens.

Requests for uncommon samplers go through numpy in either case (chain.py).

A row's token depends on its logits, its parameters, the tokens before it (penalties only), its mask, and
(seed, index). Each row is worked on alone, in place and unchanged, so that company cannot change a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.token_counts import TokenCounts
from llamabatch.sampling import native, numpy_sampler
from llamabatch.sampling.defaults import FilledParams, fill
from llamabatch.sampling.dry import DryPenalty
from llamabatch.sampling.sampler_chain import Chain
from llamabatch.sampling.token_masks import Masks

NO_TOKEN = numpy_sampler.NO_TOKEN


class SamplerState:
    """What sampling a row takes beside its logits. Made once for a sequence; `index` moves on, `mask` may change.

    Attributes:
        params: how to sample.
        seed: the request's, 0 .. 2**64-1.
        index: which output token this is, from 0.
        counts: the tokens before it, needed for penalties only; ids outside the vocabulary are ignored.
        mask: bit i of word i / 32 allows token i (llguidance's format), uint32, without gaps; None: no mask. What
            params.allowed_token_ids forbids stays forbidden.
        masks: where the mask of each token comes from; None for most.
        chain: the samplers that few ask for; None for most.
        token_ids: prompt and output so far; kept up to date where there is a chain.
        error: why there was no token, where a logits processor is the reason.
    """

    __slots__ = ("_prepared", "chain", "counts", "error", "index", "mask", "masks", "params", "seed", "token_ids")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        index: int = 0,
        counts: TokenCounts | None = None,
        mask: npt.NDArray[np.uint32] | None = None,
        repeats: DryPenalty | None = None,
    ) -> None:
        """`repeats`: what DRY goes by; without it there is none."""
        self.params = params if isinstance(params, FilledParams) else fill(params)
        self.seed = seed
        self.index = index
        self.counts = counts
        self.mask = mask
        self.masks: Masks | None = None
        self.chain = Chain(self.params, repeats) if self.params.uncommon else None
        self.token_ids: Sequence[int] = ()
        self.error: str | None = None
        self._prepared: native.Prepared | None = None

    @property
    def prepared(self) -> native.Prepared:
        """The parameters as the helper reads them."""
        if self._prepared is None:
            self._prepared = native.Prepared(self.params)
        return self._prepared

    def later(self, number: int) -> SamplerState:
        """The same for the output token that comes so many after this one."""
        draw = SamplerState(self.params, self.seed, self.index + number, self.counts, self.mask)
        draw._prepared = self.prepared
        return draw


def sample_rows(logits: npt.NDArray[np.float32], draws: list[SamplerState], n_threads: int = 1) -> list[int]:
    """A token id for each row, or NO_TOKEN where the logits are not numbers or nothing is allowed.

    Args:
        logits: shape (len(draws), vocabulary), float32; not changed.
        draws: one for each row.
        n_threads: for the compiled helper, where it has OpenMP and the rows are worth it.
    """
    if native.available():
        tokens = native.sample_rows(logits, draws, n_threads)
        for i in [i for i, draw in enumerate(draws) if draw.chain is not None]:
            tokens[i] = _sample_row(logits[i], draws[i])
        return tokens
    return [_sample_row(row, draw) for row, draw in zip(logits, draws, strict=True)]


def _sample_row(row: npt.NDArray[np.float32], draw: SamplerState) -> int:
    return numpy_sampler.sample_row(row, draw) if draw.chain is None else draw.chain.sample(row, draw)


def distribution(
    row: npt.NDArray[np.float32], draw: SamplerState
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that a row may draw, in order of their ids, and their probabilities, which sum to 1.

    A token less than 2^-34 times as likely as the likeliest has probability 0. Both are empty where the logits are
    not numbers or nothing is allowed.
    """
    if draw.chain is None and native.available():
        raw_ids, raw_weights = native.candidates(row, draw)
        ids, weights = np.array(raw_ids, np.int64), np.array(raw_weights)
    else:
        ids, raw = (numpy_sampler if draw.chain is None else draw.chain).candidates(row, draw)
        weights = raw.astype(np.float64)
    return ids, weights / weights.sum() if len(ids) else weights
