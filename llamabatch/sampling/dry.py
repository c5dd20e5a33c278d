"""DryPenalty: finds the tokens that would extend a repeated run, and the lengths of these runs. Pure Python.

The rules are those of llama.cpp's sampler (llama_sampler_init_dry). That sampler reads the whole window for each token.
Here a new token takes little work. A repeated run can only end at an earlier place of the last token. The run is one
token longer than the run that ended one place before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

_MAX_BREAKER_BYTES = 40
_MAX_TAIL = 20  # maximum number of tokens in a breaker after its first token

Tails = Mapping[int, frozenset[tuple[int, ...]]]


class DryPenalty:
    """The repeated runs in the text of one sequence. The runs depend only on the sequence's tokens.

    Args:
        tails: the sequence breakers, as returned by breaker_tokens. No run may cross a breaker.
        shortest: runs of fewer tokens are ignored (dry_allowed_length).
        window: the number of last tokens that are searched; -1: all tokens.
    """

    def __init__(self, tails: Tails, shortest: int, window: int = -1) -> None:
        self._tails = tails
        self._tail_lengths = sorted({len(tail) for found in tails.values() for tail in found})
        self._shortest = shortest
        self._window = window
        self._tokens: list[int] = []
        self._places: dict[int, deque[int]] = {}  # token -> its places in the window
        self._runs: dict[int, int] = {}  # earlier place of the last token -> length of the run that ends at this place
        self._break = (-1, -1)  # places of the first and last token of the last breaker

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of the text: the whole prompt, or the tokens sampled since the last call."""
        if len(token_ids) == 1:
            self._add(token_ids[0])
        elif token_ids:
            for token_id in token_ids:
                self._append(token_id)
            self._runs = _runs_to_the_end(self._tokens, self._window)

    def _add(self, token_id: int) -> None:
        before = self._runs
        self._runs = {place: before.get(place - 1, 0) + 1 for place in self._places.get(token_id, ())}
        self._append(token_id)

    def _append(self, token_id: int) -> None:
        place = len(self._tokens)
        self._tokens.append(token_id)
        places = self._places.setdefault(token_id, deque())
        places.append(place)
        while self._window >= 0 and places[0] <= place - self._window:
            places.popleft()
        for length in self._tail_lengths:
            head = place - length
            if head >= self._break[0] and self._is_breaker(head, length):
                self._break = (head, place)

    def _is_breaker(self, head: int, length: int) -> bool:
        if head < 0:
            return False
        found = self._tails.get(self._tokens[head])
        return found is not None and tuple(self._tokens[head + 1 : head + 1 + length]) in found

    def lengths(self) -> dict[int, int]:
        """Returns the tokens that would extend a repeated run, each with the length of its run. Ignores runs of fewer
        than `shortest` tokens."""
        n = len(self._tokens)
        seen = n if self._window < 0 else min(n, self._window)
        head, end = self._break
        most = n - 1 - end if head >= n - seen else seen
        if seen <= self._shortest or most < self._shortest:
            return {}
        longest: dict[int, int] = {}
        for place, run in self._runs.items():
            length = min(run, most, seen - (n - 1 - place))
            if length >= self._shortest:
                token_id = self._tokens[place + 1]
                if token_id < 0:
                    continue  # a cell of a picture, not a token
                if length > longest.get(token_id, 0) and () not in self._tails.get(token_id, ()):
                    longest[token_id] = length
        return longest


def breaker_tokens(
    breakers: Iterable[str], n_vocab: int, token_bytes: Callable[[int], bytes], tokenize: Callable[[bytes], list[int]]
) -> Tails:
    """Returns the token sequences that contain a breaker. Keys: their first tokens. Values: the tokens after the first.

    For a sequence of one token, the tokens after the first are ().

    Args:
        token_bytes: returns the text of a token id, or the name of a special token.
        tokenize: returns the tokens of a string, without special tokens. It is called with the ends of breakers.
    """
    tails: dict[int, set[tuple[int, ...]]] = {}
    words = [token_bytes(token_id) for token_id in range(n_vocab)]
    for string in (breaker.encode()[:_MAX_BREAKER_BYTES] for breaker in breakers):
        rests = {cut: tuple(tokenize(string[cut:])[:_MAX_TAIL]) for cut in range(1, len(string))}
        for token_id, word in enumerate(words):
            if string in word:
                tails.setdefault(token_id, set()).add(())
                continue
            for cut, rest in rests.items():
                if word.endswith(string[:cut]):
                    tails.setdefault(token_id, set()).add(rest)
    return {token_id: frozenset(found) for token_id, found in tails.items()}


def _runs_to_the_end(tokens: Sequence[int], window: int) -> dict[int, int]:
    """Returns a dict: each earlier place of the last token -> length of the run that ends at this place.

    The tokens of a run equal the last tokens of the text.

    Uses the Z function of the reversed text (Gusfield 1997). The time is proportional to the length of the text.
    """
    n = len(tokens) if window < 0 else min(len(tokens), window)
    backwards = list(reversed(tokens[len(tokens) - n :]))
    z, left, right = [0] * n, 0, 0  # [left, right) is the match with the greatest end
    for k in range(1, n):
        length = min(right - k, z[k - left]) if k < right else 0
        while k + length < n and backwards[length] == backwards[k + length]:
            length += 1
        z[k] = length
        if k + length > right:
            left, right = k, k + length
    last = len(tokens) - 1
    return {last - k: length for k, length in enumerate(z) if length}
