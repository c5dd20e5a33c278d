"""Detokenizer: converts token ids to text, one token at a time. Characters and stop strings may span several tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from dataclasses import dataclass


class Detokenizer:
    """The text of one sequence. Text that may still belong to a stop string or a character is held back.

    Args:
        token_bytes: id -> the bytes of the token's text.
        stop: strings that end the text. The first complete string ends it. If one token completes several strings, the
            string that begins first ends the text.
        include_stop: True: the text ends with the stop string; False: the text ends before it.
        min_tokens: stop strings that end within the first `min_tokens` tokens are ignored.
        errors: how to treat bytes that are not UTF-8, as in bytes.decode.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        errors: str = "replace",
    ) -> None:
        self.stopped: str | None = None
        self._token_bytes = token_bytes
        self._include_stop = include_stop
        self._exempt_tokens = min_tokens if stop else 0
        self._exempt = 0  # stop strings within this many first characters of _held are ignored
        self._stop = sorted(stop, key=len, reverse=True)
        self._longest_prefix = max((len(s) - 1 for s in stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=errors)
        self._is_whole = True  # False: the decoder holds a part of a character
        self._held = ""
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All text that has been released so far."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Appends a token. Returns the text that is now safe to show."""
        data = self._token_bytes(token_id)
        if self._is_whole and data.isascii():  # three times as fast as the decoder
            new = data.decode("ascii")
        else:
            new = self._decoder.decode(data)
            self._is_whole = not self._decoder.getstate()[0]
        if not self._stop:  # without stop strings, no text is held back
            if new:
                self._shown.append(new)
            return new
        if self._exempt_tokens:
            self._exempt_tokens -= 1
            self._exempt = len(self._held) + len(new)
        return self._release(new)

    def flush(self) -> str:
        """Ends the text. Returns the text that was held back."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is not None:
            return text
        rest, self._held = self._held, ""
        self._shown.append(rest)
        return text + rest

    def _release(self, new: str) -> str:
        if self.stopped is not None or not new:
            return ""
        text = self._held + new
        cut = self._cut(text)
        shown, self._held = text[:cut], "" if self.stopped is not None else text[cut:]
        self._exempt = max(0, self._exempt - cut)
        self._shown.append(shown)
        return shown

    def _cut(self, text: str) -> int:
        """Returns the number of characters that are safe to show. Sets `stopped` when a stop string is complete."""
        if not self._stop:
            return len(text)
        places = ((text.find(s, max(0, self._exempt + 1 - len(s))), s) for s in self._stop)
        found = min(((at, s) for at, s in places if at >= 0), key=lambda f: f[0], default=None)
        if found is not None:
            at, self.stopped = found
            return at + len(self.stopped) if self._include_stop else at
        for length in range(min(self._longest_prefix, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return len(text) - length
        return len(text)


@dataclass(frozen=True)
class Vocabulary:
    """The facts about a vocabulary that an engine needs. This class does not depend on llama.cpp.

    Attributes:
        size: number of tokens; ids run from 0 to size - 1.
        is_eog: id -> True if the token ends a generation.
        token_bytes: id -> the bytes of the token's text; empty for special tokens.
        all_bytes: as token_bytes, but returns the name of a special token.
        bos: the token that begins every text of the model; None: the model's texts begin without such a token.
    """

    size: int
    is_eog: Callable[[int], bool]
    token_bytes: Callable[[int], bytes]
    all_bytes: Callable[[int], bytes]
    bos: int | None = None

    def shown_bytes(self, preserved: Collection[int]) -> Callable[[int], bytes]:
        """Returns a function like token_bytes that also returns the names of the special tokens in `preserved`."""
        if not preserved:
            return self.token_bytes
        shown = frozenset(preserved)
        return lambda token_id: self.all_bytes(token_id) if token_id in shown else self.token_bytes(token_id)
