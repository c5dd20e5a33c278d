"""Infill: llama.cpp's sampler for code in a gap (src/llama-sampler.cpp), for rows whose chain names it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from llamabatch.sampling.numpy_sampler import Floats, Ids, top_of, weights_of

_MOST = 4096  # the likeliest tokens, which are searched for tokens that begin alike
_LEAST = 0.2  # tokens below this probability are dropped
_END_COUNTS = 3  # an end of the text counts as this many times the mean of all tokens


class Infill:
    """The infill sampler of one vocabulary.

    Args:
        eog_ids: tokens that end a text. end: the token that ends a turn, or otherwise a text.
        token_bytes: the bytes of a token by its id, none for special tokens.
    """

    def __init__(self, eog_ids: Iterable[int], end: int | None, token_bytes: Callable[[int], bytes]) -> None:
        self._eog_ids = np.array(sorted(eog_ids), np.int64)
        self._end = end
        self._bytes = token_bytes

    def left(self, values: Floats, ids: Ids) -> Ids:
        """Returns the ids that stay, rising: only ends of the text if these are likely; otherwise the likely tokens,
        where a token that begins another stands for both.

        Args:
            values: a whole row. ids: at least one of its tokens, rising; none is -inf.
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
        """Merges tokens of which one begins the other: adds up the shares, in place, at the likelier one. Returns a
        mask of the others."""
        order = top_of(shares, _MOST).tolist()
        texts = {place: self._bytes(int(ids[place])) for place in order}
        beginnings = {text for text in texts.values() if text}
        begun: dict[bytes, list[int]] = defaultdict(list)  # text -> the tokens that begin with it, likeliest first
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
