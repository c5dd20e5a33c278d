"""Samples rows with only the likeliest tokens, as a device returns them. Decides for which requests such rows are
enough.

The samplers see such a row as a vocabulary of DEVICE_TOP tokens, in order of their ids. top_k is the first cut of the
chain. If top_k is below DEVICE_TOP, it keeps the same tokens as in the whole vocabulary. So top_p, min_p, temperature
and the draw use the same numbers. Three kinds of options need the whole row: options that change the order of tokens
before top_k (logit_bias, penalties, masks), options that read all tokens (top_n_sigma, a logits processor), and
logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamabatch.config import DEVICE_TOP
from llamabatch.request.request import Request
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, sample_rows

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


def is_enough(request: Request, state: SamplerState) -> bool:
    """Returns True if this request's next token depends only on the DEVICE_TOP likeliest tokens of its row."""
    params = state.params
    if params.wants_logprobs or params.logprobs is not None or params.prompt_logprobs is not None:
        return False
    if request.score_from is not None or request.ranked:
        return False
    changes = params.biases or params.allowed_ids is not None or state.counts is not None
    masked = state.masks is not None or state.grammar is not None or params.structure is not None
    return not (changes or masked or state.chain is not None) and (params.greedy or 0 < params.top_k < DEVICE_TOP)


class TopRows:
    """The likeliest tokens of some rows.

    Args:
        ids, logits: shape (rows, DEVICE_TOP), each row in any order.
    """

    def __init__(self, ids: Ids, logits: Logits) -> None:
        # One sort of int64 replaces an argsort: the id is in the high 32 bits, the logit in the low 32 bits.
        pairs = ids.astype(np.int64) << 32 | logits.view(np.uint32)
        pairs.sort(axis=1)
        self.ids: Ids = (pairs >> 32).astype(np.int32)
        self.logits: Logits = (pairs & 0xFFFFFFFF).astype(np.uint32).view(np.float32)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | npt.NDArray[np.bool_]) -> TopRows:
        part = object.__new__(TopRows)
        part.ids, part.logits = self.ids[rows], self.logits[rows]
        return part

    def is_ambiguous(self, states: Sequence[SamplerState]) -> bool:
        """Returns True if top_k keeps a token that is as likely as the least likely token of its row. An equally likely
        token of a lower id may then be missing. Also True if the logits of a row are not numbers."""
        wanted = [1 if state.params.greedy else state.params.top_k for state in states]
        n_better = (self.logits > self.logits.min(axis=1, keepdims=True)).sum(axis=1)
        return bool((n_better < wanted).any())

    def sample(self, states: list[SamplerState], n_threads: int) -> list[int]:
        """Returns a token id for each row, or NO_TOKEN; see sample_rows."""
        places = sample_rows(self.logits, states, n_threads, dictated=False)
        tokens = [
            NO_TOKEN if place == NO_TOKEN else row[place] for place, row in zip(places, self.ids.tolist(), strict=True)
        ]
        return [t if s.dictated is None else s.dictated for t, s in zip(tokens, states, strict=True)]
