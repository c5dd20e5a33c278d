"""What shape of model a GGUF file holds, from the first kilobytes of its header: cheap enough for every load.

The walk ends where the vocabulary begins, so that no Python object is made for each of its strings (gguf.GGUFReader
takes seconds for that). Layout: ggml/include/gguf.h; names of keys: gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llamabatch.errors import ModelFileError
from llamabatch.model_file import file_bytes

HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, key-value pairs
LENGTH = struct.Struct("<Q")
TYPE = struct.Struct("<I")
NUMBERS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
STRING, ARRAY = 8, 9
_TOKENS = "tokenizer.ggml.tokens"
_MAX_PAIRS = 4096  # before the vocabulary; files have some dozens
_MAX_TEXT = 1 << 16  # bytes of a key, or of a value that is read
_MAX_ITEMS = 1 << 14  # of an array that is read or passed over string by string


@dataclass(frozen=True)
class ModelShape:
    """What the speed of a model depends on; two files that agree here run alike.

    Attributes:
        architecture: as "qwen2".
        n_layer, n_embd, n_ff, n_head, n_head_kv: as the file has them, lists with commas; "" where it has none before
            its vocabulary.
        n_vocab: 0 where there is no vocabulary.
        file_type: llama.cpp's number of the quantisation; "" where it stands behind the vocabulary.
        n_tensors, file_bytes: with the above these tell one quantisation from another.
    """

    architecture: str
    n_layer: str
    n_embd: str
    n_ff: str
    n_head: str
    n_head_kv: str
    n_vocab: int
    file_type: str
    n_tensors: int
    file_bytes: int


def read_shape(path: Path) -> ModelShape:
    """Walks the header.

    Raises:
        ModelFileError: it is no GGUF file, or damaged.
        OSError: it cannot be read.
    """
    n_tensors, values, n_vocab = _read(path)
    arch = values.get("general.architecture", "")

    def value(key: str) -> str:
        return values.get(f"{arch}.{key}", "")

    return ModelShape(
        architecture=arch,
        n_layer=value("block_count"),
        n_embd=value("embedding_length"),
        n_ff=value("feed_forward_length"),
        n_head=value("attention.head_count"),
        n_head_kv=value("attention.head_count_kv"),
        n_vocab=n_vocab,
        file_type=values.get("general.file_type", ""),
        n_tensors=n_tensors,
        file_bytes=file_bytes(path),
    )


def read_numbers(path: Path) -> dict[str, str]:
    """The numbers in front of the vocabulary, lists with commas: llama.cpp itself tells nothing of lists. Raises as
    read_shape."""
    return _read(path)[1]


def _read(path: Path) -> tuple[int, dict[str, str], int]:
    """Number of tensors, what stands in front of the vocabulary, and number of tokens."""
    try:
        with path.open("rb", buffering=1 << 16) as file:
            magic, version, n_tensors, n_pairs = HEADER.unpack(file.read(HEADER.size))
            if magic != b"GGUF" or version not in (2, 3):
                raise ModelFileError(f"{path} is no GGUF file of version 2 or 3")
            return n_tensors, *_walk(file, path.stat().st_size, min(n_pairs, _MAX_PAIRS))
    except (struct.error, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"the header of {path} is damaged: {error}") from error


def _walk(file: BinaryIO, size: int, n_pairs: int) -> tuple[dict[str, str], int]:
    """The values in front of the vocabulary, as text, and the number of its tokens."""
    values: dict[str, str] = {}
    for _ in range(n_pairs):
        key = read_text(file)
        (kind,) = TYPE.unpack(file.read(TYPE.size))
        if kind in NUMBERS:
            values[key] = read_number(file, kind)
        elif kind == STRING:
            if key == "general.architecture":
                values[key] = read_text(file)
            else:
                skip_text(file, size)  # a chat template, say
        elif kind == ARRAY:
            (item,) = TYPE.unpack(file.read(TYPE.size))
            (count,) = LENGTH.unpack(file.read(LENGTH.size))
            if key == _TOKENS:
                return values, count
            values[key] = _array(file, size, item, count)
        else:
            raise ValueError(f"a value of the unknown type {kind}")
    return values, 0


def _array(file: BinaryIO, size: int, item: int, count: int) -> str:
    """Numbers with commas between them; nothing of strings and of what is too long."""
    if item in NUMBERS and count <= _MAX_ITEMS:
        return ",".join(read_number(file, item) for _ in range(count))
    skip_array(file, size, item, count, _MAX_ITEMS)
    return ""


def skip_array(file: BinaryIO, size: int, item: int, count: int, most_texts: int) -> None:
    """Passes over an array; ValueError where it holds more texts than that, or arrays."""
    if item in NUMBERS:
        skip(file, size, count * NUMBERS[item].size)
    elif item == STRING and count <= most_texts:
        for _ in range(count):
            skip_text(file, size)
    else:
        raise ValueError(f"an array of {count} items of type {item}")


def read_number(file: BinaryIO, kind: int) -> str:
    form = NUMBERS[kind]
    return str(form.unpack(file.read(form.size))[0])


def read_text(file: BinaryIO) -> str:
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > _MAX_TEXT:
        raise ValueError(f"a text of {length} bytes")
    return file.read(length).decode("utf-8", "replace")


def skip_text(file: BinaryIO, size: int) -> None:
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    skip(file, size, length)


def skip(file: BinaryIO, size: int, count: int) -> None:
    if count > size - file.tell():
        raise ValueError(f"a value of {count} bytes reaches beyond the end of the file")
    file.seek(count, 1)
