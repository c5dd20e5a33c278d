"""The prompts of a body: texts, token ids, or both mixed in one list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llamabatch.chat.messages import media_kind
from llamabatch.engine.validation import check_length
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.prompts import MARK_KEY
from llamabatch.errors import PromptError
from llamabatch.jobs.input.lines import text_or_ids
from llamabatch.media.files import at_address
from llamabatch.media.parts import MAX_COUNT, new_mark
from llamabatch.media.sources import NOWHERE
from llamabatch.request.sampling_params import MAX_TOKEN_ID
from llamabatch.server.http.errors import ApiError
from llamabatch.server.request.body import Body, Json
from llamabatch.server.request.media import media_part
from llamabatch.utils.checks import integer, show

Prompt = str | tuple[int, ...]


class MediaPrompt(NamedTuple):
    """A text and its images and audio. The text has a mark for each of them.

    Attributes:
        media: the images and audio. Each is the bytes of a file, or a message part.
        mark: the mark in the text; None: text_prompt finds the marks.
    """

    text: str
    media: tuple[bytes | Json, ...]
    mark: str | None = None

    @property
    def mapping(self) -> dict[str, Any]:
        """The prompt in the form of InputProcessor.prompts."""
        return {"prompt": self.text, "multi_modal_data": {"any": self.media, MARK_KEY: self.mark}}


Mixed = str | tuple[int | str, ...]  # a text, or a sequence of token ids and texts


MAX_PROMPTS = 16_384  # limit of prompts in a body


PROMPT_SCHEMA: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "minItems": 1},
    ]
}


MIXED_SCHEMA: Json = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": ["integer", "string", "array", "object"]}, "minItems": 1},
        {"type": "object", "properties": {"prompt_string": {"type": "string"}, "multimodal_data": {"type": "array"}}},
    ]
}


def as_prompts(
    processor: InputProcessor,
    prompts: Sequence[Prompt | MediaPrompt],
    *,
    add_special: bool = True,
    longest: int | None = None,
) -> Any:
    """Converts prompts to the form of InputProcessor.prompts: a single prompt, or a list of several.

    The name of a special token in a text, such as <|im_end|>, becomes this token. vLLM and llama-server do the same,
    because callers send rendered chat templates as prompts. A text that begins with BOS gets no second BOS.

    Args:
        add_special: put the special tokens of the vocabulary, such as BOS, around a text.
        longest: the limit of tokens in a text; None: no limit.

    Raises:
        ContextLengthError: a text has more than `longest` tokens. The length is checked first, because a check of a
            million token ids would delay other requests.
    """
    bos, found = processor.bos_text, []
    for place, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            wants = add_special and not (bos and prompt.startswith(bos))
            ids = processor.tokenize(prompt, wants, True)
            if longest is not None:
                check_length(len(ids), longest, f"prompts[{place}]: " if len(prompts) > 1 else "")
            found.append({"prompt": prompt, "prompt_token_ids": ids})
        elif isinstance(prompt, MediaPrompt):
            found.append(prompt.mapping)
        else:
            found.append({"prompt_token_ids": list(prompt)})
    return found if len(found) > 1 else found[0]


def read_prompts(name: str, given: object) -> tuple[Prompt, ...]:
    """Reads one prompt or several, each a text or token ids. Raises PromptError.

    Args:
        name: the name of the field, for error messages.
    """
    if isinstance(given, list) and given and not _is_ids(given):
        if len(given) > MAX_PROMPTS:
            raise PromptError(f"{name} is a list of {len(given)}; at most {MAX_PROMPTS} are allowed")
        return tuple(text_or_ids(f"{name}[{index}]", each) for index, each in enumerate(given))
    if not isinstance(given, (str, list)):
        raise PromptError(f"{name} is {show(given)}; give a text, token ids, or a list of them")
    return (text_or_ids(name, given),)


def _is_ids(given: list[Any]) -> bool:
    return all(isinstance(each, (int, float)) for each in given)


def read_mixed(given: object, name: str = "prompt") -> tuple[tuple[Mixed, ...], bool]:
    """Returns the prompts, and True if `given` is a list of prompts. Raises PromptError, ApiError.

    A list that contains a number is one prompt of texts and token ids.

    Args:
        name: the name of the field, for error messages.
    """
    if isinstance(given, list) and given and not any(isinstance(each, int) for each in given):
        if len(given) > MAX_PROMPTS:
            raise PromptError(f"{name} is a list of {len(given)}; at most {MAX_PROMPTS} are allowed")
        return tuple(_mixed(f"{name}[{place}]", each) for place, each in enumerate(given)), True
    return (_mixed(name, given),), False


def _mixed(name: str, given: object) -> Mixed:
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise ApiError(400, f"{name} has multimodal_data, but only texts can be read here", param=name)
        if "content" in given:
            return _parts_of(name, given["content"])
        text = given.get("prompt_string")
        if not isinstance(text, str):
            raise PromptError(f"{name} is {show(given)}; give an object with the text prompt_string")
        return text
    if isinstance(given, list) and given:
        return tuple(each if isinstance(each, str) else _token(name, each) for each in given)
    raise PromptError(f"{name} is {show(given)}; give a text, token ids, or both in one list")


def read_with_media(given: object, body: Body, name: str = "prompt") -> tuple[tuple[Mixed | MediaPrompt, ...], bool]:
    """Reads prompts as read_mixed does. Also accepts prompts with images and audio if the model reads them."""
    if not body.reads:
        return read_mixed(given, name)
    listed = given if isinstance(given, list) and len(given) <= MAX_PROMPTS else [given]
    several = isinstance(given, list)
    names = [f"{name}[{place}]" if several else name for place in range(len(listed))]
    found = [_with_media(place, each, body) for place, each in zip(names, listed, strict=True)]
    if not any(found):
        return read_mixed(given, name)
    read = zip(found, names, listed, strict=True)
    return tuple(own if own is not None else _mixed(place, each) for own, place, each in read), several


def _with_media(name: str, given: object, body: Body) -> MediaPrompt | None:
    """Returns a prompt with media; None: `given` has no media, or its prompt_string is not a text."""
    content = given.get("content") if isinstance(given, dict) else None
    if isinstance(content, list) and any(media_kind(part) is not None for part in content):
        media = [part for part in content if media_kind(part) is not None]
        mark = new_mark()
        place = {"type": "text", "text": mark}
        text = _parts_of(name, [part if media_kind(part) is None else place for part in content])
        return MediaPrompt(text, tuple(media_part(f"content of {name}", part, body) for part in media), mark)
    data = given.get("multimodal_data") if isinstance(given, dict) else None
    if not data or not isinstance(given, dict) or not isinstance(given.get("prompt_string"), str):
        return None
    if not isinstance(data, list) or not all(isinstance(each, str) for each in data):
        raise PromptError(f"multimodal_data is {show(data)}; give a list of pictures and sounds in base64")
    if len(data) > MAX_COUNT:
        raise PromptError(f"multimodal_data has {len(data):,} pictures and sounds; allowed are up to {MAX_COUNT}")
    files = (at_address(f"data:;base64,{each}", "an element of multimodal_data", NOWHERE) for each in data)
    return MediaPrompt(given["prompt_string"], tuple(files))


def _parts_of(name: str, content: object) -> str:
    """Joins the texts of content parts. The parts have the form of a message's content."""
    if not isinstance(content, list) or not content:
        raise PromptError(f'content of {name} is {show(content)}; give parts, as [{{"type": "text", "text": "Hello"}}]')
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise PromptError(f"content of {name} has the part {show(part)}; only parts of type 'text' are read")
        texts.append(text)
    return "".join(texts)


def _token(name: str, given: object) -> int:
    return integer(PromptError, f"a token id of {name}", given, 0, MAX_TOKEN_ID)


def mixed_ids(prompt: Mixed, processor: InputProcessor) -> list[int]:
    """Returns the token ids of a prompt. A text at the beginning of the prompt gets special tokens, such as BOS."""
    found: list[int] = []
    for place, part in enumerate((prompt,) if isinstance(prompt, str) else prompt):
        if isinstance(part, int):
            found.append(part)
        elif part or place == 0:
            found += processor.tokenize(part, place == 0, True)
    return found
