"""The saved state of a slot's cells: llama.cpp's own format, but independent of the slot and the number of slots."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.config import CONTENT_OPTIONS, KV_TYPES, ResolvedConfig
from llamabatch.errors import EngineError, InputError
from llamabatch.gguf.resolve import file_bytes
from llamabatch.llama import library
from llamabatch.llama.build_info import build_marker, cpu_library
from llamabatch.llama.model import SEVERAL_POSITIONS, Model
from llamabatch.llama.positions import position_ranges
from llamabatch.request.media import MediaRun
from llamabatch.utils.checks import show

# The fingerprint hashes this many bytes at the beginning of a model file (metadata, tensor table, some weights) and at
# its end.
_HEAD_BYTES, _TAIL_BYTES = 16 * 2**20, 2**20
_KERNEL_VARIABLES = ("GGML_CPU_AMX", "GGML_CPU_TILED_MM")  # environment variables that choose kernels
_WORD = struct.Struct("<I")
_TYPE_AND_ROW = struct.Struct("<iQ")
_TYPE_AND_SIZES = struct.Struct("<iII")
_TWO_WORDS = struct.Struct("<II")
# The head of a recurrent state: number of cells, position of the only cell, number of sequences in this cell, 1 if the
# S state is transposed, number of layers.
_RECURRENT = struct.Struct("<IiIII")
_CELL_BYTES, _EXT_BYTES = 12, 12
# For each quantised type: the size of a block in bytes, and the number of float16 values at its beginning.
_BLOCKS = {"q8_0": (34, 1), "q4_0": (18, 1), "q4_1": (20, 2), "iq4_nl": (18, 1), "q5_0": (22, 1), "q5_1": (24, 2)}


def facts(model: Model, config: ResolvedConfig) -> dict[str, Any]:
    """Returns the facts about model, library and options that determine the values of cells, apart from rounding."""
    lib: Any = library.load()
    changes = {name: value for name in CONTENT_OPTIONS if (value := getattr(config, name)) not in (None, ())}
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
        "changes": json.dumps(changes) if changes else None,
        "mmproj": None if model.projector is None else _encoder(model.projector.path, config),
    }


def _encoder(path: Path, config: ResolvedConfig) -> str:
    """Returns a text with the fingerprint of the mmproj file, and with the options that change the cells of
    pictures."""
    return f"{fingerprint(path)}, tokens {config.image_min_tokens} to {config.image_max_tokens}"


def kernels(config: ResolvedConfig) -> str:
    """Returns a text that names the build and the options that choose kernels. With other kernels, cells are rounded
    differently."""
    module: Any = library.load()
    marker = build_marker(module)
    build = "stock" if marker is None else json.dumps(dict(marker), sort_keys=True)
    has_prompts = "prompts" in library.repack_features() and not config.batch_invariant
    chosen = {
        "build": hashlib.blake2b(build.encode(), digest_size=6).hexdigest(),
        "prompts": "by their own" if has_prompts else "as others",
        "extra_bufts": config.extra_bufts,
        **{name: value for name in _KERNEL_VARIABLES if (value := os.environ.get(name)) is not None},
    }
    return ", ".join([cpu_library(module).name, *(f"{name} {value}" for name, value in chosen.items())])


def fingerprint(path: Path) -> str:
    """Returns a hash of a model file's size, beginning and end. Takes about 20 ms."""
    digest = hashlib.blake2b(_WORD.pack(file_bytes(path) & 0xFFFFFFFF), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        digest.update(file.read(_TAIL_BYTES))
    return digest.hexdigest()


def move(lib: Any, source: Any, target: Any, slot: int, more_streams: int, room: ctypes.Array[ctypes.c_uint8]) -> bool:
    """Copies a slot's cells to a context with `more_streams` additional streams, where the same slot must be empty.

    Returns False if llama.cpp refuses. The slot then stays empty.

    Args:
        room: a buffer as large as the state plus four bytes for each additional stream, or larger.
    """
    size = int(lib.llama_state_seq_get_size(source, slot))
    whole = size + _WORD.size * more_streams
    if whole > len(room) or int(lib.llama_state_seq_get_data(source, room, size, slot)) != size:
        return False
    # The streams are stored in order. The additional streams come last, without cells.
    (n_streams,) = _WORD.unpack_from(room, 8)
    _WORD.pack_into(room, 8, n_streams + more_streams)
    ctypes.memset(ctypes.addressof(room) + size, 0, whole - size)
    return int(lib.llama_state_seq_set_data(target, room, whole, slot)) == whole


def copy_out(lib: Any, handle: Any, slot: int) -> npt.NDArray[np.uint8] | None:
    """Returns a slot's state in llama.cpp's format; None if llama.cpp refuses. The state fits only slots of the same
    context."""
    size = int(lib.llama_state_seq_get_size(handle, slot))
    state = np.empty(size, np.uint8)  # a state may have some 100 MB, so np.zeros would be slow
    written = int(lib.llama_state_seq_get_data(handle, _pointer(state), size, slot)) if size else 0
    return state if size and written == size else None


def widened(state: npt.NDArray[np.uint8], n_streams: int) -> npt.NDArray[np.uint8]:
    """Adapts a state from `copy_out` to a context that has grown to `n_streams` streams. Works only for models with one
    KV cache."""
    more = n_streams - _WORD.unpack_from(state.data, 8)[0]
    if more == 0:
        return state
    wide = np.concatenate([state, np.zeros(_WORD.size * more, np.uint8)])  # the new streams come last, without cells
    _WORD.pack_into(wide.data, 8, n_streams)
    return wide


def copy_in(lib: Any, handle: Any, slot: int, state: npt.NDArray[np.uint8]) -> bool:
    """Fills a slot with a state from `copy_out`. Returns False if llama.cpp refuses; the slot is then empty."""
    return int(lib.llama_state_seq_set_data(handle, _pointer(state), state.size, slot)) == state.size


def _pointer(state: npt.NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@dataclass(frozen=True)
class Layout:
    """The parts of a sequence's state, in the order in which llama.cpp writes them.

    Attributes:
        n_caches: number of KV caches: 1 for most models; 2 for a model with sliding windows; 0 for a purely recurrent
            model.
        has_state: True if a recurrent state follows.
        has_ext: True if cells also store a position in two dimensions or a token id.
        has_v: True if V is stored in addition to K.
    """

    n_caches: int = 1
    has_state: bool = False
    has_ext: bool = False
    has_v: bool = True

    @classmethod
    def of(cls, model: Model) -> Layout:
        lib: Any = library.load()
        is_hybrid = bool(lib.llama_model_is_hybrid(model.handle))
        # If a token has several positions, its cell also stores a position in two dimensions.
        has_ext = int(lib.llama_model_rope_type(model.handle)) in SEVERAL_POSITIONS
        has_ext = has_ext or any(".ple." in key for key in model.metadata)
        latent = any(key.endswith(".key_length_mla") and value != "0" for key, value in model.metadata.items())
        n_caches = 2 if model.has_window else 1
        return cls(0 if model.is_recurrent and not is_hybrid else n_caches, model.is_recurrent, has_ext, not latent)

    def cells_end(self, state: bytes | memoryview, start: int) -> int:
        """Returns the end of one cache's cells. `start` is the offset of the cell count. May raise struct.error."""
        (count,) = _WORD.unpack_from(state, start)
        at = start + _WORD.size + count * (_CELL_BYTES + self.has_ext * _EXT_BYTES)
        is_transposed, layers = _TWO_WORDS.unpack_from(state, at)
        at += _TWO_WORDS.size
        for part in range(1 + self.has_v):
            for _ in range(layers):
                if part and is_transposed:
                    _, element_bytes, n_values = _TYPE_AND_SIZES.unpack_from(state, at)
                    at += _TYPE_AND_SIZES.size + element_bytes * n_values * count
                else:
                    _, row_bytes = _TYPE_AND_ROW.unpack_from(state, at)
                    at += _TYPE_AND_ROW.size + row_bytes * count
                if at > len(state):
                    raise struct.error
        return int(at)


def save(lib: Any, handle: Any, slot: int, layout: Layout) -> bytes:
    """Returns a slot's state in a form that does not depend on the slot or the number of slots."""
    raw = copy_out(lib, handle, slot)
    if raw is None:
        raise EngineError(f"llama.cpp does not give the state of slot {slot}")
    return portable(raw, layout)


def portable(raw: npt.NDArray[np.uint8], layout: Layout) -> bytes:
    """Converts a state from `copy_out` to the form that `load` reads. This form does not contain the number of slots.

    llama.cpp writes a magic number and the seq id. For each KV cache, the number of streams follows, then for each
    stream the number of its cells and their contents (llama-kv-cache.cpp, state_write). Only one stream has cells. A
    recurrent state comes last.
    """
    state, at = memoryview(raw.data), 8
    parts = [state[:4]]
    try:
        for number in range(layout.n_caches):
            (n_streams,) = _WORD.unpack_from(state, at)
            start, before = at + _WORD.size, 0
            while before < n_streams and _WORD.unpack_from(state, start)[0] == 0:
                start, before = start + _WORD.size, before + 1
            if before == n_streams:
                raise EngineError("the slot is empty")
            after = _WORD.size * (n_streams - before - 1)
            is_last = number + 1 == layout.n_caches and not layout.has_state
            end = len(state) - after if is_last else layout.cells_end(state, start)
            parts.append(state[start:end])
            at = end + after
    except struct.error as error:
        raise InputError("its format is not known") from error
    return b"".join([*parts, state[at:]])


def load(lib: Any, handle: Any, slot: int, n_streams: int, state: bytes, layout: Layout) -> bool:
    """Fills a slot with a state from `save`. Returns False if llama.cpp refuses; the slot is then empty."""
    others = _WORD.pack(0) * (n_streams - 1)
    parts, at = [state[:4], _WORD.pack(slot)], 4
    for number in range(layout.n_caches):
        is_last = number + 1 == layout.n_caches and not layout.has_state
        end = len(state) if is_last else layout.cells_end(state, at)
        parts += [_WORD.pack(n_streams), state[at:end], others]
        at = end
    whole = np.frombuffer(b"".join([*parts, state[at:]]), np.uint8)
    return copy_in(lib, handle, slot, whole)


def check(
    model: Model,
    config: ResolvedConfig,
    token_ids: Sequence[int],
    state: bytes,
    media_runs: Sequence[MediaRun] = (),
) -> None:
    """Checks a saved state of unknown origin before llama.cpp sees it.

    llama.cpp checks the types and the row sizes, and does not read beyond the end. But it trusts the positions. So this
    check requires that the cells have the positions of their tokens, counted from 0 (for a sliding window: the last
    positions). The sizes must add up to the state's length. All numbers must be finite, because one NaN in a cell would
    reach the next sequence that uses the cell.

    Args:
        media_runs: the pictures in the prompt that take fewer positions than cells, in order.

    Raises:
        InputError: the state is not from this model and engine; the message gives the reason.
    """
    lib: Any = library.load()
    worst = max(token_ids)
    if worst >= model.n_vocab:
        raise InputError(f"token id {worst} is outside the vocabulary; allowed are 0 to {model.n_vocab - 1}")
    walk = _Walk(state, len(token_ids), media_runs, Layout.of(model), model.n_vocab)
    try:
        walk.run(int(lib.llama_model_n_layer(model.handle)), lib, config)
    except (struct.error, ValueError) as error:  # InputError is a ValueError
        detail = error if isinstance(error, InputError) else "it ends too early"
        raise InputError(f"the saved state does not fit this engine: {detail}") from error


class _Walk:
    """Reads a state piece by piece. Raises InputError for a bad state, and struct.error or ValueError if the state ends
    too early.

    Args:
        media_runs: as for `check`.
    """

    def __init__(
        self, state: bytes, n_tokens: int, media_runs: Sequence[MediaRun], layout: Layout, n_vocab: int
    ) -> None:
        self._state = state
        self._at = 4  # after the magic number
        self._n_tokens = n_tokens
        self._media_runs = media_runs
        self._layout = layout
        self._n_vocab = n_vocab

    def run(self, n_layer: int, lib: Any, config: ResolvedConfig) -> None:
        layout = self._layout
        for number in range(layout.n_caches):
            is_last = number + 1 == layout.n_caches and not layout.has_state
            end = len(self._state) if is_last else layout.cells_end(self._state, self._at)
            self._check_cache(n_layer, lib, config, end, is_window=number > 0)
        if layout.has_state:
            self._check_recurrent(n_layer)
        if self._at != len(self._state):
            raise InputError(f"{len(self._state) - self._at} bytes follow its last layer")

    def _check_cache(self, n_layer: int, lib: Any, config: ResolvedConfig, end: int, *, is_window: bool) -> None:
        (n_cells,) = self._unpack(_WORD)
        is_exact = self._layout.has_state or self._layout.n_caches > 1
        least, most = self._n_tokens, self._n_tokens if is_exact else config.n_ctx
        if is_window:
            least = 1
        if not least <= n_cells <= most:
            raise InputError(f"it has {n_cells} cells; allowed are {least} to {most}")
        self._check_cells(n_cells, self._n_tokens - n_cells if is_window else 0)
        is_transposed, layers = self._unpack(_TWO_WORDS)
        if is_transposed > 1 or not (layers or self._layout.n_caches > 1) or layers > n_layer:
            raise InputError(f"it has {layers} layers of {n_layer}, and V transposed: {is_transposed}")
        for _ in range(layers):
            self._check_rows("K", config.type_k, lib, n_cells)
        n_v = 0
        while self._at < end:  # some layers have no V
            n_v += 1
            if n_v > layers:
                raise InputError(f"{end - self._at} bytes follow its last layer")
            if is_transposed:
                self._check_columns(config.type_v, lib, n_cells)
            else:
                self._check_rows("V", config.type_v, lib, n_cells)

    def _check_recurrent(self, n_layer: int) -> None:
        """Checks the only cell, and the rows of the R and S states of all layers (llama-memory-recurrent.cpp,
        state_write)."""
        n_cells, position, n_seq_id, is_transposed, layers = self._unpack(_RECURRENT)
        last = int(position_ranges(self._media_runs, self._n_tokens)[0, -1])
        if (n_cells, n_seq_id, is_transposed, layers) != (1, 0, 0, n_layer) or position != last:
            raise InputError(
                f"its recurrent state is that of position {position} and {layers} layers; it must be that of position "
                f"{last} and {n_layer}"
            )
        n_rows = 0
        while self._at < len(self._state):
            number, row_bytes = self._unpack(_TYPE_AND_ROW)
            n_rows += 1
            if number != 0 or n_rows > 2 * n_layer:
                raise InputError(
                    f"its recurrent state has {n_rows} rows, the last of type {number}; allowed are {2 * n_layer} rows "
                    "of type 0 (F32)"
                )
            self._check_finite("a recurrent state", "f32", self._piece(row_bytes))

    def _check_cells(self, n_cells: int, first: int) -> None:
        has_ext = self._layout.has_ext
        ext = [("x", "<i4"), ("y", "<i4"), ("token", "<i4")] if has_ext else []
        cell = np.dtype([("position", "<i4"), ("n_seq_id", "<u4"), *ext, ("seq_id", "<i4")])
        cells = np.frombuffer(self._piece(n_cells * cell.itemsize), cell)
        if (cells["n_seq_id"] != 1).any():
            raise InputError("a cell belongs to several sequences, or to none")
        least, most = np.sort(position_ranges(self._media_runs, first + n_cells)[:, first:], axis=1)
        found = np.sort(cells["position"])
        if ((found < least) | (found > most)).any():
            raise InputError(f"its {n_cells} cells do not have the positions of its tokens")
        if ext and not ((cells["token"] >= -1) & (cells["token"] < self._n_vocab)).all():
            raise InputError("a cell has a token outside the vocabulary")

    def _check_rows(self, which: str, name: str, lib: Any, n_cells: int) -> None:
        number, row_bytes = self._unpack(_TYPE_AND_ROW)
        self._check_type(which, number, name, lib)
        if row_bytes * n_cells > len(self._state):
            raise InputError(f"a row of {which} has {show(row_bytes)} bytes, more than the file holds")
        self._check_finite(which, name, self._piece(row_bytes * n_cells))

    def _check_columns(self, name: str, lib: Any, n_cells: int) -> None:
        number, element_bytes, n_values = self._unpack(_TYPE_AND_SIZES)
        self._check_type("V", number, name, lib)
        self._check_finite("V", name, self._piece(element_bytes * n_values * n_cells))

    def _check_type(self, which: str, number: int, name: str, lib: Any) -> None:
        if number != type_number(lib, name):
            known = {type_number(lib, other): other for other in KV_TYPES}
            raise InputError(f"{which} has the type {known.get(number, number)}; this engine has {name}")

    def _check_finite(self, which: str, name: str, data: memoryview) -> None:
        if name == "f32":
            is_odd = (np.frombuffer(data, "<u4") & 0x7F800000) == 0x7F800000
        elif name == "bf16":
            is_odd = (np.frombuffer(data, "<u2") & 0x7F80) == 0x7F80
        elif name == "f16":
            is_odd = (np.frombuffer(data, "<u2") & 0x7C00) == 0x7C00
        else:
            block_bytes, n_scales = _BLOCKS[name]
            blocks = np.frombuffer(data, "<u2").reshape(-1, block_bytes // 2)
            is_odd = (blocks[:, :n_scales] & 0x7C00) == 0x7C00
        if is_odd.any():
            raise InputError(f"{which} holds values that are no finite numbers")

    def _unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self._piece(form.size))

    def _piece(self, n_bytes: int) -> memoryview:
        piece = memoryview(self._state)[self._at : self._at + n_bytes]
        if len(piece) != n_bytes:
            raise InputError("it ends too early")
        self._at += n_bytes
        return piece


def type_number(lib: Any, name: str) -> int:
    """Returns llama.cpp's number for a type of the KV cache."""
    return 30 if name == "bf16" else int(getattr(lib, f"GGML_TYPE_{name.upper()}"))  # the binding has no BF16
