"""Infill: llama.cpp's sampler that completes code in a gap (src/llama-sampler.cpp). A request's chain must name it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from llamabatch.sampling.numpy_sampler import Floats, Ids, top_of, weights_of

_MOST = 4096  # number of likeliest tokens that are compared for common beginnings
_LEAST = 0.2  # tokens with a lower probability are dropped
_END_COUNTS = 3  # only ends stay if 3 * number of tokens * share of ends > share of other tokens


class Infill:
    """The infill sampler of one vocabulary.

    Args:
        eog_ids: tokens that end a text.
        end: the token that ends a turn, or else the token that ends a text; None: the vocabulary has neither.
        token_bytes: returns the bytes of a token id; b"" for special tokens.
    """

    def __init__(self, eog_ids: Iterable[int], end: int | None, token_bytes: Callable[[int], bytes]) -> None:
        self._eog_ids = np.array(sorted(eog_ids), np.int64)
        self._end = end
        self._bytes = token_bytes

    def left(self, values: Floats, ids: Ids) -> Ids:
        """Returns the ids to keep, in ascending order: end tokens and those other tokens that are likely. If end tokens
        are likely, only they stay. If no other token is likely, only `end` stays, or the likeliest token if `end`
        is not possible. If the text of a token begins with the text of another token, only the likelier token stays.

        Args:
            values: logits of a whole row.
            ids: at least one token of the row, in ascending order; no logit is -inf.
        """
        of_ids = values[ids]
        weights = weights_of(of_ids, of_ids.max())
        shares = weights / weights.sum()
        ends = np.isin(ids, self._eog_ids)
        if _END_COUNTS * shares[ends].sum() * len(ids) > shares[~ends].sum():
            return ids[ends]
        gone = self._merge(shares, ids)
        stays = (ends & ~gone) | (shares >= _LEAST)
        n_texts = int((stays & ~ends).sum())
        if n_texts == 0:
            may_end = self._end is not None and values[self._end] > -np.inf
            return np.array([self._end if may_end else ids[of_ids.argmax()]], np.int64)
        stays &= ends | (shares >= shares[stays].sum() / (n_texts + 1))
        left: Ids = ids[stays]
        return left

    def _merge(self, shares: Floats, ids: Ids) -> npt.NDArray[np.bool_]:
        """Merges two tokens if the text of one begins with the text of the other. Adds the share of the less likely
        token to the share of the likelier token, in place. Returns a mask of the less likely tokens."""
        order = top_of(shares, _MOST).tolist()
        texts = {place: self._bytes(int(ids[place])) for place in order}
        beginnings = {text for text in texts.values() if text}
        begun: dict[bytes, list[int]] = defaultdict(list)  # text -> places of tokens that begin with this text
        for place, text in texts.items():
            for length in range(1, len(text) + 1):
                if text[:length] in beginnings:
                    begun[text[:length]].append(place)
        gone = np.zeros(len(ids), np.bool_)
        for place in order:
            for other in begun.get(texts[place], ()):
                if gone[place]:
                    break
                if other != place and not gone[other]:
                    to, of = (other, place) if shares[other] > shares[place] else (place, other)
                    shares[to] += shares[of]
                    shares[of] = 0.0
                    gone[of] = True
        return gone
