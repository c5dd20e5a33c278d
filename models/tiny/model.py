"""The Llama architecture in plain PyTorch, in the layout that llama.cpp's `llama` graph computes.

RoPE turns neighbouring pairs (2i, 2i+1), as llama.cpp does for this architecture: so export needs no permutation of the
query and key rows. (Hugging Face's Llama turns halves instead, which is why its converter has to permute.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 2048
    width: int = 192
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int = 2
    ffn: int = 512
    context_length: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads


def rope_table(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, head_dim / 2)."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (batch, length, heads, head_dim)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, length, heads, head_dim), heads sharing the fewer K/V heads; heads joined again.

    Written out for short rows under torch.compile, where PyTorch's fused kernel spends more than it saves on a CPU (its
    backward pass took a third of the step at 256 tokens); fused for long rows, whose score matrix would not fit in the
    cache, and without the compiler, which leaves the written-out form several times slower.
    """
    batch, length, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[2]
    group = n_heads // n_kv_heads
    if length > 512 or not torch.compiler.is_compiling():
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)
    q = q.unflatten(2, (n_kv_heads, group)).permute(0, 2, 3, 1, 4)  # batch, kv head, group, length, head_dim
    q = q.reshape(batch * n_kv_heads, group * length, head_dim)
    k = k.permute(0, 2, 3, 1).reshape(batch * n_kv_heads, head_dim, length)
    v = v.transpose(1, 2).reshape(batch * n_kv_heads, length, head_dim)
    scores = torch.bmm(q, k).view(-1, group, length, length) * head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.float().masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
    mixed = torch.bmm(weights.view(-1, group * length, length), v)
    mixed = mixed.view(batch, n_kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch, length, n_heads * head_dim)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, head_dim = config.width, config.head_dim
        self.attn_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.attn_q = nn.Linear(width, config.n_heads * head_dim, bias=False)
        self.attn_k = nn.Linear(width, config.n_kv_heads * head_dim, bias=False)
        self.attn_v = nn.Linear(width, config.n_kv_heads * head_dim, bias=False)
        self.attn_output = nn.Linear(config.n_heads * head_dim, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.ffn_gate = nn.Linear(width, config.ffn, bias=False)
        self.ffn_up = nn.Linear(width, config.ffn, bias=False)
        self.ffn_down = nn.Linear(config.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        h = self.attn_norm(x)
        q = apply_rope(self.attn_q(h).unflatten(-1, (c.n_heads, c.head_dim)), cos, sin)
        k = apply_rope(self.attn_k(h).unflatten(-1, (c.n_kv_heads, c.head_dim)), cos, sin)
        v = self.attn_v(h).unflatten(-1, (c.n_kv_heads, c.head_dim))
        x = x + self.attn_output(attend(q, k, v))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class TinyLlama(nn.Module):
    """Token ids in, hidden states out; `logits` maps those to the vocabulary through the tied embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.output_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        cos, sin = rope_table(config, config.context_length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init)
        for layer in self.layers:  # so that the residual stream keeps its scale with depth
            for linear in (layer.attn_output, layer.ffn_down):
                nn.init.normal_(linear.weight, std=0.05 / math.sqrt(2 * config.n_layers))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token_embd(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.output_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight)
