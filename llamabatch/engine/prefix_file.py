"""A prefix's KV cells in a file: for which model and engine they are, the tokens, and llama.cpp's own bytes.

Layout: a magic, the length of a JSON header (uint32, little endian), the header, the token ids (int32), the state, and
a BLAKE2b digest of all before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamabatch.errors import InputError
from llamabatch.utils.checks import show

_MAGIC = b"LLAMABATCH KV 1\n"
_MAX_HEADER = 2**20
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class PrefixFile:
    """The contents of a file.

    Attributes:
        token_ids: the prefix.
        state: llama.cpp's bytes of its cells, without the number of slots.
    """

    token_ids: tuple[int, ...]
    state: bytes


def write(path: str | os.PathLike[str], prefix: PrefixFile, facts: Mapping[str, Any]) -> None:
    """Writes the whole file or none. Raises InputError if it cannot be written."""
    sizes = {"n_tokens": len(prefix.token_ids), "n_bytes": len(prefix.state)}
    header = json.dumps({**facts, **sizes}).encode()
    body = b"".join((_MAGIC, _LENGTH.pack(len(header)), header, _packed(prefix.token_ids), prefix.state))
    part = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(body)
            file.write(hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"the prefix cannot be saved to {os.fspath(path)}: {error.strerror}") from error


def read(path: str | os.PathLike[str], facts: Mapping[str, Any]) -> PrefixFile:
    """A file that fits these facts.

    Raises:
        InputError: it cannot be read, is damaged, or was saved by another model, llama.cpp or kind of KV cache; the
            message names what differs.
    """
    name = os.fspath(path)
    data = _contents(name)
    if not data.startswith(_MAGIC):
        raise InputError(f"{name} is no prefix file of llamabatch")
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise InputError(f"the prefix file {name} is damaged or was cut off: its checksum differs")
    # a right checksum says that nothing was lost, not that the writer meant well: nothing below is taken on trust
    header, start = _header(name, body)
    n_tokens, n_bytes = _size(name, header, "n_tokens"), _size(name, header, "n_bytes")
    for fact, wanted in facts.items():
        if header.get(fact) != wanted:
            found = show(header.get(fact))
            raise InputError(f"the prefix file {name} is for {fact} {found}; this engine has {wanted!r}")
    tokens_end = start + 4 * n_tokens
    if len(body) != tokens_end + n_bytes:
        raise InputError(f"the prefix file {name} has {len(body)} bytes; its header tells of {tokens_end + n_bytes}")
    ids = array("i", body[start:tokens_end])
    if sys.byteorder == "big":
        ids.byteswap()
    if min(ids) < 0:
        raise InputError(f"the prefix file {name} has the token id {min(ids)}; ids begin at 0")
    return PrefixFile(tuple(ids), body[tokens_end:])


def _contents(name: str) -> bytes:
    """All bytes of a regular file: a pipe might never end, and a device has no size. Raises InputError."""
    try:
        with open(name, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{name} is no regular file; give a file that save_prefix wrote")
            if file.peek(len(_MAGIC))[: len(_MAGIC)] != _MAGIC:  # before gigabytes of something else are read
                raise InputError(f"{name} is no prefix file of llamabatch")
            return file.read()
    except OSError as error:
        raise InputError(f"the prefix file {name} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise InputError(f"the prefix file {name} does not fit in memory") from error


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe that nothing writes to would block


def _header(name: str, body: bytes) -> tuple[dict[str, Any], int]:
    """The JSON header and where the token ids begin. Raises InputError."""
    start = len(_MAGIC) + _LENGTH.size
    if len(body) < start:
        raise InputError(f"the prefix file {name} ends before its header")
    (length,) = _LENGTH.unpack(body[len(_MAGIC) : start])
    if length > _MAX_HEADER or start + length > len(body):
        raise InputError(f"the prefix file {name} has a header of {length} bytes; allowed are up to {_MAX_HEADER}")
    try:
        header = json.loads(body[start : start + length])
    except (ValueError, RecursionError) as error:
        raise InputError(f"the prefix file {name} has a header that is no JSON") from error
    if not isinstance(header, dict):
        raise InputError(f"the prefix file {name} has the header {show(header)}; it must be a JSON object")
    return header, start + length


def _size(name: str, header: Mapping[str, Any], key: str) -> int:
    """A count of the header. Raises InputError."""
    count = header.get(key)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < 2**63:
        raise InputError(f"the prefix file {name} has {key} {show(count)}; it must be a whole number from 1")
    return count


def _packed(token_ids: Sequence[int]) -> bytes:
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
