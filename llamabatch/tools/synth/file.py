"""Writes a GGUF file: header, vocabulary, and the weights, one chunk at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llamabatch.errors import InputError, SetupError
from llamabatch.tools.synth.architectures import feed_forward_length, head_count_kv, metadata
from llamabatch.tools.synth.blocks import RandomBits
from llamabatch.tools.synth.shapes import Shape
from llamabatch.tools.synth.types import FILE_TYPES, QUANTS, Tensor, tensors_of
from llamabatch.tools.synth.vocab import add_vocab
from llamabatch.utils.atomic_file import replacement
from llamabatch.utils.checks import nearest
from llamabatch.utils.paths import absolute

_ALIGNMENT = 32
_CHUNK_BYTES = 16 << 20


def write_model(
    shape: Shape, path: Path, quant: str = "Q8_0", seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> int:
    """Writes a GGUF file and returns its size in bytes. The same arguments give the same file.

    The file appears at `path` only when it is complete. Raises InputError if an argument is invalid or the disk is too
    full, and SetupError without the gguf package.

    Args:
        progress: called as progress(done, total), in bytes of weights.
    """
    if quant.upper() not in QUANTS:
        raise InputError(f"unknown quantisation {quant!r}{nearest(quant, QUANTS)}")
    if quant.upper() == "MXFP4_MOE" and not shape.n_expert:
        others = ", ".join(each for each in QUANTS if each != "MXFP4_MOE")
        raise InputError(f"{quant} is for models with experts, and this shape of {shape.arch} has none; give {others}")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be 0 or more")
    return write_file(shape, path, FILE_TYPES[quant.upper()], list(tensors_of(shape, quant.upper())), seed, progress)


def write_file(
    shape: Shape, path: Path, file_type: int, tensors: list[Tensor], seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Writes a file as write_model does, but with the given tensors. `file_type`: llama.cpp's llama_ftype."""
    path = Path(absolute(path))
    total = sum(tensor.size for tensor in tensors)
    _check_target(path, total)
    with replacement(path) as temporary:
        write_header(str(temporary), shape, file_type, tensors)
        with open(temporary, "ab") as file:
            _write_tensors(file, tensors, seed, lambda done: progress(done, total) if progress else None)
            size = file.tell()
        temporary.chmod(0o644)
    return size


def _check_target(path: Path, total: int) -> None:
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file to write")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist; make it first")
    needed, free = total + (64 << 20), shutil.disk_usage(path.parent).free
    if free < needed:
        raise InputError(
            f"{path} needs {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free; "
            "free some space or write elsewhere"
        )


def write_header(path: str, shape: Shape, file_type: int, tensors: list[Tensor]) -> None:
    """Writes everything before the weights. Raises SetupError without the gguf package."""
    try:
        import gguf
    except ImportError as error:
        raise SetupError('writing model files needs the gguf package: pip install "llamabatch[tools]"') from error
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"random weights, {shape.n_layer} layers of {shape.n_embd}")
    writer.add_description("Random weights for measuring speed; the text means nothing.")
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(feed_forward_length(shape))
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(head_count_kv(shape))
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.rope_dim or shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    for key, value in metadata(shape):
        _add(writer, f"{shape.arch}.{key}", value)
    add_vocab(writer, shape)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind.name]
        dims = [tensor.columns] if tensor.rows == tensor.matrices == 1 else [tensor.rows, tensor.columns]
        dims = [tensor.matrices, *dims] if tensor.matrices > 1 else dims
        writer.add_tensor_info(tensor.name, dims, np.dtype(np.float32), tensor.size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tensors(file: BinaryIO, tensors: list[Tensor], seed: int, report: Callable[[int], None]) -> None:
    """Appends the weights, each tensor at a multiple of the alignment, with one chunk in memory at a time."""
    done = 0
    for index, tensor in enumerate(tensors):
        file.write(bytes(-file.tell() % _ALIGNMENT))
        for chunk in _chunks(tensor, RandomBits(seed, index)):
            file.write(chunk)
            done += len(chunk)
            report(done)
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _chunks(tensor: Tensor, bits: RandomBits) -> Iterator[memoryview]:
    if tensor.values is not None:
        yield memoryview(tensor.values.tobytes())
        return
    step = _CHUNK_BYTES // tensor.kind.size // 8 * 8  # a multiple of 8 blocks uses whole words of random bits
    for start in range(0, tensor.blocks, step):
        rows = min(step, tensor.blocks - start)
        yield memoryview(np.ascontiguousarray(tensor.kind.fill(bits, rows, tensor.std)).reshape(-1).data)
