"""Where the weights of a model go: what each layer takes, and of which tensors llama.cpp keeps a second, repacked copy.

A mapped file stays in memory as it is. Tensors whose products have kernels for another layout (ggml-cpu's extra buffer
types) are copied into buffers of their own besides: ggml-cpu/amx/amx.cpp and mmq.cpp, ggml-cpu/repack.cpp. KleidiAI and
RISC-V have such buffers, too; these are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llamabatch.gguf_walk import TensorInfo

_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
# no matrix product reads these, so that they are never repacked
_LOOKED_UP = ("token_embd", "token_types", "position_embd", "ssm_conv1d", "shortconv.conv", "rope_")
# AMX: extra bytes a block of 256 (32 for Q8_0) elements, mmq.cpp, get_row_size; types with 16 or 32 need no more
_AMX_EXTRA = {"Q4_0": 0, "Q4_1": 0, "Q8_0": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 0, "IQ4_XS": 2, "F16": 0}
_AMX_ROWS = 32  # TILE_N * 2
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
class Weights:
    """Bytes by layer; the last one is what makes the logits.

    Attributes:
        layers: of the file, one figure a layer.
        copies: what their repacked copies take.
        rest: what is looked up, not multiplied: the embedding of tokens, and what belongs to no layer.
        largest: of a tensor.
    """

    layers: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    rest: int = 0
    largest: int = 0


def weights(tensors: Iterable[TensorInfo], n_layer: int, features: frozenset[str]) -> Weights:
    """Sorts the tensors of a file.

    Args:
        features: what the build of llama.cpp repacks for: of "amx", "avx2", "avx512", "neon", and with
            native_patches/0006 "rows" (AVX2) and "vnni512" (AVX-512 VNNI); empty if it may not.
    """
    found = {tensor.name: tensor for tensor in tensors}
    layers, copies = [0] * (n_layer + 1), [0] * (n_layer + 1)
    rest = 0
    for tensor in found.values():
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
    """Bytes of the model's files that are of use after loading.

    Attributes:
        mapped: what stays mapped: of each file from the first tensor that is used as it lies there to the last one.
            llama.cpp maps and reads the whole file first, then unmaps both ends: llama-model-loader.cpp, load_all_data.
        used: of these, the tensors that are used as they are. Without mapping they are all that is kept.
        embedding: of these, what is looked up only because the logits are made with a copy.
    """

    mapped: int
    used: int
    embedding: int


def in_files(
    tensors: Sequence[TensorInfo], parts: Sequence[int], n_layer: int, features: frozenset[str], on_cpu: Sequence[bool]
) -> Files:
    """What stays of the files where tensors have repacked copies, or lie on GPUs.

    Args:
        parts: tensors of each file; empty: there is one.
        on_cpu: one truth a layer, the last one of what makes the logits.
    """
    mapped = used = embedding = start = 0
    tied = all(tensor.name != _OUTPUT for tensor in tensors)
    for count in parts or (len(tensors),):
        kept = []
        for tensor in tensors[start : start + count]:
            layer = _layer(tensor.name, n_layer)
            if (layer is None or on_cpu[layer]) and not _copy(tensor, features):
                kept.append(tensor)
                if tensor.name == _EMBEDDING and tied and _copy(tensor, features, tied=True):
                    embedding = tensor.n_bytes
        if kept:
            mapped += max(each.offset + each.n_bytes for each in kept) - min(each.offset for each in kept)
        used += sum(each.n_bytes for each in kept)
        start += count
    return Files(mapped, used, embedding)


def _layer(name: str, n_layer: int) -> int | None:
    match = _LAYER.match(name)
    if match is not None:
        return min(int(match[1]), n_layer)
    return n_layer if name.startswith("output") else None


def _copy(tensor: TensorInfo, features: frozenset[str], tied: bool = False) -> int:
    """Bytes of the tensor's repacked copy; 0 where it stays as it is."""
    if len(tensor.dims) < 2 or not features or (not tied and any(part in tensor.name for part in _LOOKED_UP)):
        return 0
    columns, rows = tensor.dims[:2]
    kind = tensor.type_name
    matrix = len(tensor.dims) == 2
    if (
        "amx" in features
        and matrix
        and kind in _AMX_EXTRA
        and rows % _AMX_ROWS == 0
        and columns % _amx_block(kind) == 0
    ):
        return tensor.n_bytes + rows * (columns // _amx_block(kind)) * _AMX_EXTRA[kind]
    if not matrix and "exps" not in tensor.name:  # of three dimensions, only experts are repacked
        return 0
    for feature, multiple in _REPACKED.get(kind, ()):
        # experts of Q6_K stay as they are
        if feature in features and rows % multiple == 0 and (matrix or feature != "vnni512"):
            return tensor.n_bytes
    return 0


def _amx_block(kind: str) -> int:
    return {"F16": 16, "Q4_0": 32, "Q4_1": 32, "Q8_0": 32}.get(kind, 256)
