"""Adds up the bytes of a model's tensors: of each layer, of repacked copies, and of the needed parts of the files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from llamabatch.gguf.reader import TensorInfo

_LAYER = re.compile(r"blk\.(\d+)\.")
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# No matrix product reads these tensors, so they are never repacked.
_LOOKED_UP = ("token_embd", "token_types", "position_embd", "ssm_conv1d", "shortconv.conv", "rope_")
# AMX: extra bytes for each block of _amx_block() elements (mmq.cpp, get_row_size).
_AMX_EXTRA = {"Q4_0": 0, "Q4_1": 0, "Q8_0": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 0, "IQ4_XS": 2, "F16": 0}
_AMX_ROWS = 32  # AMX needs a multiple of this number of rows: TILE_N * 2
# Types repacked by native_patches/0012. The formats of this patch are tried before llama.cpp's own. They pack 16 or 8
# rows of a tensor together, and do not change the number of bytes.
_WIDE_FLOATS = frozenset({"BF16", "F16"})
_WIDE = _WIDE_FLOATS | {"IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"}
_WIDE_ALL = _WIDE | {"Q4_0", "Q8_0"}  # repacked in experts; also in matrices if the CPU has AMX or AVX-512 VNNI
_WIDE_BY_EIGHT = _WIDE | {"Q4_0"}
_WIDE_ROWS = {"wide": 16, "wide8": 8}
# Keys: types of weights. Values: (feature, divisor) for each way of repacking. A tensor is repacked only if the divisor
# divides its number of rows (repack.cpp, ggml_repack_get_optimal_repack_type).
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
    """The bytes of a model's weights by layer. The last layer makes the logits.

    Attributes:
        layers: weights of each layer in the file.
        copies: repacked copies of each layer.
        rest: tensors outside the layers, such as the token embedding. They are looked up, not multiplied.
    """

    layers: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    rest: int = 0


def weights(
    tensors: Iterable[TensorInfo], n_layer: int, features: frozenset[str], placed: frozenset[str] = frozenset()
) -> Weights:
    """Returns the weights of a model by layer, and llama.cpp's repacked copies of them.

    Args:
        features: the features for which this build of llama.cpp repacks weights; empty: it repacks none. llama.cpp
            itself has "amx", "avx2", "avx512" and "neon". native_patches/0006 adds "rows" (AVX2) and "vnni512" (AVX-512
            VNNI), 0012 adds "wide" (AVX-512) or "wide8" (AVX2 alone), and 0020 adds "prompts" if "wide" has separate
            kernels for rows of prompts.
        placed: names of tensors to leave out, since override_tensor places them.
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
            copies[n_layer] += copy_bytes(tensor, features)
        else:
            layers[layer] += tensor.n_bytes
            copies[layer] += copy_bytes(tensor, features)
    if OUTPUT not in found and EMBEDDING in found:  # llama.cpp loads a tied embedding once more for the logits
        copies[n_layer] += copy_bytes(found[EMBEDDING], features, tied=True)
    return Weights(tuple(layers), tuple(copies), rest)


class Files(NamedTuple):
    """The bytes of the model's files that are needed after the load.

    A tensor is used in place if it lies in main memory and has no repacked copy.

    Attributes:
        mapped: the bytes from the first to the last tensor that is used in place, in each file. llama.cpp maps and
            reads the whole file first, then unmaps both ends (llama-model-loader.cpp, load_all_data).
        used: the bytes of the tensors that are used in place. Without mapping only these tensors are kept.
        embedding: the bytes of the token embedding if it is used in place only to look tokens up, because a copy of it
            makes the logits; otherwise 0.
        ends: the bytes from the first tensor of each file to the last tensor that is used in place.
        largest_copied: the bytes of the largest tensor in main memory that is not used in place.
        not_dropped: the bytes of the token embedding if it is on a GPU, but lies between tensors that are used in
            place. Its pages stay in memory; pages of other copied tensors are freed (native_patches/0014).
    """

    mapped: int
    used: int
    embedding: int
    ends: int = 0
    largest_copied: int = 0
    not_dropped: int = 0


def in_files(
    tensors: Sequence[TensorInfo],
    parts: Sequence[int],
    n_layer: int,
    features: frozenset[str],
    on_cpu: Sequence[bool],
    placed: Mapping[str, bool] = MappingProxyType({}),
) -> Files:
    """Returns the part of the files that stays in memory if tensors have repacked copies, or lie on GPUs.

    Args:
        parts: number of tensors in each file; empty: there is one file.
        on_cpu: True for each layer in main memory; the last item is for the output.
        placed: by name, True for each tensor of override_tensor in main memory.
    """
    mapped = used = embedding = ends = largest = start = not_dropped = 0
    tied = all(tensor.name != OUTPUT for tensor in tensors)
    for count in parts or (len(tensors),):
        kept, away = [], None
        for tensor in tensors[start : start + count]:
            layer = _layer(tensor.name, n_layer)
            here = placed.get(tensor.name, layer is None or on_cpu[layer])
            if not here:
                away = tensor if tensor.name == EMBEDDING else away
                continue
            if copy_bytes(tensor, features):
                largest = max(largest, tensor.n_bytes)
                continue
            kept.append(tensor)
            if tensor.name == EMBEDDING and tied and (copy_bytes(tensor, features, tied=True) or not on_cpu[n_layer]):
                embedding = tensor.n_bytes
        if kept:
            first, end = min(each.offset for each in kept), max(each.offset + each.n_bytes for each in kept)
            mapped += end - first
            not_dropped += away.n_bytes if away is not None and first < away.offset < end else 0
            ends += end
        used += sum(each.n_bytes for each in kept)
        start += count
    return Files(mapped, used, embedding, ends, largest, not_dropped)


def _layer(name: str, n_layer: int) -> int | None:
    match = _LAYER.match(name)
    if match is not None:
        return min(int(match[1]), n_layer)
    return n_layer if name.startswith("output") else None


def multiplied(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Returns the tensors used in matrix products, including the token embedding if it also makes the logits."""
    found = [tensor for tensor in tensors if len(tensor.dims) >= 2]
    tied = all(tensor.name != OUTPUT for tensor in found)
    return [
        tensor
        for tensor in found
        if (tied and tensor.name == EMBEDDING) or not any(part in tensor.name for part in _LOOKED_UP)
    ]


def is_only_looked_up(tensor: TensorInfo, tensors: Iterable[TensorInfo], features: frozenset[str]) -> bool:
    """Returns True for the token embedding if the logits are made with another matrix, or with a copy."""
    if tensor.name != EMBEDDING:
        return False
    return any(each.name == OUTPUT for each in tensors) or copy_bytes(tensor, features, tied=True) > 0


def copy_bytes(tensor: TensorInfo, features: frozenset[str], tied: bool = False) -> int:
    """Returns the bytes of the tensor's repacked copy; 0 if it is not repacked."""
    by = repacked_by(tensor, features, tied)
    if by == "amx":
        columns, rows = tensor.dims[:2]
        kind = tensor.type_name
        return tensor.n_bytes + rows * (columns // _amx_block(kind)) * _AMX_EXTRA[kind]
    return 0 if by is None else tensor.n_bytes


def repacked_by(tensor: TensorInfo, features: frozenset[str], tied: bool = False) -> str | None:
    """Returns the feature for which llama.cpp repacks a tensor, such as "amx"; None if it is not repacked.

    Args:
        features: as in `weights`.
        tied: the token embedding also makes the logits.
    """
    if len(tensor.dims) < 2 or not features or (not tied and any(part in tensor.name for part in _LOOKED_UP)):
        return None
    columns, rows = tensor.dims[:2]
    kind = tensor.type_name
    matrix = len(tensor.dims) == 2
    expert = not matrix and "exps" in tensor.name
    for feature, multiple in _WIDE_ROWS.items():
        dense = _WIDE_BY_EIGHT if feature == "wide8" else _WIDE_ALL if features & {"amx", "vnni512"} else _WIDE
        wide = _WIDE_ALL if expert else dense if matrix else frozenset()
        fits = rows % multiple == 0 and (kind not in _WIDE_FLOATS or columns % multiple == 0)
        if feature in features and kind in wide and fits:
            return feature
    if (
        "amx" in features
        and matrix
        and kind in _AMX_EXTRA
        and rows % _AMX_ROWS == 0
        and columns % _amx_block(kind) == 0
    ):
        return "amx"
    if not matrix and "exps" not in tensor.name:  # Of tensors with three dimensions only experts are repacked.
        return None
    for feature, multiple in _REPACKED.get(kind, ()):
        # For AVX-512 VNNI, experts of Q6_K are not repacked.
        if feature in features and rows % multiple == 0 and (matrix or feature != "vnni512"):
            return feature
    return None


def _amx_block(kind: str) -> int:
    return {"F16": 16, "Q4_0": 32, "Q4_1": 32, "Q8_0": 32}.get(kind, 256)
