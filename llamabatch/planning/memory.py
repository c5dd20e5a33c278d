"""Computes the memory of an engine before anything is loaded: weights, KV cells and buffers, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llamabatch.config import MIN_CTX, ResolvedConfig
from llamabatch.gguf.pooling import RANK
from llamabatch.planning.model_facts import Layer, ModelFacts
from llamabatch.planning.passes import GpuBuffers, logits_bytes, padded, pass_bytes, pooling_bytes
from llamabatch.planning.placement import Placement

# Bytes per element, from ggml's block layouts (ggml-common.h): bytes of a block / elements of a block.
TYPE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32,
    "q5_0": 22 / 32, "q5_1": 24 / 32,
}  # fmt: skip

MIB = 2**20
# The next two constants were measured with CPython 3.11 on Linux, x86-64. tests/long/memory_prediction.py compares
# plans with more measurements.
PROCESS_BYTES = 51 * MIB  # a process with llamabatch, numpy and llama.cpp's libraries imported, without a model
ENGINE_BYTES = 9 * MIB  # one engine: a thread with its stack and heap, graphs, batches, llguidance, Python objects
# Bytes of a used cell in addition to K and V. In llama-kv-cells.h: position, shift and extent (16), a bit for each of
# 256 sequences (32), a node in the set of used cells and a node in the set of the sequence's positions (48 each). In
# Python: the token id (32), and an entry for it in the prompt, the sequence and the kept prefix (8 each).
_LISTED_BYTES = 144 + 56
_TOKEN_BYTES = 180  # bytes per token of llama.cpp's vocabulary: texts, ids, merges
# The virtual memory reserved by a thread: its stack and an arena of glibc's malloc. It counts against RLIMIT_AS only.
_THREAD_SPACE = (8 + 64) * MIB
_ARENA_SPACE = 64 * MIB  # virtual memory needed by malloc while it aligns an arena
_PROCESS_SPACE = 48 * MIB  # libraries that are loaded later, and memory kept by malloc


@dataclass(frozen=True)
class GpuNeed:
    """The bytes of one engine on one GPU. `number` is the GPU's index in llama.cpp's list."""

    number: int
    weights: int
    kv_cache: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.compute

    def plus(self, other: GpuNeed) -> GpuNeed:
        """Returns the sum of the needs of two models on one GPU."""
        sums = (self.weights + other.weights, self.kv_cache + other.kv_cache, self.compute + other.compute)
        return GpuNeed(self.number, *sums)


@dataclass(frozen=True)
class Memory:
    """The bytes of one engine. `gpus` has the memory of GPUs; all other fields count main memory.

    Attributes:
        weights: the part of the model's file that stays in memory.
        kv_cache: cells and states of all slots. If the context starts with fewer slots, also the cells of the first
            context, since both contexts exist while the context grows.
        compute: buffers of a pass, its logits, the working memory of threads, and the lists of cells and tokens.
        layout: a description of the KV cache, for messages.
        draft: the memory of the whole draft model, with its cells and buffers.
        copies: weights repacked for this CPU.
        vocabulary: the vocabulary, the adapters, and the engine's own objects.
        projector: weights of the mmproj file, buffers of an encoder pass, and kept pictures.
        cache_ram: the maximum memory for saved states of prefixes.
        embeddings: a second context, made when the first text is embedded. `total` includes this context only for a
            model that can only embed or rank.
        reclaimable: mapped pages of the file that are not read again, since a copy is used. The system may free them.
        data: all memory that is not mapped from a file, plus `reserved`.
        reserved: additional address space that is never written.
        loading: the part of the file that is in memory only during the load, in addition to `shared`; not in `total`.
        file: the size of the mapped file. Its address space stays reserved when pages are freed.
        locked: the part locked by use_mlock: from the start of a mapped file to the last tensor that is used in place.
    """

    weights: int
    kv_cache: int
    compute: int
    layout: str = ""
    draft: int = 0
    copies: int = 0
    vocabulary: int = 0
    projector: int = 0
    cache_ram: int = 0
    embeddings: int = 0
    reclaimable: int = 0
    data: int = 0
    loading: int = 0
    file: int = 0
    locked: int = 0
    reserved: int = 0
    gpus: tuple[GpuNeed, ...] = ()

    @property
    def total(self) -> int:
        """The main memory of one engine."""
        return self.shared + self.own

    @property
    def peak(self) -> int:
        """The maximum main memory of one engine, during the load or afterwards."""
        return self.shared + max(self.loading, self.own)

    @property
    def shared(self) -> int:
        """The memory shared by all engines of a process."""
        return self.weights + self.copies + self.vocabulary + self.projector

    @property
    def own(self) -> int:
        """The memory that is not shared with other engines."""
        return self.kv_cache + self.compute + self.draft + self.cache_ram

    def together(self, engines: int, *, children: bool, mapped: bool = True) -> int:
        """Returns the main memory of several engines. Engines in one process share the weights. Engines in child
        processes share the mapped file."""
        if not children:
            return self.shared + engines * self.own
        once = self.weights if mapped else 0
        return once + engines * (self.total - once + PROCESS_BYTES)

    def address_space(self, engines: int, threads: int) -> int:
        """Returns the virtual memory for RLIMIT_AS, with the whole file and the unused space reserved by threads."""
        shared = self.shared - self.weights + max(self.file, self.weights)
        return shared + engines * (self.own + self.reserved + threads * _THREAD_SPACE) + _ARENA_SPACE + _PROCESS_SPACE

    def document(self) -> dict[str, Any]:
        """Returns plain values for JSON, in bytes."""
        return {**asdict(self), "gpus": [{**asdict(gpu), "total": gpu.total} for gpu in self.gpus], "total": self.total}

    def describe(self) -> str:
        """Returns the sum with its terms, for messages."""
        parts = [
            (self.weights, "weights"),
            (self.copies, "repacked copies"),
            (self.kv_cache, f"KV cache ({self.layout})"),
            (self.compute, "buffers"),
            (self.vocabulary, "vocabulary"),
            (self.draft, "draft model"),
            (self.projector, "projector"),
            (self.cache_ram, "saved prefixes"),
        ]
        always = ("weights", "buffers")
        shown = " + ".join(f"{mib(n)} {name}" for n, name in parts if n or name in always or name.startswith("KV"))
        return f"{shown} = {mib(self.total)}"


def memory(facts: ModelFacts, config: ResolvedConfig, gpu_shares: Sequence[float] = ()) -> Memory:
    """Returns the memory of one engine.

    The sum has weights and their copies, KV cells in multiples of 256 (per slot, or in total if kv is "unified"),
    recurrent states (per slot, f32), the buffers of one pass, and the rows of logits.

    Args:
        gpu_shares: the share of the layers on each GPU, as llama.cpp distributes them; empty: everything on the CPU.
    """
    placement = Placement.of(facts, config, gpu_shares)
    if config.device_sampling == "auto" and placement.devices[-1] is None:
        config = replace(config, device_sampling="off")
    layers = facts.layers or (Layer(facts.k_values, facts.v_values, facts.state_values),)
    contexts = _contexts(config)
    states = 1 + facts.n_snapshots(config)
    kept = [sum(_kept(layer, config, n_slots, states) for n_slots in contexts) for layer in layers]
    passes = [pass_bytes(facts, config, n_slots, _attended(config, n_slots)) for n_slots in contexts]
    buffers = GpuBuffers.of(facts, config, _attended(config, config.n_slots), len(gpu_shares), passes[0].written)
    gpus = [_on_gpu(number, placement, config, kept, buffers) for number in range(len(gpu_shares))]
    draft = _draft(facts, config, gpu_shares)
    if draft is not None:
        gpus = [ours.plus(theirs) for ours, theirs in zip(gpus, draft.gpus, strict=True)]
    embeddings, reserved = pooling_bytes(facts, config)
    if facts.is_encoder or config.pooling == RANK:
        kv_cache, compute = 0, embeddings
    else:
        here = (n for n, device in zip(kept, placement.devices, strict=False) if device is None)
        kv_cache = sum(here if config.offload_kqv else kept)
        graphs = sum(each.written for each in passes) if placement.computes_here(config) else buffers.on_cpu
        logits = sum(logits_bytes(facts, config, n_slots) for n_slots in contexts)
        compute = graphs + passes[0].work + logits + _listed(facts, config)
        reserved = passes[0].untouched
    vocabulary = (facts.n_vocab * _TOKEN_BYTES if facts.file_bytes else 0) + facts.adapter_bytes + ENGINE_BYTES
    loaded = placement.in_main_memory(config, len(gpu_shares))
    cache_ram = 0 if facts.is_encoder or config.pooling == RANK else config.cache_ram * MIB
    if cache_ram and config.cache_disk is not None:  # room for two states, one being written and one being read
        cache_ram += 2 * kv_cache // config.n_slots
    private = (
        kv_cache
        + cache_ram
        + compute
        + reserved
        + loaded.copies
        + vocabulary
        + facts.projector_bytes
        + (draft.data if draft is not None else 0)
    )
    return Memory(
        **loaded._asdict(),
        kv_cache=kv_cache,
        compute=compute,
        layout=_layout(facts, config, contexts),
        draft=draft.total - ENGINE_BYTES if draft is not None else 0,
        vocabulary=vocabulary,
        projector=facts.projector_bytes,
        cache_ram=cache_ram,
        embeddings=embeddings,
        data=private if config.use_mmap else private + loaded.weights,
        file=facts.file_bytes if config.use_mmap else 0,
        reserved=reserved,
        gpus=tuple(gpus),
    )


def _contexts(config: ResolvedConfig) -> tuple[int, ...]:
    """Returns the numbers of slots of all contexts: of the full context, and of a smaller first context if there is
    one. Both contexts exist while cells are copied from the first into the full context."""
    start = min(config.start_slots, config.n_slots)
    return (config.n_slots,) if start == config.n_slots else (config.n_slots, start)


def _attended(config: ResolvedConfig, n_slots: int) -> int:
    """Returns the number of cells that one pass can attend to."""
    cells = padded(config.n_ctx)
    return min(cells * n_slots, padded(config.kv_cells)) if config.kv == "unified" else cells


def _kept(layer: Layer, config: ResolvedConfig, n_slots: int, states: int) -> int:
    """Returns the bytes kept by a layer: its cells, and `states` states for each slot."""
    is_unified, cells = config.kv == "unified", _attended(config, n_slots)
    per_cell = layer.k_values * TYPE_BYTES[config.type_k] + layer.v_values * TYPE_BYTES[config.type_v]
    if layer.window and not config.swa_full:  # one window per slot and the tokens of a pass (llama-kv-cache-iswa.cpp)
        window = layer.window * (n_slots if is_unified else 1)
        cells = min(cells, padded(window + min(config.n_ubatch, config.n_batch)))
    return int((1 if is_unified else n_slots) * cells * per_cell) + n_slots * states * layer.state_values * 4


def _listed(facts: ModelFacts, config: ResolvedConfig) -> int:
    if not facts.k_values and not facts.v_values:
        return 0
    return _attended(config, config.n_slots) * (1 if config.kv == "unified" else config.n_slots) * _LISTED_BYTES


def _layout(facts: ModelFacts, config: ResolvedConfig, contexts: tuple[int, ...]) -> str:
    if facts.is_encoder or config.pooling == RANK:
        return "none: an encoder" if facts.is_encoder else "none: it ranks texts"
    n_slots, cells = config.n_slots, _attended(config, config.n_slots)
    if facts.state_values and not facts.k_values and not facts.v_values:
        return f"{n_slots} states"
    layout = f"{cells:,} cells shared by {n_slots}" if config.kv == "unified" else f"{n_slots} x {cells:,} cells"
    if len(contexts) > 1:
        layout += f", and those of {contexts[1]} while it grows"
    return f"{layout} and states" if facts.state_values else layout


def _draft(facts: ModelFacts, config: ResolvedConfig, gpu_shares: Sequence[float]) -> Memory | None:
    if facts.draft is None:
        return None
    n_ctx = max(MIN_CTX, min(config.n_ctx, facts.draft.n_ctx_train))
    return memory(facts.draft, replace(config.for_draft_model(), n_ctx=n_ctx), gpu_shares)


def _on_gpu(
    number: int, placement: Placement, config: ResolvedConfig, kept: Sequence[int], buffers: GpuBuffers
) -> GpuNeed:
    """Returns the memory of an engine on one GPU, without the draft model. `kept` has the bytes of the cells and states
    of each layer.
    """
    layers, named = placement.layers_of(number), placement.named_bytes(number)
    has_output = placement.devices[-1] == number
    return GpuNeed(
        number,
        placement.layer_bytes(number) + named + placement.tied_bytes(number),
        sum(kept[layer] for layer in layers) if config.offload_kqv else 0,
        buffers.on(layers, len(kept), has_output, named > 0),
    )


def mib(n_bytes: int) -> str:
    """Formats bytes as "1,234 MiB", for messages."""
    return f"{n_bytes / MIB:,.0f} MiB"
