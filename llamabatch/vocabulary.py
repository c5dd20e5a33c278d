"""What the engine has to know of a vocabulary. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """What the engine has to know of a vocabulary, without the library behind it.

    Attributes:
        size: number of tokens; ids run from 0 to size - 1.
        is_eog: id -> whether it ends a generation.
        token_bytes: id -> the bytes of its text; empty for special tokens.
        all_bytes: the same, but for special tokens their names.
        bos: the token that the model wants at the beginning of every text; None: it wants none.
    """

    size: int
    is_eog: Callable[[int], bool]
    token_bytes: Callable[[int], bytes]
    all_bytes: Callable[[int], bytes]
    bos: int | None = None
