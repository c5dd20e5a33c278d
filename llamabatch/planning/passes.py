"""Computes the buffers of a pass over a model with its options, in main memory and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from llamabatch.config import ResolvedConfig
from llamabatch.planning.compute_buffers import (
    PIPELINE_COPIES,
    Widths,
    embedding_bytes,
    graph_bytes,
    input_bytes,
    output_bytes,
    work_bytes,
)
from llamabatch.planning.model_facts import ModelFacts

CELL_PADDING = 256  # llama.cpp rounds the cells of a slot up to a multiple of this number


def padded(n_cells: int) -> int:
    """Rounds a number of cells up as llama.cpp does."""
    return -(-n_cells // CELL_PADDING) * CELL_PADDING


class Pass(NamedTuple):
    """The shape of the largest pass. The fields are the first arguments of graph_bytes, in order."""

    widths: Widths
    n_tokens: int
    n_cells: int
    n_outputs: int
    flash: bool
    state_bytes: int
    n_snapshots: int

    @classmethod
    def of(cls, facts: ModelFacts, config: ResolvedConfig, n_slots: int, cells: int) -> Pass:
        """Returns the shape for these options. `cells`: the number of cells that one pass can attend to."""
        return cls(
            _with_samplers(_widths(facts), config),
            min(config.n_ubatch, cells * n_slots),
            cells if facts.k_values or facts.v_values else 0,
            config.output_rows(n_slots, facts.n_vocab),
            config.flash_attn != "off",  # "auto" means on where there is a kernel; see capacity._flash_attn
            n_slots * 4 * max((layer.state_values for layer in facts.layers), default=facts.state_values),
            facts.n_snapshots(config),
        )


class PassBytes(NamedTuple):
    """The bytes of a pass in main memory: the part of its buffer that is written, the rest of the buffer, and ggml's
    working memory."""

    written: int
    untouched: int
    work: int


def pass_bytes(facts: ModelFacts, config: ResolvedConfig, n_slots: int, cells: int) -> PassBytes:
    """Returns the bytes of the largest pass. The arguments are as for Pass.of."""
    shape = Pass.of(facts, config, n_slots, cells)
    one_layer = facts.n_layer == 1 and not facts.is_encoder
    written = graph_bytes(*shape, min(shape.n_tokens, n_slots) if one_layer else shape.n_tokens)
    threads = config.n_threads_batch if "prompts" in facts.features and not config.batch_invariant else 0
    return PassBytes(written, graph_bytes(*shape) - written, work_bytes(shape.widths, shape.n_tokens, threads))


def _with_samplers(widths: Widths, config: ResolvedConfig) -> Widths:
    """Doubles n_vocab if device_sampling is on. llama.cpp then copies the logits to pad them with one more row
    (llama-graph.cpp, build_sampling)."""
    return widths if config.device_sampling == "off" else replace(widths, n_vocab=2 * widths.n_vocab)


def _widths(facts: ModelFacts) -> Widths:
    """Returns the widths of a pass. Assumes a feed-forward network of four times n_embd if the widths are not known."""
    if facts.widths is not None:
        return facts.widths
    kv = facts.k_values + facts.v_values
    return Widths(facts.n_embd, facts.n_vocab, facts.n_head, facts.n_embd, min(kv, 2 * facts.n_embd), 12 * facts.n_embd)


def logits_bytes(facts: ModelFacts, config: ResolvedConfig, n_slots: int) -> int:
    """Returns the bytes of the output rows: one row for each slot, more where guesses are checked. With device_sampling
    a row takes four times the bytes, because it also has room for sampled logits, probabilities and token ids of the
    whole vocabulary (llama-context.cpp, output_reserve)."""
    rows = n_slots if config.speculate == "off" else config.output_rows(n_slots, facts.n_vocab)
    return rows * facts.n_vocab * (4 if config.device_sampling == "off" else 16)


def pooling_bytes(facts: ModelFacts, config: ResolvedConfig) -> tuple[int, int]:
    """Returns the bytes of llama/embedder.py's context for one pass: those that are written, and those that never are.

    llama.cpp keeps room for the logits of the whole vocabulary for each token. The graph of an encoder has no logits,
    so this room is not written.
    """
    n_tokens = padded(min(config.n_ubatch, config.n_batch))
    widths = replace(_widths(facts), n_vocab=0) if facts.is_encoder else _widths(facts)
    graph = graph_bytes(widths, n_tokens, n_tokens, n_tokens, config.flash_attn != "off")
    cells = 0 if facts.is_encoder else n_tokens * (facts.k_values + facts.v_values) * 2
    logits = n_tokens * facts.n_vocab * 4
    written = cells + graph + work_bytes(widths, n_tokens)
    return (written, logits) if facts.is_encoder and facts.lazy_cells else (written + logits, 0)


@dataclass(frozen=True)
class GpuBuffers:
    """The buffer sizes of a pass that uses GPUs, in bytes. tests/devices/test_memory.py compares them with llama.cpp's.

    In a pair, the first item is the size without the output on this GPU. The second is the size with it.

    Attributes:
        start: a GPU with the first layer and other layers.
        follow: a GPU with several layers, but not the first.
        only: a GPU with one layer that is neither the first nor the last.
        only_first: a GPU with the first layer alone.
        last: a GPU with the last layer alone. Only output rows enter the feed-forward network of that layer.
        output: a GPU with the output alone.
        on_cpu: the buffer of the CPU if no layer is there.
    """

    start: tuple[int, int]
    follow: tuple[int, int]
    only: tuple[int, int]
    only_first: tuple[int, int]
    last: tuple[int, int]
    output: int
    on_cpu: int

    @classmethod
    def of(cls, facts: ModelFacts, config: ResolvedConfig, cells: int, n_gpus: int, graph: int) -> GpuBuffers:
        """Returns the buffers for these options.

        Args:
            cells: as in Pass.of.
            graph: bytes of the whole pass.
        """
        shape = Pass.of(facts, config, config.n_slots, cells)
        widths, n_tokens = shape.widths, shape.n_tokens
        rows = min(n_tokens, shape.n_outputs)
        inputs = input_bytes(widths, n_tokens, shape.n_cells, shape.flash)
        embedded = embedding_bytes(widths, n_tokens)
        copies = PIPELINE_COPIES if _is_pipeline(facts, config, n_gpus) else 1
        entering = -embedded if copies == 1 else (copies - 1) * inputs

        def both(n_fed: int | None = None, *, follows: bool = False, one_layer: bool = False) -> tuple[int, int]:
            """Returns two buffer sizes in bytes: the first without the output on this GPU, the second with it."""
            without, with_it = (
                graph_bytes(*shape._replace(n_outputs=n), n_fed, follows=follows, apart=copies > 1, one_layer=one_layer)
                for n in (0, rows)
            )
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
        """Returns the buffer size of a GPU, in bytes.

        Args:
            held: indices of the layers on the GPU.
            has_more: True if the GPU also has single tensors of other layers.
        """
        if not held and not has_more:
            return self.output if has_output else 0
        if has_more or held[0] == 0:
            return (self.start if has_more or len(held) > 1 else self.only_first)[has_output]
        kind = self.follow if len(held) > 1 else self.last if held[0] == n_layer - 1 else self.only
        return kind[has_output]


def _is_pipeline(facts: ModelFacts, config: ResolvedConfig, n_gpus: int) -> bool:
    """Returns True if passes over several GPUs overlap. ggml then keeps copies of the inputs (llama-context.cpp)."""
    all_layers = config.n_gpu_layers < 0 or config.n_gpu_layers > facts.n_layer
    return n_gpus > 1 and all_layers and config.split_mode == "layer" and config.offload_kqv and not facts.placed
