"""A file with the KV cells of a prefix: facts of the model and engine, the tokens, and llama.cpp's own bytes.

The fact MMPROJ names the encoder of the pictures and audio among the tokens. In a file of text alone MMPROJ is None,
and the file fits an engine with any mmproj file. The header's media_runs has four numbers for each picture that takes
fewer positions than cells: start, length, n_pos and n_time of MediaRun.

Layout: a magic, the length of a JSON header (uint32, little endian), the header, the token ids (int32), the state, and
a BLAKE2b digest of everything before the digest.
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
from typing import Any, BinaryIO

from llamabatch.errors import InputError
from llamabatch.request.media import MediaRun
from llamabatch.utils.checks import show
from llamabatch.utils.paths import one_line

_MAGIC = b"LLAMABATCH KV 1\n"
MMPROJ = "mmproj"
_RUNS = "media_runs"
_MAX_HEADER = 2**20
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class PrefixFile:
    """The contents of a prefix file, without its header.

    Attributes:
        token_ids: tokens of the prefix.
        state: llama.cpp's bytes of the prefix's cells, in a form that does not depend on the number of slots.
        media_runs: the pictures of the prefix in order, without pictures that take one position per cell.
    """

    token_ids: tuple[int, ...]
    state: bytes
    media_runs: tuple[MediaRun, ...] = ()


def write(path: str | os.PathLike[str], prefix: PrefixFile, facts: Mapping[str, Any], mode: int = 0o666) -> None:
    """Writes a prefix file, whole or not at all. Raises InputError if the file cannot be written.

    Args:
        mode: permissions of the file, before the process's umask.
    """
    sizes = {"n_tokens": len(prefix.token_ids), "n_bytes": len(prefix.state)}
    mmproj = facts.get(MMPROJ) if has_media(prefix.token_ids) else None
    runs = [(run.start, run.length, run.n_pos, run.n_time) for run in prefix.media_runs]
    header = json.dumps({**facts, **sizes, MMPROJ: mmproj, _RUNS: runs}).encode()
    part = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for piece in (_MAGIC, _LENGTH.pack(len(header)), header, _packed(prefix.token_ids), prefix.state):
                file.write(piece)
                digest.update(piece)
            file.write(digest.digest())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"the prefix cannot be saved to {one_line(path)}: {error.strerror}") from error


def has_media(token_ids: Sequence[int]) -> bool:
    """Returns True if some of the tokens stand for a picture or for audio. Such tokens have ids below 0."""
    return min(token_ids) < 0


def fits(header: Mapping[str, Any], facts: Mapping[str, Any], token_ids: Sequence[int]) -> bool:
    """Returns True if an engine with these facts can use a file with this header and these tokens."""
    own = {name: header.get(name) for name in facts}
    if has_media(token_ids):
        return own == facts and own.get(MMPROJ) is not None
    return {**own, MMPROJ: None} == {**facts, MMPROJ: None}


def read(
    path: str | os.PathLike[str], facts: Mapping[str, Any], *, most_tokens: int = 2**31, most_bytes: int = 2**63
) -> PrefixFile:
    """Reads a file that must fit these facts. Size, header and facts are checked before the rest is read.

    Args:
        most_tokens, most_bytes: a file with more tokens, or more bytes of state, is refused.

    Raises:
        InputError: the file cannot be read, is damaged, was saved by another model, llama.cpp or kind of KV cache, or
            is too large for this engine. The message names the difference.
    """
    name = one_line(path)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):  # a pipe might never end, and a device has no size
                raise InputError(f"{name} is no regular file; give a file that save_prefix wrote")
            return _Reader(file, name, found.st_size - _DIGEST_BYTES).read(facts, most_tokens, most_bytes)
    except OSError as error:
        raise InputError(f"the prefix file {name} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise InputError(f"the prefix file {name} does not fit in memory") from error


def read_head(path: str | os.PathLike[str]) -> tuple[dict[str, Any], array[int]]:
    """Reads header and token ids of a file, without a check of facts and checksum. Raises InputError."""
    name = one_line(path)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            return _Reader(file, name, os.fstat(file.fileno()).st_size - _DIGEST_BYTES).read_head()
    except OSError as error:
        raise InputError(f"the prefix file {name} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads a file piece by piece, and trusts nothing in the file. The checksum finds damage, but the writer of the
    file may have chosen harmful content. All methods raise InputError."""

    def __init__(self, file: BinaryIO, name: str, body_bytes: int) -> None:
        self._file = file
        self._name = name
        self._left = body_bytes  # unread bytes before the digest
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def read(self, facts: Mapping[str, Any], most_tokens: int, most_bytes: int) -> PrefixFile:
        name, header = self._name, self._header()
        n_tokens, n_bytes = self._size(header, "n_tokens"), self._size(header, "n_bytes")
        self._check_facts(header, {fact: value for fact, value in facts.items() if fact != MMPROJ})
        if self._left != 4 * n_tokens + n_bytes:
            raise InputError(
                f"the prefix file {name} is damaged or was cut off: {self._left} bytes follow its header, which "
                f"announces {4 * n_tokens + n_bytes}"
            )
        if n_tokens > most_tokens:
            raise InputError(f"the prefix file {name} has {n_tokens} tokens; n_ctx is {most_tokens}")
        if n_bytes > most_bytes:
            raise InputError(f"the prefix file {name} has {n_bytes} bytes of state; at most {most_bytes} fit here")
        ids = self._ids(n_tokens)
        state = self._piece(n_bytes)
        if self._file.read(_DIGEST_BYTES) != self._digest.digest():
            raise InputError(f"the prefix file {name} is damaged or was cut off: its checksum differs")
        if has_media(ids):
            if facts.get(MMPROJ) is None:
                raise InputError(f"the prefix file {name} has a picture or a sound; load the model with mmproj")
            self._check_facts(header, {MMPROJ: facts[MMPROJ]})
        return PrefixFile(tuple(ids), state, self._media_runs(header, ids))

    def _check_facts(self, header: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        for fact, wanted in facts.items():
            if header.get(fact) != wanted:
                found = show(header.get(fact))
                raise InputError(f"the prefix file {self._name} is for {fact} {found}; this engine has {wanted!r}")

    def read_head(self) -> tuple[dict[str, Any], array[int]]:
        header = self._header()
        n_tokens = self._size(header, "n_tokens")
        if self._left < 4 * n_tokens:
            raise InputError(f"the prefix file {self._name} is damaged or was cut off: it ends before its tokens")
        return header, self._ids(n_tokens)

    def _ids(self, n_tokens: int) -> array[int]:
        ids = array("i", self._piece(4 * n_tokens))
        if sys.byteorder == "big":
            ids.byteswap()
        return ids

    def _header(self) -> dict[str, Any]:
        if self._piece(len(_MAGIC)) != _MAGIC:
            raise InputError(f"{self._name} is no prefix file of llamabatch")
        if self._left < _LENGTH.size:
            raise InputError(f"the prefix file {self._name} ends before its header")
        (length,) = _LENGTH.unpack(self._piece(_LENGTH.size))
        if length > min(_MAX_HEADER, self._left):
            raise InputError(
                f"the prefix file {self._name} is damaged or was cut off: a header of {length} bytes; allowed are up "
                f"to {_MAX_HEADER}, and there are {self._left}"
            )
        try:
            header = json.loads(self._piece(length))
        except (ValueError, RecursionError) as error:
            raise InputError(f"the prefix file {self._name} has a header that is no JSON") from error
        if not isinstance(header, dict):
            raise InputError(f"the prefix file {self._name} has the header {show(header)}; it must be a JSON object")
        return header

    def _media_runs(self, header: Mapping[str, Any], ids: array[int]) -> tuple[MediaRun, ...]:
        """Returns the runs of the pictures listed in the header. Each run must consist of ids below 0. Runs must be in
        order and must not overlap.
        """
        runs, end = list[MediaRun](), 0
        given = header.get(_RUNS, [])
        for each in given if isinstance(given, list) else [given]:
            is_run = isinstance(each, list) and len(each) == 4 and all(type(number) is int for number in each)
            start, length, n_pos, n_time = each if is_run else (-1, 0, 0, 0)
            run = MediaRun(start, length, 0, 0, True, n_pos, n_time)
            is_inside = end <= start < run.end <= len(ids) and max(ids[start : run.end]) < 0
            if not (is_inside and 1 <= n_pos <= length and 1 <= n_time <= length):
                raise InputError(f"the prefix file {self._name} has the picture {show(each)}, which its tokens lack")
            runs.append(run)
            end = run.end
        return tuple(runs)

    def _size(self, header: Mapping[str, Any], key: str) -> int:
        """Returns a count from the header."""
        count = header.get(key)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < 2**63:
            raise InputError(f"the prefix file {self._name} has {key} {show(count)}; it must be a whole number from 1")
        return count

    def _piece(self, n_bytes: int) -> bytes:
        """Returns the next `n_bytes` bytes, or fewer if another process has cut the file."""
        piece = self._file.read(n_bytes)
        self._left -= len(piece)
        self._digest.update(piece)
        return piece


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # else opening a pipe without a writer would block


def _packed(token_ids: Sequence[int]) -> bytes:
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
