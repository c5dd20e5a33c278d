"""Media in message parts. Replaces media by marks, which a chat template writes as text. Makes message parts from table
cells."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from llamabatch.chat.messages import MEDIA_MARK, media_kind
from llamabatch.errors import PromptError
from llamabatch.media.files import is_address
from llamabatch.media.pictures import read_address, read_picture
from llamabatch.media.sounds import MOST_S, is_sound, read_sound
from llamabatch.media.sources import NOWHERE, MediaSources
from llamabatch.request.media import IMAGE, SOUND, Kind, Media
from llamabatch.utils.checks import show

MAX_IN_ALL = 192 * 2**20
"""Maximum bytes of a prompt's decoded media: 67 million pixels, or 50 minutes of audio at 16,000 samples a second."""

MAX_COUNT = 256
"""Maximum number of pictures and audio clips of a prompt."""


def has_media(conversation: Any) -> bool:
    """Returns True if a message has a part with a picture or audio."""
    messages = conversation if isinstance(conversation, (list, tuple)) else ()  # other types are refused later
    return any(media_kind(part) is not None for message in messages for part in _parts(message))


def new_mark() -> str:
    """Returns a mark for the media in one text. The mark is random, so that no user can write it into a text."""
    return f"<media-{secrets.token_hex(16)}>"


def marked(conversation: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], str]:
    """Replaces each picture and audio part by a mark. Returns the new messages, the media parts, and the mark."""
    mark = new_mark()
    found: list[Mapping[str, Any]] = []
    messages: list[Mapping[str, Any]] = []
    for message in conversation:
        parts = _parts(message)
        own = [part for part in parts if media_kind(part) is not None]
        if own:
            found += own
            place = {"type": MEDIA_MARK, MEDIA_MARK: mark}
            message = {**message, "content": [part if media_kind(part) is None else place for part in parts]}
        messages.append(message)
    return messages, found, mark


class MediaInput:
    """The media of one prompt. The media are read one by one, and share a size limit and a time limit.

    Args:
        n: the number of media.
        pictures: True if the model reads pictures.
        rate: samples per second of the audio that the model reads; 0: the model does not read audio.
        sources: as for read_address.
        cancelled: returns True if no caller waits for the prompt any more.

    Attributes:
        media: the media that have been read so far.

    Raises:
        PromptError: there are more than MAX_COUNT media.
    """

    def __init__(
        self,
        n: int,
        pictures: bool,
        rate: int,
        sources: MediaSources = NOWHERE,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        if n > MAX_COUNT:
            raise PromptError(f"the prompt has {n:,} pictures and sounds; allowed are up to {MAX_COUNT}")
        self._pictures, self._rate, self._sources = pictures, rate, sources.from_now()
        self._cancelled = cancelled
        self._left = MAX_IN_ALL
        self.media: list[Media] = []

    def add(self, given: Any, kind: Kind | None = None) -> None:
        """Reads a picture or audio in any form. Raises the errors of read_picture and read_sound.

        Args:
            kind: IMAGE or SOUND. None: SOUND for bytes that start like an audio file (is_sound), otherwise IMAGE.
        """
        if kind is None and isinstance(given, bytes):
            kind = SOUND if is_sound(given) else IMAGE
        self._take(kind or IMAGE, given, is_open=True)

    def add_part(self, part: Mapping[str, Any]) -> None:
        """Reads the picture or the audio of a message part. Raises the errors of `add`."""
        kind = media_kind(part) or IMAGE
        given, is_open = _sound_of(part) if kind == SOUND else _picture_of(part)
        self._take(kind, given, is_open=is_open)

    def _take(self, kind: Kind, given: Any, *, is_open: bool) -> None:
        if self._cancelled is not None and self._cancelled():
            raise CancelledError
        read = self._read_sound if kind == SOUND else self._read_picture
        media = read(given, is_open)
        self._left -= media.n_raw_bytes
        self.media.append(media)

    def _read_picture(self, given: Any, is_open: bool) -> Media:
        if not self._pictures:
            raise PromptError("the prompt has a picture, but the mmproj file reads sounds only")
        read = read_picture if is_open else read_address
        return read(given, self._left // 3, self._sources)

    def _read_sound(self, given: Any, is_open: bool) -> Media:
        if not self._rate:
            raise PromptError("the prompt has a sound, but the mmproj file reads pictures only")
        if not is_open and not (isinstance(given, str) and is_address(given)):
            raise PromptError(f"a sound has the address {show(given)}; give data:audio/wav;base64,…")
        return read_sound(given, self._rate, min(self._left // 4, int(MOST_S * self._rate)), self._sources)


def parts_of_cell(cell: Any, kind: Kind = IMAGE) -> list[dict[str, Any]]:
    """Returns the message parts for a cell of a table; [] for an empty cell.

    Args:
        cell: as for read_picture or read_sound, {"bytes": …, "path": …} as in Hugging Face datasets, or a list of
            these.
    """
    if cell is None or (isinstance(cell, str) and not cell) or (isinstance(cell, float) and math.isnan(cell)):
        return []
    if isinstance(cell, Mapping) and "array" not in cell and ("bytes" in cell or "path" in cell):
        given = cell.get("bytes")
        return parts_of_cell(cell.get("path") if given is None else given, kind)
    is_pair = kind == SOUND and isinstance(cell, tuple) and len(cell) == 2 and hasattr(cell[0], "dtype")
    if kind == IMAGE and (pixels := _as_pixels(cell)) is not None:
        cell = pixels
    if (isinstance(cell, (list, tuple)) and not is_pair) or getattr(cell, "dtype", None) == "object":
        return [part for each in cell for part in parts_of_cell(each, kind)]
    name = "image" if kind == IMAGE else "audio"
    return [{"type": name, name: cell}]


def message_with_media(text: str, row: Mapping[str, Any], columns: Mapping[Kind, Sequence[str]]) -> dict[str, Any]:
    """Returns a user's message with the pictures and audio of a row before the text.

    Raises:
        PromptError: all columns of a kind are empty.
    """
    media: list[dict[str, Any]] = []
    for kind, names in columns.items():
        found = [part for name in names for part in parts_of_cell(row.get(name), kind)]
        if not found:
            raise PromptError(f"there is no {'picture' if kind == IMAGE else 'sound'} in {', '.join(map(show, names))}")
        media += found
    return {"role": "user", "content": [*media, {"type": "text", "text": text}]}


def _as_pixels(cell: Any) -> Any:
    """Returns the pixels of a cell that is a list of lists of lists, as in data frames; None for other cells."""
    is_deep = isinstance(cell, list) and cell and isinstance(cell[0], list) and cell[0] and isinstance(cell[0][0], list)
    if not is_deep:
        return None
    array = np.asarray(cell)
    if array.ndim != 3 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        return None
    return array.astype(np.uint8)


def placed(conversation: Sequence[Mapping[str, Any]], folder: str) -> list[Mapping[str, Any]]:
    """Puts `folder` in front of each relative path of media, and returns the new conversation."""
    return [
        {**message, "content": [_placed(part, folder) for part in _parts(message)]}
        if any(media_kind(part) is not None for part in _parts(message))
        else message
        for message in conversation
    ]


def _placed(part: Any, folder: str) -> Any:
    kind = media_kind(part)
    name = "audio" if kind == SOUND else "image"
    given: Any = None if kind is None else part.get(name)
    is_path = isinstance(given, os.PathLike) or (isinstance(given, str) and not is_address(given))
    return {**part, name: os.path.join(folder, os.path.expanduser(given))} if is_path else part


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()


def _picture_of(part: Mapping[str, Any]) -> tuple[Any, bool]:
    """Returns the picture of a part, and True if the picture may have any form, such as a path.

    The second result is True for {"type": "image", "image": …}. It is False for {"image_url": {"url": …}},
    {"image_url": …}, {"url": …} and Anthropic's {"source": …}. Users of a server may send these four, so only data:
    addresses and allowed addresses are read.
    """
    if isinstance(source := part.get("source"), Mapping) and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', 'image')};base64,{source['data']}", False
    if isinstance(source, Mapping) and source.get("url") is not None:
        return source["url"], False
    for name in ("image", "image_pil"):
        if part.get(name) is not None:
            return part[name], True
    return _address(part, "image_url"), False


def _sound_of(part: Mapping[str, Any]) -> tuple[Any, bool]:
    """Returns the audio of a part, and True if the audio may have any form, such as a path. The second result is True
    for "audio", and False for OpenAI's "input_audio" and for addresses."""
    given = part.get("input_audio")
    if isinstance(given, Mapping) and isinstance(given.get("data"), str):
        return f"data:audio;base64,{given['data']}", False
    if part.get("audio") is not None:
        return part["audio"], True
    return _address(part, "audio_url"), False


def _address(part: Mapping[str, Any], name: str) -> Any:
    address = part.get(name, part.get("url"))
    address = address.get("url") if isinstance(address, Mapping) else address
    if address is None:
        what = "picture" if media_kind(part) == IMAGE else "sound"
        example = "image" if media_kind(part) == IMAGE else "audio"
        raise PromptError(
            f"a part of type {show(part['type'])} has no {what}; give {{'type': {example!r}, {example!r}: …}}"
        )
    return address
