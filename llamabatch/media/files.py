"""Reads the bytes of a picture or of audio from an address, a path or a Media."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llamabatch.errors import EngineError, PromptError
from llamabatch.media.sources import MediaSources
from llamabatch.request.media import Kind, Media, digest_of
from llamabatch.utils.checks import show
from llamabatch.utils.paths import absolute, one_line

MAX_FILE_BYTES = 64 * 2**20
_DATA = re.compile(r"data:([^,]*),(.*)", re.DOTALL)


def is_address(text: str) -> bool:
    """Returns True for an address (data: or any scheme with ://), False for a path."""
    return re.match(r"data:|[a-zA-Z][\w+.-]+://", text, re.IGNORECASE) is not None


def at_address(address: Any, what: str, sources: MediaSources) -> bytes:
    """Returns the bytes of a data: address, or the bytes at an allowed address.

    Args:
        what: "a picture" or "a sound", for messages.
        sources: the allowed addresses in addition to data: addresses; NOWHERE: no others.

    Raises:
        PromptError: the address is not allowed, or cannot be read.
    """
    if not isinstance(address, str):
        raise PromptError(f"{what} has the address {show(address)}; give data:…;base64,…")
    if address[:5].lower() != "data:":
        return sources.read(address, MAX_FILE_BYTES, what)
    match = _DATA.fullmatch(address)
    if match is None or not match[1].lower().endswith(";base64"):
        raise PromptError(f"{what} is {show(address)}; give data:…;base64,… with the bytes in base64")
    try:
        return base64.b64decode("".join(match[2].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{what} is no base64: {error}") from error


Decode = Callable[[bytes, str], tuple[bytes, int, int]]
"""Converts the bytes of a file. The second argument names the file in messages. Returns raw data, width and height."""


def media_of(kind: Kind, data: bytes, name: str, decode: Decode) -> Media:
    """Returns the Media of a file's bytes. The Media contains the raw data, or the file's bytes if these are shorter.

    Raises:
        PromptError: there are no bytes or too many bytes, or `decode` raises.
    """
    if len(data) > MAX_FILE_BYTES:
        raise PromptError(f"{name} is larger than {MAX_FILE_BYTES:,} bytes")
    if not data:
        raise PromptError(f"{name} is empty")
    raw, width, height = decode(data, name)
    if len(raw) <= len(data):
        return Media(raw, width, height, kind)
    return Media(data, width, height, kind, "file", digest_of(kind, raw, width, height))


def media_at(path: str | os.PathLike[str], kind: Kind, what: str, decode: Decode) -> Media:
    """Returns the Media of a file. The Media contains the path in place of the data, or the data if the file is a pipe.

    Args:
        what: "the picture" or "the sound", for messages.

    Raises:
        PromptError: the file cannot be read. Also the errors of media_of.
    """
    media = media_of(kind, _bytes_at(path, what), f"{what} {one_line(os.fspath(path))}", decode)
    full = absolute(path)
    return replace(media, data=full, form="path") if os.path.isfile(full) else media  # a pipe cannot be read again


def _bytes_at(path: str | os.PathLike[str], what: str) -> bytes:
    """Returns the first MAX_FILE_BYTES + 1 bytes of a file. Raises PromptError."""
    if not os.fspath(path):
        raise PromptError(f"the path of {what} is empty")
    try:
        with open(absolute(path), "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PromptError(f"{what} {one_line(os.fspath(path))} cannot be read: {reason}") from error


def raw_of(media: Media, what: str, decode: Decode) -> bytes:
    """Returns the raw data of a Media. Raises EngineError if the file has changed or cannot be read any more.

    Args:
        what: "picture" or "sound", for messages.
    """
    if isinstance(media.data, bytes) and media.form == "raw":
        return media.data
    name = f"a {what}" if isinstance(media.data, bytes) else f"the {what} {one_line(media.data)}"
    try:
        data = media.data if isinstance(media.data, bytes) else _bytes_at(media.data, f"the {what}")
        raw, width, height = decode(data, name)
    except PromptError as error:
        raise EngineError(f"{error}, although it was readable when the request was made") from error
    if isinstance(media.data, str) and digest_of(media.kind, raw, width, height) != media.digest:
        raise EngineError(f"{name} has changed since it was given")
    return raw
