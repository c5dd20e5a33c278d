"""Limits the length of texts before they are tokenized. llama.cpp reads a text to its end, and needs 35 bytes of memory
for each byte of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamabatch.engine.validation import check_length
from llamabatch.errors import ContextLengthError, PromptError
from llamabatch.llama.model import Model

# The limit of characters in a text if it is only tokenized, or if it may be cut to n_ctx.
MAX_TEXT = 2**20
# The first text above the limit is still tokenized if the text has at most this many characters. The refusal can then
# give the number of tokens.
COUNTED = 2**18
_MARKS = 2**14  # extra characters: a call also tokenizes tags of thinking and of tools


class BoundedModel:
    """A Model whose `tokenize` refuses long texts without reading them.

    Args:
        longest: the limit of characters in a text.
        refusal: returns the exception for a text of this many characters.
        n_texts: limits all texts together to n_texts * longest characters; None: no limit.
        n_ctx: the limit of tokens in a text. If the first long text has at most COUNTED characters, it is tokenized,
            and its refusal gives the number of tokens. None: all refusals give the number of characters.
    """

    def __init__(
        self,
        model: Model,
        longest: int,
        refusal: Callable[[int], Exception],
        n_texts: int | None = None,
        n_ctx: int | None = None,
    ) -> None:
        self._model = model
        self._longest = longest
        self._refusal = refusal
        self._n_ctx = n_ctx
        self._left = None if n_texts is None else n_texts * longest + _MARKS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Tokenizes like Model.tokenize. Raises the refusal for a long text."""
        if len(text) > self._longest:
            if self._n_ctx is not None and len(text) <= COUNTED:
                n_ctx, self._n_ctx = self._n_ctx, None
                ids = self._model.tokenize(text, add_special=add_special, parse_special=parse_special)
                check_length(len(ids), n_ctx)
            raise self._refusal(len(text))
        if self._left is not None:
            self._left -= len(text)
            if self._left < 0:
                raise self._refusal(self._longest - self._left)
        return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)


def for_prompts(model: Model, n_ctx: int, n_prompts: int, *, cuts: bool) -> Any:
    """Returns a model for the prompts of a call. It refuses texts of more than n_ctx * longest_token characters: they
    have more than n_ctx tokens, because a character has at least one byte and a token at most `longest_token` bytes.

    Args:
        cuts: True: longer texts are accepted, because prompts that are too long are cut later.
    """
    longest = n_ctx * model.longest_token

    def refusal(n: int) -> Exception:
        if cuts:
            return PromptError(f"the prompt has {n} characters; up to {max(longest, MAX_TEXT)} can be truncated")
        error = ContextLengthError(
            f"the prompt has {n} characters; n_ctx allows 1 to {n_ctx} tokens, which are {longest} characters at most"
        )
        error.n_tokens, error.n_allowed = -(-n // model.longest_token), n_ctx
        return error

    return BoundedModel(model, max(longest, MAX_TEXT) if cuts else longest, refusal, n_prompts, None if cuts else n_ctx)


def for_tokens(model: Model) -> Any:
    """Returns a model for texts that are only tokenized. All texts together may have MAX_TEXT characters."""
    return BoundedModel(
        model,
        MAX_TEXT,
        lambda n: PromptError(f"the text has {n} characters; up to {MAX_TEXT} are tokenized at once; send it in parts"),
        1,
    )
