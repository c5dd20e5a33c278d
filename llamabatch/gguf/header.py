"""The header of a GGUF file: its metadata, its tensors, and the place of the vocabulary."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from llamabatch.errors import ModelFileError
from llamabatch.gguf.reader import START, TEXT, TOKENS, TYPE_NAMES, HeaderReader, Items, Number, TensorInfo, Value
from llamabatch.utils.checks import show
from llamabatch.utils.paths import one_line

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)  # the end of a part's name (llama_split_path)
_MAX_PARTS = 1024
_PAGE = 4096  # a file may have at most this many bytes after the last tensor and its padding


@dataclass(frozen=True)
class Header:
    """Everything before the weights of one GGUF file.

    Attributes:
        metadata: maps a key to a number, a text, a tuple of up to 16,384 numbers, or Items.
        types: maps a key to GGUF's number for the type of the value; ARRAY for arrays.
        item_types: maps the key of an array to GGUF's number for the type of the items.
        tensors: the tensors, in the file's order.
        n_tokens: size of the vocabulary; 0 without a vocabulary.
        alignment: the data of each tensor begins at a multiple of this number of bytes.
        data_start: byte at which the data of the tensors begins.
        header_bytes: byte at which the description of the last tensor ends.
        file_bytes: size of this file.
    """

    path: Path
    version: int
    metadata: Mapping[str, Value]
    types: Mapping[str, int]
    item_types: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    n_tokens: int
    alignment: int
    data_start: int
    header_bytes: int
    file_bytes: int

    @property
    def architecture(self) -> str:
        """The architecture, for example "qwen2"; "" if the file names none."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def own(self, key: str) -> Value | None:
        """Returns a value of this architecture: own("block_count") is the value of "qwen2.block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def texts(self) -> dict[str, str]:
        """Returns the metadata as texts; see as_text. Leaves out Items and the arrays of the tokenizer."""
        return {
            key: as_text(value)
            for key, value in self.metadata.items()
            if not isinstance(value, Items) and not (isinstance(value, tuple) and key.startswith("tokenizer."))
        }


@dataclass(frozen=True)
class MetadataArray:
    """An array of a GGUF's header. len() is its length.

    Attributes:
        type: type of the items: "string", "int", "float" or "bool".
        count: number of items.
        values: the items; None for texts, and for more than 16,384 numbers, which are not read.
    """

    type: str
    count: int
    values: tuple[bool | int | float, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.count


MetadataValue: TypeAlias = "Number | str | MetadataArray"


def metadata_of(values: Mapping[str, Value]) -> Mapping[str, MetadataValue]:
    """Returns read-only metadata for a caller, with a MetadataArray for each array."""
    return MappingProxyType({key: _shown(value) for key, value in values.items()})


def _shown(value: Value) -> MetadataValue:
    if isinstance(value, tuple):
        return MetadataArray(type(value[0]).__name__ if value else "int", len(value), value)
    if isinstance(value, Items):
        kind = "string" if value.type == TEXT else TYPE_NAMES[value.type].strip("u0123456789")
        return MetadataArray(kind, value.count)
    return value


def part_names(name: str) -> list[str]:
    """Returns the names of all files of a split model (`model-00001-of-00003.gguf`) in order; otherwise [name]."""
    match = _PART.search(name)
    if match is None or not 1 <= int(match[2]) <= _MAX_PARTS:
        return [name]
    return [f"{name[: match.start()]}-{n:05d}-of-{match[2]}{match[3]}" for n in range(1, int(match[2]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """Returns the files of the model that `path` belongs to: one file, unless the model was split."""
    return [path.with_name(name) for name in part_names(path.name)] if path.name else [path]


def check_start(path: Path) -> None:
    """Checks only the first bytes of a file. Raises as read_header."""
    with path.open("rb", buffering=0) as file:
        HeaderReader(path, file, chunk=START.size).start()


def read_header(path: Path) -> Header:
    """Reads the header of one file. An unchanged file is not read again.

    Raises:
        ModelFileError: the file is not a GGUF file, or it is damaged; the message names the field and the value.
        OSError: the file cannot be read.
    """
    status = path.stat()
    return _read_header(path, (status.st_size, status.st_mtime_ns, status.st_ino))


def read_parts(path: Path) -> tuple[Header, ...]:
    """Reads the headers of all parts of a model. Raises as read_header."""
    return tuple(read_header(part) for part in part_paths(path))


def read_tensors(path: Path) -> tuple[TensorInfo, ...]:
    """Reads the tensors of all parts of a model. Raises as read_header."""
    return tuple(tensor for header in read_parts(path) for tensor in header.tensors)


@functools.lru_cache(maxsize=64)  # a model may have many parts
def _read_header(path: Path, _unchanged: tuple[int, int, int]) -> Header:
    with path.open("rb", buffering=0) as file:
        reader = HeaderReader(path, file)
        version, n_tensors, n_values = reader.start()
        reader.read_values(n_values)
        alignment = reader.alignment()
        tensors = reader.tensors(n_tensors)
        tokens = reader.values.get(TOKENS)
        data_start = -(-reader.at // alignment) * alignment
        _check_end(path, tensors, data_start, alignment, reader.size)
        return Header(
            path=path,
            version=version,
            metadata=reader.values,
            types=reader.types,
            item_types=reader.item_types,
            tensors=tensors,
            n_tokens=tokens.count if isinstance(tokens, Items) else 0,
            alignment=alignment,
            data_start=data_start,
            header_bytes=reader.at,
            file_bytes=reader.size,
        )


def _check_end(path: Path, tensors: tuple[TensorInfo, ...], data_start: int, alignment: int, file_bytes: int) -> None:
    """Refuses a file with more data after its tensors, because llama.cpp maps and reads the whole file."""
    last = max(tensors, key=lambda tensor: tensor.offset + tensor.n_bytes, default=None)
    end = data_start + (last.offset + last.n_bytes if last is not None else 0)
    beyond = file_bytes - end
    if beyond > alignment + _PAGE:
        what = f"the data of its last tensor, {show(last.name)}" if last is not None else "its header"
        raise ModelFileError(
            f"{one_line(path)} has {beyond} bytes behind {what}, which ends at byte {end}; allowed are up to "
            f"{alignment + _PAGE}"
        )


def as_text(value: Number | str | tuple[Number, ...]) -> str:
    """Returns a value as text, as llama.cpp writes it. The items of a list are separated by commas."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
