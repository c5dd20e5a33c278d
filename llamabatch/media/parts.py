"""The pictures in the messages of a conversation, each replaced by a mark that the chat template writes as text; and
the parts of messages for the pictures in a cell of a table."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.chat.conversation import MEDIA_MARK, is_picture
from llamabatch.errors import PromptError
from llamabatch.media.pictures import is_address, read_address, read_picture
from llamabatch.media.sources import NOWHERE, MediaSources
from llamabatch.request.media import Media
from llamabatch.utils.checks import show

MAX_IN_ALL = 64 * 2**20
"""Pixels of the pictures of a conversation: a message to a child process holds them."""


def has_pictures(conversation: Any) -> bool:
    """True if a message has a part with a picture."""
    messages = conversation if isinstance(conversation, (list, tuple)) else ()  # others are refused by their type
    return any(is_picture(part) for message in messages for part in _parts(message))


def take_pictures(
    conversation: Sequence[Mapping[str, Any]], sources: MediaSources = NOWHERE
) -> tuple[list[Mapping[str, Any]], list[Media], str]:
    """The messages with marks in place of pictures, the pictures in order, and the mark.

    The mark is drawn anew for each conversation, so that no text can contain it.

    Args:
        sources: as of read_address.

    Raises:
        PromptError, SetupError: as read_picture.
    """
    mark = f"<media-{secrets.token_hex(16)}>"
    pictures: list[Media] = []
    left = MAX_IN_ALL
    messages: list[Mapping[str, Any]] = []
    for message in conversation:
        parts = _parts(message)
        if any(map(is_picture, parts)):
            content: list[Any] = []
            for part in parts:
                if is_picture(part):
                    picture = _picture_of(part, left, sources)
                    left -= picture.width * picture.height
                    pictures.append(picture)
                    content.append({"type": MEDIA_MARK, MEDIA_MARK: mark})
                else:
                    content.append(part)
            message = {**message, "content": content}
        messages.append(message)
    return messages, pictures, mark


def read_pictures(given: Sequence[Any], sources: MediaSources = NOWHERE) -> list[Media]:
    """The pictures of one prompt. Raises as read_picture."""
    pictures: list[Media] = []
    for each in given:
        left = MAX_IN_ALL - sum(picture.width * picture.height for picture in pictures)
        pictures.append(read_picture(each, left, sources))
    return pictures


def parts_of_cell(cell: Any) -> list[dict[str, Any]]:
    """The parts of a message for a cell of a table: of one picture, of a list of them, none for an empty cell.

    Args:
        cell: a picture as of read_picture; {"bytes": …, "path": …}, as datasets of Hugging Face have it.
    """
    if cell is None or (isinstance(cell, str) and not cell) or (isinstance(cell, float) and math.isnan(cell)):
        return []
    if isinstance(cell, Mapping) and ("bytes" in cell or "path" in cell):
        given = cell.get("bytes")
        return parts_of_cell(cell.get("path") if given is None else given)
    if isinstance(cell, (list, tuple)) or getattr(cell, "dtype", None) == "object":
        return [part for each in cell for part in parts_of_cell(each)]
    return [{"type": "image", "image": cell}]


def placed(conversation: Sequence[Mapping[str, Any]], folder: str) -> list[Mapping[str, Any]]:
    """The conversation with the relative paths of its pictures below a folder."""
    return [
        {**message, "content": [_placed(part, folder) for part in parts]}
        if any(map(is_picture, parts := _parts(message)))
        else message
        for message in conversation
    ]


def _placed(part: Any, folder: str) -> Any:
    given: Any = part.get("image") if is_picture(part) else None
    is_path = isinstance(given, os.PathLike) or (isinstance(given, str) and not is_address(given))
    return {**part, "image": os.path.join(folder, os.path.expanduser(given))} if is_path else part


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()


def _picture_of(part: Mapping[str, Any], most: int, sources: MediaSources) -> Media:
    """The picture of a part: of {"type": "image", "image": …} in any form; of {"image_url": {"url": …}}, {"image_url":
    …}, {"url": …} and Anthropic's {"source": …}, which may come from strangers, by an address that may be read.

    Args:
        most: pixels that it may have.
    """
    if isinstance(source := part.get("source"), Mapping) and isinstance(source.get("data"), str):
        return read_address(f"data:{source.get('media_type', 'image')};base64,{source['data']}", most)
    for name in ("image", "image_pil"):
        if part.get(name) is not None:
            return read_picture(part[name], most, sources)
    address = part.get("image_url", part.get("url"))
    address = address.get("url") if isinstance(address, Mapping) else address
    if address is None:
        raise PromptError(f"a part of type {show(part['type'])} has no picture; give {{'type': 'image', 'image': …}}")
    return read_address(address, most, sources)
