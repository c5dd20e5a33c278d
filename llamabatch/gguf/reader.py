"""Reads the values, arrays and tensors of a GGUF header in one pass, in pure Python and with bounded sizes.

The texts of a vocabulary are skipped by their lengths, so that no Python object is made for each of 152,000 tokens
(gguf.GGUFReader takes seconds to make them). Layout: ggml/include/gguf.h and ggml/src/gguf.cpp; sizes of types: ggml.c.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from llamabatch.errors import ModelFileError
from llamabatch.utils.checks import show
from llamabatch.utils.paths import one_line

MAGIC = b"GGUF"
VERSIONS = (2, 3)
TOKENS = "tokenizer.ggml.tokens"
# These are GGUF's numbers for the types of values.
UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY = 4, 5, 6, 7, 8, 9
TYPE_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array"),
    *("uint64", "int64", "float64"),
)
# Maps ggml's number of a tensor type to its name, the elements in a block, and the bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

Number: TypeAlias = "bool | int | float"

START = struct.Struct("<4sIQQ")  # magic, version, tensors, values
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_NUMBERS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT
_MAX_VALUES = 1 << 16  # maximum number of metadata values in a file; usual files have some dozens
_MAX_TENSORS = 1 << 17  # maximum number of tensors in a file; the largest mixture-of-experts models have some thousands
_MAX_NAME = 1 << 16  # maximum bytes of a key, as in llama.cpp
_MAX_TENSOR_NAME = 63  # maximum bytes of a tensor's name: GGML_MAX_NAME without its NUL
_MAX_DIMS = 4
_MAX_SIZE = 2**63 - 1
_MAX_TEXT = 1 << 24  # maximum bytes of a text value; chat templates have some thousands
_MAX_ITEMS = 1 << 14  # maximum length of a stored array of numbers; a longer array becomes Items
_MAX_TEXTS = 1 << 24  # maximum length of an array of texts; large vocabularies have 300,000 tokens and 500,000 merges
_MAX_HEADER = 1 << 29
_CHUNK = 1 << 20
_ALIGNMENTS = tuple(1 << n for n in range(3, 17))


@dataclass(frozen=True)
class Items:
    """The place of an array that is not stored, because its items are texts or too many numbers.

    Attributes:
        type: GGUF's number for the type of an item.
        count: number of items.
        start, end: the place of the items in the file, in bytes.
    """

    type: int
    count: int
    start: int
    end: int


Value: TypeAlias = "Number | str | tuple[Number, ...] | Items"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as described in the header.

    Attributes:
        dims: elements in each dimension, the row length first, as in the file.
        type: the type, as ggml's number.
        offset: bytes from data_start to its data.
        n_bytes: size of its data.
    """

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int
    n_bytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type][0]

    @property
    def n_elements(self) -> int:
        return math.prod(self.dims)


def _content(start: bytes) -> str:
    """Describes a file that is not a GGUF file, by its first bytes."""
    if not start:
        return "it is empty"
    if start.startswith(b"version https"):
        return "it is a pointer of Git LFS; git lfs pull brings the model"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a page of a web site; the address of the download may want a login"
    return f"it starts with {show(start[:4].decode('latin-1'))}, not {show(MAGIC.decode())}"


class HeaderReader:
    """Reads a header from front to back, not further than needed.

    Attributes:
        at: offset of the next byte.
        values, types, item_types: by key, as in header.Header.
    """

    def __init__(self, path: Path, file: BinaryIO, chunk: int = _CHUNK) -> None:
        self.path = path
        self.at = 0
        self.size = os.fstat(file.fileno()).st_size
        self.values: dict[str, Value] = {}
        self.types: dict[str, int] = {}
        self.item_types: dict[str, int] = {}
        self._file = file
        self._chunk = chunk
        self._data = b""

    def start(self) -> tuple[int, int, int]:
        """Reads the first fields. Returns the version, the number of tensors, and the number of values. Raises
        ModelFileError."""
        self._read(min(self.size, START.size))
        if self._data[:4] != MAGIC:
            raise ModelFileError(f"{one_line(self.path)} is not a GGUF file: {_content(self._data)}")
        if self.size < START.size:
            raise ModelFileError(
                f"{one_line(self.path)} is truncated: it has {self.size} bytes, less than a GGUF header"
            )
        _, version, n_tensors, n_values = START.unpack_from(self._data)
        if version not in VERSIONS and int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise ModelFileError(
                f"{one_line(self.path)} has its bytes in big-endian order; give a file in little-endian order"
            )
        if version not in VERSIONS:
            raise ModelFileError(f"{one_line(self.path)} is GGUF version {version}; allowed are 2 and 3")
        if n_values > _MAX_VALUES or n_tensors > _MAX_TENSORS:
            raise self._damaged(
                f"it claims {n_tensors} tensors and {n_values} values; allowed are {_MAX_TENSORS} and {_MAX_VALUES}"
            )
        self.at = START.size
        return version, n_tensors, n_values

    def read_values(self, count: int) -> None:
        """Reads the values and their types."""
        for number in range(count):
            key = self._text(f"the key of value {number}", _MAX_NAME)
            if not key:
                raise self._damaged(f"the key of value {number} is empty")
            if key in self.types:
                raise self._damaged(f"the key {show(key)} comes twice")
            kind = self.types[key] = self._int(_TYPE, key)
            if kind != ARRAY:
                self.values[key] = self._value(key, kind)
                continue
            kind = self.item_types[key] = self._int(_TYPE, key)
            self.values[key] = self._array(key, kind, self._int(_LENGTH, key))

    def _value(self, key: str, kind: int) -> Number | str:
        if kind == TEXT:
            return self._text(key, _MAX_TEXT)
        if kind not in _NUMBERS:
            raise self._damaged(f"{show(key)} has a value of the unknown type {kind}")
        return self._number(key, _NUMBERS[kind])

    def _array(self, key: str, kind: int, count: int) -> Value:
        start = self.at
        if kind in _NUMBERS:
            form = _NUMBERS[kind]
            if count <= _MAX_ITEMS:
                self._need(self.at + count * form.size, key)
                self.at += count * form.size
                return tuple(item for (item,) in form.iter_unpack(self._data[start : self.at]))
            if count > (self.size - self.at) // form.size:
                raise self._damaged(f"{show(key)}, an array of {count} items, reaches beyond the end of the file")
            self.at += count * form.size
            self._check_size(self.at)
        elif kind == TEXT and count <= _MAX_TEXTS:
            self._skip_texts(key, count)
        else:
            raise self._damaged(f"{show(key)} is an array of {count} items of type {kind}")
        return Items(kind, count, start, self.at)

    def _skip_texts(self, key: str, count: int) -> None:
        """Skips the texts of an array. The loop is kept short because it may run hundreds of thousands of times."""
        at, data, unpack = self.at, self._data, _LENGTH.unpack_from
        end = len(data) - _LENGTH.size
        for _ in range(count):
            if at > end:
                self._need(at + _LENGTH.size, key)
                data = self._data
                end = len(data) - _LENGTH.size
            at += 8 + unpack(data, at)[0]
        self._need(at, key)
        self.at = at

    def alignment(self) -> int:
        """Returns the alignment of the tensors' data in bytes."""
        value = self.values.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if self.types.get(_ALIGNMENT, UINT32) != UINT32 or not isinstance(value, int) or value not in _ALIGNMENTS:
            raise self._damaged(f"{_ALIGNMENT} is {show(value)}; allowed are powers of two from 8 to 65536, as uint32")
        return value

    def tensors(self, count: int) -> tuple[TensorInfo, ...]:
        """Reads the descriptions of the tensors, which follow the values."""
        tensors: dict[str, TensorInfo] = {}
        for number in range(count):
            name = self._text(f"the name of tensor {number}", _MAX_TENSOR_NAME)
            if name in tensors:
                raise self._damaged(f"the tensor {show(name)} comes twice")
            tensors[name] = self._tensor(name)
        return tuple(tensors.values())

    def _tensor(self, name: str) -> TensorInfo:
        n_dims = self._int(_TYPE, name)
        if n_dims > _MAX_DIMS:
            raise self._damaged(f"tensor {show(name)} has {n_dims} dimensions; allowed are up to {_MAX_DIMS}")
        dims = tuple(self._int(_LENGTH, name) for _ in range(n_dims))
        kind = self._int(_TYPE, name)
        if kind not in TENSOR_TYPES:
            raise self._damaged(f"tensor {show(name)} has the unknown type {kind}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        n_elements = math.prod(dims)
        n_bytes = n_elements // block * block_bytes
        if any(n > _MAX_SIZE for n in dims) or n_bytes > _MAX_SIZE or n_elements > _MAX_SIZE:
            raise self._damaged(f"tensor {show(name)} has the shape {dims}, which is more than 2**63 elements or bytes")
        if dims and dims[0] % block:
            raise self._damaged(
                f"tensor {show(name)} of type {type_name} has rows of {dims[0]}, no multiple of {block}"
            )
        return TensorInfo(name, dims, kind, self._int(_LENGTH, name), n_bytes)

    def _text(self, what: str, most: int) -> str:
        length = self._int(_LENGTH, what)
        if length > most:
            raise self._damaged(f"{show(what)} has {length} bytes; allowed are up to {most}")
        start = self.at
        self._need(start + length, what)
        self.at += length
        return self._data[start : self.at].decode("utf-8", "replace")

    def _int(self, form: struct.Struct, what: str) -> int:
        return int(self._number(what, form))

    def _number(self, what: str, form: struct.Struct) -> Number:
        start = self.at
        if start + form.size > len(self._data):
            self._need(start + form.size, what)
        self.at += form.size
        number: Number = form.unpack_from(self._data, start)[0]
        return number

    def _need(self, end: int, what: str) -> None:
        """Reads on until all bytes before `end` are read. Raises ModelFileError if the file is shorter."""
        if end <= len(self._data):
            return
        if end > self.size:
            raise self._damaged(f"{show(what)} reaches beyond the end of the file, to byte {end} of {self.size}")
        self._check_size(end)
        self._read(min(self.size, max(end, 2 * len(self._data), self._chunk)))

    def _check_size(self, end: int) -> None:
        if end > _MAX_HEADER:
            raise self._damaged(f"its header is larger than {_MAX_HEADER} bytes")

    def _read(self, end: int) -> None:
        wanted, pieces = end - len(self._data), [self._data]
        while wanted > 0:
            piece = self._file.read(wanted)
            if not piece:
                raise self._damaged("the file was cut off while it was read")
            pieces.append(piece)
            wanted -= len(piece)
        self._data = b"".join(pieces)

    def _damaged(self, why: str) -> ModelFileError:
        return ModelFileError(f"the header of {one_line(self.path)} is damaged: {why}")


def read_texts(path: Path, items: Items) -> list[bytes]:
    """Reads the texts of an array, such as a vocabulary."""
    with path.open("rb") as file:
        file.seek(items.start)
        data = file.read(items.end - items.start)
    texts: list[bytes] = []
    at, unpack = 0, _LENGTH.unpack_from
    add = texts.append
    for _ in range(items.count):  # the body is short, because it may run hundreds of thousands of times
        start = at + 8
        at = start + unpack(data, at)[0]
        add(data[start:at])
    return texts
