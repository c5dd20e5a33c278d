"""Prefixes that were loaded from files, for requests that begin with their tokens. Pure Python."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from llamabatch.errors import InputError
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.common_prefix import MIN_SHARED, common_length, share_key


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """One loaded prefix.

    Attributes:
        path: the file that it was loaded from.
        token_ids: its tokens, computed without adapters.
        state: cells of these tokens, in a form that only the model runner reads.
    """

    path: str
    token_ids: list[int]
    state: bytes


class PrefixStore:
    """Loaded prefixes by the path of their file."""

    def __init__(self) -> None:
        self._prefixes: dict[str, StoredPrefix] = {}

    def __contains__(self, prefix: StoredPrefix) -> bool:
        return self._prefixes.get(prefix.path) is prefix

    def load(self, path: str, token_ids: abc.Sequence[int], state: bytes) -> None:
        """Holds a prefix until it is unloaded; it replaces an earlier one of that path."""
        self._prefixes[path] = StoredPrefix(path, list(token_ids), state)

    def unload(self, path: str) -> None:
        """Frees a prefix. Raises InputError if it is not loaded."""
        if self._prefixes.pop(path, None) is None:
            raise InputError(f"no prefix of {path} is loaded")

    def find(self, sequence: Sequence, known: int) -> tuple[StoredPrefix, int] | None:
        """The prefix that saves the most work and how many of its tokens do; None if none does.

        Args:
            known: tokens that need not be computed without the store; a prefix must save MIN_SHARED more.
        """
        if not self._prefixes or share_key(sequence.request):
            return None
        best = None
        for prefix in self._prefixes.values():
            shared = min(common_length(sequence.token_ids, prefix.token_ids), sequence.most_shared)
            if shared >= known + MIN_SHARED:
                best, known = (prefix, shared), shared
        return best
