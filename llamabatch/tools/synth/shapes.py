"""The numbers that decide the size and the speed of a model."""

from __future__ import annotations

from dataclasses import dataclass

from llamabatch.errors import InputError
from llamabatch.utils.checks import nearest

ATTENTION, RECURRENT, FEED_FORWARD = "*", "M", "-"


@dataclass(frozen=True)
class State:
    """The state that a recurrent layer (a delta net, Mamba-2 or a short convolution) keeps for a sequence.

    Attributes:
        conv: number of columns that the convolution over time reads, including the newest column.
        heads: heads of V (time_step_rank in llama.cpp); 0: the layer is only a convolution.
        head_dim: elements of a head of V.
        size: columns of the state of a head.
        groups: heads of Q and K in a delta net; groups of B and C in Mamba-2.
    """

    conv: int
    heads: int = 0
    head_dim: int = 0
    size: int = 0
    groups: int = 0

    @property
    def inner(self) -> int:
        """The number of columns of V in all heads together."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Shape:
    """The numbers of a model, named as in llama.cpp.

    Attributes:
        arch: llama.cpp's name of the architecture.
        rope_factor: in Llama 3, the divisor of low rotary frequencies; in gpt-oss, the factor of YaRN; 0: no scaling.
        rope_dim: number of rotated elements in a head; 0: all.
        tied: True if the output matrix is the embedding matrix.
        layers: one letter per layer, in Nemotron-H's notation: * attention, M recurrent, - only feed-forward; "": all
            layers have attention.
        state: the state of the recurrent layers.
        window: size of the sliding window in tokens; 0: no window. The architecture decides which layers have a window.
        n_expert: number of experts of a layer; 0: a layer has one network.
        n_expert_used: number of experts for each token.
        embedding_scale, attention_scale, residual_scale, logit_scale: Granite's factors; 0: the file has no such key.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    rms_eps: float
    tied: bool
    rope_factor: float = 0.0
    rope_dim: int = 0
    layers: str = ""
    state: State | None = None
    window: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    embedding_scale: float = 0.0
    attention_scale: float = 0.0
    residual_scale: float = 0.0
    logit_scale: float = 0.0

    def kind(self, layer: int) -> str:
        """Returns the kind of a layer: ATTENTION, RECURRENT or FEED_FORWARD."""
        return self.layers[layer] if self.layers else ATTENTION


def _qwen(n_layer: int, n_embd: int, n_ff: int, n_head: int) -> Shape:
    head_dim = n_embd // n_head
    return Shape("qwen2", n_layer, n_embd, n_ff, n_head, 2, head_dim, 151_936, 32_768, 1e6, 1e-6, tied=True)


def _llama(n_layer: int, n_embd: int, n_ff: int, n_head: int, tied: bool, rope_factor: float) -> Shape:
    head_dim = n_embd // n_head
    return Shape(
        "llama", n_layer, n_embd, n_ff, n_head, 8, head_dim, 128_256, 131_072, 5e5, 1e-5, tied, rope_factor
    )  # fmt: skip


def _qwen35(n_embd: int, n_ff: int) -> Shape:
    layers, state = "MMM*" * 6, State(conv=4, heads=16, head_dim=128, size=128, groups=16)
    return Shape(
        "qwen35", 24, n_embd, n_ff, 8, 2, 256, 248_320, 262_144, 1e7, 1e-6, tied=True, rope_dim=64, layers=layers,
        state=state,
    )  # fmt: skip


def _lfm2(n_embd: int, n_ff: int) -> Shape:
    return Shape(
        "lfm2", 16, n_embd, n_ff, n_embd // 64, 8, 64, 65_536, 128_000, 1e6, 1e-5, tied=True,
        layers="MM*MM*MM*M*M*M*M", state=State(conv=3),
    )  # fmt: skip


SHAPES: dict[str, Shape] = {
    "qwen2.5-0.5b": _qwen(24, 896, 4864, 14),
    "qwen2.5-1.5b": _qwen(28, 1536, 8960, 12),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, tied=True, rope_factor=32.0),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, tied=True, rope_factor=32.0),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, tied=False, rope_factor=8.0),
    "qwen3.5-0.8b": _qwen35(1024, 3584),
    "qwen3.5-2b": _qwen35(2048, 6144),
    "lfm2-350m": _lfm2(1024, 4608),
    "lfm2-1.2b": _lfm2(2048, 8192),
    "granite-4.0-h-350m": Shape(
        "granitehybrid", 32, 768, 2048, 12, 4, 64, 100_352, 32_768, 1e4, 1e-5, tied=True,
        layers="MMMMMMMMMM*MM*MMM*MMMMMMMMM*MMMM",
        state=State(conv=4, heads=48, head_dim=32, size=128, groups=1),
        embedding_scale=12.0, attention_scale=1 / 64, residual_scale=0.246, logit_scale=3.0,
    ),
    "nemotron-h-4b": Shape(
        "nemotron_h", 52, 3072, 12_288, 32, 8, 128, 131_072, 8192, 1e4, 1e-5, tied=False,
        layers="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        state=State(conv=4, heads=112, head_dim=64, size=128, groups=8),
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss", 24, 2880, 2880, 64, 8, 64, 201_088, 131_072, 150_000.0, 1e-5, tied=False, rope_factor=32.0,
        window=128, n_expert=32, n_expert_used=4,
    ),
    "gemma-3-270m": Shape("gemma3", 18, 640, 2048, 4, 1, 256, 262_144, 32_768, 1e6, 1e-6, tied=True, window=512),
    "gemma-3-1b": Shape("gemma3", 26, 1152, 6912, 4, 1, 256, 262_144, 32_768, 1e6, 1e-6, tied=True, window=512),
}  # fmt: skip


def find_shape(name: str) -> Shape:
    """Returns the shape with this name, in upper or lower case. Raises InputError, with similar names, if there is
    none."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise InputError(f"unknown shape {name!r}{nearest(name.lower(), SHAPES)}")
    return shape
