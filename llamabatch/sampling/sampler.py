"""Samples all output rows of a call, with the compiled helper or with numpy. Both return the same tokens.

Rows with uncommon samplers always use numpy (sampler_chain.py).

The token of a row depends on the row's logits, parameters, mask, and (seed, index). With penalties, the token also
depends on earlier tokens. Each row is read alone, in place. So other rows of the call cannot change its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling import native, numpy_sampler
from llamabatch.sampling.defaults import FilledParams, fill
from llamabatch.sampling.dry import DryPenalty
from llamabatch.sampling.infill import Infill
from llamabatch.sampling.sampler_chain import Chain
from llamabatch.sampling.token_counts import TokenCounts
from llamabatch.sampling.token_masks import Masks

if TYPE_CHECKING:
    from llamabatch.sampling.grammar_matcher import GrammarMatcher
    from llamabatch.sampling.reasoning import ReasoningTracker

NO_TOKEN = numpy_sampler.NO_TOKEN
NOTHING_MAY_COME = "no token can be chosen: the masks forbid all, or the logits are not finite numbers"


class SamplerState:
    """The state with which one sequence is sampled: everything except the logits. It is made once, and `advance`
    updates it.

    Attributes:
        params: how to sample.
        seed: the request's seed, 0 .. 2**64-1.
        index: index of the next output token to sample (from 0).
        counts: the counts of earlier tokens, for penalties; ids outside the vocabulary are ignored.
        mask: contiguous uint32 words; bit i % 32 of word i / 32 allows token i (llguidance's format). None: no mask.
            Tokens that params.allowed_token_ids forbids stay forbidden.
        masks: the sources of each token's mask; None for most sequences.
        grammar: position in the grammar of structured_outputs, one of the sources of masks; None: no grammar.
        chain: the uncommon samplers; None for most sequences.
        token_ids: prompt and output so far; updated only with a chain.
        error: message of the logits processor that failed for this token; None: no processor failed.
        reasoning: position in the thinking of a sequence with a thinking budget; None for most sequences.
        dictated: the token that replaces the sampled token, to close the thinking; None: the sampled token is used.
    """

    __slots__ = (
        *("_prepared", "chain", "counts", "dictated", "error", "grammar", "index", "mask", "masks", "params"),
        *("reasoning", "seed", "token_ids"),
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        index: int = 0,
        counts: TokenCounts | None = None,
        mask: npt.NDArray[np.uint32] | None = None,
        dry: DryPenalty | None = None,
        infill: Infill | None = None,
    ) -> None:
        """See Chain for `dry` and `infill`."""
        self.params = params if isinstance(params, FilledParams) else fill(params)
        self.seed = seed
        self.index = index
        self.counts = counts
        self.mask = mask
        self.masks: Masks | None = None
        self.grammar: GrammarMatcher | None = None
        self.chain = Chain(self.params, dry, infill) if self.params.uncommon else None
        self.token_ids: Sequence[int] = ()
        self.error: str | None = None
        self.reasoning: ReasoningTracker | None = None
        self.dictated: int | None = None
        self._prepared: native.Prepared | None = None

    @property
    def prepared(self) -> native.Prepared:
        """The parameters in the form that the helper reads."""
        if self._prepared is None:
            self._prepared = native.Prepared(self.params)
        return self._prepared

    @property
    def why_no_token(self) -> str:
        """The error message if no token could be sampled."""
        if self.error is not None:
            return self.error
        if self.grammar is not None:
            return self.grammar.why_no_token
        return NOTHING_MAY_COME

    def constrain(self, grammar: GrammarMatcher, n_vocab: int) -> None:
        """Restricts the output to a grammar."""
        self.grammar = grammar
        if self.masks is None:
            self.masks = Masks(n_vocab)
        self.masks.add(grammar)

    def advance(self, index: int, token_ids: Sequence[int]) -> None:
        """Moves to output token `index`. A second call for the same token changes nothing.

        Args:
            token_ids: prompt and output, up to output token index - 1; the state does not change the list.
        """
        self.index = index
        if self.counts is not None:
            for token_id in token_ids[len(token_ids) - (index - self.counts.num_output) :]:
                self.counts.add(token_id)
        if self.masks is not None:
            self.mask = self.masks.next(index, token_ids)
        if self.chain is not None:
            self.token_ids = token_ids
        if self.reasoning is not None:
            self.dictated = self.reasoning.dictated(index, token_ids)

    def later(self, number: int) -> SamplerState:
        """Returns the state `number` output tokens later, without sources of masks. Both states share the chain,
        because a request gets guesses only if its chain has no memory."""
        state = SamplerState(self.params, self.seed, self.index + number, self.counts, self.mask)
        state._prepared = self.prepared
        state.chain = self.chain
        return state


def sample_rows(
    logits: npt.NDArray[np.float32], states: list[SamplerState], n_threads: int = 1, *, dictated: bool = True
) -> list[int]:
    """Returns a token id for each row, or NO_TOKEN if the row's logits are not numbers or no token is allowed.

    Args:
        logits: shape (len(states), vocabulary), float32; not changed.
        states: one for each row.
        n_threads: maximum number of threads of the compiled helper. More than one is used only with OpenMP and enough
            rows.
        dictated: True: a state's dictated token replaces the sampled token.
    """
    if native.available():
        tokens = native.sample_rows(logits, states, n_threads)
        for i in [i for i, state in enumerate(states) if state.chain is not None]:
            tokens[i] = _sample_row(logits[i], states[i])
    else:
        tokens = [_sample_row(row, state) for row, state in zip(logits, states, strict=True)]
    if not dictated:
        return tokens
    return [token if state.dictated is None else state.dictated for token, state in zip(tokens, states, strict=True)]


def _sample_row(row: npt.NDArray[np.float32], state: SamplerState) -> int:
    return numpy_sampler.sample_row(row, state) if state.chain is None else state.chain.sample(row, state)


def distribution(
    row: npt.NDArray[np.float32], state: SamplerState
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns the tokens that can be drawn from a row, in order of their ids, and their probabilities. The sum of the
    probabilities is 1.

    A token has probability 0 if it is less than 2^-34 times as likely as the likeliest token. Both arrays are empty if
    the logits are not numbers or no token is allowed.
    """
    if state.chain is None and native.available():
        raw_ids, raw_weights = native.candidates(row, state)
        ids, weights = np.array(raw_ids, np.int64), np.array(raw_weights)
    else:
        ids, raw = (numpy_sampler if state.chain is None else state.chain).candidates(row, state)
        weights = raw.astype(np.float64)
    return ids, weights / weights.sum() if len(ids) else weights
