"""The forms of a prompt, as in vLLM: a text, token ids, or either of them in a mapping."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

from llamabatch.errors import PromptError
from llamabatch.request.media import IMAGE, SOUND, Kind
from llamabatch.utils.checks import items, nearest, show

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class TextPrompt(TypedDict):
    """A text in a mapping, as vLLM's TextPrompt.

    Attributes:
        prompt: the text.
        multi_modal_data: {"image": a picture, or a list of pictures} or {"audio": a clip, or a list of clips}. The
            media replace the marks in the text: <__media__>, or the marks that the model's prompts have in vLLM. The
            text is then tokenized with special tokens. A picture is a path, bytes, a data: address, a PIL image or an
            array. A clip is a path, bytes, a data: address, or a pair of samples and their rate.
    """

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """Token ids in a mapping, as vLLM's TokensPrompt.

    Attributes:
        prompt_token_ids: ids of the model's vocabulary, computed unchanged.
        prompt: the text of the ids, for RequestOutput.prompt; it is not tokenized.
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt

FORMS = "a text or a list of token ids"
_KEYS = ("prompt", "prompt_token_ids")
# The key of the media in vLLM's mappings.
_MEDIA = "multi_modal_data"
# Key of the mark in the mapping of the media. The mark is the text that stands for each picture or clip in the prompt.
# Callers do not have this key, so they cannot set a mark.
MARK_KEY = object()
_KINDS: dict[str, Kind | None] = {"image": IMAGE, "audio": SOUND, "any": None}
_NOT_YET = (
    *("multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds", "token_type_ids", "encoder_prompt"),
    *("decoder_prompt",),
)


def is_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Returns True for a non-empty list, tuple or array of whole numbers: the token ids of one prompt."""
    if isinstance(prompt, Iterator) or is_table(prompt):
        return False
    tokens = items(prompt, sys.maxsize)
    return bool(tokens) and all(
        type(t) is int or (isinstance(t, Integral) and not isinstance(t, bool)) for t in tokens or ()
    )


def plain_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns token ids as Python ints. Other threads can run during this loop, but not during a map()."""
    plain = [int(token_id) for token_id in token_ids]
    return tuple(plain)


def is_table(values: object) -> bool:
    """Returns True for a DataFrame or similar: its iterator gives column names, not rows."""
    return hasattr(type(values), "columns")


def is_prompt_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Returns True for a TextPrompt or a TokensPrompt, even with keys that are refused later. Returns False for a
    message, and for a table that is a dict of columns."""
    if not isinstance(value, Mapping) or "role" in value:
        return False
    return isinstance(value.get("prompt"), str) or any(
        key in value for key in (*_KEYS[1:], "cache_salt", _MEDIA, *_NOT_YET)
    )


def media_of(prompt: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[tuple[Kind | None, Any]], str | None]:
    """Takes the media out of a prompt mapping. Returns the mapping without media, a list of (kind, picture or clip),
    and the server's mark. This mark stands in the text for each item of the list; if it is None, the text has the usual
    marks. Raises PromptError.
    """
    data = prompt.get(_MEDIA)
    if data is None:
        return prompt, [], None
    if not isinstance(data, Mapping):
        raise PromptError(f"{_MEDIA} is {show(data)}; give {{'image': …}} or {{'audio': …}}")
    data = dict(data)
    mark = data.pop(MARK_KEY, None)
    for kind in data:
        if kind not in _KINDS:
            raise PromptError(f"{_MEDIA} has {show(kind)}; give {{'image': …}} or {{'audio': …}}")
    found = [(_KINDS[kind], each) for kind, given in data.items() for each in _listed(given)]
    if len({kind for kind, _ in found}) > 1:
        raise PromptError(f"{_MEDIA} has pictures and sounds, and their order is unknown; give them to chat()")
    if found and "prompt_token_ids" in prompt:
        raise PromptError(f"a prompt has prompt_token_ids and {_MEDIA}; media need a prompt of text")
    return {key: value for key, value in prompt.items() if key != _MEDIA}, found, mark


def _listed(given: Any) -> list[Any]:
    """Returns the given media as a list. A pair of samples and their rate is one clip."""
    if given is None:
        return []
    is_pair = isinstance(given, tuple) and len(given) == 2 and not hasattr(given[1], "dtype")
    is_sound = is_pair and hasattr(given[0], "dtype")
    return list(given) if isinstance(given, (list, tuple)) and not is_sound else [given]


def read_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """Returns the text and the token ids of a TextPrompt or TokensPrompt; None for a missing value.

    Raises:
        PromptError: a key is unknown or not supported, or a value has the wrong type.
    """
    if "cache_salt" in prompt:
        raise PromptError("a prompt has 'cache_salt', which is a parameter here; give SamplingParams(cache_salt=…)")
    for key in prompt:
        if key in _NOT_YET:
            raise PromptError(f"a prompt has {key!r}, which is not supported yet; give {' and '.join(_KEYS)} alone")
        if key == _MEDIA:
            raise PromptError(
                f"a prompt has {key!r}, which needs a prompt of text, and works only where the prompt is continued"
            )
        if key not in _KEYS:
            raise PromptError(f"a prompt has the unknown key {show(key)}{nearest(str(key), _KEYS)}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise PromptError(f"prompt of a mapping is {show(text)}; give a text")
    if "prompt_token_ids" not in prompt:
        return text, None
    if is_token_ids(ids):
        return text, plain_ids(ids)
    if isinstance(ids, (list, tuple)) and not ids:
        return text, ()  # an empty prompt is refused later
    raise PromptError(f"prompt_token_ids is {show(ids)}; give a list of token ids")
