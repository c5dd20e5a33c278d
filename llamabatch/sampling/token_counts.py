"""TokenCounts: the distinct tokens of a sequence, or of its last part, and how often each of them is in the output.
Penalties use these counts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence


class TokenCounts:
    """Two parallel arrays of tokens and counts. The sampler reads them in place. `add` is not slower for a long text.

    Attributes:
        ids: the distinct tokens of prompt and output; int32.
        counts: how often each token is in the output; 0 for tokens that are only in the prompt; int32.
        num_output: number of output tokens added so far.
    """

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self.ids = array("i", self._places)
        self.counts = array("i", bytes(self.ids.itemsize * len(self.ids)))
        self.num_output = 0

    def add(self, token_id: int) -> None:
        """Counts one more token of the output."""
        self._enter(token_id)
        self.num_output += 1

    def _enter(self, token_id: int, *, is_output: bool = True) -> None:
        place = self._places.setdefault(token_id, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token_id)
            self.counts.append(0)
        self.counts[place] += is_output

    def take_back(self, token_ids: Iterable[int], n_distinct: int) -> None:
        """Removes the tokens that were added last. `n_distinct` is the length of `ids` before these additions."""
        for token_id in token_ids:
            self.counts[self._places[token_id]] -= 1
            self.num_output -= 1
        for token_id in self.ids[n_distinct:]:
            del self._places[token_id]
        del self.ids[n_distinct:], self.counts[n_distinct:]


class WindowCounts(TokenCounts):
    """Counts of the last tokens of prompt and output. When the last copy of a token leaves the window, the last entry
    of the arrays replaces the token's entry.

    Args:
        window: number of last tokens that are counted, above 0.
    """

    def __init__(self, prompt_token_ids: Sequence[int], window: int) -> None:
        tail = prompt_token_ids[-window:]
        super().__init__(tail)
        self._window = window
        self._text = list(tail)  # the prompt's tail and the whole output
        self._num_prompt = len(tail)
        self._times = Counter(tail)  # how often each token is in the window, as prompt or output

    def add(self, token_id: int) -> None:
        self._text.append(token_id)
        super().add(token_id)
        if (place := len(self._text) - 1 - self._window) >= 0:
            self._leave(self._text[place], is_output=place >= self._num_prompt)

    def take_back(self, token_ids: Iterable[int], n_distinct: int) -> None:
        for _ in token_ids:
            self.num_output -= 1
            self._leave(self._text.pop(), is_output=True)
            if (place := len(self._text) - self._window) >= 0:
                self._enter(self._text[place], is_output=place >= self._num_prompt)

    def _enter(self, token_id: int, *, is_output: bool = True) -> None:
        self._times[token_id] += 1
        super()._enter(token_id, is_output=is_output)

    def _leave(self, token_id: int, *, is_output: bool) -> None:
        place = self._places[token_id]
        self.counts[place] -= is_output
        self._times[token_id] -= 1
        if self._times[token_id]:
            return
        del self._times[token_id], self._places[token_id]
        last, count = self.ids.pop(), self.counts.pop()
        if last != token_id:
            self.ids[place], self.counts[place] = last, count
            self._places[last] = place


def token_counts(prompt_token_ids: Sequence[int], window: int = -1) -> TokenCounts:
    """Returns the counts of a text that begins with this prompt.

    Args:
        window: number of last tokens that are counted; -1: all tokens.
    """
    return TokenCounts(prompt_token_ids) if window < 0 else WindowCounts(prompt_token_ids, window)
