"""How large the buffer is in which llama.cpp computes one pass: worked out from its graphs (src/llama-graph.cpp,
src/models/*.cpp), which ggml-alloc lays over each other wherever two tensors do not live at once.

A pass is widest in one of three places: where a layer attends, in its feed-forward network, or where the logits are
made. What is not a transformer has a place of its own. tests/model/test_graph_buffers.py holds this against what
llama.cpp reserves, for all kinds of models.
"""

from __future__ import annotations

from dataclasses import dataclass

_F32, _F16 = 4, 2
_LIVE_EMBEDDINGS = 4  # rows of n_embd that live beside a feed-forward network
_WORK = 1.15  # bytes an element of a row that is quantised for a product: Q8_K's 292 / 256


@dataclass(frozen=True)
class Widths:
    """Elements for each token of a pass, in the widest layer of each kind.

    Attributes:
        n_embd, n_vocab: as in the metadata.
        n_head: of the queries.
        queries, keys: of Q, and of K and V together.
        feed_forward: that live at once in a feed-forward network: of gate, up and their product, of all experts used.
        recurrent: that live at once in a layer with a state.
        latent: Q is turned into the space of a latent K and V, in several steps.
        masks: kinds of attention masks: 2 where some layers attend over a window.
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


def graph_bytes(
    widths: Widths,
    n_tokens: int,
    n_cells: int,
    n_outputs: int,
    flash: bool,
    state_bytes: int = 0,
    n_fed: int | None = None,
) -> int:
    """The buffer of one pass.

    Args:
        n_tokens: of the largest pass.
        n_cells: that one sequence's tokens can attend to; 0 where there is no attention.
        n_outputs: rows whose logits it makes.
        flash: with flash attention, which keeps no scores.
        state_bytes: of all states of one recurrent layer, which a pass gathers.
        n_fed: tokens that enter a feed-forward network, if not all do: in the last layer only those of outputs.
    """
    mask = n_tokens * n_cells * widths.masks * (_F16 if flash else _F32)
    steps = 2 if not widths.latent else 5 if flash else 9
    attends = n_tokens * (3 * widths.n_embd + steps * widths.queries + widths.keys)
    if not flash:
        attends += n_tokens * n_cells * widths.n_head
    feeds = (n_tokens if n_fed is None else n_fed) * (_LIVE_EMBEDDINGS * widths.n_embd + widths.feed_forward)
    keeps = n_tokens * widths.recurrent
    ends = min(n_tokens, n_outputs) * (widths.n_vocab + _LIVE_EMBEDDINGS * widths.n_embd)
    return mask + max(_F32 * max(attends, feeds, ends), _F32 * keeps + 2 * state_bytes)


def work_bytes(widths: Widths, n_tokens: int) -> int:
    """What ggml's threads write besides: the rows of one product, quantised as its weights want them."""
    return int(n_tokens * max(widths.n_embd, widths.queries, widths.feed_forward // 3) * _WORK)
