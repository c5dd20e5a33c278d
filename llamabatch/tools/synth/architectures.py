"""The metadata, tensor names and tensor sizes that llama.cpp expects for each architecture (src/models/*.cpp)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamabatch.tools.synth.shapes import ATTENTION, FEED_FORWARD, RECURRENT, Shape, State

# A factor on the embeddings and the output matrix. It makes the logits differ from one another as much as in a trained
# model, so that sampling is realistic.
_GAIN = 3.0
_PLAIN = ("llama", "qwen2")  # architectures that need no metadata besides what file.py writes for all


@dataclass(frozen=True)
class Weights:
    """A tensor before the choice of its type. It consists of `matrices` matrices of rows x columns. They contain
    `values`, or random weights with the standard deviation `std` if `values` is None."""

    name: str
    rows: int
    columns: int
    std: float
    values: Any = None
    matrices: int = 1

    @property
    def is_vector(self) -> bool:
        return self.rows == self.matrices == 1


def metadata(shape: Shape) -> Iterator[tuple[str, Any]]:
    """Yields the metadata that only some architectures have, as keys and values. The architecture's name in front of
    the keys is left out."""
    if shape.arch in _PLAIN:
        return
    yield "attention.key_length", shape.head_dim
    yield "attention.value_length", shape.head_dim
    if shape.window:
        yield "attention.sliding_window", shape.window
    if shape.n_expert:
        yield "expert_count", shape.n_expert
        yield "expert_used_count", shape.n_expert_used
        yield "expert_feed_forward_length", shape.n_ff
    for name in ("embedding_scale", "attention.scale", "residual_scale", "logit_scale"):
        if scale := getattr(shape, name.replace(".", "_")):
            yield name, scale
    if shape.arch == "gpt-oss":
        yield "rope.scaling.type", "yarn"
        yield "rope.scaling.factor", shape.rope_factor
        yield "rope.scaling.original_context_length", 4096
    if shape.arch == "nemotron_h":
        yield "attention.layer_norm_epsilon", shape.rms_eps
    if shape.arch == "granitehybrid":
        yield "rope.scaling.finetuned", False  # llama.cpp then uses no rotary embedding
    if shape.state is None:
        return
    if shape.arch == "qwen35":
        pairs = shape.rope_dim // 2
        yield "rope.dimension_sections", [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
        yield "attention.recurrent_layers", [shape.kind(layer) == RECURRENT for layer in range(shape.n_layer)]
    if shape.arch == "lfm2":
        yield "shortconv.l_cache", shape.state.conv
        return
    yield "ssm.conv_kernel", shape.state.conv
    yield "ssm.inner_size", shape.state.inner
    yield "ssm.state_size", shape.state.size
    yield "ssm.time_step_rank", shape.state.heads
    yield "ssm.group_count", shape.state.groups


def head_count_kv(shape: Shape) -> int | list[int]:
    """Returns the number of KV heads as real files have it. For some architectures this is a list with a number for
    each layer, 0 for a layer without attention."""
    if shape.arch in {"granitehybrid", "lfm2", "nemotron_h"}:
        return [shape.n_head_kv if shape.kind(layer) == ATTENTION else 0 for layer in range(shape.n_layer)]
    return shape.n_head_kv


def feed_forward_length(shape: Shape) -> int | list[int]:
    """Returns the feed-forward length as real files have it. For Nemotron-H this is a list with a number for each
    layer, 0 for a layer without a feed-forward network."""
    if shape.arch == "nemotron_h":
        return [shape.n_ff if shape.kind(layer) == FEED_FORWARD else 0 for layer in range(shape.n_layer)]
    return shape.n_ff


def weights_of(shape: Shape) -> Iterator[Weights]:
    """Yields the tensors, in the order of llama.cpp's own converter."""
    # For some architectures, llama.cpp multiplies the embeddings or divides the logits by a constant. As in a trained
    # model, the weights compensate for this.
    scale = shape.n_embd**0.5 if shape.arch == "gemma3" else shape.embedding_scale or 1.0
    if not shape.tied:
        yield _matrix("output", shape.n_vocab, shape.n_embd, gain=_GAIN)
    yield _matrix("token_embd", shape.n_vocab, shape.n_embd, gain=_GAIN / scale)
    if shape.arch == "llama" and shape.rope_factor:
        factors = _rope_factors(shape)
        yield Weights("rope_freqs.weight", 1, factors.size, 0.0, factors)
    for layer in range(shape.n_layer):
        yield from _layer(shape, f"blk.{layer}.", shape.kind(layer))
    last = "token_embd_norm" if shape.arch == "lfm2" else "output_norm"
    yield _norm(last, shape.n_embd, scale * (shape.logit_scale or 1.0))


def _layer(shape: Shape, at: str, kind: str) -> Iterator[Weights]:
    yield _norm(f"{at}attn_norm", shape.n_embd)
    if kind == ATTENTION:
        yield from _attention(shape, at)
    elif kind == RECURRENT:
        assert shape.state is not None
        yield from _RECURRENT[shape.arch](shape, shape.state, at)
    if shape.arch == "nemotron_h":
        if kind == FEED_FORWARD:
            yield _matrix(f"{at}ffn_up", shape.n_ff, shape.n_embd)
            yield _matrix(f"{at}ffn_down", shape.n_embd, shape.n_ff)
        return
    if shape.arch in {"gemma3", "gpt-oss", "qwen35"}:
        yield _norm(f"{at}post_attention_norm", shape.n_embd)
    if shape.arch not in {"gpt-oss", "qwen35"}:
        yield _norm(f"{at}ffn_norm", shape.n_embd)
    yield from _experts(shape, at) if shape.n_expert else _feed_forward(shape, at)
    if shape.arch == "gemma3":
        yield _norm(f"{at}post_ffw_norm", shape.n_embd)


def _attention(shape: Shape, at: str) -> Iterator[Weights]:
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    has_bias = shape.arch in {"gpt-oss", "qwen2"}
    gated = 2 if shape.arch == "qwen35" else 1  # qwen35's matrix for Q also computes a gate for each head
    for letter, rows in (("q", gated * n_q), ("k", n_kv), ("v", n_kv)):
        yield _matrix(f"{at}attn_{letter}", rows, shape.n_embd)
        if has_bias:
            yield _bias(f"{at}attn_{letter}", rows)
    yield _matrix(f"{at}attn_output", shape.n_embd, n_q)
    if shape.arch == "gpt-oss":
        yield _bias(f"{at}attn_output", shape.n_embd)
        yield Weights(f"{at}attn_sinks.weight", 1, shape.n_head, 1.0)
    if shape.arch in {"gemma3", "lfm2", "qwen35"}:
        yield _norm(f"{at}attn_q_norm", shape.head_dim)
        yield _norm(f"{at}attn_k_norm", shape.head_dim)


def _delta_net(shape: Shape, state: State, at: str) -> Iterator[Weights]:
    n_qkv = 2 * state.groups * state.size + state.inner
    yield _matrix(f"{at}attn_qkv", n_qkv, shape.n_embd)
    yield _matrix(f"{at}attn_gate", state.inner, shape.n_embd)
    yield _matrix(f"{at}ssm_conv1d", n_qkv, state.conv)
    yield Weights(f"{at}ssm_dt.bias", 1, state.heads, 0.0, _steps(state))
    yield Weights(f"{at}ssm_a", 1, state.heads, 0.0, _decays(state))
    yield _matrix(f"{at}ssm_beta", state.heads, shape.n_embd)
    yield _matrix(f"{at}ssm_alpha", state.heads, shape.n_embd)
    yield _norm(f"{at}ssm_norm", state.head_dim)
    yield _matrix(f"{at}ssm_out", shape.n_embd, state.inner)


def _mamba2(shape: Shape, state: State, at: str) -> Iterator[Weights]:
    n_conv = state.inner + 2 * state.groups * state.size
    yield _matrix(f"{at}ssm_in", n_conv + state.inner + state.heads, shape.n_embd)
    yield _matrix(f"{at}ssm_conv1d", n_conv, state.conv)
    yield _bias(f"{at}ssm_conv1d", n_conv)
    yield Weights(f"{at}ssm_dt.bias", 1, state.heads, 0.0, _steps(state))
    yield Weights(f"{at}ssm_a", state.heads, 1, 0.0, _decays(state))
    yield Weights(f"{at}ssm_d", state.heads, 1, 0.0, np.ones(state.heads, np.float32))
    ones = np.ones(state.inner, np.float32)
    yield Weights(f"{at}ssm_norm.weight", state.groups, state.inner // state.groups, 0.0, ones)
    yield _matrix(f"{at}ssm_out", shape.n_embd, state.inner)


def _short_conv(shape: Shape, state: State, at: str) -> Iterator[Weights]:
    yield _matrix(f"{at}shortconv.conv", shape.n_embd, state.conv)
    yield _matrix(f"{at}shortconv.in_proj", 3 * shape.n_embd, shape.n_embd)
    yield _matrix(f"{at}shortconv.out_proj", shape.n_embd, shape.n_embd)


_RECURRENT = {"qwen35": _delta_net, "granitehybrid": _mamba2, "nemotron_h": _mamba2, "lfm2": _short_conv}


def _feed_forward(shape: Shape, at: str) -> Iterator[Weights]:
    yield _matrix(f"{at}ffn_gate", shape.n_ff, shape.n_embd)
    yield _matrix(f"{at}ffn_up", shape.n_ff, shape.n_embd)
    yield _matrix(f"{at}ffn_down", shape.n_embd, shape.n_ff)


def _experts(shape: Shape, at: str) -> Iterator[Weights]:
    yield _matrix(f"{at}ffn_gate_inp", shape.n_expert, shape.n_embd)
    yield _bias(f"{at}ffn_gate_inp", shape.n_expert)
    n_ff, n_embd = shape.n_ff, shape.n_embd
    for name, rows, columns in (("gate", n_ff, n_embd), ("up", n_ff, n_embd), ("down", n_embd, n_ff)):
        yield Weights(f"{at}ffn_{name}_exps.weight", rows, columns, columns**-0.5, matrices=shape.n_expert)
        yield Weights(f"{at}ffn_{name}_exps.bias", shape.n_expert, rows, 0.1)


def _matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> Weights:
    return Weights(f"{name}.weight", rows, columns, gain * columns**-0.5)


def _norm(name: str, columns: int, value: float = 1.0) -> Weights:
    return Weights(f"{name}.weight", 1, columns, 0.0, np.full(columns, value, np.float32))


def _bias(name: str, columns: int) -> Weights:
    return Weights(f"{name}.bias", 1, columns, 0.1)


def _decays(state: State) -> Any:
    """Returns the decays at the start of Mamba-2's training: -1 to -16. Negative decays keep the state from growing."""
    return -np.linspace(1.0, 16.0, state.heads, dtype=np.float32)


def _steps(state: State) -> Any:
    """Returns the biases that softplus turns into time steps of 0.001 to 0.1, as at the start of a training."""
    return np.log(np.expm1(np.geomspace(0.001, 0.1, state.heads))).astype(np.float32)


def _rope_factors(shape: Shape) -> Any:
    """Returns Llama 3's rope factors as llama.cpp's converter writes them. They divide low frequencies by
    `rope_factor`."""
    low_wavelength, high_wavelength = 8192 / 1.0, 8192 / 4.0  # trained context / frequency factor (low, high)
    frequencies = shape.rope_base ** -(np.arange(0, shape.head_dim, 2, dtype=np.float32) / shape.head_dim)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / shape.rope_factor + smooth)
    factors = np.where(wavelengths > low_wavelength, shape.rope_factor, between)
    return np.where(wavelengths < high_wavelength, 1.0, factors).astype(np.float32)
