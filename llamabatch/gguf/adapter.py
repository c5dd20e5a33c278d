"""Checks adapter files before llama.cpp reads them, because some files would make llama.cpp abort.

A LoRA is a GGUF with general.type "adapter" and pairs of tensors NAME.lora_a and NAME.lora_b (llama.cpp's
convert_lora_to_gguf.py). A control vector has general.architecture "controlvector" and tensors direction.LAYER
(cvector-generator). Layout: ggml/include/gguf.h.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llamabatch.errors import ModelFileError
from llamabatch.gguf.header import Header, read_header
from llamabatch.gguf.reader import FLOAT32, TEXT, UINT32
from llamabatch.utils.paths import one_line

_MAX_VALUES = 1 << 22  # maximum number of floats in one direction of a control vector
_F32 = 0
# Every backend can multiply by weights of these types and read their rows. These are ggml's numbers for F32, F16,
# Q4_0 .. Q8_0 and BF16.
_WEIGHT_TYPES = (0, 1, 2, 3, 6, 7, 8, 30)
# The types of these values, by key. llama.cpp does not check them: a value of another type aborts the process.
_TYPED = {
    "general.type": TEXT,
    "general.architecture": TEXT,
    "adapter.type": TEXT,
    "adapter.lora.alpha": FLOAT32,
    "general.alignment": UINT32,
}
_ALORA = "adapter.alora.invocation_tokens"


@dataclass(frozen=True)
class AdapterFile:
    """An adapter file that passed the checks.

    Attributes:
        kind: "lora" or "control vector".
        directions: maps the number of a layer to the n_embd values of its vector; empty for a LoRA.
    """

    kind: str
    directions: Mapping[int, array[float]]


def read_adapter(path: Path, *, n_embd: int, n_layer: int, n_expert: int) -> AdapterFile:
    """Checks an adapter file, and reads the values of a control vector.

    Args:
        n_embd, n_layer, n_expert: width, number of layers and number of experts of the model to adapt.

    Raises:
        ModelFileError: the file is missing, damaged, not an adapter, or for a model of another shape.
    """
    try:
        header = read_header(path)
        for key, kind in header.types.items():
            if kind != _TYPED.get(key, kind):
                raise ValueError(f"{key} has a value of type {kind}")
        if header.architecture == "controlvector":
            return AdapterFile("control vector", _read_directions(header, n_embd, n_layer))
        _check_lora(header, n_expert)
        return AdapterFile("lora", {})
    except OSError as error:
        raise ModelFileError(f"adapter {one_line(path)} cannot be read: {error.strerror}") from error
    except ModelFileError as error:  # the message already names the path
        raise ModelFileError(f"adapter {error}") from error
    except (ValueError, EOFError) as error:
        raise ModelFileError(f"adapter {one_line(path)}: {error}") from error


def _check_lora(header: Header, n_expert: int) -> None:
    """Checks metadata and tensors, because llama.cpp uses them unchecked. Raises ValueError."""
    values = header.texts()
    kinds = values.get("general.type"), values.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise ValueError(f"general.type and adapter.type are {kinds[0]!r} and {kinds[1]!r}, not 'adapter' and 'lora'")
    if _ALORA in header.metadata:
        raise ValueError("it is an activated LoRA, which works from its invocation tokens on; these are not supported")
    if not math.isfinite(float(values.get("adapter.lora.alpha", 0))):
        raise ValueError(f"adapter.lora.alpha is {values['adapter.lora.alpha']}")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if not any(name.endswith(".lora_a") for name in tensors):
        raise ValueError("it holds no LoRA tensor")
    for name, tensor in tensors.items():
        if tensor.type not in _WEIGHT_TYPES:
            raise ValueError(f"tensor {name!r} has the type {tensor.type}; allowed are {_WEIGHT_TYPES}")
        if not tensor.dims or not all(1 <= n < 2**31 for n in tensor.dims):
            raise ValueError(f"tensor {name!r} has the shape {tensor.dims}")
        experts = tensor.dims[2:]
        if experts != ((n_expert,) if "_exps." in name else ()):
            raise ValueError(f"tensor {name!r} has the shape {tensor.dims}; the model has {n_expert} experts")
    a, b = tensors.get("token_embd.weight.lora_a"), tensors.get("token_embd.weight.lora_b")
    if a is not None and b is not None and a.dims[0] != b.dims[0]:
        raise ValueError(f"token_embd.weight has pairs of the ranks {a.dims[0]} and {b.dims[0]}")


def _read_directions(header: Header, n_embd: int, n_layer: int) -> dict[int, array[float]]:
    if not header.tensors:
        raise ValueError("it holds no direction")
    directions = {}
    with header.path.open("rb") as file:
        for tensor in header.tensors:
            prefix, _, number = tensor.name.partition(".")
            if prefix != "direction" or not number.isdecimal() or not 1 <= int(number) < n_layer:
                raise ValueError(
                    f"it has a tensor {tensor.name!r}; this model takes direction.1 to direction.{n_layer - 1}"
                )
            if tensor.type != _F32 or tensor.dims != (n_embd,) or n_embd > _MAX_VALUES:
                raise ValueError(
                    f"tensor {tensor.name!r} has the type {tensor.type} and shape {tensor.dims}; it must hold {n_embd} "
                    "floats"
                )
            directions[int(number)] = _read(file, header.data_start + tensor.offset, n_embd)
    return directions


def _read(file: BinaryIO, start: int, count: int) -> array[float]:
    file.seek(start)
    values = array("f")
    values.fromfile(file, count)
    if not all(map(math.isfinite, values)):
        raise ValueError("it holds values that are no finite numbers")
    return values
