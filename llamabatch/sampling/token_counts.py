"""TokenCounts: the distinct tokens of a sequence and their number in its output, for the penalties."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class TokenCounts:
    """Two parallel arrays, which the sampler reads in place; the cost of an addition does not grow with the text.

    Attributes:
        ids: the distinct tokens of prompt and output, in order of their first appearance; int32.
        counts: number of each in the output; int32. 0 for tokens of the prompt alone.
        num_output: tokens of the output that are counted.
    """

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self.ids = array("i", self._places)
        self.counts = array("i", bytes(self.ids.itemsize * len(self.ids)))
        self.num_output = 0

    def add(self, token_id: int) -> None:
        """Counts one more token of the output."""
        place = self._places.setdefault(token_id, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token_id)
            self.counts.append(0)
        self.counts[place] += 1
        self.num_output += 1

    def take_back(self, token_ids: Iterable[int], n_distinct: int) -> None:
        """Undoes the adding of these, the last that were added. `n_distinct`: how many ids there were before."""
        for token_id in token_ids:
            self.counts[self._places[token_id]] -= 1
            self.num_output -= 1
        for token_id in self.ids[n_distinct:]:
            del self._places[token_id]
        del self.ids[n_distinct:], self.counts[n_distinct:]
