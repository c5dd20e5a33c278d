"""Computes the size of the buffer for one pass from llama.cpp's graphs (src/llama-graph.cpp, src/models/*.cpp).

In this buffer ggml-alloc gives two tensors the same bytes if they are not needed at the same time. A pass needs the
most bytes in one of three places: the attention of a layer, its feed-forward network, or the logits. A layer with a
recurrent state adds bytes of its own. tests/model/test_graph_buffers.py compares these sizes with the bytes that
llama.cpp reserves, for all kinds of models.
"""

from __future__ import annotations

from dataclasses import dataclass

_F32, _F16 = 4, 2
_LIVE_EMBEDDINGS = 4  # in a feed-forward network, each token needs this many vectors of n_embd at once
_WORK = 1.15  # bytes per element of a row that is quantised for a matrix product: Q8_K's 292 / 256
# These numbers come from kernels/repack-prompts.h: the bytes per element of a converted row, the bytes per row for one
# thread's sums (of 16 strips of weights), and the maximum number of rows that are computed at once.
_PROMPT_WORK, _PROMPT_SUMS, _PROMPT_ROWS = 4, 1024 + 128, 512


@dataclass(frozen=True)
class Widths:
    """The numbers of elements for each token of a pass, in the widest layer of each kind.

    Attributes:
        n_embd, n_vocab: as in the metadata.
        n_head: query heads.
        queries: elements of Q.
        keys: elements of K and V together.
        feed_forward: elements needed at once in a feed-forward network: gate, up and product, in all used experts.
        recurrent: elements needed at once in a layer with a state.
        latent: True if K and V are latent; Q is projected into their space in several steps.
        masks: number of attention masks; 2 if some layers attend over a window.
        values: elements of V alone.
        per_layer: elements of the per-layer embeddings (Gemma 3n and 4), which are kept until the last layer.
        streams: number of vectors of n_embd passed on by a layer for each token (Gemma 3n: AltUp).
    """

    n_embd: int
    n_vocab: int
    n_head: int
    queries: int
    keys: int
    feed_forward: int
    recurrent: int = 0
    latent: bool = False
    masks: int = 1
    values: int = 0
    per_layer: int = 0
    streams: int = 1


def graph_bytes(
    widths: Widths,
    n_tokens: int,
    n_cells: int,
    n_outputs: int,
    flash: bool,
    state_bytes: int = 0,
    n_snapshots: int = 0,
    n_fed: int | None = None,
    *,
    follows: bool = False,
    apart: bool = False,
    one_layer: bool = False,
) -> int:
    """Returns the bytes of the buffer for one pass, or for the part of a pass on one device.

    Args:
        n_tokens: tokens of the largest pass.
        n_cells: cells to which a token can attend; 0 without attention.
        n_outputs: rows of logits.
        flash: flash attention is on. It stores no scores.
        state_bytes: bytes of the states of all sequences in one recurrent layer. A pass gathers these states.
        n_snapshots: number of older states that a recurrent layer writes for each sequence.
        n_fed: tokens that enter a feed-forward network; None: all. In the last layer only output rows enter it.
        follows: the first layer is on another device; otherwise the input embeddings stay until the end.
        apart: the inputs of the pass lie in several copies; this function counts one of them.
        one_layer: the device has a single layer. The bytes of the mask are then free after the attention of this layer.
    """
    mask = n_tokens * n_cells * widths.masks * (_F16 if flash else _F32)
    steps = 2 if not widths.latent else 5 if flash else 9
    attends = n_tokens * (3 * widths.n_embd + steps * widths.queries + widths.keys)
    if not flash:
        attends += n_tokens * n_cells * widths.n_head
    elif follows and not widths.latent:
        whole = max(widths.n_embd, widths.queries) + widths.queries + widths.keys
        attends = n_tokens * ((1 if apart else 2) * widths.n_embd + whole)
    live = _LIVE_EMBEDDINGS - (1 if (follows and not apart) or (one_layer and apart) else 0)
    feeds = (n_tokens if n_fed is None else n_fed) * (live * widths.n_embd + widths.feed_forward)
    if one_layer and not apart:
        feeds -= min(feeds, mask // _F32)
    keeps = n_tokens * widths.recurrent
    ends = min(n_tokens, n_outputs) * (widths.n_vocab + _LIVE_EMBEDDINGS * widths.n_embd)
    begins = n_tokens * (3 * widths.per_layer + 2 * widths.n_embd) if widths.per_layer else 0
    mixes = n_tokens * (6 * widths.streams + 2) * widths.n_embd if widths.streams > 1 else 0
    kept = mask + _F32 * n_tokens * widths.per_layer
    return kept + max(_F32 * max(begins, mixes, attends, feeds, ends), _F32 * keeps + (2 + n_snapshots) * state_bytes)


PIPELINE_COPIES = 4  # copies of the inputs with pipeline parallelism over GPUs: GGML_SCHED_MAX_COPIES


def input_bytes(widths: Widths, n_tokens: int, n_cells: int, flash: bool) -> int:
    """Returns the bytes of the inputs sent by the CPU to GPUs in a pass. The inputs are the mask, the embeddings and,
    without flash attention, the indices for the cells of a transposed V."""
    mask = n_tokens * n_cells * widths.masks * (_F16 if flash else _F32)
    columns = 0 if flash or not n_cells else n_tokens * widths.values * 8
    return mask + embedding_bytes(widths, n_tokens) + columns


def embedding_bytes(widths: Widths, n_tokens: int) -> int:
    """Returns the bytes of the token embeddings of a pass. The CPU looks them up."""
    return n_tokens * widths.n_embd * _F32


def output_bytes(widths: Widths, n_outputs: int) -> int:
    """Returns the buffer size, in bytes, of a GPU that makes the logits and has no layer."""
    return n_outputs * (widths.n_vocab + widths.n_embd) * _F32


def work_bytes(widths: Widths, n_tokens: int, prompt_threads: int = 0) -> int:
    """Returns the bytes of ggml's working memory, which is not in the buffer of graph_bytes. ggml stores the rows of a
    matrix product there, quantised to the type needed by the weights.

    Args:
        prompt_threads: threads of a pass with the kernels for prompts (native_patches/0020); 0: no such kernels are
            used. These kernels convert rows to 16 bits (32 bits for F16 weights), and each thread stores sums.
    """
    widest = max(widths.n_embd, widths.queries, widths.feed_forward // 3)
    if not prompt_threads:
        return int(n_tokens * widest * _WORK)
    return n_tokens * widest * _PROMPT_WORK + prompt_threads * min(n_tokens, _PROMPT_ROWS) * _PROMPT_SUMS
