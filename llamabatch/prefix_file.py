"""A prefix's KV cells in a file: for which model and engine they are, the tokens, and llama.cpp's own bytes.

Layout: a magic, the length of a JSON header (uint32, little endian), the header, the token ids (int32), the state, and
a BLAKE2b digest of all before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamabatch.errors import InputError

_MAGIC = b"LLAMABATCH KV 1\n"
_MAX_HEADER = 2**20
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class PrefixFile:
    """What a file holds.

    Attributes:
        token_ids: the prefix.
        state: what llama.cpp made of it, without the number of its slots.
    """

    token_ids: tuple[int, ...]
    state: bytes


def write(path: str | os.PathLike[str], prefix: PrefixFile, facts: Mapping[str, Any]) -> None:
    """Writes the whole file or none. Raises InputError if it cannot be written."""
    sizes = {"n_tokens": len(prefix.token_ids), "n_bytes": len(prefix.state)}
    header = json.dumps({**facts, **sizes}).encode()
    body = b"".join((_MAGIC, _LENGTH.pack(len(header)), header, _packed(prefix.token_ids), prefix.state))
    beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(body)
            file.write(hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(f"the prefix cannot be saved to {os.fspath(path)}: {error.strerror}") from error


def read(path: str | os.PathLike[str], facts: Mapping[str, Any]) -> PrefixFile:
    """A file that fits these facts.

    Raises:
        InputError: it cannot be read, is damaged, or was saved by another model, llama.cpp or kind of KV cache; the
            message names what differs.
    """
    name = os.fspath(path)
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"the prefix file {name} cannot be read: {error.strerror}") from error
    if not data.startswith(_MAGIC):
        raise InputError(f"{name} is no prefix file of llamabatch")
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise InputError(f"the prefix file {name} is damaged or was cut off: its checksum differs")
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(body[len(_MAGIC) : start])
    try:
        header = json.loads(body[start : start + min(length, _MAX_HEADER)])
        n_tokens, n_bytes = int(header.pop("n_tokens")), int(header.pop("n_bytes"))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"the prefix file {name} has a damaged header") from error
    for fact, wanted in facts.items():
        if header.get(fact) != wanted:
            raise InputError(f"the prefix file {name} is for {fact} {header.get(fact)!r}; this engine has {wanted!r}")
    tokens_end = start + length + 4 * n_tokens
    if n_tokens < 1 or len(body) != tokens_end + n_bytes:
        raise InputError(f"the prefix file {name} has {len(body)} bytes; its header tells of {tokens_end + n_bytes}")
    ids = array("i", body[start + length : tokens_end])
    if sys.byteorder == "big":
        ids.byteswap()
    return PrefixFile(tuple(ids), body[tokens_end:])


def _packed(token_ids: ListLike[int]) -> bytes:
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
