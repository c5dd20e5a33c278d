"""What an adapter file holds, from a walk over its header, so that nothing which would abort llama.cpp reaches it.

A LoRA is a GGUF with general.type "adapter" and pairs of tensors NAME.lora_a and NAME.lora_b (llama.cpp's
convert_lora_to_gguf.py); a control vector has general.architecture "controlvector" and tensors direction.LAYER
(cvector-generator). Layout: ggml/include/gguf.h.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llamabatch.errors import ModelFileError
from llamabatch.gguf_shape import (
    ARRAY,
    HEADER,
    LENGTH,
    NUMBERS,
    STRING,
    TYPE,
    read_number,
    read_text,
    skip_array,
    skip_text,
)

_MAX_PAIRS = 4096
_MAX_TENSORS = 1 << 16
_MAX_VALUES = 1 << 22  # floats of one direction
_TEXT, _FLOAT, _UINT = STRING, 6, 4
_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT
_F32 = 0
# ggml's numbers of the types whose products and rows every backend computes: F32, F16, Q4_0 .. Q8_0, BF16
_WEIGHT_TYPES = (0, 1, 2, 3, 6, 7, 8, 30)
# metadata that llama.cpp reads without asking for its type: another one aborts the process
_TYPED = {
    "general.type": _TEXT,
    "general.architecture": _TEXT,
    "adapter.type": _TEXT,
    "adapter.lora.alpha": _FLOAT,
    "general.alignment": _UINT,
}
_ALORA = "adapter.alora.invocation_tokens"


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class AdapterFile:
    """A file that passed the checks.

    Attributes:
        kind: "lora" or "control vector".
        directions: of a control vector: layer -> its n_embd values.
    """

    kind: str
    directions: Mapping[int, array[float]]


def read_adapter(path: Path, *, n_embd: int, n_layer: int, n_expert: int) -> AdapterFile:
    """Walks the header, and reads the values of a control vector.

    Args:
        n_embd, n_layer, n_expert: of the model that it is for.

    Raises:
        ModelFileError: it is missing, damaged, neither kind of adapter, or for a model of another shape.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            values, tensors = _walk(file, size)
            start = -(-file.tell() // _alignment(values)) * _alignment(values)
            if values.get("general.architecture") == "controlvector":
                _check_directions(tensors, n_embd, n_layer)
                return AdapterFile("control vector", {n: _read(file, start, t) for n, t in _numbered(tensors)})
            _check_lora(values, tensors, n_expert)
            return AdapterFile("lora", {})
    except OSError as error:
        raise ModelFileError(f"adapter {path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, EOFError) as error:
        raise ModelFileError(f"adapter {path}: {error}") from error


def _walk(file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, _Tensor]]:
    magic, version, n_tensors, n_pairs = HEADER.unpack(file.read(HEADER.size))
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("it is no GGUF file of version 2 or 3")
    if n_pairs > _MAX_PAIRS or n_tensors > _MAX_TENSORS:
        raise ValueError(f"it announces {n_pairs} values and {n_tensors} tensors")
    values: dict[str, str] = {}
    for _ in range(n_pairs):
        key = read_text(file)
        (kind,) = TYPE.unpack(file.read(TYPE.size))
        if kind != _TYPED.get(key, kind):
            raise ValueError(f"{key} has a value of type {kind}")
        values[key] = read_text(file) if key in _TYPED and kind == STRING else _value(file, size, kind)
    tensors = {}
    for _ in range(n_tensors):
        name = read_text(file)
        (n_dims,) = TYPE.unpack(file.read(TYPE.size))
        if not 1 <= n_dims <= 4:
            raise ValueError(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(LENGTH.unpack(file.read(LENGTH.size))[0] for _ in range(n_dims))
        (kind,) = TYPE.unpack(file.read(TYPE.size))
        (offset,) = LENGTH.unpack(file.read(LENGTH.size))
        tensors[name] = _Tensor(shape, kind, offset)
    return values, tensors


def _value(file: BinaryIO, size: int, kind: int) -> str:
    """A number; of a text or an array nothing."""
    if kind in NUMBERS:
        return read_number(file, kind)
    if kind == STRING:
        skip_text(file, size)
        return ""
    if kind != ARRAY:
        raise ValueError(f"a value of the unknown type {kind}")
    (item,) = TYPE.unpack(file.read(TYPE.size))
    (count,) = LENGTH.unpack(file.read(LENGTH.size))
    skip_array(file, size, item, count, _MAX_TENSORS)
    return ""


def _alignment(values: Mapping[str, str]) -> int:
    value = int(values.get("general.alignment", _ALIGNMENT))
    if value not in [1 << n for n in range(3, 17)]:
        raise ValueError(f"general.alignment is {value}")
    return value


def _check_lora(values: Mapping[str, str], tensors: Mapping[str, _Tensor], n_expert: int) -> None:
    """What llama.cpp takes for granted of the tensors; the rest it checks itself."""
    kinds = values.get("general.type"), values.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise ValueError(f"general.type and adapter.type are {kinds[0]!r} and {kinds[1]!r}, not 'adapter' and 'lora'")
    if _ALORA in values:
        raise ValueError("it is an activated LoRA, which works from its invocation tokens on; these are not supported")
    if not math.isfinite(float(values.get("adapter.lora.alpha", 0))):
        raise ValueError(f"adapter.lora.alpha is {values['adapter.lora.alpha']}")
    if not any(name.endswith(".lora_a") for name in tensors):
        raise ValueError("it holds no LoRA tensor")
    for name, tensor in tensors.items():
        if tensor.type not in _WEIGHT_TYPES:
            raise ValueError(f"tensor {name!r} has the type {tensor.type}; allowed are {_WEIGHT_TYPES}")
        if not all(1 <= n < 2**31 for n in tensor.shape):
            raise ValueError(f"tensor {name!r} has the shape {tensor.shape}")
        experts = tensor.shape[2:]
        if experts != ((n_expert,) if "_exps." in name else ()):
            raise ValueError(f"tensor {name!r} has the shape {tensor.shape}; the model has {n_expert} experts")
    a, b = tensors.get("token_embd.weight.lora_a"), tensors.get("token_embd.weight.lora_b")
    if a is not None and b is not None and a.shape[0] != b.shape[0]:
        raise ValueError(f"token_embd.weight has pairs of the ranks {a.shape[0]} and {b.shape[0]}")


def _check_directions(tensors: Mapping[str, _Tensor], n_embd: int, n_layer: int) -> None:
    if not tensors:
        raise ValueError("it holds no direction")
    for name, tensor in tensors.items():
        prefix, _, number = name.partition(".")
        if prefix != "direction" or not number.isdecimal() or not 1 <= int(number) < n_layer:
            raise ValueError(f"it has a tensor {name!r}; this model takes direction.1 to direction.{n_layer - 1}")
        if tensor.type != _F32 or tensor.shape != (n_embd,) or n_embd > _MAX_VALUES:
            raise ValueError(
                f"tensor {name!r} has the type {tensor.type} and shape {tensor.shape}; it must hold {n_embd} floats"
            )


def _numbered(tensors: Mapping[str, _Tensor]) -> list[tuple[int, _Tensor]]:
    return [(int(name.partition(".")[2]), tensor) for name, tensor in tensors.items()]


def _read(file: BinaryIO, start: int, tensor: _Tensor) -> array[float]:
    file.seek(start + tensor.offset)
    values = array("f")
    values.fromfile(file, tensor.shape[0])
    if not all(map(math.isfinite, values)):
        raise ValueError("it holds values that are no finite numbers")
    return values
