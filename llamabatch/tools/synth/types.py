"""The tensors of a shape, each in the type that llama.cpp's own quantiser chooses for it (llama-quant.cpp)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamabatch.tools.synth.architectures import Weights, weights_of
from llamabatch.tools.synth.blocks import F16, F32, MXFP4, Q4_0, Q4_K, Q5_0, Q6_K, Q8_0, BlockType
from llamabatch.tools.synth.shapes import Shape

QUANTS = ("Q8_0", "Q4_0", "Q4_K_M", "MXFP4_MOE", "F16")
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "MXFP4_MOE": 38}  # values of llama_ftype
_BASE_TYPES = {"F16": F16, "Q4_0": Q4_0, "Q8_0": Q8_0, "Q4_K_M": Q4_K, "MXFP4_MOE": Q8_0}
_SMALLER_BLOCKS = {"Q4_K": Q5_0, "Q6_K": Q8_0}  # type with blocks of 256 weights -> substitute with blocks of 32
_UNQUANTISED = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")


@dataclass(frozen=True, kw_only=True)
class Tensor(Weights):
    """A tensor to write."""

    kind: BlockType

    @property
    def blocks(self) -> int:
        return self.matrices * self.rows * self.columns // self.kind.weights

    @property
    def size(self) -> int:
        return self.blocks * self.kind.size


def tensors_of(shape: Shape, quant: str) -> Iterator[Tensor]:
    """Yields the tensors for one of QUANTS, in the order of llama.cpp's own converter."""
    parts = list(weights_of(shape))
    values = [part.name for part in parts if part.name.endswith(("attn_v.weight", "attn_qkv.weight"))]
    downs = [part.name for part in parts if part.name.endswith(("ffn_down.weight", "ffn_down_exps.weight"))]
    # In Q4_K_M, attn_v and ffn_down are larger (Q6_K) in some layers. For ffn_down the quantiser counts all layers,
    # even layers without this matrix.
    better = {name for i, name in enumerate(values) if _more_bits(i, len(values))}
    better |= {name for i, name in enumerate(downs) if _more_bits(i, shape.n_layer)}
    for part in parts:
        yield Tensor(**vars(part), kind=_type(part, quant, shape.tied, part.name in better))


def _type(part: Weights, quant: str, tied: bool, is_better: bool) -> BlockType:
    if part.is_vector or not part.name.endswith(".weight") or part.name.endswith(_UNQUANTISED):
        return F32
    kind = _BASE_TYPES[quant]
    if part.name == ("token_embd.weight" if tied else "output.weight"):
        kind = Q6_K if quant in {"Q4_0", "Q4_K_M"} else kind
    elif quant == "Q4_K_M" and is_better:
        kind = Q6_K
    elif quant == "MXFP4_MOE" and part.matrices > 1:
        kind = MXFP4
    return kind if part.columns % kind.weights == 0 else _SMALLER_BLOCKS[kind.name]


def _more_bits(layer: int, n_layer: int) -> bool:
    """Returns True if Q4_K_M stores attn_v and ffn_down of this layer as Q6_K (llama-quant.cpp, use_more_bits)."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
