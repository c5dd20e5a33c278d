"""Writes tiny models with random weights of every kind of architecture, with the bundled vocabulary, as GGUF files.

Their texts mean nothing, but every operation of the architecture runs, and weights in f32 make rounding errors small.
Names and shapes of tensors are those of llama.cpp's src/models/*.cpp. Shapes are in ggml's order, columns first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llamabatch.gguf.resolve import resolve

N_VOCAB = 2048
N_EMBD = 64
N_FF = 128
N_HEAD = 4
N_HEAD_KV = 2
HEAD = N_EMBD // N_HEAD
N_CTX = 2048
WINDOW = 32

RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge the Document by the Query.<|im_end|>\n<|im_start|>user\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)

Tensor = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], Any]  # name, shape, values if they are not random
Metadata = dict[str, Any]
Kind = tuple[Metadata, Callable[[], Iterator[Tensor]]]


def write(kind: str, path: Path, seed: int = 0, *, part_tensors: int = 0, **changes: Any) -> Path:
    """Writes the model of a kind, and returns the path.

    Args:
        kind: one of KINDS, which are llama.cpp's names of architectures.
        part_tensors: splits the model into files of so many tensors. The returned path is then that of the first file.
        changes: metadata to add or change. "__" in a key means "."; the value None leaves the key out.
    """
    metadata, tensors = KINDS[kind]
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=part_tensors)
    _describe(writer, kind, metadata | {key.replace("__", "."): value for key, value in changes.items()})
    rng = np.random.default_rng(seed)
    for name, shape, *given in tensors():
        writer.add_tensor(name, given[0] if given else _random(rng, name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part_tensors else path


def write_with_words(kind: str, path: Path, words: Sequence[str]) -> Path:
    """Writes the model of a kind, with these special tokens in place of the last tokens of the bundled vocabulary."""
    fields = dict(_bundled_fields())
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    tokens[-len(words) :], types[-len(words) :] = words, [gguf.TokenType.USER_DEFINED] * len(words)
    return write(kind, path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types)


def write_bert(path: Path, pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN, seed: int = 0) -> Path:
    """Writes a BERT encoder for embeddings: width 64, at most 512 tokens. Without `pooling`, the file names none."""
    return write("bert", path, seed, pooling_type=pooling)


def write_qwen3_reranker(path: Path, *, template: str | None = RERANK_TEMPLATE, **changes: Any) -> Path:
    """Writes a decoder that ranks like Qwen3-Reranker: by the logits of "yes" and "no" after a template."""
    tokenizer = {} if template is None else {"tokenizer.chat_template.rerank": template}
    return write("qwen3", path, **tokenizer, **changes)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    """Returns the values of a tensor.

    Norms are 1, biases are small, and matrices keep the size of activations. The logits then spread about as far as
    those of a trained model. A norm after a block is 8, so that the block counts more than the token's own embedding.
    Otherwise a model with tied embeddings would repeat the last token for ever.
    """
    if "norm" in name or "_ln." in name:
        value = 0.0 if name.endswith(".bias") else 8.0 if "post_" in name else 1.0
        return np.full(shape[::-1], value, np.float32)
    gain = 4.0 if name in ("output.weight", "token_embd.weight") else 1.0
    std = 0.1 if name.endswith(".bias") or len(shape) == 1 else gain * shape[0] ** -0.5
    return rng.normal(0.0, std, shape[::-1]).astype(np.float32)


def _ends(norm: str = "output_norm") -> Iterator[Tensor]:
    yield "token_embd.weight", (N_EMBD, N_VOCAB)
    yield "output.weight", (N_EMBD, N_VOCAB)
    yield f"{norm}.weight", (N_EMBD,)


def _attention(at: str, bias: bool = False) -> Iterator[Tensor]:
    n_kv = N_HEAD_KV * HEAD
    for letter, rows in (("q", N_EMBD), ("k", n_kv), ("v", n_kv)):
        yield f"{at}attn_{letter}.weight", (N_EMBD, rows)
        if bias:
            yield f"{at}attn_{letter}.bias", (rows,)
    yield f"{at}attn_output.weight", (N_EMBD, N_EMBD)


def _feed_forward(at: str) -> Iterator[Tensor]:
    yield f"{at}ffn_norm.weight", (N_EMBD,)
    yield f"{at}ffn_gate.weight", (N_EMBD, N_FF)
    yield f"{at}ffn_up.weight", (N_EMBD, N_FF)
    yield f"{at}ffn_down.weight", (N_FF, N_EMBD)


def _experts(at: str, n_expert: int = 4) -> Iterator[Tensor]:
    yield f"{at}ffn_norm.weight", (N_EMBD,)
    yield f"{at}ffn_gate_inp.weight", (N_EMBD, n_expert)
    yield f"{at}ffn_gate_exps.weight", (N_EMBD, N_FF, n_expert)
    yield f"{at}ffn_down_exps.weight", (N_FF, N_EMBD, n_expert)
    yield f"{at}ffn_up_exps.weight", (N_EMBD, N_FF, n_expert)


def _shared_expert(at: str) -> Iterator[Tensor]:
    yield f"{at}ffn_gate_shexp.weight", (N_EMBD, N_FF)
    yield f"{at}ffn_down_shexp.weight", (N_FF, N_EMBD)
    yield f"{at}ffn_up_shexp.weight", (N_EMBD, N_FF)


def _llama() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(2):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (N_EMBD,)
        yield from _attention(at)
        yield from _feed_forward(at)


def _gemma2() -> Iterator[Tensor]:
    yield "token_embd.weight", (N_EMBD, N_VOCAB)
    yield "output_norm.weight", (N_EMBD,)
    for layer in range(4):
        at = f"blk.{layer}."
        for norm in ("attn_norm", "post_attention_norm", "post_ffw_norm"):
            yield f"{at}{norm}.weight", (N_EMBD,)
        yield from _attention(at)
        yield from _feed_forward(at)


def _qwen2moe() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(2):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (N_EMBD,)
        yield from _attention(at, bias=True)
        yield from _experts(at)
        yield f"{at}ffn_gate_inp_shexp.weight", (N_EMBD,)
        yield from _shared_expert(at)


# DeepSeek's latent attention: K and V of a token are stored as one vector of 32 values and a rotary part of 8
_KV_RANK, _Q_RANK, _ROPE, _NOPE = 32, 24, 8, 16


def _deepseek2() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(2):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (N_EMBD,)
        yield f"{at}attn_q_a_norm.weight", (_Q_RANK,)
        yield f"{at}attn_kv_a_norm.weight", (_KV_RANK,)
        yield f"{at}attn_q_a.weight", (N_EMBD, _Q_RANK)
        yield f"{at}attn_q_b.weight", (_Q_RANK, N_HEAD * (_NOPE + _ROPE))
        yield f"{at}attn_kv_a_mqa.weight", (N_EMBD, _KV_RANK + _ROPE)
        yield f"{at}attn_k_b.weight", (_NOPE, _KV_RANK, N_HEAD)
        yield f"{at}attn_v_b.weight", (_KV_RANK, HEAD, N_HEAD)
        yield f"{at}attn_output.weight", (N_HEAD * HEAD, N_EMBD)
        if layer == 0:
            yield from _feed_forward(at)
        else:
            yield from _experts(at)
            yield from _shared_expert(at)


_INNER, _STATE, _CONV, _DT_RANK = 2 * N_EMBD, 8, 4, 4


def _mamba_layer(at: str, norms: bool = False) -> Iterator[Tensor]:
    yield f"{at}attn_norm.weight", (N_EMBD,)
    yield f"{at}ssm_in.weight", (N_EMBD, 2 * _INNER)
    yield f"{at}ssm_conv1d.weight", (_CONV, _INNER)
    yield f"{at}ssm_conv1d.bias", (_INNER,)
    yield f"{at}ssm_x.weight", (_INNER, _DT_RANK + 2 * _STATE)
    yield f"{at}ssm_dt.weight", (_DT_RANK, _INNER)
    yield f"{at}ssm_dt.bias", (_INNER,)
    decay = -np.tile(np.arange(1, _STATE + 1, dtype=np.float32), (_INNER, 1))
    yield f"{at}ssm_a", (_STATE, _INNER), decay  # negative, because otherwise the state grows without end
    yield f"{at}ssm_d", (_INNER,), np.ones(_INNER, np.float32)
    yield f"{at}ssm_out.weight", (_INNER, N_EMBD)
    if norms:
        for name, width in (("dt", _DT_RANK), ("b", _STATE), ("c", _STATE)):
            yield f"{at}ssm_{name}_norm.weight", (width,)


def _mamba() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(2):
        yield from _mamba_layer(f"blk.{layer}.")


def _jamba() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(4):
        at = f"blk.{layer}."
        if layer % 2 == 0:
            yield from _mamba_layer(at, norms=True)
        else:
            yield f"{at}attn_norm.weight", (N_EMBD,)
            yield from _attention(at)
        yield from _feed_forward(at)


_SSM_HEADS = 4


def _granitehybrid() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(4):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (N_EMBD,)
        if layer % 2 == 0:
            yield f"{at}ssm_in.weight", (N_EMBD, 2 * _INNER + 2 * _STATE + _SSM_HEADS)
            yield f"{at}ssm_conv1d.weight", (_CONV, _INNER + 2 * _STATE)
            yield f"{at}ssm_conv1d.bias", (_INNER + 2 * _STATE,)
            yield f"{at}ssm_dt.bias", (_SSM_HEADS,)
            yield f"{at}ssm_a", (1, _SSM_HEADS), -np.arange(1, _SSM_HEADS + 1, dtype=np.float32).reshape(-1, 1)
            yield f"{at}ssm_d", (1, _SSM_HEADS), np.ones((_SSM_HEADS, 1), np.float32)
            yield f"{at}ssm_norm.weight", (_INNER, 1)
            yield f"{at}ssm_out.weight", (_INNER, N_EMBD)
        else:
            yield from _attention(at)
        yield from _feed_forward(at)


def _lfm2() -> Iterator[Tensor]:
    yield from _ends("token_embd_norm")
    for layer in range(4):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (N_EMBD,)
        if layer % 2 == 0:
            yield f"{at}shortconv.conv.weight", (_CONV, N_EMBD)
            yield f"{at}shortconv.in_proj.weight", (N_EMBD, 3 * N_EMBD)
            yield f"{at}shortconv.out_proj.weight", (N_EMBD, N_EMBD)
        else:
            yield f"{at}attn_q_norm.weight", (HEAD,)
            yield f"{at}attn_k_norm.weight", (HEAD,)
            yield from _attention(at)
        yield from _feed_forward(at)


_LORA = 8


def _rwkv7() -> Iterator[Tensor]:
    yield from _ends()
    yield "output_norm.bias", (N_EMBD,)
    yield "token_embd_norm.weight", (N_EMBD,)
    yield "token_embd_norm.bias", (N_EMBD,)
    for layer in range(2):
        at = f"blk.{layer}."
        for norm in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            yield f"{at}{norm}.weight", (N_EMBD,)
            yield f"{at}{norm}.bias", (N_EMBD,)
        for letter in "wav":
            yield f"{at}time_mix_{letter}0.weight", (N_EMBD,)
            yield f"{at}time_mix_{letter}1.weight", (N_EMBD, _LORA)
            yield f"{at}time_mix_{letter}2.weight", (_LORA, N_EMBD)
        yield f"{at}time_mix_g1.weight", (N_EMBD, _LORA)
        yield f"{at}time_mix_g2.weight", (_LORA, N_EMBD)
        yield f"{at}time_mix_lerp_fused.weight", (N_EMBD, 1, 1, 6), np.full((6, 1, 1, N_EMBD), 0.5, np.float32)
        for name in ("k_k", "k_a", "r_k"):
            yield f"{at}time_mix_{name}.weight", (N_EMBD,)
        for name in ("key", "value", "receptance", "output"):
            yield f"{at}time_mix_{name}.weight", (N_EMBD, N_EMBD)
        yield f"{at}channel_mix_lerp_k.weight", (N_EMBD, 1, 1), np.full((1, 1, N_EMBD), 0.5, np.float32)
        yield f"{at}channel_mix_key.weight", (N_EMBD, N_FF)
        yield f"{at}channel_mix_value.weight", (N_FF, N_EMBD)


def _rwkv6() -> Iterator[Tensor]:
    yield from _ends()
    yield "output_norm.bias", (N_EMBD,)
    yield "token_embd_norm.weight", (N_EMBD,)
    yield "token_embd_norm.bias", (N_EMBD,)
    half = np.full((1, 1, N_EMBD), 0.5, np.float32)
    for layer in range(2):
        at = f"blk.{layer}."
        for norm in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            yield f"{at}{norm}.weight", (N_EMBD,)
            yield f"{at}{norm}.bias", (N_EMBD,)
        yield f"{at}time_mix_w1.weight", (N_EMBD, 5 * _LORA)
        yield f"{at}time_mix_w2.weight", (_LORA, N_EMBD, 5)
        yield f"{at}time_mix_lerp_x.weight", (N_EMBD, 1, 1), half
        yield f"{at}time_mix_lerp_fused.weight", (N_EMBD, 1, 1, 5), np.full((5, 1, 1, N_EMBD), 0.5, np.float32)
        yield f"{at}time_mix_first.weight", (HEAD, N_HEAD)
        yield f"{at}time_mix_decay.weight", (N_EMBD,)
        yield f"{at}time_mix_decay_w1.weight", (N_EMBD, _LORA)
        yield f"{at}time_mix_decay_w2.weight", (_LORA, N_EMBD)
        for name in ("key", "value", "receptance", "gate", "output"):
            yield f"{at}time_mix_{name}.weight", (N_EMBD, N_EMBD)
        yield f"{at}channel_mix_lerp_k.weight", (N_EMBD, 1, 1), half
        yield f"{at}channel_mix_lerp_r.weight", (N_EMBD, 1, 1), half
        yield f"{at}channel_mix_key.weight", (N_EMBD, N_FF)
        yield f"{at}channel_mix_value.weight", (N_FF, N_EMBD)
        yield f"{at}channel_mix_receptance.weight", (N_EMBD, N_EMBD)


def _apertus() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(2):
        at = f"blk.{layer}."
        for norm, width in (("attn_norm", N_EMBD), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD), ("ffn_norm", N_EMBD)):
            yield f"{at}{norm}.weight", (width,)
        yield from _attention(at)
        yield f"{at}ffn_up.weight", (N_EMBD, N_FF)
        yield f"{at}ffn_down.weight", (N_FF, N_EMBD)


def _step35() -> Iterator[Tensor]:
    yield from _ends()
    for layer in range(4):
        at = f"blk.{layer}."
        for norm, width in (("attn_norm", N_EMBD), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            yield f"{at}{norm}.weight", (width,)
        yield from _attention(at)
        yield f"{at}attn_gate.weight", (N_EMBD, N_HEAD)
        if layer == 0:
            yield from _feed_forward(at)
        else:
            yield from _experts(at)
            yield f"{at}exp_probs_b.bias", (4,)
            yield from _shared_expert(at)


# Gemma 4 adds a part of each token's embedding to each layer, and its last layers read K and V of earlier ones.
_WINDOWS_4 = (True, False, True, False, True, False)  # which layers have a window; the last two have no own K and V
_WIDTH_4 = 32


def _gemma4() -> Iterator[Tensor]:
    yield "token_embd.weight", (N_EMBD, N_VOCAB)
    yield "output_norm.weight", (N_EMBD,)
    yield "per_layer_token_embd.weight", (_WIDTH_4 * len(_WINDOWS_4), N_VOCAB)
    yield "per_layer_model_proj.weight", (N_EMBD, _WIDTH_4 * len(_WINDOWS_4))
    yield "per_layer_proj_norm.weight", (_WIDTH_4,)
    yield "rope_freqs.weight", (HEAD,), np.ones(HEAD, np.float32)
    for layer, has_window in enumerate(_WINDOWS_4):
        at, head = f"blk.{layer}.", HEAD if has_window else 2 * HEAD
        for norm in ("attn_norm", "post_attention_norm", "post_ffw_norm", "post_norm"):
            yield f"{at}{norm}.weight", (N_EMBD,)
        for letter, n_heads in (("q", N_HEAD), ("k", N_HEAD_KV), ("v", N_HEAD_KV)):
            yield f"{at}attn_{letter}.weight", (N_EMBD, n_heads * head)
        yield f"{at}attn_output.weight", (N_HEAD * head, N_EMBD)
        yield f"{at}attn_q_norm.weight", (head,)
        yield f"{at}attn_k_norm.weight", (head,)
        yield from _feed_forward(at)
        yield f"{at}inp_gate.weight", (N_EMBD, _WIDTH_4)
        yield f"{at}proj.weight", (_WIDTH_4, N_EMBD)
        yield f"{at}layer_output_scale.weight", (1,), np.ones(1, np.float32)


# Gemma 3n has four streams for each token (AltUp). Attention computes one of them, and the others are predicted. Layers
# from the twentieth on read K and V of earlier layers. llama.cpp fixes the widths and the number twenty. Random weights
# would double a rounding error in each layer: weights that differ by 1e-7 gave logprobs 0.7 apart. Therefore keys are
# small here, and a layer adds little to its input.
_LAYERS_3N, _WIDTH_3N, _STREAMS, _LAUREL_3N = 23, 256, 4, 64


def _gemma3n() -> Iterator[Tensor]:
    yield from _ends()
    yield "altup_proj.weight", (N_EMBD, N_EMBD, _STREAMS - 1)
    yield "altup_unembd_proj.weight", (N_EMBD, N_EMBD, _STREAMS - 1)
    yield "per_layer_token_embd.weight", (_WIDTH_3N * _LAYERS_3N, N_VOCAB)
    yield "per_layer_model_proj.weight", (N_EMBD, _WIDTH_3N * _LAYERS_3N)
    yield "per_layer_proj_norm.weight", (_WIDTH_3N,)
    for layer in range(_LAYERS_3N):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (N_EMBD,)
        yield from _attention(at)
        yield f"{at}attn_q_norm.weight", (HEAD,), np.full(HEAD, 0.1, np.float32)
        yield f"{at}attn_k_norm.weight", (HEAD,)
        yield from _feed_forward(at)
        for norm in ("post_attention", "post_ffw", "post"):
            yield f"{at}{norm}_norm.weight", (N_EMBD,), np.full(N_EMBD, 0.5, np.float32)
        yield f"{at}inp_gate.weight", (N_EMBD, _WIDTH_3N)
        yield f"{at}proj.weight", (_WIDTH_3N, N_EMBD)
        yield f"{at}altup_router_norm.weight", (N_EMBD,)
        yield f"{at}altup_router.weight", (N_EMBD, _STREAMS)
        yield f"{at}altup_predict_coef.weight", (_STREAMS, _STREAMS * _STREAMS)
        yield f"{at}altup_correct_coef.weight", (_STREAMS, _STREAMS)
        yield f"{at}altup_correct_scale.weight", (N_EMBD,), np.ones(N_EMBD, np.float32)
        yield f"{at}laurel_l.weight", (N_EMBD, _LAUREL_3N)
        yield f"{at}laurel_r.weight", (_LAUREL_3N, N_EMBD)
        yield f"{at}laurel_post_norm.weight", (N_EMBD,), np.full(N_EMBD, 0.5, np.float32)


def _bert() -> Iterator[Tensor]:
    yield "token_embd.weight", (N_EMBD, N_VOCAB)
    yield "token_types.weight", (N_EMBD, 2)
    yield "position_embd.weight", (N_EMBD, 512)
    norms = ["token_embd_norm"]
    for layer in range(2):
        at = f"blk.{layer}."
        for letter in ("q", "k", "v", "output"):
            yield f"{at}attn_{letter}.weight", (N_EMBD, N_EMBD)
            yield f"{at}attn_{letter}.bias", (N_EMBD,)
        for name, columns, rows in (("up", N_EMBD, N_FF), ("down", N_FF, N_EMBD)):
            yield f"{at}ffn_{name}.weight", (columns, rows)
            yield f"{at}ffn_{name}.bias", (rows,)
        norms += [f"{at}attn_output_norm", f"{at}layer_output_norm"]
    for norm in norms:
        yield f"{norm}.weight", (N_EMBD,)
        yield f"{norm}.bias", (N_EMBD,)


def _t5() -> Iterator[Tensor]:
    yield "token_embd.weight", (N_EMBD, N_VOCAB)
    for side in ("enc", "dec"):
        yield f"{side}.output_norm.weight", (N_EMBD,)
        for layer in range(2):
            at = f"{side}.blk.{layer}."
            parts = ["attn"] if side == "enc" else ["attn", "cross_attn"]
            for part in parts:
                yield f"{at}{part}_norm.weight", (N_EMBD,)
                for letter in ("q", "k", "v", "o"):
                    yield f"{at}{part}_{letter}.weight", (N_EMBD, N_EMBD)
            if layer == 0:
                yield f"{at}attn_rel_b.weight", (N_HEAD, 32)
            yield f"{at}ffn_norm.weight", (N_EMBD,)
            yield f"{at}ffn_up.weight", (N_EMBD, N_FF)
            yield f"{at}ffn_down.weight", (N_FF, N_EMBD)


_ATTENTION: Metadata = {
    "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_HEAD_KV,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD,
    "rope.freq_base": 1e4,
}


def _qwen3() -> Iterator[Tensor]:
    yield from _ends()
    yield "cls.output.weight", (N_EMBD, 2)
    for layer in range(2):
        at = f"blk.{layer}."
        for norm, width in (("attn_norm", N_EMBD), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            yield f"{at}{norm}.weight", (width,)
        yield from _attention(at)
        yield from _feed_forward(at)


_SSM: Metadata = {
    "ssm.conv_kernel": _CONV,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _DT_RANK,
}
_EVERY_OTHER = [0, N_HEAD_KV, 0, N_HEAD_KV]  # a layer without KV heads is a recurrent one
_BY_LAYER: Metadata = {"block_count": 4, "attention.head_count_kv": _EVERY_OTHER}
_MOE: Metadata = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": N_FF}

KINDS: dict[str, Kind] = {
    "llama": (_ATTENTION, _llama),
    "gemma2": (
        _ATTENTION
        | {"block_count": 4, "attention.sliding_window": WINDOW, "attention.key_length": HEAD}
        | {"attention.value_length": HEAD, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _gemma2,
    ),
    "qwen2moe": (_ATTENTION | _MOE | {"expert_shared_feed_forward_length": N_FF}, _qwen2moe),
    "deepseek2": (
        _ATTENTION
        | _MOE
        | {"attention.head_count_kv": 1, "attention.q_lora_rank": _Q_RANK, "attention.kv_lora_rank": _KV_RANK}
        | {"attention.key_length": _KV_RANK + _ROPE, "attention.value_length": _KV_RANK}
        | {"attention.key_length_mla": _NOPE + _ROPE, "attention.value_length_mla": HEAD}
        | {"rope.dimension_count": _ROPE, "leading_dense_block_count": 1, "expert_shared_count": 1},
        _deepseek2,
    ),
    "mamba": (_SSM | {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count": 0}, _mamba),
    "rwkv7": (
        {"attention.layer_norm_epsilon": 1e-5, "wkv.head_size": N_EMBD, "attention.head_count": 0}
        | {f"attention.{name}_lora_rank": _LORA for name in ("decay", "iclr", "value_residual_mix", "gate")},
        _rwkv7,
    ),
    "jamba": (_ATTENTION | _SSM | _BY_LAYER, _jamba),
    "granitehybrid": (
        _ATTENTION | _SSM | _BY_LAYER | {"ssm.time_step_rank": _SSM_HEADS, "ssm.group_count": 1},
        _granitehybrid,
    ),
    "lfm2": (_ATTENTION | _BY_LAYER | {"shortconv.l_cache": _CONV}, _lfm2),
    "rwkv6": (
        {"attention.layer_norm_epsilon": 1e-5, "wkv.head_size": HEAD, "attention.head_count": 0}
        | {"time_mix_extra_dim": _LORA, "time_decay_extra_dim": _LORA},
        _rwkv6,
    ),
    "apertus": (
        _ATTENTION | {f"xielu.{name}": 0.8 for name in ("alpha_n", "alpha_p", "beta")} | {"xielu.eps": -1e-6},
        _apertus,
    ),
    "step35": (
        _ATTENTION
        | _MOE
        | {"block_count": 4, "attention.key_length": HEAD, "attention.value_length": HEAD}
        | {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [False, True, True, False]}
        | {"expert_shared_feed_forward_length": N_FF, "leading_dense_block_count": 1},
        _step35,
    ),
    "gemma4": (
        _ATTENTION
        | {"block_count": len(_WINDOWS_4), "attention.sliding_window": WINDOW}
        | {"attention.sliding_window_pattern": list(_WINDOWS_4), "attention.shared_kv_layers": 2}
        | {"attention.key_length": 2 * HEAD, "attention.value_length": 2 * HEAD, "rope.dimension_count": 2 * HEAD}
        | {"attention.key_length_swa": HEAD, "attention.value_length_swa": HEAD, "rope.dimension_count_swa": HEAD}
        | {"embedding_length_per_layer_input": _WIDTH_4, "final_logit_softcapping": 30.0},
        _gemma4,
    ),
    "gemma3n": (
        _ATTENTION
        | {"block_count": _LAYERS_3N, "attention.sliding_window": WINDOW, "attention.layer_norm_rms_epsilon": 1e-2}
        | {"attention.key_length": HEAD, "attention.value_length": HEAD}
        | {"embedding_length_per_layer_input": _WIDTH_3N, "altup.num_inputs": _STREAMS}
        | {"attention.shared_kv_layers": _LAYERS_3N - 20},
        _gemma3n,
    ),
    "bert": (
        {"context_length": 512, "attention.head_count": N_HEAD, "attention.layer_norm_epsilon": 1e-5}
        | {"attention.causal": False},
        _bert,
    ),
    "qwen3": (
        _ATTENTION
        | {"attention.key_length": HEAD, "attention.value_length": HEAD}
        | {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]},
        _qwen3,
    ),
    "t5": (
        {"attention.head_count": N_HEAD, "attention.layer_norm_rms_epsilon": 1e-5}
        | {"attention.key_length": HEAD, "attention.value_length": HEAD}
        | {"attention.relative_buckets_count": 32, "decoder_start_token_id": 0},
        _t5,
    ),
}  # fmt: skip
_COMMON: Metadata = {"context_length": N_CTX, "embedding_length": N_EMBD, "block_count": 2, "feed_forward_length": N_FF}


def _describe(writer: Any, kind: str, metadata: Metadata) -> None:
    writer.add_name(f"random {kind}")
    for key, value in (_COMMON | metadata).items():
        _add(writer, key if key.startswith(("general.", "tokenizer.", "xielu.")) else f"{kind}.{key}", value)
    for name, field in _bundled_fields():
        if name in metadata:
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_token_type_count(2)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _bundled_fields() -> list[tuple[str, Any]]:
    """Returns the bundled model's metadata fields of the vocabulary and the chat template."""
    reader = gguf.GGUFReader(resolve("tiny"))
    return [(name, field) for name, field in reader.fields.items() if name.startswith("tokenizer.")]
