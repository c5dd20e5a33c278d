"""A llama_context: decoding, logits, memory. Only this file and batch.py know the C calls for them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.config import DEVICE_TOP, ROPE_OPTIONS, ResolvedConfig
from llamabatch.errors import ConfigError, EngineClosedError, EngineError
from llamabatch.llama import devices, kv_state, library, log
from llamabatch.llama.model import Model
from llamabatch.planning.passes import padded
from llamabatch.request.adapters import AdapterSet
from llamabatch.sampling.top_rows import TopRows

logger = logging.getLogger(__name__)

_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
# Device sampling needs these functions and structs of llama.cpp.
_SAMPLING = (
    "llama_sampler_seq_config", "llama_set_sampler", "llama_get_sampled_candidates_ith",
    "llama_get_sampled_candidates_count_ith", "llama_get_sampled_logits_ith", "llama_get_sampled_logits_count_ith",
)  # fmt: skip


class DecodeCode(IntEnum):
    """Return codes of llama_decode (llama.h)."""

    OK = 0
    NO_ROOM = 1  # there are no free cells; the context is unchanged
    ABORTED = 2
    INVALID = -1  # the context is unchanged
    ALLOCATION = -2
    FAILED = -3


class Context:
    """Owns a llama_context. Only one thread may use it at a time. Close the context before its model.

    Args:
        model: must stay open until close().
        config: config of the engine.
        n_slots: number of sequences. Each sequence has its own n_ctx cells. If config.kv is "unified", all sequences
            share at most kv_cells cells instead.

    Raises:
        ConfigError: this llama.cpp does not support the value of n_slots, speculate or device_sampling.
        EngineError: llama.cpp could not make the context (no memory, or cache types that exclude each other).
    """

    def __init__(self, model: Model, config: ResolvedConfig, n_slots: int) -> None:
        self._lib = lib = library.load()
        most_slots = int(lib.llama_max_parallel_sequences())
        if n_slots > most_slots:  # llama.cpp would abort the process
            raise ConfigError(f"n_slots is {n_slots}; this build of llama.cpp allows 1 to {most_slots}")
        n_ctx = config.n_ctx
        params = context_params(lib, model, config)
        self.n_slots = n_slots
        self._unified = config.kv == "unified"
        # llama.cpp divides its n_ctx among the sequences. Our n_ctx is the share of one request.
        params.n_ctx = padded(n_ctx) * n_slots
        if self._unified:
            params.n_ctx = min(params.n_ctx, padded(config.kv_cells))
        params.n_batch = config.n_batch
        params.n_ubatch = config.n_ubatch
        params.n_seq_max = n_slots
        if snapshots := model.n_snapshots(config):
            params.n_rs_seq = snapshots
        # Without n_outputs_max, llama.cpp reserves n_batch rows of logits.
        params.n_outputs_max = config.output_rows(n_slots, model.n_vocab)
        params.type_k = kv_state.type_number(lib, config.type_k)
        params.type_v = kv_state.type_number(lib, config.type_v)
        params.kv_unified = self._unified
        params.swa_full = config.swa_full
        self._chains: list[Any] = []  # one sampler per slot while the device selects the likeliest tokens
        self.can_sample = self._can_sample(config, model.n_vocab)
        if self.can_sample:
            chains = self._new_chains()
            params.samplers, params.n_samplers = _sequences(lib, chains), n_slots
            params.n_outputs_max_per_seq = 1
        log.recent_complaints()
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            self._free_chains()
            reason = log.reason()
            raise EngineError(f"no context of {n_slots} slots of {n_ctx} tokens can be made: {reason}")
        if snapshots and lib.llama_n_rs_seq(self.handle) < snapshots:
            self.close()
            raise ConfigError(
                f"speculate is {config.speculate!r}, but this llama.cpp keeps no older states of {model.path.name}, "
                "which are needed after wrong guesses; give 'off'"
            )
        self._memory = lib.llama_get_memory(self.handle)
        # llama.cpp may drop cells that lie further back than this number of tokens. With 0, all cells stay.
        self._window = 0 if config.swa_full else model.window
        self._n_vocab = model.n_vocab
        self._layout = kv_state.Layout.of(model)
        self._model = model
        self._threads = self._most_threads = config.n_threads, config.n_threads_batch
        self.adapters: AdapterSet = ()

    @property
    def has_memory(self) -> bool:
        """True if the context keeps computed cells. The context of an encoder does not."""
        return bool(self._memory)

    def close(self) -> None:
        if self.handle:
            self._lib.llama_free(self.handle)
            self.handle = None
        self._free_chains()

    def _can_sample(self, config: ResolvedConfig, n_vocab: int) -> bool:
        """Returns True if the device should select the likeliest tokens.

        Raises ConfigError if device_sampling is "on" and the binding has no functions for it.
        """
        if config.device_sampling == "off" or n_vocab <= DEVICE_TOP:
            return False
        if config.device_sampling == "auto" and (config.n_gpu_layers == 0 or not devices.used(config, self._lib)):
            return False  # planning/capacity.py has the same rule, but does not plan every context
        known = {name for name, *_ in self._lib.llama_context_params._fields_}
        missing = [name for name in ("samplers", "n_samplers", "n_outputs_max_per_seq") if name not in known]
        missing += [name for name in _SAMPLING if not hasattr(self._lib, name)]
        if missing and config.device_sampling == "on":
            raise ConfigError(
                f"device_sampling is 'on', but this binding of llama.cpp has no {missing[0]}; give 'auto' or 'off'"
            )
        return not missing

    def _new_chains(self) -> list[Any]:
        """Makes a sampler per slot that keeps the DEVICE_TOP likeliest tokens.

        The samplers are new each time, because a context accepts the same sampler only once.
        """
        lib = self._lib
        self._chains = [
            lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params()) for _ in range(self.n_slots)
        ]
        for chain in self._chains:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(DEVICE_TOP))
        return self._chains

    def _free_chains(self) -> None:
        for chain in self._chains:
            self._lib.llama_sampler_free(chain)
        self._chains = []

    @property
    def samples_on_device(self) -> bool:
        """True while the device returns the likeliest tokens of a row instead of its logits."""
        return bool(self._chains)

    def sample_on_device(self, on: bool) -> None:
        """Switches device sampling on or off for the next decodes. `can_sample` must be True to switch it on. A switch
        takes the time of some steps, because llama.cpp plans its buffers again."""
        if on == self.samples_on_device:
            return
        old, self._chains = self._chains, []
        chains = self._new_chains() if on else [None] * self.n_slots
        taken = [self._lib.llama_set_sampler(self.handle, slot, chain) for slot, chain in enumerate(chains)]
        for chain in old:
            self._lib.llama_sampler_free(chain)
        if not all(taken):  # all slots then return whole rows
            self.can_sample = False
            self.sample_on_device(False)

    def set_adapters(self, adapters: AdapterSet) -> None:
        """Sets the adapters of the next decodes. Raises EngineError if llama.cpp refuses them."""
        self._model.adapters.apply(self.handle, self.adapters, adapters)
        self.adapters = adapters

    def use_threads(self, most: int) -> None:
        """Sets the threads of the next decodes: the number in the config, but not more than `most`."""
        one_row, more_rows = self._most_threads
        threads = min(one_row, most), min(more_rows, most)
        if threads != self._threads:
            self._lib.llama_set_n_threads(self.handle, *threads)
            self._threads = threads

    def decode(self, batch: Any) -> DecodeCode:
        """Calls llama_decode. Raises EngineClosedError if the call was halted."""
        code = DecodeCode(self._lib.llama_decode(self.handle, batch))
        if code is DecodeCode.ABORTED:
            raise EngineClosedError("the engine was closed while it computed")
        return code

    def decode_whole(self, batch: Any) -> DecodeCode:
        """Calls llama_decode for one sequence whose tokens all attend to one another."""
        self._lib.llama_set_causal_attn(self.handle, False)
        try:
            return self.decode(batch)
        finally:
            self._lib.llama_set_causal_attn(self.handle, True)

    def logits(self, n_rows: int) -> npt.NDArray[np.float32]:
        """Returns the output rows of the last decode, in batch order, as a view into llama.cpp's buffer.

        The view has the shape (n_rows, vocabulary) and is valid until the next decode.

        Raises:
            EngineError: llama.cpp has no logits, or the device returned only the likeliest tokens.
        """
        if self.samples_on_device:
            raise EngineError(
                "the logits are still on the device, which returned only the likeliest tokens: a bug in llamabatch"
            )
        pointer = self._lib.llama_get_logits(self.handle)
        return _rows(pointer, ctypes.c_float, n_rows, self._n_vocab)

    def rows(self, n_rows: int) -> npt.NDArray[np.float32] | TopRows:
        """Returns the output rows of the last decode, in batch order: whole rows, or only their likeliest tokens.

        Args:
            n_rows: number of all output rows of that decode.
        """
        if not self.samples_on_device:
            return self.logits(n_rows)
        lib, handle, n_vocab = self._lib, self.handle, self._n_vocab
        first, last = -n_rows, -1  # for llama.cpp, -1 is the last output row
        counts = [lib.llama_get_sampled_candidates_count_ith(handle, end) for end in (first, last)]
        counts += [lib.llama_get_sampled_logits_count_ith(handle, end) for end in (first, last)]
        if counts == [DEVICE_TOP] * 4:
            ids = _rows(lib.llama_get_sampled_candidates_ith(handle, first), ctypes.c_int32, n_rows, n_vocab)
            logits = _rows(lib.llama_get_sampled_logits_ith(handle, first), ctypes.c_float, n_rows, n_vocab)
            return TopRows(ids[:, :DEVICE_TOP], np.ascontiguousarray(logits[:, :DEVICE_TOP]))
        if self.can_sample:
            logger.warning("the device of the output cannot find the likeliest tokens of a row; it returns all logits")
            self.can_sample = False
        pointer = lib.llama_get_sampled_logits_ith(handle, first)  # the device returned whole rows instead
        if not pointer:  # llama.cpp refused the samplers
            pointer = lib.llama_get_logits(handle)
        elif counts[2:] != [n_vocab] * 2:
            raise EngineError(f"the device returned {counts} candidates and logits; wanted are {DEVICE_TOP}, or all")
        return _rows(pointer, ctypes.c_float, n_rows, n_vocab)

    def clear(self, slot: int, start: int = 0) -> bool:
        """Drops a slot's cells from position `start` on. Returns False if the model's state cannot be cut there."""
        self._check(slot)
        if not self._lib.llama_memory_seq_rm(self._memory, slot, start if start else -1, -1):
            return False
        if not (start and self._window):
            return True
        # llama.cpp cuts at any place. But the next tokens need the cells of the window before `start`, and llama.cpp
        # may have reused some of them.
        first = int(self._lib.llama_memory_seq_pos_min(self._memory, slot))
        return 0 <= first <= max(0, start + 1 - self._window)

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        """Copies the cells of the first `count` positions of slot `source` to slot `target`.

        In a split cache llama.cpp can copy only whole sequences between streams; a partial copy would abort the
        process. In a unified cache the copy shares its cells with the source and takes no time.
        """
        self._check(source)
        self._check(target)
        if self._unified:  # a copy adds cells to the target, so the target is cleared first
            start, end = (-1, -1) if self.length(source) == count else (0, count)
            self.clear(target)
            self._lib.llama_memory_seq_cp(self._memory, source, target, start, end)
            return
        self._lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        if self.length(target) != count and not self.clear(target, count):
            raise EngineError(f"the copy of {count} tokens from slot {source} to {target} cannot be cut")

    @property
    def is_ragged(self) -> bool:
        """True if one pass can compute any slots of a split cache, with any number of tokens for each slot."""
        return not self._unified and library.takes_ragged(self.handle)

    @property
    def takes_prompts(self) -> bool:
        """True if llama.cpp has special kernels for tokens that a batch marks as prompt tokens."""
        return library.takes_prompts(self.handle)

    @property
    def can_shift(self) -> bool:
        """True if llama.cpp can change the positions of cells. Model.can_shift says if other slots stay unchanged."""
        return bool(self._lib.llama_memory_can_shift(self._memory))

    def shift(self, slot: int, start: int, count: int) -> None:
        """Drops `count` tokens from position `start` on. The positions of all later tokens decrease by `count`."""
        self._check(slot)
        if not self._lib.llama_memory_seq_rm(self._memory, slot, start, start + count):
            raise EngineError(f"slot {slot} cannot be cut from position {start} to {start + count}")
        self._lib.llama_memory_seq_add(self._memory, slot, start + count, -1, -count)

    def state(self, slot: int) -> bytes:
        """Returns the state of a slot in a form that does not depend on the slot or the number of slots."""
        self._check(slot)
        return kv_state.save(self._lib, self.handle, slot, self._layout)

    def state_bytes(self, slot: int) -> int:
        """Returns the size of raw_state in bytes."""
        self._check(slot)
        return int(self._lib.llama_state_seq_get_size(self.handle, slot))

    def raw_state(self, slot: int) -> npt.NDArray[np.uint8] | None:
        """Returns a slot's state in llama.cpp's format; None if llama.cpp refuses. The state fits only slots of this
        context."""
        self._check(slot)
        return kv_state.copy_out(self._lib, self.handle, slot)

    def restore(self, slot: int, state: bytes | npt.NDArray[np.uint8], count: int) -> bool:
        """Fills a slot with the first `count` positions of a saved state, from `state` or `raw_state`.

        Returns False if llama.cpp refuses the state.
        """
        self._check(slot)
        n_streams = 1 if self._unified else self.n_slots
        if isinstance(state, bytes):
            loaded = kv_state.load(self._lib, self.handle, slot, n_streams, state, self._layout)
        else:
            if self._layout.n_caches == 1 and not self._layout.has_state:
                state = kv_state.widened(state, n_streams)
            loaded = kv_state.copy_in(self._lib, self.handle, slot, state)
        held = self.length(slot) if loaded else -1
        return held == count or (held > count and self.clear(slot, count) and self.length(slot) == count)

    def carry_over(self, slots: Iterable[int], target: Context) -> frozenset[int]:
        """Copies the cells of `slots` to a larger context, where these slots are empty. Returns the copied slots."""
        slots = list(slots)
        more = 0 if self._unified else target.n_slots - self.n_slots
        sizes = [int(self._lib.llama_state_seq_get_size(self.handle, slot)) for slot in slots]
        room = (ctypes.c_uint8 * (max(sizes, default=0) + 4 * more))()  # one buffer for all: pages fault in once
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
        """Returns the slot's highest position plus 1. This is the number of its tokens if all of them are text."""
        self._check(slot)
        return int(self._lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.n_slots:  # llama.cpp would abort the process
            raise ValueError(f"slot {slot} is out of range; allowed are 0 to {self.n_slots - 1}")


def context_params(lib: Any, model: Model, config: ResolvedConfig) -> Any:
    """Returns the parameters that all contexts of an engine share: threads, attention, abort callback, and rotary
    embedding. Options of the rotary embedding that are not given keep the file's values."""
    params = lib.llama_context_default_params()
    params.n_threads = config.n_threads
    params.n_threads_batch = config.n_threads_batch
    params.flash_attn_type = _FLASH_ATTN[config.flash_attn]
    params.offload_kqv = config.offload_kqv
    params.op_offload = config.op_offload
    params.no_perf = True
    model.halt.give_to(lib, params)
    if config.rope_scaling is not None:
        params.rope_scaling_type = int(getattr(lib, f"LLAMA_ROPE_SCALING_TYPE_{config.rope_scaling.upper()}"))
    for name in ROPE_OPTIONS:
        if name != "rope_scaling" and getattr(config, name) is not None:
            setattr(params, name, getattr(config, name))
    return params


def _sequences(lib: Any, chains: list[Any]) -> Any:
    """Returns an array of llama_sampler_seq_config with the sampler of each slot."""
    array = (lib.llama_sampler_seq_config * len(chains))()
    for slot, chain in enumerate(chains):
        array[slot].seq_id, array[slot].sampler = slot, ctypes.cast(chain, ctypes.c_void_p)
    return array


def _rows(pointer: Any, kind: Any, n_rows: int, n_vocab: int) -> npt.NDArray[Any]:
    """Returns a view of output rows. In llama.cpp's buffer, a row begins every n_vocab elements."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    if address is None:
        raise EngineError("llama.cpp gave no logits")
    return np.ctypeslib.as_array((kind * (n_rows * n_vocab)).from_address(address)).reshape(n_rows, n_vocab)
