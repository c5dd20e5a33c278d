"""A llama_context: decoding, logits, memory. Only this file and batch.py know the C calls for them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.config import ROPE_OPTIONS, ResolvedConfig
from llamabatch.errors import ConfigError, EngineError
from llamabatch.llama import kv_state, library, log
from llamabatch.llama.model import Model
from llamabatch.request.adapters import AdapterSet

_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_CELL_PADDING = 256


class DecodeCode(IntEnum):
    """Return codes of llama_decode (llama.h)."""

    OK = 0
    NO_ROOM = 1  # no cells: nothing changed
    ABORTED = 2
    INVALID = -1  # nothing changed
    ALLOCATION = -2
    FAILED = -3


class Context:
    """Owns a llama_context. For one thread at a time; close it before its model.

    Args:
        model: must stay open until close().
        config: of the engine.
        n_slots: number of sequences. Each has n_ctx cells of its own; if config.kv is "unified", they share as many,
            at most kv_cells.

    Raises:
        EngineError: llama.cpp could not make it (no memory, or cache types that exclude each other).
    """

    def __init__(self, model: Model, config: ResolvedConfig, n_slots: int) -> None:
        self._lib = lib = library.load()
        most_slots = int(lib.llama_max_parallel_sequences())
        if n_slots > most_slots:  # beyond it llama.cpp aborts the process
            raise ConfigError(f"n_slots is {n_slots}; this build of llama.cpp allows 1 to {most_slots}")
        n_ctx = config.n_ctx
        params = lib.llama_context_default_params()
        self.n_slots = n_slots
        self._unified = config.kv == "unified"
        # llama.cpp divides its n_ctx among the sequences; ours is what one request may use
        params.n_ctx = _padded(n_ctx) * n_slots
        if self._unified:
            params.n_ctx = min(params.n_ctx, _padded(config.kv_cells))
        params.n_batch = config.n_batch
        params.n_ubatch = config.n_ubatch
        params.n_seq_max = n_slots
        # unset it reserves n_batch rows of logits
        params.n_outputs_max = config.output_rows(n_slots, model.n_vocab)
        params.n_threads = config.n_threads
        params.n_threads_batch = config.n_threads_batch
        params.flash_attn_type = _FLASH_ATTN[config.flash_attn]
        params.type_k = kv_state.type_number(lib, config.type_k)
        params.type_v = kv_state.type_number(lib, config.type_v)
        params.kv_unified = self._unified
        params.offload_kqv = config.offload_kqv
        params.op_offload = config.op_offload
        params.swa_full = config.swa_full
        params.no_perf = True
        scale_rope(lib, params, config)
        log.recent_complaints()
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            reason = log.reason()
            raise EngineError(f"no context of {n_slots} slots of {n_ctx} tokens can be made: {reason}")
        self._memory = lib.llama_get_memory(self.handle)
        self._window = 0 if config.swa_full else model.window  # older cells of some layers may be gone
        self._n_vocab = model.n_vocab
        self._model = model
        self.adapters: AdapterSet = ()

    @property
    def has_memory(self) -> bool:
        """True if the context keeps what it has computed; an encoder's does not."""
        return bool(self._memory)

    def close(self) -> None:
        if self.handle:
            self._lib.llama_free(self.handle)
            self.handle = None

    def set_adapters(self, adapters: AdapterSet) -> None:
        """Sets the adapters of the following decodes. Raises EngineError where llama.cpp refuses them."""
        self._model.adapters.apply(self.handle, self.adapters, adapters)
        self.adapters = adapters

    def decode(self, batch: Any) -> DecodeCode:
        """One llama_decode."""
        return DecodeCode(self._lib.llama_decode(self.handle, batch))

    def logits(self, n_rows: int) -> npt.NDArray[np.float32]:
        """The output rows of the last decode, in batch order: a view of shape (n_rows, vocabulary) into llama.cpp's
        buffer, valid until the next decode."""
        pointer = self._lib.llama_get_logits(self.handle)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise EngineError("llama.cpp gave no logits")
        buffer = (ctypes.c_float * (n_rows * self._n_vocab)).from_address(address)
        rows: npt.NDArray[np.float32] = np.ctypeslib.as_array(buffer).reshape(n_rows, self._n_vocab)
        return rows

    def clear(self, slot: int, start: int = 0) -> bool:
        """Forgets a slot's cells from position `start` on; False where the model's state cannot be cut there."""
        self._check(slot)
        if not self._lib.llama_memory_seq_rm(self._memory, slot, start if start else -1, -1):
            return False
        if not (start and self._window):
            return True
        # llama.cpp cuts anywhere, also where the next tokens would attend to cells that it has used again
        first = int(self._lib.llama_memory_seq_pos_min(self._memory, slot))
        return 0 <= first <= max(0, start + 1 - self._window)

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        """Makes the first `count` tokens of slot `source` those of slot `target`.

        Between the streams of a split cache only whole sequences can be copied; a part aborts the process. In a
        unified one the copy shares its cells with the source, and takes no time.
        """
        self._check(source)
        self._check(target)
        if self._unified:
            self.clear(target)
            self._lib.llama_memory_seq_cp(self._memory, source, target, 0, count)
            return
        self._lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        if not self.clear(target, count):
            raise EngineError(f"the copy of {count} tokens from slot {source} to {target} cannot be cut")

    @property
    def is_ragged(self) -> bool:
        """True if one pass takes any slots of a split cache, with any number of tokens each."""
        return not self._unified and library.takes_ragged(self.handle)

    @property
    def can_shift(self) -> bool:
        """True if llama.cpp can change the positions of cells; Model.can_shift says if that leaves no trace."""
        return bool(self._lib.llama_memory_can_shift(self._memory))

    def shift(self, slot: int, start: int, count: int) -> None:
        """Forgets `count` tokens from position `start` on; the positions of those behind them fall by as many."""
        self._check(slot)
        if not self._lib.llama_memory_seq_rm(self._memory, slot, start, start + count):
            raise EngineError(f"slot {slot} cannot be cut from position {start} to {start + count}")
        self._lib.llama_memory_seq_add(self._memory, slot, start + count, -1, -count)

    def state(self, slot: int) -> bytes:
        """The state of a slot, to be kept or saved."""
        self._check(slot)
        return kv_state.save(self._lib, self.handle, slot)

    def restore(self, slot: int, state: bytes, count: int) -> bool:
        """Fills a slot with the first `count` tokens of a state; False if llama.cpp refuses it."""
        self._check(slot)
        n_streams = 1 if self._unified else self.n_slots
        loaded = kv_state.load(self._lib, self.handle, slot, n_streams, state)
        return loaded and self.clear(slot, count) and self.length(slot) == count

    def carry_over(self, slots: Iterable[int], target: Context) -> frozenset[int]:
        """Copies the cells of these slots to a larger context, in which the same slots are empty; returns the slots
        that were copied."""
        slots = list(slots)
        more = 0 if self._unified else target.n_slots - self.n_slots
        sizes = [int(self._lib.llama_state_seq_get_size(self.handle, slot)) for slot in slots]
        room = (ctypes.c_uint8 * (max(sizes, default=0) + 4 * more))()  # one for all: its pages fault in once
        carried = set()
        for slot in slots:
            self._check(slot)
            moved = kv_state.move(self._lib, self.handle, target.handle, slot, more, room)
            if moved and target.length(slot) == self.length(slot):
                carried.add(slot)
            else:
                target.clear(slot)
        return frozenset(carried)

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        self._check(slot)
        return int(self._lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.n_slots:  # llama.cpp would abort the process
            raise ValueError(f"slot {slot} is out of range; allowed are 0 to {self.n_slots - 1}")


def scale_rope(lib: Any, params: Any, config: ResolvedConfig) -> None:
    """Sets the rotary embedding of a context; what is not given stays as in the file."""
    if config.rope_scaling is not None:
        params.rope_scaling_type = int(getattr(lib, f"LLAMA_ROPE_SCALING_TYPE_{config.rope_scaling.upper()}"))
    for name in ROPE_OPTIONS:
        if name != "rope_scaling" and getattr(config, name) is not None:
            setattr(params, name, getattr(config, name))


def _padded(n_cells: int) -> int:
    return -(-n_cells // _CELL_PADDING) * _CELL_PADDING
