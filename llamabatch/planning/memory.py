"""The memory of an engine, computed before anything is loaded: weights, KV cells, buffers, by arithmetic alone."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from llamabatch.config import MIN_CTX, ResolvedConfig
from llamabatch.gguf.pooling import RANK
from llamabatch.gguf.reader import TensorInfo
from llamabatch.planning.compute_buffers import (
    PIPELINE_COPIES,
    Widths,
    embedding_bytes,
    graph_bytes,
    input_bytes,
    output_bytes,
    work_bytes,
)
from llamabatch.planning.model_facts import Layer, ModelFacts

# Bytes an element, from ggml's block layouts (ggml-common.h): bytes of a block / elements in it.
TYPE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32,
    "q5_0": 22 / 32, "q5_1": 24 / 32,
}  # fmt: skip
Places: TypeAlias = "tuple[tuple[str, int | None], ...]"

MIB = 2**20
CELL_PADDING = 256  # llama.cpp rounds the cells of a slot up to this
# Measured with CPython 3.11 on Linux, x86-64, tests/long/memory_prediction.py holds the sum against more of them:
PROCESS_BYTES = 51 * MIB  # a process that has imported llamabatch, numpy and llama.cpp's libraries, and loaded nothing
ENGINE_BYTES = 9 * MIB  # a thread with its stack and heap, graphs, batches, llguidance, Python's objects
# Bytes of a cell in use beside K and V. llama-kv-cells.h: position, shift and extent (16), a bit for each of 256
# sequences (32), a node in the set of used cells and one in that of its sequence's positions (48 each).
# Python: the token's number (32), and its place in the prompt, the sequence and the kept prefix (8 each).
_LISTED_BYTES = 144 + 56
_TOKEN_BYTES = 180  # of llama.cpp's vocabulary: texts, ids, merges
# Virtual memory, which counts where RLIMIT_AS is set: a thread reserves its stack and an arena of glibc's malloc.
_THREAD_SPACE = (8 + 64) * MIB
_ARENA_SPACE = 64 * MIB  # more, while an arena is aligned
_PROCESS_SPACE = 48 * MIB  # libraries that are not loaded yet, and what malloc keeps
_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
# no matrix product reads these, so that they are never repacked
_LOOKED_UP = ("token_embd", "token_types", "position_embd", "ssm_conv1d", "shortconv.conv", "rope_")
# AMX: extra bytes a block of 256 (32 for Q8_0) elements, mmq.cpp, get_row_size; types with 16 or 32 need no more
_AMX_EXTRA = {"Q4_0": 0, "Q4_1": 0, "Q8_0": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 0, "IQ4_XS": 2, "F16": 0}
_AMX_ROWS = 32  # TILE_N * 2
# native_patches/0012, before all others: columns by sixteen, in as many bytes
_WIDE = frozenset({"IQ4_NL", "Q4_K", "Q5_K", "Q6_K"})
_WIDE_WITH_TILES = _WIDE | {"Q4_0", "Q8_0"}  # and experts without
_WIDE_ROWS = 16
# repack.cpp, ggml_repack_get_optimal_repack_type: type -> (what the build must have, rows are a multiple of)
_REPACKED = {
    "Q4_0": (("avx2", 8), ("neon", 4)),
    "Q4_K": (("avx2", 8), ("neon", 8)),
    "Q2_K": (("avx512", 8),),
    "Q5_K": (("neon", 8),),
    "Q6_K": (("vnni512", 8), ("neon", 8)),
    "IQ4_NL": (("avx2", 8), ("neon", 4)),
    "MXFP4": (("avx2", 8), ("neon", 4)),
    "Q8_0": (("rows", 8), ("neon", 4)),
}


@dataclass(frozen=True)
class GpuNeed:
    """Bytes on one GPU; `number` is its index in llama.cpp's list."""

    number: int
    weights: int
    kv_cache: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.compute


@dataclass(frozen=True)
class Memory:
    """Bytes of one engine. Memory of GPUs is counted in `gpus` alone.

    Attributes:
        weights: the part of the model's file that stays in memory.
        kv_cache: cells and states of all slots; where the context starts with fewer, also those of the first context,
            which exist beside the larger one while it grows.
        compute: buffers of a pass, its logits, the working memory of threads, and the lists of cells and tokens.
        layout: the KV cache in words, for messages.
        draft: the whole draft model.
        copies: weights repacked for this CPU.
        vocabulary: also adapters, and an engine's own objects.
        embeddings: a second context, made when the first text is embedded; in `total` for a model that only
            embeds, or ranks.
        reclaimable: mapped pages of the file that are not read again, since a copy is used: the system may take them.
        data: the part of all this that no file backs, and `reserved`.
        reserved: address space beside all this that is never written.
        loading: beside `shared`, during the load only: the part of the file that is given back; not in `total`.
        file: the mapped file, whose address space stays as it is while pages are given back.
        locked: the part that use_mlock locks: from the start of a mapped file to the last tensor that is used in place.
    """

    weights: int
    kv_cache: int
    compute: int
    layout: str = ""
    draft: int = 0
    copies: int = 0
    vocabulary: int = 0
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
        """Main memory."""
        return self.shared + self.own

    @property
    def peak(self) -> int:
        """The most that one engine takes: during the load, or at work."""
        return self.shared + max(self.loading, self.own)

    @property
    def shared(self) -> int:
        """The part that all engines of a process have once."""
        return self.weights + self.copies + self.vocabulary

    @property
    def own(self) -> int:
        """The part that each engine has."""
        return self.kv_cache + self.compute + self.draft

    def together(self, engines: int, *, children: bool, mapped: bool = True) -> int:
        """Main memory of several engines: in one process they share the weights, as children the mapped file."""
        if not children:
            return self.shared + engines * self.own
        once = self.weights if mapped else 0
        return once + engines * (self.total - once + PROCESS_BYTES)

    def address_space(self, engines: int, threads: int) -> int:
        """Virtual memory, for RLIMIT_AS: the whole file, and what threads reserve without use."""
        shared = self.shared - self.weights + max(self.file, self.weights)
        return shared + engines * (self.own + self.reserved + threads * _THREAD_SPACE) + _ARENA_SPACE + _PROCESS_SPACE

    def document(self) -> dict[str, Any]:
        """Plain values for JSON, in bytes."""
        return {**asdict(self), "gpus": [{**asdict(gpu), "total": gpu.total} for gpu in self.gpus], "total": self.total}

    def describe(self) -> str:
        """The sum with its terms, for messages."""
        parts = [
            (self.weights, "weights"),
            (self.copies, "repacked copies"),
            (self.kv_cache, f"KV cache ({self.layout})"),
            (self.compute, "buffers"),
            (self.vocabulary, "vocabulary"),
            (self.draft, "draft model"),
        ]
        always = ("weights", "buffers")
        shown = " + ".join(f"{mib(n)} {name}" for n, name in parts if n or name in always or name.startswith("KV"))
        return f"{shown} = {mib(self.total)}"


def memory(facts: ModelFacts, config: ResolvedConfig, gpu_shares: Sequence[float] = ()) -> Memory:
    """Memory of one engine: weights and their copies, KV cells rounded to 256 (a slot, or in all if kv is "unified"),
    recurrent states (a slot, f32), the buffers of one pass, and the rows of logits.

    Args:
        gpu_shares: of the layers, one figure a GPU, as llama.cpp deals them out; empty: everything on the CPU.
    """
    n_slots = config.n_slots
    unified = config.kv == "unified"
    cells = padded(config.n_ctx)  # that one pass can attend to
    if unified:
        cells = min(cells * n_slots, padded(config.kv_cells))
    per_cell = facts.k_values * TYPE_BYTES[config.type_k] + facts.v_values * TYPE_BYTES[config.type_v]
    layers = facts.layers or (Layer(facts.k_values, facts.v_values, facts.state_values),)
    kept = [_kept(layer, config, cells, 1 if unified else n_slots, n_slots) for layer in layers]
    placed = facts.placed if gpu_shares else ()  # else all are in main memory
    sorted_weights = _sorted(facts, frozenset(name for name, _ in placed))
    devices = _devices(config, len(layers), gpu_shares)
    if config.device_sampling == "auto" and devices[-1] is None:
        config = replace(config, device_sampling="off")
    graph, untouched, work = _pass(facts, config, n_slots, cells)
    buffers = _GpuBuffers.of(facts, config, n_slots, cells, len(gpu_shares), graph)
    logits = _logits(facts, config, n_slots)
    start = min(config.start_slots, n_slots)
    if start < n_slots:  # the first context holds these until all cells stand in the larger one
        first_cells = min(cells, padded(config.n_ctx) * start)
        first = [_kept(layer, config, first_cells, 1 if unified else start, start) for layer in layers]
        kept = [both + one for both, one in zip(kept, first, strict=True)]
        graph += _pass(facts, config, start, first_cells)[0]
        logits += _logits(facts, config, start)
    draft = None
    if facts.draft is not None:
        n_ctx = max(MIN_CTX, min(config.n_ctx, facts.draft.n_ctx_train))
        draft = memory(facts.draft, replace(config.for_draft_model(), n_ctx=n_ctx), gpu_shares)
    layout = f"{cells:,} cells shared by {n_slots}" if unified else f"{n_slots} x {cells:,} cells"
    if start < n_slots:
        layout += f", and those of {start} while it grows"
    if facts.state_values:
        layout = f"{layout} and states" if per_cell else f"{n_slots} states"
    sizes = {tensor.name: tensor for tensor in facts.tensors} if placed else {}
    tied = _tied(facts) if devices[-1] is not None and not any(name == _EMBEDDING for name, _ in placed) else 0
    gpus = tuple(
        _on_gpu(
            number,
            devices,
            sorted_weights,
            kept,
            buffers,
            draft,
            sum(sizes[name].n_bytes for name, gpu in placed if gpu == number),
            tied,
            config.offload_kqv,
        )
        for number in range(len(gpu_shares))
    )
    moved = sum(gpu.weights for gpu in gpus) - sum(g.weights for g in (draft.gpus if draft else ())) - tied
    kept_here = sum(n for n, device in zip(kept, devices, strict=False) if device is None or not config.offload_kqv)
    copies = sum(n for n, device in zip(sorted_weights.copies, devices, strict=False) if device is None)
    copies += sum(_copy(sizes[name], facts.features) for name, gpu in placed if gpu is None)
    computes_here = None in devices or any(gpu is None for _, gpu in placed) or not config.offload_kqv
    listed = cells * (1 if unified else n_slots) * _LISTED_BYTES if per_cell else 0
    compute = (graph if computes_here else buffers.on_cpu) + work + logits + listed
    vocabulary = (facts.n_vocab * _TOKEN_BYTES if facts.file_bytes else 0) + facts.adapter_bytes + ENGINE_BYTES
    files = _in_files(facts, tuple(device is None for device in devices), facts.file_bytes - moved, placed)
    drops = facts.drops_copied_pages and not config.use_mlock
    here = files.mapped if config.use_mmap and not drops else files.used
    given_back = facts.file_bytes - here if config.use_mmap else 0
    if drops and given_back:  # a copy is there before its pages go
        given_back = max(0, given_back - copies) + files.largest_copied
    embeddings, reserved = _embeddings(facts, config)
    if facts.is_encoder or config.pooling == RANK:
        kept_here, compute, layout = 0, embeddings, "none: an encoder" if facts.is_encoder else "none: it ranks texts"
        untouched = reserved
    reclaimable = here - files.used + files.embedding if config.use_mmap and not config.use_mlock else 0
    theirs = draft.total - ENGINE_BYTES if draft is not None else 0
    private = kept_here + compute + untouched + copies + vocabulary + (draft.data if draft is not None else 0)
    return Memory(
        weights=here,
        kv_cache=kept_here,
        compute=compute,
        layout=layout,
        draft=theirs,
        copies=copies,
        vocabulary=vocabulary,
        embeddings=embeddings,
        reclaimable=reclaimable,
        data=private if config.use_mmap else private + here,
        loading=given_back,
        file=facts.file_bytes if config.use_mmap else 0,
        locked=_locked(facts, files, config),
        reserved=untouched,
        gpus=gpus,
    )


@lru_cache(maxsize=16)
def _sorted_tensors(facts: ModelFacts, placed: frozenset[str]) -> Weights:
    return weights(facts.tensors, facts.n_layer, facts.features, placed)


@lru_cache(maxsize=16)
def _in_files(facts: ModelFacts, on_cpu: tuple[bool, ...], file_bytes: int, placed: Places) -> Files:
    """As in_files; where the tensors are not known, `file_bytes` stay."""
    if not facts.tensors:
        return Files(file_bytes, file_bytes, 0)
    here = {name: gpu is None for name, gpu in placed}
    return in_files(facts.tensors, facts.parts, facts.n_layer, facts.features, on_cpu, here)


def _sorted(facts: ModelFacts, placed: frozenset[str]) -> Weights:
    """The weights by layer; all in one layer where the tensors are not known."""
    if facts.tensors:
        return _sorted_tensors(facts, placed)
    return Weights((facts.file_bytes,), (0,))


def _locked(facts: ModelFacts, files: Files, config: ResolvedConfig) -> int:
    """Bytes that use_mlock locks. llama.cpp locks no repacked copies: their buffers are not those of a host."""
    if not config.use_mlock:
        return 0
    if not config.use_mmap:
        return files.used
    before = facts.file_bytes - sum(tensor.n_bytes for tensor in facts.tensors)  # the headers
    return min(facts.file_bytes, before + files.ends) if files.ends else 0


def _kept(layer: Layer, config: ResolvedConfig, cells: int, streams: int, n_slots: int) -> int:
    per_cell = layer.k_values * TYPE_BYTES[config.type_k] + layer.v_values * TYPE_BYTES[config.type_v]
    if layer.window and not config.swa_full:  # llama-kv-cache-iswa.cpp: the windows, and the tokens of a pass
        window = layer.window * (n_slots if config.kv == "unified" else 1)
        cells = min(cells, padded(window + min(config.n_ubatch, config.n_batch)))
    return int(streams * cells * per_cell) + n_slots * layer.state_values * 4


def _pass(facts: ModelFacts, config: ResolvedConfig, n_slots: int, cells: int) -> tuple[int, int, int]:
    """Bytes of the largest pass: the part of its buffer that is written, the rest of it, and the work of threads."""
    n_tokens = min(config.n_ubatch, cells * n_slots)
    rows = config.output_rows(n_slots, facts.n_vocab)
    states = n_slots * 4 * max((layer.state_values for layer in facts.layers), default=facts.state_values)
    widths = _widths(facts)
    has_cells = facts.k_values or facts.v_values
    flash = config.flash_attn != "off"  # auto is on wherever a kernel is there: capacity._flash_attn
    attended = cells if has_cells else 0
    widths = _with_samplers(widths, config)
    reserved = graph_bytes(widths, n_tokens, attended, rows, flash, states)
    n_fed = min(n_tokens, n_slots) if facts.n_layer == 1 and not facts.is_encoder else n_tokens
    written = graph_bytes(widths, n_tokens, attended, rows, flash, states, n_fed)
    return written, reserved - written, work_bytes(widths, n_tokens)


def _with_samplers(widths: Widths, config: ResolvedConfig) -> Widths:
    """With device_sampling a pass pads its logits with one more row, in a copy: llama-graph.cpp, build_sampling."""
    return widths if config.device_sampling == "off" else replace(widths, n_vocab=2 * widths.n_vocab)


def _widths(facts: ModelFacts) -> Widths:
    """The widths of a pass; where the tensors are not known, with a feed-forward network of four times n_embd."""
    if facts.widths is not None:
        return facts.widths
    kv = facts.k_values + facts.v_values
    return Widths(facts.n_embd, facts.n_vocab, facts.n_head, facts.n_embd, min(kv, 2 * facts.n_embd), 12 * facts.n_embd)


def _logits(facts: ModelFacts, config: ResolvedConfig, n_slots: int) -> int:
    """Bytes of the output rows: one for each slot, more where guesses are checked. With device_sampling each has room
    for the logits, probabilities and ids of all its tokens once more: llama-context.cpp, output_reserve."""
    rows = n_slots if config.speculate == "off" else config.output_rows(n_slots, facts.n_vocab)
    return rows * facts.n_vocab * (4 if config.device_sampling == "off" else 16)


def _embeddings(facts: ModelFacts, config: ResolvedConfig) -> tuple[int, int]:
    """Bytes of the context of llama/embedder.py for the tokens of one pass: those that are written, and the rest.

    llama.cpp keeps logits of the whole vocabulary for each token, also for an encoder, whose graph has none.
    """
    n_tokens = padded(min(config.n_ubatch, config.n_batch))
    widths = replace(_widths(facts), n_vocab=0) if facts.is_encoder else _widths(facts)
    graph = graph_bytes(widths, n_tokens, n_tokens, n_tokens, config.flash_attn != "off")
    cells = 0 if facts.is_encoder else n_tokens * (facts.k_values + facts.v_values) * 2
    logits = n_tokens * facts.n_vocab * 4
    written = cells + graph + work_bytes(widths, n_tokens)
    return (written, logits) if facts.is_encoder and facts.lazy_cells else (written + logits, 0)


def _devices(config: ResolvedConfig, n_layer: int, shares: Sequence[float]) -> list[int | None]:
    """The GPU of each layer and, last, of the output; None: the CPU. From llama-model.cpp, load_tensors."""
    on_gpus = config.n_gpu_layers if config.n_gpu_layers >= 0 else n_layer + 1
    first = max(n_layer + 1 - on_gpus, 0)
    count = min(on_gpus, n_layer + 1)
    if not shares or count == 0:
        return [None] * (n_layer + 1)
    limits, total = [], 0.0
    for share in shares:
        total += share
        limits.append(total)
    limits = [limit / total if total else 1.0 for limit in limits]
    last = len(limits) - 1
    return [
        None if layer < first else min(last, bisect_right(limits, (layer - first) / count))
        for layer in range(n_layer + 1)
    ]


@dataclass(frozen=True)
class _GpuBuffers:
    """Bytes of the buffers of a pass beside GPUs. tests/devices/test_memory.py holds them against those of llama.cpp.

    Attributes:
        start: of a GPU with the first layer and others; with and without the output, as in the next three.
        follow: with layers, not the first.
        only: with one layer that is neither the first nor the last.
        only_first: with the first layer alone.
        last: with the last layer alone, where only output rows go on to its feed-forward network.
        output: with the output alone.
        on_cpu: of the CPU where it has no layer.
    """

    start: tuple[int, int]
    follow: tuple[int, int]
    only: tuple[int, int]
    only_first: tuple[int, int]
    last: tuple[int, int]
    output: int
    on_cpu: int

    @classmethod
    def of(
        cls, facts: ModelFacts, config: ResolvedConfig, n_slots: int, cells: int, n_gpus: int, graph: int
    ) -> _GpuBuffers:
        n_tokens, widths = min(config.n_ubatch, cells * n_slots), _with_samplers(_widths(facts), config)
        attended = cells if facts.k_values or facts.v_values else 0
        inputs = input_bytes(widths, n_tokens, attended, config.flash_attn != "off")
        embedded = embedding_bytes(widths, n_tokens)
        copies = PIPELINE_COPIES if _is_pipeline(facts, config, n_gpus) else 1
        entering = -embedded if copies == 1 else (copies - 1) * inputs
        rows = min(n_tokens, config.output_rows(n_slots, facts.n_vocab))
        flash = config.flash_attn != "off"
        states = n_slots * 4 * max((layer.state_values for layer in facts.layers), default=facts.state_values)

        def both(n_fed: int | None = None, *, follows: bool = False, one_layer: bool = False) -> tuple[int, int]:
            """Without the output, which another GPU makes, and with it."""
            without, with_it = (
                graph_bytes(
                    widths, n_tokens, attended, n, flash, states, n_fed,
                    follows=follows, apart=copies > 1, one_layer=one_layer,
                )
                for n in (0, rows)
            )  # fmt: skip
            return without + entering, with_it + entering

        start = both()
        output = output_bytes(widths, rows) + (embedding_bytes(widths, rows) * copies if copies > 1 else 0)
        return cls(
            start=(start[0], graph + entering),
            follow=both(follows=True),
            only=both(follows=True, one_layer=True),
            only_first=both(one_layer=True) if copies > 1 else start,
            last=both(rows, follows=True),
            output=output,
            on_cpu=copies * inputs + embedded,
        )

    def on(self, held: Sequence[int], n_layer: int, has_output: bool, has_more: bool) -> int:
        """Bytes of a GPU.

        Args:
            held: the numbers of its layers.
            has_more: it has single tensors of other layers.
        """
        if not held and not has_more:
            return self.output if has_output else 0
        if has_more or held[0] == 0:
            return (self.start if has_more or len(held) > 1 else self.only_first)[has_output]
        kind = self.follow if len(held) > 1 else self.last if held[0] == n_layer - 1 else self.only
        return kind[has_output]


def _is_pipeline(facts: ModelFacts, config: ResolvedConfig, n_gpus: int) -> bool:
    """True if passes over several GPUs overlap, for which ggml keeps copies of what enters: llama-context.cpp."""
    all_layers = config.n_gpu_layers < 0 or config.n_gpu_layers > facts.n_layer
    return n_gpus > 1 and all_layers and config.split_mode == "layer" and config.offload_kqv and not facts.placed


def _tied(facts: ModelFacts) -> int:
    """Bytes of the embedding of tokens where it makes the logits, too; the GPU of the output has a copy of it."""
    found = {tensor.name: tensor.n_bytes for tensor in facts.tensors}
    return 0 if _OUTPUT in found else found.get(_EMBEDDING, 0)


def _on_gpu(
    number: int,
    devices: list[int | None],
    parts: Weights,
    kept: list[int],
    buffers: _GpuBuffers,
    draft: Memory | None,
    placed: int,
    tied: int,
    offload_kqv: bool,
) -> GpuNeed:
    """The share of one GPU.

    Args:
        placed: bytes of tensors that override_tensor puts there.
        tied: bytes of the output's copy of the embedding of tokens.
    """
    has_output = devices[-1] == number
    held = [layer for layer, device in enumerate(devices[:-1]) if device == number]
    compute = buffers.on(held, len(devices) - 1, has_output, placed > 0)
    need = GpuNeed(
        number,
        placed
        + sum(n for n, device in zip(parts.layers, devices, strict=False) if device == number)
        + (tied if has_output else 0),
        sum(n for n, device in zip(kept, devices, strict=False) if device == number and offload_kqv),
        compute,
    )
    if draft is None:
        return need
    theirs = draft.gpus[number]
    return replace(
        need,
        weights=need.weights + theirs.weights,
        kv_cache=need.kv_cache + theirs.kv_cache,
        compute=need.compute + theirs.compute,
    )


def padded(n_cells: int) -> int:
    """Cells as llama.cpp rounds them up."""
    return -(-n_cells // CELL_PADDING) * CELL_PADDING


def mib(n_bytes: int) -> str:
    """Bytes as "1,234 MiB", for messages."""
    return f"{n_bytes / MIB:,.0f} MiB"


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights by layer; the last layer makes the logits.

    Attributes:
        layers: weights of each layer in the file.
        copies: repacked copies of each layer.
        rest: tensors of no layer, which are looked up, not multiplied: the embedding of tokens, for one.
        largest: the largest tensor.
    """

    layers: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    rest: int = 0
    largest: int = 0


def weights(
    tensors: Iterable[TensorInfo], n_layer: int, features: frozenset[str], placed: frozenset[str] = frozenset()
) -> Weights:
    """The weights of a model by layer, and which of them llama.cpp keeps a second, repacked copy of.

    Args:
        features: of "amx", "avx2", "avx512", "neon", with native_patches/0006 "rows" (AVX2) and "vnni512" (AVX-512
            VNNI), with 0012 "wide" (AVX-512 VNNI), those for which this build of llama.cpp repacks; empty: none.
        placed: names of tensors to leave out: override_tensor has a place for them.
    """
    found = {tensor.name: tensor for tensor in tensors}
    layers, copies = [0] * (n_layer + 1), [0] * (n_layer + 1)
    rest = 0
    for tensor in found.values():
        if tensor.name in placed:
            continue
        layer = _layer(tensor.name, n_layer)
        if layer is None:
            rest += tensor.n_bytes
        else:
            layers[layer] += tensor.n_bytes
            copies[layer] += _copy(tensor, features)
    if _OUTPUT not in found and _EMBEDDING in found:  # one tensor for both ends, loaded for each
        copies[n_layer] += _copy(found[_EMBEDDING], features, tied=True)
    largest = max((tensor.n_bytes for tensor in found.values()), default=0)
    return Weights(tuple(layers), tuple(copies), rest, largest)


class Files(NamedTuple):
    """Bytes of the model's files that are of use after the load.

    Attributes:
        mapped: in each file, from the first tensor that is used in place to the last. llama.cpp maps and reads all of
            the file first, then unmaps both ends: llama-model-loader.cpp, load_all_data.
        used: the tensors among them that are used in place. Without mapping they are all that is kept.
        embedding: the part of `used` that is only looked up, since the logits are made with a copy.
        ends: from the first tensor of each file to the last that is used in place.
        largest_copied: the largest tensor of main memory that is not used in place.
    """

    mapped: int
    used: int
    embedding: int
    ends: int = 0
    largest_copied: int = 0


def in_files(
    tensors: Sequence[TensorInfo],
    parts: Sequence[int],
    n_layer: int,
    features: frozenset[str],
    on_cpu: Sequence[bool],
    placed: Mapping[str, bool] = MappingProxyType({}),
) -> Files:
    """The part of the files that stays where tensors have repacked copies, or lie on GPUs.

    Args:
        parts: number of tensors in each file; empty: there is one file.
        on_cpu: for each layer, and last for the output, True if it lies in main memory.
        placed: the same for the tensors of override_tensor, by name.
    """
    mapped = used = embedding = ends = largest = start = 0
    tied = all(tensor.name != _OUTPUT for tensor in tensors)
    for count in parts or (len(tensors),):
        kept = []
        for tensor in tensors[start : start + count]:
            layer = _layer(tensor.name, n_layer)
            here = placed.get(tensor.name, layer is None or on_cpu[layer])
            if not here:
                continue
            if _copy(tensor, features):
                largest = max(largest, tensor.n_bytes)
                continue
            kept.append(tensor)
            if tensor.name == _EMBEDDING and tied and (_copy(tensor, features, tied=True) or not on_cpu[n_layer]):
                embedding = tensor.n_bytes
        if kept:
            end = max(each.offset + each.n_bytes for each in kept)
            mapped += end - min(each.offset for each in kept)
            ends += end
        used += sum(each.n_bytes for each in kept)
        start += count
    return Files(mapped, used, embedding, ends, largest)


def _layer(name: str, n_layer: int) -> int | None:
    match = _LAYER.match(name)
    if match is not None:
        return min(int(match[1]), n_layer)
    return n_layer if name.startswith("output") else None


def multiplied(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """The matrices that rows are multiplied with; the embedding among them where it makes the logits, too."""
    found = [tensor for tensor in tensors if len(tensor.dims) >= 2]
    tied = all(tensor.name != _OUTPUT for tensor in found)
    return [
        tensor
        for tensor in found
        if (tied and tensor.name == _EMBEDDING) or not any(part in tensor.name for part in _LOOKED_UP)
    ]


def _copy(tensor: TensorInfo, features: frozenset[str], tied: bool = False) -> int:
    """Bytes of the tensor's repacked copy; 0 where it stays as it is."""
    by = repacked_by(tensor, features, tied)
    if by == "amx":
        columns, rows = tensor.dims[:2]
        kind = tensor.type_name
        return tensor.n_bytes + rows * (columns // _amx_block(kind)) * _AMX_EXTRA[kind]
    return 0 if by is None else tensor.n_bytes


def repacked_by(tensor: TensorInfo, features: frozenset[str], tied: bool = False) -> str | None:
    """The feature for which llama.cpp repacks a tensor, as "amx"; None: it stays as it is.

    Args:
        features: as in `weights`.
        tied: the embedding makes the logits, too.
    """
    if len(tensor.dims) < 2 or not features or (not tied and any(part in tensor.name for part in _LOOKED_UP)):
        return None
    columns, rows = tensor.dims[:2]
    kind = tensor.type_name
    matrix = len(tensor.dims) == 2
    expert = not matrix and "exps" in tensor.name
    tiles = matrix and "amx" in features
    wide = _WIDE_WITH_TILES if expert or tiles else _WIDE if matrix else frozenset()
    if "wide" in features and kind in wide and rows % _WIDE_ROWS == 0:
        return "wide"
    if (
        "amx" in features
        and matrix
        and kind in _AMX_EXTRA
        and rows % _AMX_ROWS == 0
        and columns % _amx_block(kind) == 0
    ):
        return "amx"
    if not matrix and "exps" not in tensor.name:  # of three dimensions, only experts are repacked
        return None
    for feature, multiple in _REPACKED.get(kind, ()):
        # experts of Q6_K stay as they are
        if feature in features and rows % multiple == 0 and (matrix or feature != "vnni512"):
            return feature
    return None


def _amx_block(kind: str) -> int:
    return {"F16": 16, "Q4_0": 32, "Q4_1": 32, "Q8_0": 32}.get(kind, 256)
