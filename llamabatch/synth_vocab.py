"""A byte-level BPE vocabulary of any size, made up: right in kind and size, meaningless as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

NORMAL, CONTROL, UNUSED = 1, 3, 5  # llama.cpp's token types
_SPACE = "Ġ"  # how byte-level BPE writes a space


@dataclass(frozen=True)
class Vocab:
    """Tokens by id with their types, and the merges that reach some of them from bytes."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


def make_vocab(size: int, special: Sequence[str], special_start: int) -> Vocab:
    """`size` tokens: the 256 bytes, frequent pairs of letters, made-up words; `special` from id `special_start` on.

    What is left behind the special tokens is padding of type UNUSED, as in the real files.
    """
    tokens = [*_byte_tokens(), *_pairs()][:special_start]
    tokens += _words(special_start - len(tokens))
    tokens += special
    types = [NORMAL] * special_start + [CONTROL] * len(special)
    padding = size - len(tokens)
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(padding)]
    types += [UNUSED] * padding
    known = set(tokens[:special_start])
    merges = [f"{pair[0]} {pair[1]}" for pair in _pairs() if pair in known]
    return Vocab(tokens, types, merges)


def _byte_tokens() -> list[str]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the rest follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _pairs() -> list[str]:
    letters = "etaoinshrdlucm"
    return [a + b for a, b in product(_SPACE + letters, letters)]


def _words(count: int) -> list[str]:
    """Different strings of one space and three syllables, about as long as the tokens of a real vocabulary."""
    syllables = [c + v for c, v in product("bdfghjklmnprstvwyz", "aeiou")]
    words = (_SPACE + a + b + c for a, b, c in product(syllables, repeat=3))
    return [word for word, _ in zip(words, range(count), strict=False)]
