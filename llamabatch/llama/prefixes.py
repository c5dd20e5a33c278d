"""Saving a slot's cells, and giving them back to another context: what llama.cpp writes, made fit for any slots."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from pathlib import Path
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.errors import EngineError
from llamabatch.llama import library
from llamabatch.llama.model import Model
from llamabatch.model_file import file_bytes

# Of the model file the size, its first and its last part are hashed: metadata, tensor table and some of the weights.
_HEAD_BYTES, _TAIL_BYTES = 16 * 2**20, 2**20
_WORD = struct.Struct("<I")


def facts(model: Model, config: EngineConfig) -> dict[str, Any]:
    """What cells depend on beside their tokens: files of other models and engines differ in one of these."""
    lib: Any = library.load()
    return {
        "model": fingerprint(model.path),
        "llama_cpp": str(lib.__version__).split("+")[0],
        "state_version": int(lib.LLAMA_STATE_SEQ_VERSION),
        "n_embd": int(lib.llama_model_n_embd(model.handle)),
        "n_layer": int(lib.llama_model_n_layer(model.handle)),
        "type_k": config.type_k,
        "type_v": config.type_v,
        "flash_attn": config.flash_attn,
        "adapters": [],
    }


def fingerprint(path: Path) -> str:
    """Of a model file; takes some 20 ms."""
    digest = hashlib.blake2b(_WORD.pack(file_bytes(path) & 0xFFFFFFFF), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        digest.update(file.read(_TAIL_BYTES))
    return digest.hexdigest()


def move(lib: Any, source: Any, target: Any, slot: int, more_streams: int, room: ctypes.Array[ctypes.c_uint8]) -> bool:
    """Copies a slot's cells into that slot, which is empty, of a context with so many more streams; False if llama.cpp
    refuses, and then it stays empty.

    Args:
        room: large enough for the state, and four bytes for each further stream.
    """
    size = int(lib.llama_state_seq_get_size(source, slot))
    whole = size + _WORD.size * more_streams
    if whole > len(room) or int(lib.llama_state_seq_get_data(source, room, size, slot)) != size:
        return False
    # the streams come in their order, and those that the source does not have are the last: without cells
    (n_streams,) = _WORD.unpack_from(room, 8)
    _WORD.pack_into(room, 8, n_streams + more_streams)
    ctypes.memset(ctypes.addressof(room) + size, 0, whole - size)
    return int(lib.llama_state_seq_set_data(target, room, whole, slot)) == whole


def take(lib: Any, handle: Any, slot: int) -> bytes:
    """What llama.cpp writes of a slot, without how many slots there are.

    It writes a magic, the seq id, the number of streams, and for each stream the number of its cells and what they hold
    (llama-kv-cache.cpp, state_write); one stream alone has any.
    """
    size = int(lib.llama_state_seq_get_size(handle, slot))
    buffer = (ctypes.c_uint8 * size)()
    if int(lib.llama_state_seq_get_data(handle, buffer, size, slot)) != size:
        raise EngineError(f"llama.cpp does not give the state of slot {slot}")
    state = bytes(buffer)
    (n_streams,) = _WORD.unpack_from(state, 8)
    before = 0
    while before < n_streams and _WORD.unpack_from(state, 12 + 4 * before)[0] == 0:
        before += 1
    if before == n_streams:
        raise EngineError(f"slot {slot} is empty")
    return state[:4] + state[12 + 4 * before : len(state) - 4 * (n_streams - before - 1)]


def give(lib: Any, handle: Any, slot: int, n_streams: int, state: bytes) -> bool:
    """Fills a slot with what `take` gave; False if llama.cpp refuses, and then the slot is empty."""
    others = _WORD.pack(0) * (n_streams - 1)
    whole = b"".join((state[:4], _WORD.pack(slot), _WORD.pack(n_streams), state[4:], others))
    buffer = (ctypes.c_uint8 * len(whole)).from_buffer_copy(whole)
    return int(lib.llama_state_seq_set_data(handle, buffer, len(whole), slot)) == len(whole)
