"""Vocab: the tokens of a model by id and by name, and its special tokens. Pure Python."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from llamabatch.errors import PromptError
from llamabatch.utils.checks import integer, show


class TokenSource(Protocol):
    """The part of a model that a Vocab reads."""

    n_vocab: int
    special_ids: Mapping[str, int]

    @property
    def eog_ids(self) -> tuple[int, ...]: ...

    def token_text(self, token_id: int) -> str: ...

    def piece(self, token_id: int) -> bytes: ...


class Vocab:
    """The vocabulary of a model. len() returns the number of tokens. Iteration yields the vocabulary's form of each
    token, by rising id.

    The vocabulary's form of a token is not its text: a space may be "Ġ" or "▁", a byte "<0x0A>". `bytes` returns the
    text. The vocabulary is in this process, even if the engine is in a child process. After close(), a method raises
    EngineClosedError unless it has read the data already.

    Attributes:
        special_ids: the model's special tokens. Keys: llama.cpp's names, such as "bos", "eos", "eot", "sep", "nl",
            "pad", "mask" and "fim_pre". Values: token ids.
        source: the model. The vocabulary is read from this object.
    """

    def __init__(self, source: TokenSource) -> None:
        self.special_ids: dict[str, int] = dict(source.special_ids)
        self.source = source
        self._size = source.n_vocab
        self._ids: dict[str, int] | None = None
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Number of tokens; ids are 0 to size - 1."""
        return self._size

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None if the model has none."""
        return self.special_ids.get("bos")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None if the model has none."""
        return self.special_ids.get("eos")

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a turn of a conversation; None if the model has none."""
        return self.special_ids.get("eot")

    @property
    def pad_token_id(self) -> int | None:
        """The token for padding; None if the model has none."""
        return self.special_ids.get("pad")

    @property
    def eog_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a generation, in rising order. The first access reads the whole vocabulary."""
        return self.source.eog_ids

    def token(self, token_id: int) -> str:
        """Returns the vocabulary's form of a token. Raises PromptError for an id outside the vocabulary."""
        return self.source.token_text(integer(PromptError, "token_id", token_id, 0, self._size - 1))

    def bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text, or the name of a special token. Raises PromptError like
        `token`."""
        return self.source.piece(integer(PromptError, "token_id", token_id, 0, self._size - 1))

    def id(self, token: str) -> int:
        """Returns the id of a token in the vocabulary's form; the lowest id if several tokens have this form. The first
        call reads the whole vocabulary.

        Raises:
            PromptError: the vocabulary has no such token. Use tokenize() for other texts.
        """
        found = self._by_token().get(token) if isinstance(token, str) else None
        if found is None:
            raise PromptError(f"the vocabulary has no token {show(token)}; tokenize() makes tokens of a text")
        return found

    def __contains__(self, token: object) -> bool:
        return isinstance(token, str) and token in self._by_token()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[str]:
        return map(self.source.token_text, range(self._size))

    def __repr__(self) -> str:
        return f"Vocab(size={self._size}{''.join(f', {name}={i}' for name, i in self.special_ids.items())})"

    def _by_token(self) -> dict[str, int]:
        with self._lock:
            if self._ids is None:
                ids: dict[str, int] = {}
                for token_id, token in enumerate(self):
                    ids.setdefault(token, token_id)
                self._ids = ids
            return self._ids
